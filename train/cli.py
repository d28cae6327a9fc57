"""`draftsmith`: the command line. Each command is a few lines over the public API; torch is imported when one runs.

What a user can mend (DraftsmithError) is one red paragraph and exit code 2; anything else is a bug and shows its
traceback. Must not know how any stage works.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from speculators.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from rich.table import Table

    from train.masks import ConversationTokenizer
    from train.recipe import Recipe
    from train.sources import Example


class Commands(TyperGroup):
    """The group of commands; turns the project's errors into a paragraph."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DraftsmithError as error:
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Train drafters for speculative decoding, and prove that they help.",
)  # fmt: skip

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, such as those in recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Overrides, such as training.steps=200.")
]


@app.command()
def schema(
    section: Annotated[str, typer.Argument(help="Only keys that begin with this, such as training.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Every key of a recipe: what it takes, its default, and why."""
    from train.recipe import describe_schema

    rows = [row for row in describe_schema() if row.name.startswith(section)]
    if not rows:
        raise ConfigError(f"schema: no key begins with {section!r}; `draftsmith schema` alone prints them all")
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    table = _table("key", "takes", "default", "meaning")
    for row in rows:
        depth = row.name.count(".")
        table.add_row(Text(row.name, style="cyan" if depth else "bold cyan"), *map(Text, row[1:]))
    Console().print(table)


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would happen, and stop.")] = False,
) -> None:
    """Run a recipe: regenerate, train, export, measure, gate. Run again, it continues. Exit code 1: a gate is missed."""
    from train.run import run

    with _resumable():
        raise typer.Exit(run(recipe, overrides or (), dry_run=dry_run))


@app.command()
def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sample: Annotated[int, typer.Option(min=0, help="Show the mask of this example, counted from 0.")] = 0,
    validation: Annotated[bool, typer.Option("--validation", help="Look at data.validation instead.")] = False,
) -> None:
    """Look at the data of a recipe: counts per workload, and one example with its supervised tokens in green."""
    from train.data import conversation_tokenizer, load_tokenizer
    from train.recipe import load_recipe
    from train.sources import load_sources

    checked = load_recipe(recipe, overrides or ())
    sources = checked.data.validation if validation else checked.data.train
    if not sources:
        raise ConfigError(f"{recipe}: data.validation is empty; there is nothing to look at")
    examples = load_sources(sources, seed=checked.data.shuffle_seed)
    tokenizer = conversation_tokenizer(checked.data, load_tokenizer(checked.target))
    if sample >= len(examples):
        raise ConfigError(f"--sample {sample}: there are {len(examples)} examples, numbered from 0")
    _print_statistics(checked, examples, tokenizer)
    _print_masks(examples[sample], tokenizer)
