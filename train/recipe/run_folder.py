"""The names of what a run leaves in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.train.recipe.recipe import Recipe

RECIPE = "recipe.yaml"  # resolved: every key, every default
EXPORT = "export"  # the drafter in the recipe's first format
TARGET = "target"  # the target, where it was trained as well
REPORT = "acceptance.json"
PAGE = "report.html"


def checkpoints(recipe: Recipe, stage: str | None = None) -> Path:
    """The folder of a stage's checkpoints, by default of the last; without stages there is one."""
    root = Path(recipe.output_dir) / "checkpoints"
    names = [section.name for section in recipe.stages]
    return root / (stage or names[-1]) if names else root
