"""Options classes (pydantic models) as commands of typer, after the manner of vLLM: every field is
a flag of its name. Imports no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from draftsmith.speculators.errors import ConfigError

SHORT = {"speculative_config": ["-sc"], "tensor_parallel_size": ["-tp"]}  # as in vLLM
METAVARS = {  # by type in the JSON schema
    "string": "TEXT",
    "integer": "NUMBER",
    "number": "NUMBER",
    "object": "JSON",
    "array": "TEXT",
}
OBJECT = "expected a JSON object in single quotes"
Model = TypeVar("Model", bound=BaseModel)
Values = dict[str, Any]  # of the flags that were given, as they were typed


def json_or_text(value: Any) -> Any:
    """What a text spells in JSON; everything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def json_option(name: str, text: str) -> dict[str, Any] | None:
    """The JSON object that an option of this name takes; None if it is not given."""
    value = json_or_text(text) if text else None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{OBJECT}, got {text}", where=name)
    return value


JsonObject = Annotated[dict[str, Any], BeforeValidator(json_or_text)]
Mode = Annotated[dict[str, Any] | int, BeforeValidator(json_or_text)]
CommaSeparated = BeforeValidator(lambda values: ",".join(map(str, values)).split(","))


def flag_name(field: str) -> str:
    """--max-num-seqs of max_num_seqs; a field's unit, as in timeout_s, is no part of its flag."""
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

    schemas = model.model_json_schema()["properties"]
    parameters = [_keyword("context", typer.Context)]
    for field, info in model.model_fields.items():
        if not info.exclude:
            parameters.append(_keyword(field, _option(field, info, schemas[field])))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = model.__doc__
    settings = {
        "allow_extra_args": others,
        "ignore_unknown_options": others,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda flag: flag.replace("_", "-"),  # as vLLM's
    }
    app.command(name, context_settings=settings)(command)


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo, schema: dict[str, Any]) -> Any:
    """The type of a flag for typer: a text wherever pydantic reads the value. `schema`: of the
    field, in JSON schema."""
    part = schema.get("anyOf", [schema])[0]
    json_type = part.get("type", "string")
    kind: Any = {"boolean": bool, "array": list[str]}.get(json_type, str)
    metavar = "|".join(part["enum"]) if "enum" in part else METAVARS.get(json_type)
    flag = flag_name(name)
    if kind is bool and "anyOf" in schema:  # true, false, or neither
        flag += f"/--no-{flag.removeprefix('--')}"
    default = None if field.is_required() else field.get_default()
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text = (field.description or "") + ("; may be repeated" if json_type == "array" else "")
    if shown not in (None, "", {}, False):
        text += f" ({shown})"
    option = typer.Option(
        flag, *SHORT.get(name, ()), help=text.strip(), metavar=metavar, show_default=False
    )
    return Annotated[kind | None, option]


def validated(model: type[Model], command: str, given: Values) -> Model:
    """The model from the values of its flags. ConfigError names the flag of the first invalid
    one."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join([command, *(flag_name(str(name)) for name in first["loc"][:1])])
        message = OBJECT if first["type"] == "dict_type" else first["msg"]
        raise ConfigError(message.removeprefix("Value error, "), where=where) from None
