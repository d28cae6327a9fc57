"""`python -m draftsmith.inference.bench …`: the same as `draftsmith bench`."""

from __future__ import annotations

import typer

from draftsmith.inference import console
from draftsmith.inference.bench.command import register

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    register(app)
    console.run(lambda: app(prog_name="draftsmith bench"))
