"""scripts/real_model.py: what it takes from the folder beside it, and what it asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.train.recipe.load import load_recipe
from scripts import real_model
from tests.support.reports import in_engine, make_report


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with a model, prompts and one suite."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl.gz").touch()
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "humaneval.jsonl").touch()
    return tmp_path


def test_what_lies_beside_is_used_and_the_usual_places_else(beside, tmp_path, monkeypatch):
    job = real_model.job_of(["--beside", str(beside), "--out", str(tmp_path / "out")])
    assert job.model == beside / "model" and job.prompts == [beside / "prompts.jsonl.gz"]
    assert job.suites["humaneval"] == beside / "suites" / "humaneval.jsonl"
    assert job.wheels is None
    empty = tmp_path / "empty"
    (empty / "wheels").mkdir(parents=True)
    bare = real_model.job_of(["--beside", str(empty)])
    assert bare.model == real_model.MODEL and len(bare.prompts) == 2
    assert bare.wheels == empty / "wheels"
    monkeypatch.delenv("DRAFTSMITH_VLLM_PYTHON", raising=False)
    assert real_model.vllm_python(bare) is None  # no wheel of vLLM


@pytest.mark.parametrize("head", real_model.HEADS)
def test_training_it_asks_for_is_a_recipe_within_its_limits(head, beside, tmp_path):
    job = real_model.job_of(["--beside", str(beside), "--out", str(tmp_path), "--limit", "500"])
    command, recipe, *overrides = real_model.train_words(job, head)
    checked = load_recipe(recipe, overrides)
    assert command == "train" and checked.family == head
    assert checked.training.max_minutes == 15 and checked.data.train[0].limit == 500
    assert Path(checked.output_dir) == tmp_path / head
    dry = real_model.job_of(["--dry-run", "--beside", str(beside)])
    assert load_recipe(recipe, real_model.train_words(dry, head)[2:]).data.train[0].limit == 20
    assert dry.out != real_model.job_of([]).out


def report_of(engine: str) -> dict[str, Any]:
    """A report of one engine."""
    report = make_report() if engine == "draftsmith" else in_engine(make_report(), engine)
    return json.loads(report.model_dump_json())


def test_reports_of_a_suite_are_a_row_with_both_engines():
    row = real_model.cells("eagle3", "mt_bench", report_of("draftsmith"), report_of("vllm"))
    assert len(row) == len(real_model.COLUMNS) and real_model.NONE not in row
    alone = real_model.cells("dspark", "mt_bench", report_of("draftsmith"))
    assert alone[4] == alone[6] == real_model.NONE
    assert real_model.markdown([row]).count("\n") == 3


def test_command_that_fails_ends_the_job_with_its_name():
    with pytest.raises(real_model.StepFailed, match="-c"):
        real_model.run(["python3", "-c", "raise SystemExit(3)"])


def test_search_path_of_the_caller_stays_behind_the_project(monkeypatch):
    """Where packages lie beside an interpreter, its commands need them as well."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    path = real_model.project_environment()["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(real_model.ROOT / "src"), "/packages"]


class Commands:
    """What is asked to run, none of which does: its report is there at once. Those that write into
    a folder of `fail` fail; after `most` of them the machine is gone."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.fail: set[str] = set()
        self.most = 100

    def run(self, words, environment=None) -> None:
        folder = Path(str(words[-1]).removeprefix("output_dir="))
        if len(self.folders) == self.most:
            raise KeyboardInterrupt
        self.folders.append(folder.name)
        if folder.name in self.fail:
            raise real_model.StepFailed(f"{folder.name} ended")
        folder.mkdir(parents=True, exist_ok=True)
        engine = "vllm" if "vllm" in words else "draftsmith"
        (folder / "acceptance.json").write_text(json.dumps(report_of(engine)))


@pytest.fixture
def commands(monkeypatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(real_model, "run", commands.run)
    monkeypatch.setattr(real_model, "project_python", lambda job: Path("python"))
    monkeypatch.setattr(real_model, "SUITES", ("humaneval",))
    monkeypatch.delenv("DRAFTSMITH_VLLM_PYTHON", raising=False)
    return commands


def test_start_after_the_machine_was_gone_goes_on_with_the_table(beside, tmp_path, commands):
    job = real_model.job_of(["--beside", str(beside), "--out", str(tmp_path / "out")])
    commands.most = 3
    with pytest.raises(KeyboardInterrupt):
        real_model.do(job)
    assert commands.folders == ["eagle3", "eagle3-humaneval", "dspark"]
    table = tmp_path / "out" / "table.md"
    assert table.read_text().count("\n") == 2 + 3
    commands.most = 100
    real_model.do(job)
    assert commands.folders[3:] == ["dspark-humaneval"]
    assert table.read_text().count("\n") == 2 + 4


def test_step_that_fails_is_named_and_the_others_run(beside, tmp_path, commands, capsys):
    commands.fail = {"eagle3", "dspark-humaneval"}
    with pytest.raises(SystemExit, match="eagle3 ended\nreal_model: dspark-humaneval ended"):
        real_model.main(["--beside", str(beside), "--out", str(tmp_path / "out")])
    assert commands.folders == ["eagle3", "dspark", "dspark-humaneval"]
    assert "| dspark | held out |" in capsys.readouterr().out


def test_suite_keeps_its_row_where_vllm_fails_and_only_that_is_tried_again(
    beside, tmp_path, commands, monkeypatch
):
    monkeypatch.setattr(real_model, "HEADS", ("eagle3",))
    monkeypatch.setattr(real_model, "vllm_python", lambda job: Path("python"))
    commands.fail = {"eagle3-humaneval-vllm"}
    arguments = ["--beside", str(beside), "--out", str(tmp_path / "out")]
    job = real_model.job_of(arguments)
    row = real_model.do(job).rows["eagle3", "humaneval"]
    assert row[2] != real_model.NONE == row[4]
    commands.fail.clear()
    row = real_model.do(job).rows["eagle3", "humaneval"]
    assert row[2] != real_model.NONE != row[4]
    real_model.do(job)
    vllm = ["eagle3-humaneval-vllm"] * 2
    assert commands.folders == ["eagle3", "eagle3-humaneval", *vllm]
    real_model.do(real_model.job_of([*arguments, "--minutes", "30"]))
    assert commands.folders[4] == "eagle3"  # what is asked is another
