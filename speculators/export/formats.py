"""The export formats, and the layout of each family in each format.

Writing, strict reading, `draftsmith inspect` and docs/serve.md go by these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export.layouts import (
    dflash,
    draft_model,
    eagle,
    eagle3,
    medusa,
    mlp,
    mtp,
    peagle,
    sglang,
    speculators,
    transformers,
)
from draftsmith.speculators.export.layouts.format import Format

NATIVE = "vllm"
NAMED_ONLY = (("sglang",), ("transformers",))
# Format -> its purpose.
FORMATS: dict[str, str] = {
    "vllm": (
        "what vLLM reads with --speculative-config; what Draftsmith writes unless asked otherwise"
    ),
    "speculators": (
        "vLLM's speculators format: config.json names the target; if that is a model of the Hub,"
        " `vllm serve FOLDER` is all"
    ),
    "sglang": "what SGLang reads: taps numbered by layer outputs, its own names where they differ",
    "transformers": (
        "what plain transformers loads as `assistant_model`: draft models; DFlash and MTP heads,"
        " with a file of their modules"
    ),
}
# A folder that does not name its family belongs to the first layout that recognises it, but for
# those of SGLang alone (other tools write its sections with either numbering of taps) and of
# transformers alone (no other tool writes them).
_TABLE: tuple[Format, ...] = (
    speculators.SpeculatorsPEagle(),
    speculators.SpeculatorsDFlash(),
    speculators.SpeculatorsDFlash2(),
    speculators.SpeculatorsDSpark(),
    # The last of its format: it recognises algorithms that are not known.
    speculators.SpeculatorsEagle3(),
    Format(mlp.MLPLayout(), "vllm"),
    Format(medusa.MedusaLayout(), "vllm"),
    Format(mtp.MtpLayout(), "vllm", "sglang"),
    Format(dflash.DSparkLayout(), "vllm", "sglang"),
    Format(dflash.DFlash2Layout(), "vllm", "sglang"),
    Format(dflash.DFlashLayout(), "vllm", "sglang"),
    Format(peagle.PEagleLayout(), "vllm"),
    Format(eagle3.Eagle3Layout(), "vllm"),
    Format(eagle.EagleLayout(), "vllm"),
    # The last that recognises anything: every causal LM is one.
    Format(draft_model.DraftModelLayout(), "vllm", "sglang", "transformers"),
    Format(sglang.SGLangEagle3Layout(), "sglang"),
    Format(sglang.SGLangEagleLayout(), "sglang"),
    transformers.TransformersDFlash(),
    transformers.TransformersMtp(),
)
# (name of a format, family) -> the family's layout in that format.
LAYOUTS: dict[tuple[str, str], Format] = {
    (name, row.family): row for row in _TABLE for name in row.names
}
FAMILIES = tuple(family for format_, family in LAYOUTS if format_ == NATIVE)


def layout_for(format_: str, family: str) -> Format:
    """The layout of a family in a format. ConfigError names those that it has."""
    if format_ not in FORMATS:
        raise ConfigError(
            f"expected one of {', '.join(FORMATS)}", where=f"export format {format_!r}"
        )
    if (layout := LAYOUTS.get((format_, family))) is None:
        raise ConfigError(
            f"has no place for a drafter of family {family}; this family"
            f" is written as {', '.join(formats_of(family))}",
            where=f"export format {format_}",
        )
    return layout


def formats_of(family: str) -> list[str]:
    """The formats that a family can be written in."""
    return [name for name in FORMATS if (name, family) in LAYOUTS]


def format_of(fields: Mapping[str, Any]) -> str:
    """The format of a folder's config.json."""
    section = fields.get("draftsmith") or {}
    if "speculators_config" in fields or "speculators_model_type" in fields:
        return "speculators"
    return section.get("format", NATIVE)


def layout_of(fields: Mapping[str, Any], names: set[str], where: str) -> Format:
    """The layout that config.json names, or the first that recognises the folder."""
    section = fields.get("draftsmith") or {}
    family = section.get("family")
    format_ = section.get("format", NATIVE)
    layout = LAYOUTS.get((format_, family or ""))
    if family is None:
        unnamed = (row for row in _TABLE if row.names not in NAMED_ONLY)
        layout = next((row for row in unnamed if row.recognises(fields, names)), None)
    if layout is None:
        raise CheckpointError(
            f"not a drafter this version reads (architectures"
            f" {fields.get('architectures')}, family {family}, format {format_}); it reads"
            f" {', '.join(FAMILIES)}, and targets that carry a module of their own; give the folder"
            " of one of these, or start from scratch",
            where=where,
        )
    return layout
