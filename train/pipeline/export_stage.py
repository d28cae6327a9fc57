"""What a run leaves behind: its drafter in every format of the recipe.

The first format is `<output_dir>/export`, the folder that is measured; any other is a folder of its own beside it,
`export-<format>`. Not below it: an upload or a loader that takes every *.safetensors of a folder would find several
drafters there. Must not know what a format says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speculators.export import export_drafter
from train.recipe.run_folder import EXPORT

if TYPE_CHECKING:
    from speculators.drafter import Drafter
    from train.recipe.recipe import Recipe


def write_formats(recipe: Recipe, drafter: Drafter, *, dtype: torch.dtype, provenance: dict[str, Any]) -> Path:
    """Writes every format; returns the folder of the first."""
    out, names = Path(recipe.output_dir), recipe.export.formats
    folders = [out / (f"{EXPORT}-{name}" if i else EXPORT) for i, name in enumerate(names)]
    for name, folder in zip(names, folders, strict=True):
        export_drafter(drafter, folder, dtype=dtype, provenance=provenance, format=name)
    return folders[0]
