"""The faults of a drafter's folder, by kind: engines' reactions to each, and its repair. The table
is faults.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

REFUSES, CRASHES, SWALLOWS, HARMLESS = "refuses", "crashes", "swallows", "harmless"
Reaction = Literal["refuses", "crashes", "swallows", "harmless"]
IN_SGLANG = (
    "dflash",
    "dflash2",
    "dspark",
)  # families whose faults SGLang's reactions are known for


class Kind(BaseModel):
    """One kind of fault; the fields are explained in faults.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    meaning: str
    vllm: Reaction
    then: str
    todo: str
    sglang: Reaction | None = None
    exceptions: dict[str, tuple[Reaction, str]] = {}
    warning: bool = False


_TABLE = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
KINDS = {name: Kind(**fields) for name, fields in yaml.safe_load(_TABLE).items()}


@dataclass(frozen=True)
class Fault:
    """One fault of one folder: its place in words, and the entry of the table for the drafter's
    family."""

    kind: str
    what: str
    vllm: Reaction
    then: str
    todo: str
    warning: bool
    sglang: Reaction | None  # where it is known


def fault(kind: str, what: str, family: str | None = None) -> Fault:
    """A fault of a kind of the table, in a drafter of `family`."""
    entry = KINDS[kind]
    vllm, then = entry.exceptions.get(family or "", (entry.vllm, entry.then))
    sglang = entry.sglang if family in IN_SGLANG else None
    return Fault(kind, what, vllm, then, entry.todo, entry.warning, sglang)
