"""Names, shapes and dtypes of a folder's tensors, from safetensors' headers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from draftsmith.speculators.errors import CheckpointError

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Header(NamedTuple):
    """The header of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name for floating-point tensors, safetensors' for others
    file: Path

    @property
    def is_floating_point(self) -> bool:
        """True of all floating-point dtypes, those of eight bits included."""
        return self.dtype.startswith(("float", "bfloat", "F"))


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor of a folder by name. CheckpointError for a damaged file."""
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
