"""`python -m inference.bench …`: `draftsmith bench`, where guides call a client of their own."""

from __future__ import annotations

import typer

from inference import console
from inference.bench.command import register

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    register(app)
    console.run(lambda: app(prog_name="draftsmith bench"))
