"""Exports change places whole, whatever kills the change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftsmith.speculators.errors import CheckpointError
from draftsmith.train.pipeline import export_swap
from draftsmith.train.pipeline.export_swap import PREVIOUS, finish_swap, swap_back, swap_in
from tests.support.errors import raises_at

NAMES = ("export", "export-sglang")


def write(folder: Path, head: str) -> list[Path]:
    """The exports of a head in two formats, below `folder`."""
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "head").write_text(head)
    return [folder / name for name in NAMES]


def heads(folder: Path) -> list[str]:
    return [(folder / name / "head").read_text() for name in NAMES]


@pytest.fixture
def run(tmp_path) -> Path:
    write(tmp_path / "run", "old")
    return tmp_path / "run"


def test_swap_keeps_the_exports_before_and_undo_swaps_again(run):
    with raises_at(CheckpointError, run / PREVIOUS):
        swap_back(run)
    swap_in(run, write(run / "refresh", "new"))
    assert (heads(run), heads(run / PREVIOUS)) == (["new"] * 2, ["old"] * 2)
    for now, before in (("old", "new"), ("new", "old")):
        swap_back(run)
        assert (heads(run), heads(run / PREVIOUS)) == ([now] * 2, [before] * 2)
    assert not finish_swap(run)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("renames", range(8))
def test_swap_killed_after_any_rename_is_all_old_or_is_finished_to_all_new(
    run, renames, undone, monkeypatch
):
    """The moment between the two renames of a folder is among them."""
    swap_in(run, write(run / "first", "older"))
    swap_back(run)  # the exports before are `older`
    rename = os.rename
    left = iter(range(renames))

    def rename_or_die(source, destination):
        if next(left, None) is None:
            raise Killed
        rename(source, destination)

    exports = write(run / "refresh", "new")
    killed = False
    with monkeypatch.context() as patch:
        patch.setattr(export_swap.os, "rename", rename_or_die)
        try:
            swap_back(run) if undone else swap_in(run, exports)
        except Killed:
            killed = True
    finished = finish_swap(run)
    now, before = heads(run), heads(run / PREVIOUS)
    new = ["older" if undone else "new"] * 2
    if finished or not killed:
        assert (now, before) == (new, ["old"] * 2)
    else:
        assert (now, before) == (["old"] * 2, ["older"] * 2)
    assert finished == (killed and renames >= (1 if undone else 3))
    assert {path.name for path in run.glob(".exports-*")} <= {".exports-accepted-not-yet"}
