"""`draftsmith bench`: the load generator of inference.bench as a command."""

from __future__ import annotations

import importlib.util

import typer

from speculators.errors import ConfigError

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

        raise typer.Exit(run(context.args))
