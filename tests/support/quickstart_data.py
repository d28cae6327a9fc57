"""The quickstart's conversations: as a source of a recipe, and as rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "data"
WORKLOADS = ("math", "python", "json", "rewrite", "table", "chat")


def source(split: str, limit: int, /, **options: Any) -> dict[str, Any]:
    """The first `limit` conversations of a split (train, validation, test), the six workloads in
    turn."""
    return {"path": str(DATA / f"{split}.jsonl.gz"), "limit": limit, **options}


def rows(
    split: str, count: int, first: int = 0, workloads: Sequence[str] = WORKLOADS
) -> list[dict[str, Any]]:
    """`count` rows of a split's file (`messages`, `workload`, `expected`) from these workloads,
    from the row `first` of them on."""

    def of_workloads() -> Iterator[dict[str, Any]]:
        with gzip.open(DATA / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            yield from (row for row in map(json.loads, file) if row["workload"] in workloads)

    chosen = list(islice(of_workloads(), first, first + count))
    if len(chosen) < count:
        raise ValueError(f"{split}: {len(chosen)} rows from row {first} on, expected {count}")
    return chosen
