"""The registry of drafter families, and the construction of their configs.

A family's module is imported on first use. No family imports this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from draftsmith.speculators.config import DrafterConfig, TargetShape, default_tap_layers
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError

# family name -> "module:class". Adding a family adds a line here.
FAMILIES: dict[str, str] = {
    "dflash": "draftsmith.speculators.families.dflash:DFlash",
    "dflash2": "draftsmith.speculators.families.dflash2:DFlash2",
    "draft_model": "draftsmith.speculators.families.draft_model.model:DraftModel",
    "dspark": "draftsmith.speculators.families.dspark:DSpark",
    "eagle": "draftsmith.speculators.families.eagle:Eagle",
    "eagle3": "draftsmith.speculators.families.eagle3:Eagle3",
    "medusa": "draftsmith.speculators.families.medusa:Medusa",
    "mlp": "draftsmith.speculators.families.mlp:MLPSpeculator",
    "mtp": "draftsmith.speculators.families.mtp:Mtp",
    "peagle": "draftsmith.speculators.families.peagle:PEagle",
}


def family_class(name: str) -> type[Drafter]:
    """The class of a family. ConfigError, which lists all families, for another name."""
    if name not in FAMILIES:
        raise ConfigError(
            f"unknown drafter family {name!r}; expected one of {', '.join(sorted(FAMILIES))}"
        )
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def build_config(where: str, family: str, **fields: Any) -> DrafterConfig:
    """Builds the family's config. ConfigError names `where` and every invalid field."""
    try:
        return family_class(family).config_class(family=family, **fields)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(p) for p in e['loc']) or 'drafter'}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigError("; ".join(lines), where=where) from error


def config_for_target(
    target: TargetShape, family: str, *, tap_layers: Sequence[int] | None = None, **overrides: Any
) -> DrafterConfig:
    """The config of `family` for a target: its sizes, rope and eps, but for `overrides`."""
    cls = family_class(family)
    fields = cls.config_class.for_target(target, family)
    if cls.traits.reads_taps:
        fields["tap_layers"] = tuple(sorted(tap_layers or default_tap_layers(target.num_layers)))
    fields.update({k: v for k, v in overrides.items() if v is not None})
    fields = cls.config_class.completed(fields)
    return build_config(f"drafter for {target.name_or_path}", **fields)
