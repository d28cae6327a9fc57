"""Reads names, shapes and precisions of a folder's tensors from the headers of its safetensors
files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from draftsmith.speculators.errors import CheckpointError

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Header(NamedTuple):
    """The header of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name for floating-point tensors, safetensors' for others
    file: Path


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor of a folder by name. CheckpointError for a file that is damaged or no
    safetensors."""
    headers: dict[str, Header] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    view = reader.get_slice(name)
                    dtype = FLOATS.get(view.get_dtype(), view.get_dtype())
                    headers[name] = Header(tuple(view.get_shape()), dtype, file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"damaged, or not safetensors ({error}); copy or download it again", where=f"{file}"
            ) from error
    return headers


def pickled_files(folder: Path) -> list[str]:
    """Files that only unpickling could read. They are named and never opened."""
    return sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)})


def other_dtypes(
    fields: Mapping[str, Any], headers: Mapping[str, Header], exact: tuple[str, ...] = ()
) -> list[str]:
    """Floating-point tensors in another precision than config.json names; `exact`: endings of names
    that may be."""
    named = fields.get("dtype") or fields.get("torch_dtype")
    return sorted(
        name
        for name, header in headers.items()
        if named
        and header.dtype in FLOATS.values()
        and header.dtype != named
        and not name.endswith(exact or ("\0",))
    )
