"""The names of what a run leaves in its folder, and folders that are written whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.speculators.export import replace_folder

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


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` at the end, or is removed after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        replace_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
