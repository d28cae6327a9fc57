"""What a command line of this project does with errors: what a user can mend is one red paragraph and exit code 2."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

from speculators.errors import DraftsmithError


def print_error(error: DraftsmithError) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))


def run(app: typer.Typer) -> None:
    """Runs a command line; anything but a DraftsmithError is a bug and shows its traceback."""
    try:
        app()
    except DraftsmithError as error:
        print_error(error)
        sys.exit(2)
