"""The kinds of those fields of a drafter's config.json that are read before its configuration is
built, which checks its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.speculators.errors import CheckpointError

Object = dict[str, Any]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _OwnSection(_Fields):
    family: str | None = None
    format: str | None = None
    target: Object | None = None
    num_speculative_tokens: int | None = None


class _SpeculatorsConfig(_Fields):
    proposal_methods: list[Object] | None = None
    verifier: Object | None = None


class _Layers(_Fields):
    architectures: list[str] | None = None
    model_type: str | None = None
    layer_types: list[str] | None = None
    block_size: int | None = None
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _ConfigFile(_Layers):
    draftsmith: _OwnSection | None = None
    speculators_config: _SpeculatorsConfig | None = None
    eagle_config: _Layers | None = None
    dflash_config: _Layers | None = None
    transformer_layer_config: _Layers | None = None


def check_kinds(fields: Mapping[str, Any], where: str) -> None:
    """CheckpointError for a field that is of another kind, by its name."""
    try:
        _ConfigFile.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{name} is {first['input']!r}: {first['msg'].lower()}", where=where
        ) from error
