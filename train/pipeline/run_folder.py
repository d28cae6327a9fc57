"""The folders of a run: made and written to before anything is loaded; its own is of one run at a
time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator

from draftsmith.inference.whole_file import check_folder, check_writable, remove_scratch
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.processes import on_first
from draftsmith.train.recipe.recipe import EXPORT, TARGET, Recipe

LOCK = "run.lock"  # names the process that writes into the folder
# What `fresh_folder` calls an export, or a trained target, that is being written.
TORN = re.compile(rf"\.({EXPORT}(-\w+)?|{TARGET})-[a-z0-9_]{{8}}")
SAME_START = 2.0  # seconds that two readings of the start of one process may differ by


def check_folders(recipe: Recipe, *, features: bool = True) -> None:
    """ConfigError names the key of a folder that cannot be written to, before the hours after which
    it is needed. Shared ones that hold something may hold all, and be read alone. `features`: the
    hidden states are needed too."""
    check_folder("output_dir", Path(recipe.output_dir))
    for _, stage in recipe.training_stages():
        shared = {"regenerate.cache_dir": stage.regenerate.cache_dir}
        if not stage.regenerate.enabled:
            shared = {}
        if features and (stage.features.mode == "cache" or stage.features.endpoints):
            shared["features.dir"] = stage.features.dir
        for key, folder in shared.items():
            if folder is not None and not (os.path.isdir(folder) and os.listdir(folder)):
                check_folder(key, Path(folder))


@contextmanager
def claimed(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """`folder` belongs to this run, whose first process holds its lock. ConfigError: it cannot be
    written to, or another run is at work there. A killed run leaves no obstacle, and what it had
    half-written is removed."""
    on_first(accelerator, lambda: _claim(folder))
    try:
        yield
    finally:
        if accelerator.is_main_process:
            _release(folder)


def _claim(folder: Path) -> None:
    lock = folder / LOCK
    check_writable("output_dir", lock)
    with _opened(lock) as descriptor:
        holder = _read(descriptor)
        if holder and not _is_gone(holder):
            raise ConfigError(_refusal(lock, holder), where=f"output_dir {folder}")
        _write(descriptor, _this_process())
    remove_scratch(folder)
    for torn in folder.glob(".*"):
        if TORN.fullmatch(torn.name):
            shutil.rmtree(torn, ignore_errors=True)


def _release(folder: Path) -> None:
    with suppress(OSError):  # as of a disk that was taken away: what stays is the lock of the dead
        lock = folder / LOCK
        with _opened(lock) as descriptor:
            if _read(descriptor) == _this_process():
                lock.unlink()


@contextmanager
def _opened(lock: Path) -> Iterator[int]:
    """The descriptor of the lock's file, which nobody else has opened so meanwhile; on a disk
    without file locks that is not certain."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                    yield descriptor
                    return
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """The holder; empty: none, or one that was killed while it wrote its name."""
    try:
        return json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}


def _write(descriptor: int, holder: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    os.fsync(descriptor)


def _this_process() -> dict[str, Any]:
    process = psutil.Process()
    return {
        "pid": process.pid,
        "host": socket.gethostname(),
        "started": process.create_time(),
        "booted": psutil.boot_time(),
    }


def _is_gone(holder: dict[str, Any]) -> bool:
    """True if the holder ran on this host and its process has ended, awaited by its parent or not.

    Starts count from that of the machine: setting the clock moves both."""
    if holder["host"] != socket.gethostname():
        return False
    booted = psutil.boot_time()
    try:
        process = psutil.Process(holder["pid"])
        started = process.create_time() - booted
        ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    return ended or abs(started - holder["started"] + holder.get("booted", booted)) > SAME_START


def _refusal(lock: Path, holder: dict[str, Any]) -> str:
    run = f"process {holder['pid']} of {holder['host']}"
    if holder["host"] == socket.gethostname():
        return f"another run is at work there ({run}); wait for it, end it, or set output_dir"
    return (
        f"another run is at work there, or was killed ({run}); if that process has ended, delete"
        f" {lock}, and else set output_dir"
    )
