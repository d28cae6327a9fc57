"""A class of options as a command: every field of a pydantic model is an option.

    class Options(BaseModel):
        port: int = Field(8000, description="port to listen on", ge=0)

    register(app, "serve", Options, run)      # --port NUMBER   port to listen on (8000)

    def run(values, words):                   # {"port": "8001"}, as it was typed
        options = validated(Options, "serve", values)

typer splits the command line, and pydantic reads the values: so one class holds the names,
defaults, limits and help of a command, and Python code can have the same options (`LLM` and `serve`
share theirs). A wrong value is a ConfigError that names its option. Imports no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import expanded

SHORT = {"speculative_config": ["-sc"], "tensor_parallel_size": ["-tp"]}  # as in vLLM
OBJECT = "expected a JSON object in single quotes"

Model = TypeVar("Model", bound=BaseModel)
Values = dict[str, Any]  # by field, as they were typed


# ------------------------------------------------------------------ values


def json_or_text(value: Any) -> Any:
    """What a text spells in JSON; everything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def json_option(name: str, text: str) -> dict[str, Any] | None:
    """The JSON object that was typed for the option `name`; None for null, and if `text` is empty.
    ConfigError for anything else."""
    if not text:
        return None
    value = json_or_text(text)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{OBJECT}, got {text}", where=name)
    return value


def _split_at_commas(values: Any) -> list[str]:
    """["1,2", "4"], of an option that was typed twice, or (1, 2, 4) -> ["1", "2", "4"]."""
    return ",".join(map(str, values)).split(",")


# Types of fields whose values are typed in other ways than pydantic reads by itself.
JsonObject = Annotated[dict[str, Any], BeforeValidator(json_or_text)]
Mode = Annotated[dict[str, Any] | int, BeforeValidator(json_or_text)]
CommaSeparated = BeforeValidator(_split_at_commas)


def passed_values(values: Values) -> Values:
    """The values of the options that were passed; typer has None, or no value, for the others."""
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def validated(model: type[Model], command: str, values: Values) -> Model:
    """The options as an object of their class. ConfigError for the first that is wrong; its `where`
    is the command and the option."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    where = command
    if first["loc"]:
        where += f" {flag_name(str(first['loc'][0]))}"
    if first["type"] == "missing":
        raise ConfigError("must be given; --help says what it takes", where=where)
    if first["type"] == "dict_type":
        raise ConfigError(OBJECT, where=where)
    raise ConfigError(first["msg"].removeprefix("Value error, "), where=where)


# ------------------------------------------------------------------ options


def flag_name(field: str) -> str:
    """--max-num-seqs of max_num_seqs; a field's unit, as in timeout_s, is no part of it."""
    return "--" + field.removesuffix("_s").replace("_", "-")


class Kind(NamedTuple):
    """How an option is typed. `annotation`: what typer makes of the words: a switch, a list of
    texts, or a text, which pydantic reads. `metavar`: the value in the help."""

    annotation: Any
    metavar: str | None


KINDS = {  # by the type that a field has in JSON schema
    "array": Kind(list[str], "TEXT"),
    "boolean": Kind(bool, None),
    "integer": Kind(str, "NUMBER"),
    "number": Kind(str, "NUMBER"),
    "object": Kind(str, "JSON"),
    "string": Kind(str, "TEXT"),
}


def _option(name: str, field: FieldInfo, schema: dict[str, Any]) -> Any:
    """The annotation of a field's option for typer. `schema`: of the field, in JSON schema."""
    alternatives = schema.get("anyOf", [schema])  # such as an integer, or null
    first = alternatives[0]
    kind = KINDS[first.get("type", "string")]
    metavar = "|".join(first["enum"]) if "enum" in first else kind.metavar
    flag = flag_name(name)
    if kind.annotation is bool and len(alternatives) > 1:  # on, off, or as it is by default
        flag += f"/--no-{flag.removeprefix('--')}"
    option = typer.Option(
        flag, *SHORT.get(name, ()), help=_help(field, kind), metavar=metavar, show_default=False
    )
    return Annotated[kind.annotation | None, option]


def _help(field: FieldInfo, kind: Kind) -> str:
    """The description of a field, and its default where there is one to show."""
    text = field.description or ""
    if kind is KINDS["array"]:
        text += "; may be repeated"
    if field.is_required():
        return f"{text} (required)"
    default = field.get_default()
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default not in (None, "", {}) and not isinstance(default, bool):
        text += f" ({default})"
    return text


# ------------------------------------------------------------------ commands

TEXTS = ("prompt",)  # arguments that are no path


class Command(TyperCommand):
    """A command that takes `~/` at the beginning of an option or argument for the home folder, as
    recipes do: no shell expands it in quotes, and bash not in `--model=~/m`."""

    def invoke(self, ctx: Any) -> Any:
        """Runs it with the paths of its options expanded."""
        for name, value in ctx.params.items():
            if name not in TEXTS:
                ctx.params[name] = expanded(value)
        ctx.args = expanded(ctx.args)
        return super().invoke(ctx)


def register(
    app: typer.Typer,
    name: str,
    model: type[BaseModel],
    run: Callable[[Values, list[str]], object],
    *,
    others: bool = False,
) -> None:
    """Adds a command whose options are the fields of `model`, but those with `exclude`, and whose
    help is its docstring. It calls `run` with the values of the options that were passed and, with
    `others`, the words that belong to no option of the model."""

    def command(context: typer.Context, **values: Any) -> None:
        run(passed_values(values), context.args)

    # typer reads the options off the signature of a function
    schemas = model.model_json_schema()["properties"]
    parameters = [_parameter("context", typer.Context)]
    for field, info in model.model_fields.items():
        if not info.exclude:
            parameters.append(_parameter(field, _option(field, info, schemas[field])))
    described: Any = command  # mypy knows no signature of a function
    described.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = model.__doc__
    settings = {
        "allow_extra_args": others,
        "ignore_unknown_options": others,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda flag: flag.replace("_", "-"),  # as vLLM's
    }
    app.command(name, cls=Command, context_settings=settings)(command)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)
