"""speculative_config: how the target is drafted for, under vLLM's option names: a union of the
options of all methods, distinguished by `method`. Knows no model and loads nothing."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from draftsmith.inference.spec_decode.proposers.methods import method_options, methods, owners
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.speculators.errors import ConfigError


def parse_speculative_config(options: dict[str, Any] | MethodOptions | None) -> MethodOptions:
    """The checked options; ConfigError names every one that is wrong or unknown. None is drafting
    off."""
    if options is None:
        return MethodOptions()
    if isinstance(options, MethodOptions):
        return options
    if not isinstance(options, dict):
        raise ConfigError(
            f"speculative_config is a {type(options).__name__}; expected a dict of options, or None"
        )
    if odd := [name for name in options if not isinstance(name, str)]:
        raise ConfigError(
            f"the name of an option is {odd[0]!r}; expected a string", where="speculative_config"
        )
    if "method" not in options:
        raise ConfigError(
            "method is missing: name one, or the model of a drafter, whose config.json says it",
            where="speculative_config",
        )
    method = options["method"]
    if not isinstance(method, str | None):
        raise ConfigError(
            f"method={method!r}; expected a name, or None (off)", where="speculative_config"
        )
    try:
        kind = MethodOptions if method is None else method_options(method)
        return kind(**options)
    except ConfigError as error:
        raise ConfigError(f"{error}", where="speculative_config") from None
    except ValidationError as error:
        faults = [_fault(fault, kind, method) for fault in error.errors()]
        known = ", ".join(kind.model_fields)
        raise ConfigError(
            f"{'; '.join(faults)} (options: {known})", where="speculative_config"
        ) from error


def known_options() -> set[str]:
    """The names of the options of all methods."""
    return {option for name in methods() for option in method_options(name).model_fields}


def _fault(error: Any, kind: type[MethodOptions], method: str | None) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if known := owners(where):
            some = " and ".join(known) if len(known) < 3 else "trained drafters"
            return f"{where} belongs to {some}, not to {method!r}"
        return f"{where}: unknown option"
    if error["type"] == "missing":
        return f"{where} is missing: {kind.model_fields[where].description}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}={error['input']!r}: {message}" if where else message
