"""`draftsmith bench`: the load generator, with the conversations of the demo among its datasets."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import typer

from speculators.errors import ConfigError

if TYPE_CHECKING:
    from inference.bench.datasets import DatasetOptions, Question

NEEDED = ("httpx2", "prometheus_client")


def register(app: typer.Typer) -> None:
    """Adds `bench` to the project's command line; its flags are read by inference.bench.flags."""

    @app.command(
        "bench",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        help="Measure a server under load, as vllm bench serve does; --compare: with and without drafting.",
    )
    def bench(context: typer.Context) -> None:
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(f'bench: {", ".join(missing)} missing; install with pip install "draftsmith[serve]"')
        from inference.bench.command import run
        from train.data.demo import WORKLOADS

        raise typer.Exit(run(context.args, {"demo": demo_questions}, WORKLOADS))


def demo_questions(options: DatasetOptions) -> list[Question]:
    """Held-out conversations of the demo up to their last answer, which the server is to write."""
    from inference.bench.datasets import DEFAULT_OUTPUT_LEN, Question
    from train.data.demo import WORKLOADS, prompts

    asked = prompts("test", options.num_prompts, options.seed, options.workloads or WORKLOADS)
    return [Question(options.output_len or DEFAULT_OUTPUT_LEN, messages=tuple(messages)) for messages, _ in asked]
