"""Hashes of weights, which say what texts and features were made with.

A file of a checkpoint is read at most once. The Hub's cache names files by their sha256; that of
any other file is kept by its size and time of change, below the user's cache folder. Weights that
are not on this machine have the digests that the Hub states."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from draftsmith.speculators.errors import DataError, HubError
from draftsmith.speculators.hub import cached_folder, one_line, split_revision
from draftsmith.speculators.target.adapted import adapted_model

SUFFIXES = (".safetensors", ".bin")
INDEX = "model.safetensors.index.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
# A file that changed a moment ago may change again within one tick of its clock.
SETTLED_S = 2.0


def weights_sha256(folder: str | os.PathLike[str]) -> str:
    """Hash over the names and the contents of the weight files in `folder`. DataError: none."""
    files = [path for path in Path(folder).iterdir() if path.name.endswith(SUFFIXES)]
    if not files:
        raise DataError("has no weight files to hash", where=f"{folder}")
    return _combined({path.name: file_sha256(path) for path in files})


def model_weights_sha256(path_or_id: str, revision: str | None = None) -> str:
    """The same of a folder, or of a model of the Hub, whose weights need not be on this machine. Of
    an adapter's folder: over its weights and those of the model that it adapts.

    HubError: they are not, and the Hub does not answer."""
    folder = cached_folder(path_or_id, revision)
    name, revision = split_revision(path_or_id, revision)
    base = adapted_model(name)
    if base is not None:
        parts = {"adapter": weights_sha256(folder), "base": model_weights_sha256(base)}
        return _combined(parts)
    if Path(name).is_dir() or _is_whole(folder):
        return weights_sha256(folder)
    kept = _place(f"{name}@{folder.name}")
    stated = _read(kept)
    if stated is None:
        stated = {"files": _stated_by_hub(name, revision)}
        _write(kept, stated)
    return _combined(stated["files"])


def file_sha256(path: Path) -> str:
    """Of a file's contents: from its name in the Hub's cache, as it was computed before, or now."""
    real = path.resolve()
    if path.is_symlink() and real.parent.name == "blobs" and SHA256.fullmatch(real.name):
        return real.name
    before = real.stat()
    state = {"size": before.st_size, "mtime_ns": before.st_mtime_ns, "inode": before.st_ino}
    kept = _place(str(real))
    known = _read(kept)
    if known is not None and {name: known.get(name) for name in state} == state:
        return str(known["sha256"])
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    settled = time.time() - before.st_mtime > SETTLED_S
    if settled and real.stat().st_mtime_ns == before.st_mtime_ns:
        _write(kept, {**state, "sha256": digest, "path": str(real)})
    return digest


def _combined(files: Mapping[str, str]) -> str:
    """Of names and their sha256, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\n".encode())
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    """True if all weight files of a snapshot are there: those of the index, if it has one."""
    index = folder / INDEX
    if not index.is_file():
        return any(path.name.endswith(SUFFIXES) for path in folder.iterdir())
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)


def _stated_by_hub(name: str, revision: str | None) -> dict[str, str]:
    """The sha256 of each weight file, by the Hub's answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise HubError(
            f"its weights are not on this machine, and the Hub did not state their hashes:"
            f" {one_line(error)}; go online, or download the model",
            where=name,
        ) from error
    files = {
        file.rfilename: file.lfs.sha256
        for file in info.siblings or ()
        if file.rfilename.endswith(SUFFIXES) and "/" not in file.rfilename and file.lfs
    }
    if not files:
        raise DataError("has no weight files to hash", where=name)
    return files


def _place(key: str) -> Path:
    """Where what is known of a key is kept."""
    home = os.path.expanduser("~")
    if home == "~":  # of a user without one, as in containers: nothing is kept
        home = os.devnull
    root = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return root / "draftsmith" / "digests" / f"{name}.json"


def _read(place: Path) -> dict | None:
    """None: nothing that can be used."""
    try:
        value = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write(place: Path, value: dict) -> None:
    """A cache that cannot be written costs time and nothing else."""
    scratch = place.with_name(f"{place.name}.{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(value), encoding="utf-8")
        os.replace(scratch, place)
