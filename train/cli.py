"""`draftsmith`: the command line. Each command is a few lines over the public API; torch is
imported when one runs.

What the user can mend, which is a DraftsmithError or a file that cannot be read or written, is
printed in red with exit code 2; any other error is a bug and shows its traceback."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from draftsmith.inference.bench import bench_command
from draftsmith.inference.console import announce, supervised, user_errors
from draftsmith.inference.flags import Command, json_option
from draftsmith.inference.log_proxy import log_command
from draftsmith.inference.progress import HEARTBEAT, Stages
from draftsmith.inference.server import serve_command
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands import artefact, runs
from draftsmith.train.commands.certify import certify
from draftsmith.train.commands.drift import drift
from draftsmith.train.commands.evaluate import evaluate
from draftsmith.train.commands.init import init
from draftsmith.train.commands.options import AsJson, Model, Precision
from draftsmith.train.commands.prepare import prepare
from draftsmith.train.commands.refresh import refresh
from draftsmith.train.commands.serving_args import serving_args
from draftsmith.train.commands.try_methods import try_methods

NO_TORCH = ("bench", "log", "schema")  # commands that do not import it
HELP = ["-h", "--help"]


class Commands(TyperGroup):
    """The group of commands; prints the project's errors, and what works without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; an error of the user is a paragraph with exit code 2."""
        with user_errors(), supervised("draftsmith") as ctx.obj:
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command by its name, and announces it before torch is imported."""
        name, command, rest = super().resolve_command(ctx, args)
        if name not in NO_TORCH and not set(HELP) & set(rest):
            announce(ctx.obj, f"draftsmith {name}")
        return name, command, rest


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options at 80 columns
    context_settings={"help_option_names": HELP},
)


def _print_version(requested: bool) -> None:
    if requested:
        from draftsmith.version import package_version

        typer.echo(f"draftsmith {package_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and stop."
        ),
    ] = False,
) -> None:
    """Train drafters for speculative decoding, and prove that they help."""


def schema(
    section: Annotated[
        str, typer.Argument(help="Only keys that begin with this, such as training.")
    ] = "",
    family: Annotated[
        str, typer.Option(help="Family whose keys and defaults are printed.")
    ] = "eagle3",
    as_json: AsJson = False,
) -> None:
    """Print the keys of a recipe. Of each: what it takes, its default, and what it is for."""
    from draftsmith.train.recipe.recipe import describe_schema

    rows = [row for row in describe_schema(family) if row.name.startswith(section)]
    if not rows:
        raise ConfigError(
            f"no key begins with {section!r}; `draftsmith schema` alone prints them all",
            where="schema",
        )
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    console = Console(highlight=False)
    for row in rows:
        takes = f" ({row.type}; {row.default})" if row.default else f" ({row.type})"
        name = Text(f"{row.name}: ", style="cyan" if "." in row.name else "bold cyan")
        console.print(name.append(row.description, style="").append(takes, style="dim"))


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: Model,
    speculative_config: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help='How to draft, such as {"model": "DRAFTER"}; default: drafting is off.',
        ),
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Precision = "auto",
) -> None:
    """Answer one prompt, and say what drafting gained. The text is printed as it is written."""
    from transformers.utils.logging import disable_progress_bar

    from draftsmith.inference import LLM, SamplingParams
    from draftsmith.inference.entrypoints.prompts import chat_prompts, read_prompts

    disable_progress_bar()  # what is streamed is the answer
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    drafting = json_option("--speculative-config", speculative_config)
    errors = Console(stderr=True)
    with Stages(console=errors).stage(f"load {model}"):
        llm = LLM(model, dtype=dtype, speculative_config=drafting, max_num_seqs=1)
    tokenizer = llm.get_tokenizer()
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        (request,) = chat_prompts(messages, tokenizer, {"add_generation_prompt": True})
    else:
        (request,) = read_prompts(prompt, tokenizer)
    response = llm.submit(request, params, streaming=True)
    with HEARTBEAT.activity("answer", errors):
        while not response.finished:
            llm.engine.step()
            if (new := response.delta()) is not None:
                typer.echo(new.outputs[0].text, nl=False)
                HEARTBEAT.heard()
    typer.echo()
    output = response.output()
    _print_speed(len(output.outputs[0].token_ids), output.metrics)


def _print_speed(written: int, metrics: Any) -> None:
    """Tokens per second after the first, and the acceptance length if anything was drafted."""
    from draftsmith.inference.metrics import acceptance_length

    spent = (metrics.finished_time or 0) - (metrics.first_token_time or 0)
    parts = [f"{written} tokens"]
    if written > 1 and spent > 0:
        parts.append(f"{(written - 1) / spent:.0f} tokens/s")
    if metrics.num_drafts:
        length = acceptance_length(metrics.num_accepted_tokens, metrics.num_drafts)
        parts.append(f"acceptance length {length:.2f} over {metrics.num_drafts} verifications")
    Console(stderr=True).print(", ".join(parts), style="dim", highlight=False)


for command in (  # in the order of work, in which `--help` lists them
    init,
    prepare,
    runs.regenerate,
    runs.plan,
    serving_args,
    runs.cache_features,
    runs.train,
    runs.compare,
    evaluate,
    drift,
    refresh,
    artefact.inspect,
    artefact.export,
    artefact.push,
    generate,
    schema,
    certify,
    try_methods,
):
    app.command(cls=Command)(command)
serve_command.register(app)
bench_command.register(app)
log_command.register(app)

if __name__ == "__main__":
    app()
