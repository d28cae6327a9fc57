"""Result files: checked to be writable before the work begins, and written whole or not at all.
Knows no formats."""

from __future__ import annotations

import os
from pathlib import Path

from draftsmith.speculators.errors import ConfigError


def check_writable(option: str, path: Path) -> None:
    """Makes the folder of a file that is to be written later. ConfigError if it cannot be, `option`
    naming it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        scratch = _beside(path)
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}; give another file", where=f"{option} {path}"
        ) from error


def write_whole(path: Path, text: str) -> Path:
    """UTF-8, in a folder that is made if need be; a crash leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _beside(path)
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
