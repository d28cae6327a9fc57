"""Arguments that several commands have: a recipe and its overrides, the part of a process that
shares work, a model and how it decodes. `command_of`: a command whose options are a class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from draftsmith.speculators.errors import ConfigError

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, such as those in recipes/.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.steps=200."),
]
Part = Annotated[
    str,
    typer.Option(
        metavar="I/N", help="Only the I-th of N parts, from 1: several processes share the work."
    ),
]
Model = Annotated[str, typer.Option(help="The target: a folder or repository id.")]
Precision = Annotated[str, typer.Option(help="Precision of the target; auto: its own.")]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "-k",
        "--num-speculative-tokens",
        min=1,
        help="Tokens drafted per round. Default: the method's own; of a drafter with `evaluate` 4,"
        " with `try` what it was made for.",
    ),
]
SpeculativeConfig = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help="Further options of the drafter: adaptive lengths, trees (docs/runtime.md).",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest response.")]
TargetLayers = Annotated[
    int | None,
    typer.Option(help="Layers of the target, for heads that do not say which they tap."),
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="The target's name at the server, if another; repeatable."),
]
Gpu = Annotated[
    str | None,
    typer.Option(help="Device, such as h100; cpu: this one, measured. Default: this machine's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PART = re.compile(r"(?P<number>[1-9][0-9]*)/(?P<of>[1-9][0-9]*)")


Options = TypeVar("Options")


def command_of(
    name: str, options: type[Options], run: Callable[[Options], None]
) -> Callable[..., None]:
    """A command for typer whose arguments and options are the fields of a dataclass, an instance of
    which `run` gets. Its help is the docstring of `run`."""
    hints = get_type_hints(options, include_extras=True)

    def command(**values: Any) -> None:
        run(options(**values))

    fields = [
        parameter.replace(annotation=hints[field], kind=inspect.Parameter.KEYWORD_ONLY)
        for field, parameter in inspect.signature(options).parameters.items()
    ]
    described: Any = command  # mypy knows no signature of a function
    described.__signature__ = inspect.Signature(fields)
    command.__annotations__ = hints
    command.__name__ = name
    command.__doc__ = run.__doc__
    return command


def parse_part(text: str) -> tuple[int, int]:
    """`2/4` -> (1, 4). ConfigError if there is no such part."""
    match = PART.fullmatch(text)
    if match is None or int(match["number"]) > int(match["of"]):
        raise ConfigError("expected I/N with I from 1 to N, such as 2/4", where=f"--part {text}")
    return int(match["number"]) - 1, int(match["of"])
