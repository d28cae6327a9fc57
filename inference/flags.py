"""Options classes (pydantic models) as commands of typer, after the manner of vLLM: every field is
a flag of its name. Imports no torch."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator, ValidationError
from typer.core import TyperCommand

from draftsmith.speculators.errors import ConfigError

SHORT = {"speculative_config": ["-sc"], "tensor_parallel_size": ["-tp"]}  # as in vLLM
HELP = {"help_option_names": ["-h", "--help"]}
Model = TypeVar("Model", bound=BaseModel)
Values = dict[str, Any]  # of the flags that were given, as they were typed


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(kind: type | tuple[type, ...], expected: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        value = json_or_text(value) if isinstance(value, str) else value
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"expected {expected}")
        return value

    return BeforeValidator(read)


JsonObject = Annotated[dict[str, Any], _json(dict, "a JSON object in single quotes")]
Mode = Annotated[
    dict[str, Any] | int, _json((dict, int), "a JSON object in single quotes, or a number")
]
CommaSeparated = BeforeValidator(
    lambda value: value.split(",") if isinstance(value, str) else value
)


class Command(TyperCommand):
    """A command whose help has a section for each panel and no braces in its usage, and whose flags
    may be spelled with underscores and take several values, as in vLLM."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {
            flag for one in self.params if getattr(one, "multiple", False) for flag in one.opts
        }
        if any(one.param_type_name == "argument" for one in self.params):
            lists = set()  # words that follow a flag's value are arguments
        words: list[str] = []
        several = ""  # the flag whose further values are read
        for word in args:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                word = name.replace("_", "-") + equals + value
            if word.startswith("-"):
                several = word if word in lists else ""
            elif several and words[-1] != several:
                words.append(several)
            words.append(word)
        return super().parse_args(ctx, words)


def flag_name(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")


def given_values(values: Values) -> Values:
    """Those of flags that were given."""
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def register(
    app: typer.Typer,
    name: str,
    model: type[BaseModel],
    run: Callable[[Values, list[str]], object],
    *,
    panels: Mapping[str, str],
    others: bool = False,
) -> None:
    """Adds a command that calls `run` with the values of the flags that were given and, with
    `others`, the words that are no flag of its own. Its flags are the fields of `model`, but those
    with `exclude`. `panels`: sections of the help, in their order, by the first field of each."""

    def command(context: typer.Context, **values: Any) -> None:
        run(given_values(values), context.args)

    by_panel: dict[str, list[inspect.Parameter]] = {panel: [] for panel in panels.values()}
    panel = ""
    for field, info in model.model_fields.items():
        panel = panels.get(field, panel)
        if not info.exclude:
            by_panel[panel].append(_parameter(field, info, panel))
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", kind, annotation=typer.Context)]
    parameters += itertools.chain.from_iterable(by_panel.values())
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = model.__doc__
    settings = HELP | {"allow_extra_args": others, "ignore_unknown_options": others}
    app.command(name, cls=Command, context_settings=settings)(command)


def _parameter(name: str, field: Any, panel: str) -> inspect.Parameter:
    """A flag as a parameter of typer's: a text wherever pydantic reads the value."""
    kind: Any = str
    flag, annotation, metavar = flag_name(name), field.annotation, "TEXT"
    choices = [
        choice
        for part in (annotation, *get_args(annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    if annotation in (bool, bool | None):
        kind = bool
        if annotation is not bool or name.startswith("enable_"):
            flag += f"/--no-{flag.removeprefix('--')}"
    elif choices:
        metavar = "|".join(choices)
    elif get_origin(annotation) is tuple:
        separated = any(isinstance(part, BeforeValidator) for part in field.metadata)
        metavar = "A,B,…" if separated else "TEXT…"
        kind = str if separated else list[str]
    elif "dict[" in str(annotation):
        metavar = "JSON"
    elif re.search(r"\b(int|float)\b", str(annotation)):
        metavar = "NUMBER"
    default = None if field.is_required() else field.get_default()
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text = field.description or ""
    if shown not in (None, "", {}, False):
        text += f" ({shown})"
    option = typer.Option(
        flag,
        *SHORT.get(name, ()),
        help=text.strip(),
        metavar=None if kind is bool else metavar,
        show_default=False,
        rich_help_panel=panel,
    )
    annotated = Annotated[kind | None, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotated)


def validated(model: type[Model], command: str, given: Values) -> Model:
    """The model from the values of its flags. ConfigError names the flag of the first invalid
    one."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"{flag_name(name)} {given.get(name, '')}: " if name else ""
        raise ConfigError(
            f"{where}{first['msg'].removeprefix('Value error, ')}", where=f"{command}"
        ) from None
