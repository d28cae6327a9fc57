"""Processes wait for one that works and not for one that is gone; the first one's word counts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed import FileStore

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.pipeline.features_stage import _fill_together
from draftsmith.train.processes import (
    LostProcess,
    Pulse,
    RunAccelerator,
    is_shared,
    on_first,
    once_per_folder,
    require_same,
    send_tensors,
    share_files,
)
from tests.support.errors import raises_at
from tests.support.training import recipe_of
from tests.support.worlds import Scenario, in_worlds


def pulse(folder: Path, process: int, silence: float) -> Pulse:
    store = FileStore(str(folder / "store"), 2)
    return Pulse(store, process, 2, beat=0.02, silence=silence)


def test_meet_process_that_works_is_waited_for(tmp_path):
    """For longer than a process may be silent."""
    pulses = [pulse(tmp_path, process, silence=0.5) for process in (0, 1)]
    waiting = threading.Thread(target=pulses[0].meet)
    waiting.start()
    time.sleep(1.0)
    assert waiting.is_alive()
    pulses[1].meet()
    waiting.join()
    for one in pulses:
        one.stop()


def test_meet_process_without_a_sign_of_life_is_lost(tmp_path):
    alone = pulse(tmp_path, 0, silence=0.1)
    with raises_at(LostProcess, "processes"):
        alone.meet()
    alone.stop()


def test_meet_process_that_has_ended_is_lost_at_once(tmp_path):
    alone, other = pulse(tmp_path, 0, silence=1e6), pulse(tmp_path, 1, silence=1e6)
    other.stop()
    with raises_at(LostProcess, "processes"):
        alone.meet()
    alone.stop()


def test_meet_process_that_comes_last_and_ends_is_not_lost(tmp_path, monkeypatch):
    """Between two looks of the process that waits for it."""
    waiting, last = (pulse(tmp_path, process, silence=1e6) for process in (0, 1))
    look = waiting._lost

    def look_when_it_has_left(signs):
        last.meet()
        last.stop()
        monkeypatch.setattr(waiting, "_lost", look)
        return look(signs)

    monkeypatch.setattr(waiting, "_lost", look_when_it_has_left)
    waiting.meet()
    waiting.stop()


def words_of_the_first(folder: Path) -> list[Any]:
    """What each of two processes gets, whose folders are not the same."""
    accelerator = RunAccelerator(cpu=True)
    process = accelerator.process_index
    local = folder / f"machine-{process}"
    local.mkdir(exist_ok=True)

    def fail() -> None:
        raise DataError("no", where="data")

    results: dict[str, Any] = {"word": on_first(accelerator, lambda: process + 1)}
    try:
        on_first(accelerator, fail)
    except DataError as error:
        results["error"] = error.where
    try:
        require_same(accelerator, str(process), "no", where="processes")
    except ConfigError as error:
        results["different"] = error.where
    require_same(accelerator, "same", "no", where="processes")
    tree = {"a": {"b": torch.arange(4) + process, "c": [torch.tensor(2.5 + process), "text"]}}
    sent = send_tensors(accelerator, lambda: tree)
    results["tensors"] = [sent["a"]["b"].tolist(), float(sent["a"]["c"][0]), sent["a"]["c"][1]]
    (local / f"{process}.jsonl").write_text(f"of {process}")
    (local / "both.jsonl").write_text("equal")
    accelerator.wait_for_everyone()
    share_files(accelerator, local, "*.jsonl")
    results["files"] = {path.name: path.read_text() for path in local.iterdir()}
    results["once"] = once_per_folder(accelerator, folder / "rows", lambda: process)
    results["once_apart"] = once_per_folder(accelerator, local / "rows", lambda: process) - process
    try:
        once_per_folder(accelerator, folder, fail)
    except DataError as error:
        results["once_error"] = error.where
    results["shared"] = (
        is_shared(accelerator, folder),
        is_shared(accelerator, local / "new"),
    )
    cached = recipe_of("eagle3", features={"mode": "cache", "dir": str(local / "features")})
    nothing: Any = None  # is looked at before
    try:
        _fill_together(cached, nothing, [(nothing, [nothing])], accelerator, Stages(enabled=False))
    except ConfigError as error:
        results["cache"] = error.where
    everyone = gather_object([results])
    accelerator.pulse.stop()
    return everyone


def test_on_first_every_process_has_its_word(tmp_path):
    (everyone,) = in_worlds(words_of_the_first, [Scenario("apart", 2)], tmp_path).values()
    assert len(everyone) == 2
    for results in everyone:
        assert results == {
            "word": 1,
            "error": "data",
            "different": "processes",
            "tensors": [[0, 1, 2, 3], 2.5, "text"],
            "files": {"0.jsonl": "of 0", "1.jsonl": "of 1", "both.jsonl": "equal"},
            "shared": (True, False),
            "cache": "features.dir",
            "once": 0,
            "once_apart": 0,
            "once_error": "data",
        }
