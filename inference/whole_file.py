"""Result files: checked to be writable before the work begins, and written whole or not at all.
Knows no formats."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from draftsmith.speculators.errors import ConfigError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # may come without the name of a file
PROBE = b"\0" * 4096  # written and removed: a full disk takes the name of a file, but no contents
SCRATCH = re.compile(r"\.[0-9a-f]{32}\.tmp")  # the names of `_beside`


def check_writable(option: str, path: Path) -> None:
    """Makes the folder of a file that is to be written later. ConfigError if it cannot be, `option`
    naming it."""
    where = f"{option} {path}"
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError("is a folder or a device; give the name of a file", where=where)
    _probe(path, where)


def check_folder(option: str, folder: Path) -> None:
    """Makes a folder that files are to be written into later. ConfigError if it cannot be, `option`
    naming it."""
    _probe(folder / "probe", f"{option} {folder}")


def _probe(path: Path, where: str) -> None:
    scratch = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(PROBE)
    except OSError as error:
        raise ConfigError(f"cannot be written: {cause(error, path)}", where=where) from error
    finally:
        _remove(scratch)


def write_whole(path: Path, text: str) -> Path:
    """UTF-8, in a folder that is made if need be; a failure leaves what was there before, and
    nothing beside it. OSError with the path as its `filename`."""
    scratch = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:  # a full disk names no file, and others name the scratch
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        _remove(scratch)
    return path


def remove_scratch(folder: Path) -> None:
    """Removes what a killed process has left half-written in `folder`, into which no other may be
    writing now."""
    for path in folder.glob(".*.tmp"):
        if SCRATCH.fullmatch(path.name):
            _remove(path)


def cause(error: OSError, path: Path) -> str:
    """Why `path` could not be written or read, and what to do; the disk, where that is at fault."""
    if error.errno in DISK:
        place = os.path.abspath(path)
        while not os.path.ismount(place):
            place = os.path.dirname(place)
        free = shutil.disk_usage(place).free / 1e6
        room = f"its disk, {place}, has {free:,.1f} MB free"
        return f"{error.strerror} ({room}); make room there, or choose another place"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "part of its path is a file, and no folder; choose another place"
    return f"{error.strerror}; check the path and its rights, or choose another place"


def _beside(path: Path) -> Path:
    """A name that no other file has, in the folder of `path`."""
    return path.with_name(f".{uuid.uuid4().hex}.tmp")


def _remove(scratch: Path) -> None:
    """The scratch of a failure; after success there is none. One that cannot be removed is hidden,
    and its failure shall not hide the first."""
    with suppress(OSError):
        scratch.unlink()
