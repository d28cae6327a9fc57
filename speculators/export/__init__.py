"""Drafters as directories other engines load: written whole or not at all, read back strictly.

`export_drafter` writes into a temporary sibling and renames it; `load_drafter` refuses a missing, unexpected or
mis-shaped tensor (vLLM loads most of those silently and then accepts nothing). A format is one `Layout` with a table
of names, shapes and config fields; this file knows files and folders, not families.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from speculators.config import DrafterConfig
from speculators.drafter import Drafter, family_class
from speculators.errors import CheckpointError
from speculators.export.draft_model_layout import DraftModelLayout
from speculators.export.eagle3_layout import Eagle3Layout
from speculators.export.eagle_layout import EagleLayout
from speculators.export.layout import Layout
from speculators.export.medusa_layout import MedusaLayout
from speculators.export.mlp_layout import MLPLayout
from speculators.export.mtp_layout import MtpLayout
from speculators.hub import hub_trouble, split_revision
from speculators.target import FrozenTarget

# One line a family; a folder that does not name its family belongs to the first that recognises it.
LAYOUTS: dict[str, Layout] = {
    layout.family: layout
    for layout in (
        Eagle3Layout(),
        EagleLayout(),
        MedusaLayout(),
        MLPLayout(),
        MtpLayout(),
        DraftModelLayout(),  # last: every causal LM is one
    )
}


def export_drafter(
    drafter: Drafter, folder: str | Path, *, dtype: torch.dtype, provenance: dict[str, Any] | None = None
) -> Path:
    """Writes `drafter` to `folder` in its family's layout and returns the folder.

    An export that fails leaves what was there before in place. `provenance` goes into config.json under `draftsmith`.
    """
    folder = Path(folder)
    config = drafter.config.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    layout = LAYOUTS[config.family]
    fields = layout.to_config(config)
    fields["draftsmith"] |= provenance or {}
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        layout.write(drafter, config, fresh, dtype)
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        fresh.chmod(0o755)
        replace_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def replace_folder(fresh: Path, folder: Path) -> None:
    """Puts `fresh` where `folder` is; the old one goes only once the new one stands."""
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def resolve(path_or_id: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """A local folder as it is; anything else is asked of the Hub (JSON only, and safetensors): `org/name`, or
    `org/name@revision`."""
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import snapshot_download

    name, revision = split_revision(str(path_or_id), revision)
    patterns = ["*.json", "*.safetensors"] if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (ValueError, OSError) as error:  # an id that is none; the Hub's errors, and those of files
        raise CheckpointError(
            f"drafter {path_or_id}: no such folder, and the Hub did not give it: {hub_trouble(error) or error}; "
            "give the folder that an export wrote, or a repository id"
        ) from error


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").exists() or not files:
        pickled = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        hint = (
            f"; {', '.join(pickled)} is a pickle, which is never opened: convert it to safetensors first"
            if pickled
            else ""
        )
        raise CheckpointError(f"drafter {folder}: expected config.json and *.safetensors{hint}")
    return files


def read_drafter_config(
    path_or_id: str | Path, num_target_layers: int | None = None, *, config_only: bool = False
) -> DrafterConfig:
    """The configuration of an exported or published drafter, without its weights.

    `num_target_layers` is needed only for heads whose config.json does not say which layers they tap. `config_only`:
    the tensors need not be there. Right for whole language models; of a head they may say what config.json does not.
    """
    folder = resolve(path_or_id, weights=not config_only)
    names: set[str] = set()
    for file in [] if config_only else _files(folder):
        with safe_open(file, "pt") as reader:
            names |= set(reader.keys())
    fields = read_fields(folder)
    layout = _layout_of(fields, names, str(folder))
    return layout.from_config(fields, names, f"{folder}/config.json", num_target_layers)


def read_fields(path_or_id: str | Path) -> dict[str, Any]:
    """config.json of a drafter as it stands."""
    folder = resolve(path_or_id, weights=False)
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"drafter {folder}: expected config.json") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder}/config.json: not JSON: {error}") from error


def _layout_of(fields: dict[str, Any], names: set[str], where: str) -> Layout:
    family = (fields.get("draftsmith") or {}).get("family")
    if family is None:
        family = next((each.family for each in LAYOUTS.values() if each.recognises(fields, names)), None)
    if family not in LAYOUTS:
        raise CheckpointError(
            f"{where}: not a drafter this version reads (architectures {fields.get('architectures')}, "
            f"family {family}); it reads {', '.join(LAYOUTS)}, and targets that carry a module of their own; give the "
            "folder of one of these, or start from scratch"
        )
    return LAYOUTS[family]


def load_drafter(path_or_id: str | Path, target: FrozenTarget, *, dtype: torch.dtype | None = None) -> Drafter:
    """The drafter of an exported folder, attached to `target`, in evaluation mode, in the target's dtype and device.

    CheckpointError names every tensor that is missing, unexpected or of another shape; ConfigError a target it was
    not made for.
    """
    folder = resolve(path_or_id)
    config = read_drafter_config(folder, target.num_layers)
    drafter = family_class(config.family)(config).attach(target)
    load_weights(drafter, folder)
    return drafter.to(device=target.device, dtype=dtype or target.dtype).freeze()


def load_weights(drafter: Drafter, folder: Path) -> None:
    """Fills `drafter` from the tensors of `folder`, strictly. Nothing of the drafter keeps its old value."""
    LAYOUTS[drafter.config.family].read(drafter, folder, _files(folder))
