"""An exported folder once more in another format, without a recipe and without the target.

Loaded strictly and written again: same tensors, same precision. Whatever else lies in the folder comes along.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculators.errors import ConfigError
from speculators.export import export_drafter, load_weights, read_drafter_config, read_fields, resolve
from speculators.export.formats import NATIVE
from speculators.export.headers import PICKLES
from speculators.layers.peft_adapter import CONFIG
from speculators.precision import as_dtype
from speculators.registry import family_class

NOT_COPIED = ("config.json", "*.safetensors", "*.index.json", ".*", CONFIG, *PICKLES)


def redress(
    path_or_id: str | Path,
    out: str | Path,
    *,
    format: str = NATIVE,
    dtype: str = "auto",
    provenance: dict[str, Any] | None = None,
    num_target_layers: int | None = None,
) -> Path:
    """Writes the drafter of a folder or repository id to `out`; returns it.

    `dtype`: auto is the folder's own. `provenance`: what the folder does not say of itself, such as its `target`.
    `num_target_layers`: for heads of others that do not name their taps. CheckpointError for a folder that is not
    whole, ConfigError if the format has no place for the drafter.
    """
    folder, out = resolve(path_or_id), Path(out)
    if out.exists() and out.samefile(folder):
        raise ConfigError(f"export: {out} is the folder that is read; name another one to write")
    config = read_drafter_config(folder, num_target_layers)
    if getattr(config, "other_tokenizer", False):
        raise ConfigError(
            f"export: other_tokenizer: {folder} drafts by a map to its target's tokens, which no other format has; "
            "give the folder as it is to the engine"
        )
    drafter = family_class(config.family)(config)
    load_weights(drafter, folder)
    told = {name: value for name, value in (read_fields(folder).get("draftsmith") or {}).items() if name in _KEPT}
    exported = as_dtype(config.dtype if dtype == "auto" else dtype)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not any(map(path.match, NOT_COPIED))]
    told |= provenance or {}
    return export_drafter(drafter, out, dtype=exported, format=format, provenance=told, beside=files)


# What a folder says of where it comes from; the rest of its section follows from the drafter, and is written anew.
_KEPT = ("target", "recipe", "recipe_hash", "step", "num_speculative_tokens")
