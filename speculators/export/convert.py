"""Converts an exported folder to another format, without a recipe and without the target.

The drafter is loaded strictly and written again: same tensors, same precision. Other files of the
folder are copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import (
    check_replaceable,
    export_drafter,
    fresh_folder,
    load_weights,
    read_drafter_config,
    read_fields,
    resolve,
)
from draftsmith.speculators.export.formats import NATIVE, layout_for
from draftsmith.speculators.export.headers import FLOATS, PICKLES, read_headers
from draftsmith.speculators.export.layouts.base import WEIGHTS
from draftsmith.speculators.export.quantisation import quantised
from draftsmith.speculators.precision import as_dtype
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.target_head import TargetHead

# Fields of the section `draftsmith` that are kept; the others follow from the drafter and are
# written anew.
ORIGIN = (
    "target",
    "recipe",
    "recipe_hash",
    "step",
    "num_speculative_tokens",
    "longrope_length",
    "chat_template_sha256",
    "chat_template_kwargs",
    "responses",
)
NOT_COPIED = ("config.json", "*.safetensors", "*.index.json", ".*", "*.py", *PICKLES)


def convert(
    path_or_id: str | Path,
    out: str | Path,
    *,
    format: str = NATIVE,
    dtype: str = "auto",
    provenance: dict[str, Any] | None = None,
    num_target_layers: int | None = None,
    target: TargetHead | None = None,
    quantize: Literal["int8"] | None = None,
    judge: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Writes the drafter of a folder or repository id to `out`; returns it.

    `dtype`: auto is the folder's own. `provenance`: facts that the folder lacks, such as its
    `target`. `num_target_layers`: for published heads that do not name their taps. `target`: what
    the drafter is to fit, of which sizes are all that is asked. `quantize`: a scheme of
    quantisation.py for its weights; `judge`: as of `export_drafter`. CheckpointError for an
    incomplete folder, ConfigError if the format or the target has no place for the drafter."""
    folder = resolve(path_or_id)
    out = Path(out)
    check_replaceable(out, folder)
    config = read_drafter_config(folder, num_target_layers)
    drafter = family_class(config.family)(config)
    load_weights(drafter, folder)
    if target is not None:  # before int8 weights, which keep their sizes
        drafter = layout_for(format, config.family).layout.fitted(drafter.attach(target))
    if quantize is not None:
        drafter = quantised(drafter, quantize, "--quantize")
    section = read_fields(folder).get("draftsmith") or {}
    origin = {name: section[name] for name in ORIGIN if name in section} | (provenance or {})
    exported = as_dtype(_stored_dtype(folder, config) if dtype == "auto" else dtype)
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    kept = [path for path in files if not any(map(path.match, NOT_COPIED))]
    return export_drafter(
        drafter,
        out,
        dtype=exported,
        format=format,
        provenance=origin,
        beside=kept,
        judge=judge,
    )


def _stored_dtype(folder: Path, config: DrafterConfig) -> str:
    """The dtype that a folder's tensors have, whatever config.json says; that one where they have
    several, as quantised ones do."""
    headers = read_headers(folder).values()
    stored = {header.dtype for header in headers if header.is_floating_point}
    return stored.pop() if len(stored) == 1 and stored <= set(FLOATS.values()) else config.dtype


def write_back(export: str | Path, target: str | Path, out: str | Path) -> Path:
    """Copies the folder `target` to `out` with the tensors of the folder `export` in place of its
    own; returns `out`.

    Shards, other tensors, dtypes and every other file stay as they are. CheckpointError names the
    tensors that the target lacks or has in another shape."""
    export = resolve(export)
    target = Path(target)
    out = Path(out)
    for source in (export, target):
        check_replaceable(out, source, target=True)
    if not (export / WEIGHTS).is_file():
        raise CheckpointError(
            f"expected {WEIGHTS}, the MTP module; give the folder of an export",
            where=f"drafter {export}",
        )
    fresh = load_file(export / WEIGHTS)
    headers = read_headers(target)
    wrong = sorted(
        name
        for name, tensor in fresh.items()
        if name not in headers or headers[name].shape != tuple(tensor.shape)
    )
    if wrong:
        raise CheckpointError(
            f"it has no tensor of the same shape for {len(wrong)} of {export}: "
            f"{', '.join(wrong[:3])}; give the folder whose module was trained",
            where=f"--into {target}",
        )
    with fresh_folder(out) as folder:
        shutil.copytree(target, folder, dirs_exist_ok=True)
        for shard in {headers[name].file for name in fresh}:
            with safe_open(shard, "pt") as reader:
                metadata = reader.metadata()
            tensors = load_file(shard)
            for name in fresh.keys() & tensors.keys():
                tensors[name] = fresh[name].to(tensors[name].dtype)
            save_file(tensors, folder / shard.name, metadata=metadata)
    return out
