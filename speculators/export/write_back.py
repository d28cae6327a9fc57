"""A trained module put back into the checkpoint it came from, for engines that look for it there and nowhere else.

Knows folders of safetensors and names of tensors; no family.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculators.errors import CheckpointError
from speculators.export import replace_folder
from speculators.export.layouts.base import WEIGHTS


def write_back(export: str | Path, target: str | Path, out: str | Path) -> Path:
    """Copies the folder `target` to `out` with the tensors of the folder `export` in place of its own; returns `out`.

    Shards, other tensors, dtypes and every other file stay as they are. CheckpointError names the tensors that the
    target lacks or has in another shape.
    """
    export, target, out = Path(export), Path(target), Path(out)
    if out.exists() and out.samefile(target):
        raise CheckpointError(f"write_back: {out} is the target itself; name another folder")
    fresh = load_file(export / WEIGHTS)
    shards = sorted(target.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        with safe_open(shard, "pt") as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys() if name in fresh}  # noqa: SIM118
    if wrong := sorted(name for name, tensor in fresh.items() if shapes.get(name) != tuple(tensor.shape)):
        raise CheckpointError(
            f"write_back: {target} has no tensor of the same shape for {len(wrong)} of {export}: "
            f"{', '.join(wrong[:3])}; give the folder whose module was trained"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(
            target, folder, dirs_exist_ok=True, ignore=lambda _, names: {s.name for s in shards} & set(names)
        )
        for shard in shards:
            _rewrite(shard, fresh, folder / shard.name)
        folder.chmod(0o755)
        replace_folder(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def _rewrite(shard: Path, fresh: dict[str, torch.Tensor], into: Path) -> None:
    """One file, its tensors those of `fresh` where it has them."""
    with safe_open(shard, "pt") as reader:
        names, metadata = set(reader.keys()), reader.metadata()
    if not names & set(fresh):
        shutil.copyfile(shard, into)
        return
    tensors = load_file(shard)
    save_file({n: fresh[n].to(t.dtype) if n in fresh else t for n, t in tensors.items()}, into, metadata=metadata)
