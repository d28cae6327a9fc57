"""How often each target token was supervised, beside the drafter that was trained on that text: its
draft vocabulary can be cut by it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.speculators.errors import CheckpointError

# in a folder of its own: engines take every *.safetensors beside config.json for weights
FILE = "token_counts/model.safetensors"


def save_counts(counts: Tensor, folder: Path) -> None:
    """Writes counts [V] as `FILE` below `folder`."""
    (folder / FILE).parent.mkdir(exist_ok=True)
    save_file({"counts": counts.cpu().to(torch.int64)}, folder / FILE, metadata={"format": "pt"})


def load_counts(folder: Path) -> Tensor | None:
    """Reads what `save_counts` wrote [V]; None without such a file. CheckpointError if it holds
    anything else."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        counts = load_file(path).get("counts")
    except SafetensorError as error:
        raise CheckpointError(f"{error}; export the drafter again", where=f"{path}") from error
    if counts is None or counts.dim() != 1 or counts.is_floating_point():
        raise CheckpointError(
            "expected `counts`, an integer for each token; export the drafter again",
            where=f"{path}",
        )
    return counts
