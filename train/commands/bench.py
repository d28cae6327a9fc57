"""`draftsmith bench`: the load generator of inference.bench as a command."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds `bench` to the project's command line; inference.bench.options reads its flags."""

    @app.command(
        "bench",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        help=(
            "Measure a server under load, as vllm bench serve does; --compare: with and without"
            " drafting."
        ),
    )
    def bench(context: typer.Context) -> None:
        from inference.bench.command import run

        raise typer.Exit(run(context.args))
