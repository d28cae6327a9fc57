"""The registry of drafting methods: `LLM`, evaluations, `serve`, `bench` and serving commands
read it. A new method is its file and a line here.

Imports no torch: command lines list the methods in their help."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from draftsmith.speculators.errors import ConfigError

if TYPE_CHECKING:
    from draftsmith.inference.spec_decode.proposers.options import MethodOptions

HERE = "draftsmith.inference.spec_decode.proposers"

# Methods without a checkpoint -> "module:class" of their options.
TRAINING_FREE: dict[str, str] = {
    "ngram": f"{HERE}.ngram:NgramOptions",
    "suffix": f"{HERE}.suffix:SuffixOptions",
    "lookahead": f"{HERE}.lookahead:LookaheadOptions",
}
# Families with options of their own; the others have those of heads.
TRAINED: dict[str, str] = {"draft_model": f"{HERE}.head_options:DraftModelOptions"}
HEADS = f"{HERE}.head_options:HeadOptions"


def methods() -> list[str]:
    """The names of all methods."""
    from draftsmith.speculators.registry import FAMILIES

    return [*FAMILIES, *TRAINING_FREE]


def method_options(method: str) -> type[MethodOptions]:
    """The options class of a method. ConfigError, which lists all methods, for an unknown one."""
    if method not in (known := methods()):
        raise ConfigError(f"method {method!r}; expected one of {', '.join(known)}, or None (off)")
    path = TRAINING_FREE.get(method) or TRAINED.get(method, HEADS)
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def measured_beside(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an evaluation of the method that `options` of a head put beside it; none where
    it is no such method, which the check of the options says."""
    beside = options.get("with")
    return method_options(beside).measured if beside in beside_heads() else {}


def beside_heads() -> list[str]:
    """The methods that may draft beside a trained head."""
    return [name for name in TRAINING_FREE if method_options(name).beside_heads]


def option_names(kind: type[BaseModel]) -> list[str]:
    """The names of the options of a class, as they are given."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def owners(option: str) -> list[str]:
    """The methods that have this option."""
    return [name for name in methods() if option in option_names(method_options(name))]
