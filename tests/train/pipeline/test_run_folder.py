"""A run's folder belongs to one living run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from accelerate import Accelerator
from typer.testing import CliRunner

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.cli import app
from draftsmith.train.pipeline import run_folder
from draftsmith.train.pipeline.run import run
from draftsmith.train.pipeline.run_folder import LOCK, check_folders, claimed
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.errors import raises_at
from tests.support.forked import CONTEXT
from tests.support.training import recipe_of


def hold(folder: Path) -> None:
    """Claims the folder and works on."""
    with claimed(Accelerator(cpu=True), folder):
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    process = CONTEXT.Process(target=hold, args=(tmp_path,), daemon=True)
    process.start()
    while not ((tmp_path / LOCK).exists() and (tmp_path / LOCK).read_text()):
        time.sleep(0.02)
    yield process
    process.kill()


def test_claimed_folder_of_a_living_run_is_refused_until_it_is_killed(holder, tmp_path):
    with raises_at(ConfigError, f"output_dir {tmp_path}"), claimed(Accelerator(cpu=True), tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with claimed(Accelerator(cpu=True), tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_claimed_folder_is_rid_of_what_a_killed_run_had_half_written(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("draftsmith.inference.whole_file.os.replace", interrupt)
        patch.setattr("draftsmith.inference.whole_file._remove", lambda path: None)  # as if killed
        write_whole(tmp_path / "report.html", "half")
    (torn,) = tmp_path.iterdir()
    for name in (".export-ab_cd123", ".export-sglang-abcdefgh", ".target-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".exports-accepted").mkdir()  # of a swap that goes on
    notes = tmp_path / ".notes.tmp"
    notes.write_text("not of a run")
    with claimed(Accelerator(cpu=True), tmp_path):
        assert not torn.exists() and notes.exists()
        kept = {path.name for path in tmp_path.iterdir()}
        assert kept == {LOCK, ".notes.tmp", ".exports-accepted"}


def ended_child() -> dict[str, object]:
    """The number and start of a process that has ended, and that nobody has awaited."""
    child = psutil.Process(os.posix_spawnp("true", ["true"], os.environ))
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    return {"pid": child.pid, "started": child.create_time()}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"started": 1.0}, False),  # its number belongs to another process by now
        ({"host": "elsewhere", "pid": 1}, True),  # nobody here can tell
        (None, False),  # killed while it wrote its name
        ("the clock is set", True),
        ("it waits for its parent", False),  # which has not heard yet that it has ended
    ],
)
def test_claimed_lock_of_another_process_counts_while_it_may_live(tmp_path, changes, refused):
    parent = psutil.Process(os.getppid())
    lock = {"pid": parent.pid, "host": socket.gethostname(), "started": parent.create_time()}
    if changes == "the clock is set":
        changes = {"started": lock["started"] - 3600, "booted": psutil.boot_time() - 3600}
    elif changes == "it waits for its parent":
        changes = ended_child()
    text = "" if changes is None else json.dumps(lock | changes)
    (tmp_path / LOCK).write_text(text)
    expected = raises_at(ConfigError, f"output_dir {tmp_path}") if refused else nullcontext()
    with expected, claimed(Accelerator(cpu=True), tmp_path):
        pass
    assert ((tmp_path / LOCK).read_text() == text) if refused else not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("blocked", ["a file", "another run"])
def test_run_folder_that_it_cannot_have_is_refused_before_the_target_is_looked_at(
    tmp_path, blocked
):
    folder = tmp_path / "run"
    where = f"output_dir {folder}"
    if blocked == "a file":
        folder.write_text("notes")
    else:
        folder.mkdir()
        (folder / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 0.0}))
    recipe = recipe_of("eagle3", output_dir=str(folder), target={"model": str(tmp_path / "none")})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(recipe.model_dump(mode="json")))
    with raises_at(ConfigError, where):
        run(path)


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("train", "output_dir"),
        ("train", "regenerate.cache_dir"),
        ("train", "features.dir"),
        ("regenerate", "output_dir"),
        ("regenerate", "regenerate.cache_dir"),
        ("cache-features", "output_dir"),
        ("cache-features", "features.dir"),
        ("prepare", "output_dir"),
    ],
)
def test_folder_that_is_needed_hours_later_is_refused_at_the_start(tmp_path, command, key):
    """Before the target is loaded, or anything is written by it."""
    (tmp_path / "file").write_text("no folder")
    sections = {"output_dir": f"{tmp_path / 'run'}", "features": {"mode": "cache"}}
    recipe = recipe_of("eagle3", target={"model": str(tmp_path / "none")}, **sections)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(recipe.model_dump(mode="json")))
    folder = tmp_path / "file" / "folder"
    result = CliRunner().invoke(app, [command, f"{path}", f"{key}={folder}"])
    assert result.exit_code == 2 and f"{key} {folder}: " in result.output.replace("\n", "")


def test_shared_folders_that_hold_something_may_be_read_alone(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "responses.jsonl").write_text("")
    checked = []
    monkeypatch.setattr(run_folder, "check_folder", lambda key, folder: checked.append(key))
    recipe = recipe_of(
        "eagle3",
        output_dir=str(tmp_path / "run"),
        regenerate={"cache_dir": str(tmp_path / "shared")},
        features={"mode": "cache", "dir": str(tmp_path / "new")},
    )
    check_folders(recipe)
    assert checked == ["output_dir", "features.dir"]
