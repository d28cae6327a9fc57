"""The quickstart's conversations as a source of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "data"


def source(split: str, limit: int, /, **options: Any) -> dict[str, Any]:
    """The first `limit` conversations of a split (train, validation, test), the six workloads in
    turn."""
    return {"path": str(DATA / f"{split}.jsonl.gz"), "limit": limit, **options}
