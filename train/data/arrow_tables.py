"""Tables of tokens on disk, which all processes of a machine map: packed rows, and prompts.

    rows/<address>.arrow   an Arrow table, mapped and never copied
    rows/<address>.json    what was left out and counted, and the checksum of the table

The address is the hash of everything that the tokens depend on, so what is there is never written
again. The table appears whole, and its JSON after it: a table without one, or with another
checksum, is not read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.export import disk_errors

SCRATCH = ".tmp"  # how the names of files and folders end that are in work
ABANDONED_S = 24 * 3600  # after which the files of a killed writer are removed


def facts_of(path: Path) -> dict[str, Any] | None:
    """What was saved with the table; None if it is not there, not whole, or damaged."""
    with suppress(OSError, ValueError, KeyError):
        facts = json.loads(_beside(path).read_text(encoding="utf-8"))
        if facts.pop("checksum") == _checksum(path):
            return facts
    return None


def remove_abandoned(folder: Path) -> None:
    """Removes what a killed writer has left in `folder`."""
    for path in folder.glob(f".*{SCRATCH}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < ABANDONED_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def save_table(
    path: Path,
    schema: pyarrow.Schema,
    batches: Iterable[pyarrow.RecordBatch],
    facts: Mapping[str, Any],
) -> None:
    """The table, and then its facts. OSError names the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{uuid.uuid4().hex}{SCRATCH}")
    try:
        with disk_errors(path):
            with (
                pyarrow.OSFile(str(scratch), "wb") as file,
                pyarrow.ipc.new_file(file, schema) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
            checksum = _checksum(scratch)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    write_whole(_beside(path), json.dumps({**facts, "checksum": checksum}) + "\n")


def mapped_table(path: Path) -> pyarrow.Table:
    """The table that was saved at `path`: views on the mapped file."""
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
