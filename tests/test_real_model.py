"""scripts/real_model.py: what it takes from the folder beside it, and what it asks for."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_report_of_a_suite_is_a_row_with_both_engines():
    both = in_engine(make_report(), "vllm")
    report = json.loads(both.model_dump_json())
    report["results"] += json.loads(make_report().model_dump_json())["results"]
    row = real_model.cells("eagle3", "mt_bench", report)
    assert len(row) == len(real_model.COLUMNS) and real_model.NONE not in row
    alone = real_model.cells("dspark", "mt_bench", json.loads(make_report().model_dump_json()))
    assert alone[4] == alone[6] == real_model.NONE
    assert real_model.markdown([row]).count("\n") == 3


def test_command_that_fails_ends_the_job_with_its_name():
    with pytest.raises(real_model.StepFailed, match="-c"):
        real_model.run(["python3", "-c", "raise SystemExit(3)"])
