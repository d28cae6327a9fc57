"""Command lines declared as pydantic models, after the manner of vLLM's: every field is a flag.
Imports no torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationError

from speculators.errors import ConfigError

SHORT = {"speculative_config": ["-sc"], "tensor_parallel_size": ["-tp"]}  # as in vLLM
Model = TypeVar("Model", bound=BaseModel)


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
JsonList = Annotated[list[str], _json(list, 'a JSON list such as ["https://example.com"]')]


class FlagParser(argparse.ArgumentParser):
    """Raises its errors. `command`: such as `serve`."""

    def __init__(self, command: str, usage: str | None = None, **options: Any) -> None:
        super().__init__(f"draftsmith {command}", usage, allow_abbrev=False, **options)
        self.command = command

    def error(self, message: str) -> Any:
        raise ConfigError(
            f"{self.command}: {message}; `draftsmith {self.command} --help` lists the flags"
        )


def spelled(arguments: Sequence[str]) -> list[str]:
    """Writes `--speculative_config=…` as `--speculative-config=…`: vLLM takes both."""
    written = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        written.append(argument)
    return written


def flag_name(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")


def add_flags(
    parser: FlagParser,
    model: type[BaseModel],
    *,
    names: Collection[str] | None = None,
    groups: Mapping[str, str] = {},
) -> FlagParser:
    """Adds the fields of `model`, or those in `names`. Their values stay texts, which `validated`
    parses; flags that are not given set nothing. `groups`: titles in the help by the first field of
    each group."""
    target: Any = parser
    for name, field in model.model_fields.items():
        if names is not None and name not in names:
            continue
        if name in groups:
            target = parser.add_argument_group(groups[name])
        text, default = (
            field.description or "",
            None if field.is_required() else field.get_default(),
        )
        form: dict[str, Any] = {"metavar": "VALUE"}
        if field.annotation is bool:
            form = {
                "action": (
                    argparse.BooleanOptionalAction if name.startswith("enable_") else "store_true"
                )
            }
        elif field.annotation == bool | None:
            form = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.annotation) is Literal:
            form = {"choices": get_args(field.annotation)}
        elif get_origin(field.annotation) is tuple and not field.metadata:
            form |= {"nargs": "+"}
        shown = ",".join(map(str, default)) if isinstance(default, (tuple, list)) else default
        if shown not in (None, "", {}, False):
            text += f" ({shown})"
        flags = [flag_name(name), *SHORT.get(name, ())]
        target.add_argument(
            *flags,
            dest=name,
            required=field.is_required(),
            default=argparse.SUPPRESS,
            help=text.strip(),
            **form,
        )
    return parser


def validated(model: type[Model], command: str, given: Mapping[str, Any]) -> Model:
    """The model from the values of its flags. ConfigError names the flag of the first invalid
    one."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"{flag_name(name)} {given.get(name, '')}: " if name else ""
        raise ConfigError(
            f"{command}: {where}{first['msg'].removeprefix('Value error, ')}"
        ) from None
