"""Options classes (pydantic models) as commands of typer, after the manner of vLLM: every field is
a flag of its name. Imports no torch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator, ValidationError
from typer.core import TyperCommand

from draftsmith.speculators.errors import ConfigError

SHORT = {"speculative_config": ["-sc"], "tensor_parallel_size": ["-tp"]}  # as in vLLM
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
    """A command whose flags may be spelled with underscores and take several values, as in vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {
            flag
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for flag in parameter.opts
        }
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
    others: bool = False,
) -> None:
    """Adds a command that calls `run` with the values of the flags that were given and, with
    `others`, the words that are no flag of its own. Its flags are the fields of `model`, but those
    with `exclude`."""

    def command(context: typer.Context, **values: Any) -> None:
        run(given_values(values), context.args)

    fields = model.model_fields.items()
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", kind, annotation=typer.Context)]
    parameters += [_parameter(field, info) for field, info in fields if not info.exclude]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = model.__doc__
    settings = {
        "allow_extra_args": others,
        "ignore_unknown_options": others,
        "help_option_names": ["-h", "--help"],
    }
    app.command(name, cls=Command, context_settings=settings)(command)


def _parameter(name: str, field: Any) -> inspect.Parameter:
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
        if annotation is not bool:
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
        where = f"{command} {flag_name(name)}" if name else command
        raise ConfigError(first["msg"].removeprefix("Value error, "), where=where) from None
