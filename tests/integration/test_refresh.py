"""`draftsmith refresh` on a tiny target: what a log, a gate's verdict and a kill leave of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.train.pipeline import refresh as module
from draftsmith.train.pipeline.export_swap import GATHERED, INCOMING
from tests.support.cli import call, refused
from tests.support.traffic import write_log


def head(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.integration
def test_refresh_goes_on_after_a_kill_and_its_gate_decides_what_is_exported(
    recipe, run, exchanges, tmp_path, monkeypatch
):
    log = write_log(tmp_path / "log", exchanges)
    command = ("refresh", recipe, "--log", log, "--minutes", 0.02, "--share", 0.5)
    old = head(run / "export")

    with monkeypatch.context() as patch:  # killed with the new head exported, and not judged

        def killed(*_: object) -> None:
            raise KeyError("killed")

        patch.setattr(module, "judge", killed)
        with pytest.raises(KeyError, match="killed"):
            call(*command)
    assert head(run / "export") == old
    work = run / module.WORK
    assert head(work / "export") != old
    assert work.stat().st_mode & 0o077 == 0

    # traffic goes on, and the same command takes the slice that it had, and trains no more
    write_log(log, [*exchanges, *exchanges])
    monkeypatch.setattr(module, "refusals", lambda newest, old: ["not today"])
    code, output = call(*command)
    assert code == 1 and "not today" in output, output
    report = json.loads((run / module.REPORT).read_text())
    assert (report["exported"], report["reasons"]) == (False, ["not today"])
    assert report["slice"]["texts"] == {"train": 112, "choice": 16, "judge": 32}
    mix = report["supervised_tokens"]
    assert mix["old"] / sum(mix.values()) == pytest.approx(0.5, abs=0.1)
    assert report["newest"]["texts"] == 32 and report["old_suite"]["texts"] == 12
    assert head(run / "export") == old and not work.exists()

    monkeypatch.setattr(module, "refusals", lambda newest, old: [])
    write_log(log, exchanges)
    code, output = call(*command)
    assert code == 0, output
    assert head(run / "previous" / "export") == old and not work.exists()
    assert head(run / "export") != old


@pytest.mark.integration
def test_head_of_a_refresh_stays_whatever_is_killed_or_run_again(
    recipe, run, exchanges, tmp_path, monkeypatch
):
    command = ("refresh", recipe, "--log", write_log(tmp_path / "log", exchanges))
    command += ("--minutes", 0.02, "--share", 0.5)
    training = ("train", recipe, "evaluation.repeats=0", "evaluation.lossless_check=false")
    assert call(*training)[0] == 0
    old = head(run / "export")
    work = run / module.WORK
    monkeypatch.setattr(module, "refusals", lambda newest, old: [])
    with monkeypatch.context() as patch:  # killed behind the swap
        remove = module.shutil.rmtree

        def killed_at(path: Path, **options: Any) -> None:
            if path == work and (work / module.ACCEPTED).exists():
                raise KeyError("killed")
            remove(path, **options)

        patch.setattr(module.shutil, "rmtree", killed_at)
        with pytest.raises(KeyError, match="killed"):
            call(*command)
    new = head(run / "export")
    assert (new != old) and head(run / "previous" / "export") == old
    # the same command says that it was exported, and judges it by nothing more
    monkeypatch.setattr(module, "refusals", lambda newest, old: ["not again"])
    code, output = call(*command)
    assert code == 0 and "had accepted its head" in output, output
    assert head(run / "export") == new and not work.exists()
    report = json.loads((run / module.REPORT).read_text())
    assert module.refreshed_until(run) == report["slice"]["judged_since"]

    # the training's own export takes its place neither by the same command nor by `export`
    code, output = call(*training)
    assert code == 0 and "that of a refresh stays" in output, output
    assert head(run / "export") == new
    assert "the head of a refresh" in refused("export", run, tmp_path / "out")
    assert call("refresh", recipe, "--undo")[0] == 0
    assert head(run / "export") == old and module.refreshed_until(run) is None
    assert call("export", run, tmp_path / "out")[0] == 0


def test_refresh_that_was_killed_before_its_swap_goes_on(tmp_path):
    (tmp_path / module.WORK).mkdir()
    accepted = tmp_path / module.WORK / module.ACCEPTED
    accepted.write_text("slice")
    (tmp_path / GATHERED).mkdir()
    assert not module._was_accepted(tmp_path)
    assert accepted.with_name(module.SLICE).read_text() == "slice"


@pytest.mark.integration
def test_refresh_after_a_kill_and_a_change_of_the_target_begins_anew(
    recipe, run, exchanges, tiny_target, tmp_path, monkeypatch
):
    target = shutil.copytree(tiny_target, tmp_path / "changed" / tiny_target.name)
    log = write_log(tmp_path / "log", exchanges)
    command = ("refresh", recipe, f"target.model={target}", "--log", log, "--minutes", 0.02)

    def killed(*_: object) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(module, "judge", killed)
        with pytest.raises(KeyError, match="killed"):
            call(*command)
    with open(target / "chat_template.jinja", "a") as template:
        template.write("{# a comment #}")
    monkeypatch.setattr(module, "refusals", lambda newest, old: ["not today"])
    code, output = call(*command)
    assert code == 1 and "another target" in output, output


@pytest.mark.integration
def test_refresh_of_too_little_says_how_much_is_needed(recipe, run, exchanges, tmp_path):
    old = head(run / "export")
    log = write_log(tmp_path / "log", exchanges[:140])
    message = refused("refresh", recipe, "--log", log)
    assert "28 conversations" in message and "150 texts" in message
    log = write_log(tmp_path / "log", exchanges)
    message = refused("refresh", recipe, "--log", log, "--days", 0.01)  # some 14 minutes
    assert "15 exchanges" in message
    renamed = [LoggedExchange(**vars(one) | {"model": "another"}) for one in exchanges]
    log = write_log(tmp_path / "log", renamed)
    message = refused("refresh", recipe, "--log", log)
    assert "160 of another model" in message and "another 160" in message
    assert "--undo" in refused("refresh", recipe)
    assert "reads no log" in refused("refresh", recipe, "--undo", "--log", log)
    assert "no export before" in refused("refresh", recipe, "--undo")
    assert head(run / "export") == old and not (run / module.WORK).exists()


@pytest.mark.integration
def test_undo_that_was_killed_is_finished_and_not_undone_by_the_same_command(recipe, run):
    old = head(run / "export")
    killed = run / INCOMING / "export"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"before")
    code, output = call("refresh", recipe, "--undo")
    assert code == 0 and "--undo again" in output
    assert (head(run / "export"), head(run / "previous" / "export")) == (b"before", old)


@pytest.mark.integration
def test_undo_of_a_second_refresh_brings_back_the_date_of_the_first(recipe, run):
    for folder, date in ((run / "export", 2.0), (run / "previous" / "export", 1.0)):
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"draftsmith": {module.JUDGED_SINCE: date}}
        (folder / "config.json").write_text(json.dumps(facts))
    assert module.refreshed_until(run) == 2.0
    assert call("refresh", recipe, "--undo")[0] == 0
    assert module.refreshed_until(run) == 1.0
