"""Puts new exports in the place of those of a run, and keeps the ones before.

A folder is not replaced in one step; so the new ones are first brought together in a folder whose
name says that they are accepted. From that rename on, whoever finds it finishes what was begun: a
kill at any moment leaves either all of the old exports or, after `finish_swap`, all of the new
ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from draftsmith.speculators.errors import CheckpointError

PREVIOUS = "previous"  # the exports before the newest swap, under their names
INCOMING = ".exports-accepted"
GATHERED = f"{INCOMING}-not-yet"
OUTGOING = ".exports-replaced"


def swap_in(
    run: Path, exports: Iterable[Path], accept: Callable[[], object] = lambda: None
) -> None:
    """Moves the folders `exports`, of the same disk, into the run's under their names; those that
    were there go to PREVIOUS. Nothing else may be swapping. `accept` is called right before the
    rename from which on the swap is finished; until then GATHERED is there."""
    gathered = run / GATHERED
    shutil.rmtree(gathered, ignore_errors=True)
    gathered.mkdir()
    for export in exports:
        os.rename(export, gathered / export.name)
    accept()
    os.rename(gathered, run / INCOMING)
    finish_swap(run)


def finish_swap(run: Path) -> bool:
    """Finishes a swap that was killed; False: there is none."""
    incoming = run / INCOMING
    outgoing = run / OUTGOING
    if not incoming.exists() and not outgoing.exists():
        return False
    for export in sorted(incoming.glob("*")):
        outgoing.mkdir(exist_ok=True)
        if (run / export.name).exists():
            os.rename(run / export.name, outgoing / export.name)
        os.rename(export, run / export.name)
    if incoming.exists():
        incoming.rmdir()
    if outgoing.exists():
        shutil.rmtree(run / PREVIOUS, ignore_errors=True)
        os.rename(outgoing, run / PREVIOUS)
    return True


def swap_back(run: Path) -> None:
    """Swaps the exports of a run with the ones before; once more, and it is undone. CheckpointError
    if there are none."""
    previous = run / PREVIOUS
    if not any(previous.glob("*")):
        raise CheckpointError(
            "there is no export before the present one; a refresh that exports keeps it there",
            where=f"{previous}",
        )
    os.rename(previous, run / INCOMING)
    finish_swap(run)
