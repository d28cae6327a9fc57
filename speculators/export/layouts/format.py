"""A family's layout in a format: where the fields stand, and which engines read the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export.layouts.base import Fault, Fields, Layout


class Format:
    """A format, given the layout of a family.

    The layout says which tensors and fields a drafter has, in the terms of vLLM's own format; the
    format says where the fields stand in config.json, what it has no place for, and which engines
    read the folder. As written here everything is the layout's. A format with other fields derives
    from this class and asks `self.layout` for the layout's part."""

    def __init__(self, layout: Layout, *names: str) -> None:
        """`names`: keys of `formats.FORMATS` whose folders are the same."""
        self.layout = layout
        self.names = names

    @property
    def family(self) -> str:
        """The family of the layout."""
        return self.layout.family

    def recognises(self, fields: Fields, names: set[str]) -> bool:
        """True for a folder in this format and of the family that does not say so itself, by
        config.json and the names of the tensors."""
        return self.layout.recognises(fields, names)

    def check(self, config: Any, format_: str) -> None:
        """ConfigError for a drafter that engines would run wrongly from a folder in `format_`, one
        of `names`."""
        self.layout.check(config, format_)

    def no_vllm(self, config: Any) -> str:
        """Why vLLM serves no such drafter in this format, and the remedy; empty: it does."""
        if config.quantization is not None and self.layout.no_vllm_int8:
            return self.layout.no_vllm_int8
        return self.layout.no_vllm(config)

    def no_sglang(self, config: Any) -> str:
        """As `no_vllm`, of SGLang."""
        if config.quantization is not None:
            return "int8 weights were not run there; export without --quantize"
        return self.layout.no_sglang(config)

    def to_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Converts config.json as `Layout.to_config` has it to the fields of this format."""
        return self.layout.to_engine(fields)

    def from_engine(self, fields: Fields, where: str) -> Fields:
        """The inverse of `to_engine`, also for folders of other tools. CheckpointError names the
        file `where` and the field."""
        return self.layout.from_engine(fields, where)

    def field_faults(self, fields: Fields, plain: Fields, names: set[str]) -> Iterator[Fault]:
        """What `Layout.from_config` takes from config.json without a word, and an engine otherwise
        or not at all. `plain`: the fields as `from_engine` returns them; `names`: of the tensors.
        """
        return self.layout.field_faults(fields, plain, names)

    def write(
        self, drafter: Drafter, config: DrafterConfig, folder: Path, dtype: torch.dtype
    ) -> None:
        """Writes everything but config.json into an empty folder."""
        self.layout.write(drafter, config, folder, dtype)
