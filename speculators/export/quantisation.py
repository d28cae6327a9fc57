"""Quantised exports: what config.json says of int8 weights, and a quantised copy of a drafter.

The scheme is W8A8 of compressed-tensors' format `int-quantized`: int8 weights with a scale per
output, inputs rounded to int8 with a scale per token when they come. Of its 8-bit schemes it is the
one that vLLM's CPU package has a kernel for (W8A16 is packed there for 4 bits alone). Files are
written and read here, without that library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError

SCHEMES: tuple[Literal["int8"], ...] = ("int8",)
FIELD = "quantization_config"
_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {
        "group_0": {
            # all modules of a class whose name has the first; vLLM's output heads are of another
            "targets": ["Linear", "re:.*lm_head$"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}


def quantisation_fields(scheme: str | None) -> dict[str, Any]:
    """The fields of config.json for weights in `scheme`; none for plain weights."""
    return {} if scheme is None else {FIELD: _INT8}


def split_quantisation(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """`fields` of config.json -> those that say nothing of a scheme of ours, and the scheme. What
    says another one stays, and whoever reads it refuses it."""
    if fields.get(FIELD) != _INT8:
        return dict(fields), None
    return {name: value for name, value in fields.items() if name != FIELD}, "int8"


def check_scheme(scheme: str, where: str) -> None:
    """ConfigError unless weights can be written in `scheme`; `where`: the option that asks."""
    if scheme not in SCHEMES:
        raise ConfigError(f"expected one of {', '.join(SCHEMES)}, got {scheme!r}", where=where)


def require_plain(quantization: str | None, where: str) -> None:
    """ConfigError for a drafter whose weights are in a scheme, `quantization`: it can be neither
    quantised again nor trained further."""
    if quantization is not None:
        raise ConfigError(
            f"its weights are {quantization} already; give the export that it was made from",
            where=where,
        )


def quantised(drafter: Drafter, scheme: Literal["int8"], where: str) -> Drafter:
    """A copy of a drafter whose linear layers have int8 weights, the nearest to its own.
    ConfigError if it is quantised already."""
    require_plain(drafter.config.quantization, where)
    copy = drafter.deep_copy()
    copy.take_quantisation(scheme)
    return copy
