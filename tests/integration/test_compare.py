"""Several recipes side by side: each is run for its share of time, and the figures are those of its
own report."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from draftsmith.inference.console import Terminated
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.pipeline.compare import FILE, _run, changed, compare_recipes
from draftsmith.train.recipe.load import load_recipe, read
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.errors import raises_at
from tests.support.forked import interpreter


@pytest.fixture
def recipes(recipe, tmp_path) -> list[Path]:
    """eagle3, and Medusa in two stages with a LoRA."""
    tree = read(recipe)
    tree["trackers"] = []
    tree["evaluation"] |= {"lossless_check": False, "repeats": 0}
    other = tree | {"family": "medusa", "drafter": {"num_heads": 2}, "joint": {"r": 2}}
    other["stages"] = [
        {"name": "heads", "training": {"steps": 3}},
        {"name": "joint", "training": {"steps": 1}},
    ]
    paths = []
    for name, content in (("eagle3", tree), ("medusa-2", other)):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml_text(content))
    return paths


@pytest.mark.integration
def test_compare_gives_every_recipe_its_time_and_its_row(recipes, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter())
    out = tmp_path / "compare"
    entries = list(compare_recipes(recipes, {"max_minutes": 0.02}, out))
    assert [(e["name"], e["family"]) for e in entries] == [
        ("eagle3", "eagle3"),
        ("medusa-2", "medusa"),
    ]
    reports = [out / entry["name"] / "acceptance.json" for entry in entries]
    for entry, report in zip(entries, reports):
        assert 1.2 <= entry["training_seconds"] < 60 and entry["training_steps"] >= 1
        assert entry["summary"] == json.loads(report.read_text())["summary"]
    assert json.loads((out / FILE).read_text())["entries"] == entries
    resolved = read(out / "medusa-2" / "recipe.yaml")
    assert [s["training"]["max_minutes"] for s in resolved["stages"]] == [0.015, 0.005]
    stamps = [report.stat().st_mtime_ns for report in reports]
    # what is there is not run again
    assert list(compare_recipes(recipes, {"max_minutes": 0.02}, out)) == entries
    assert [report.stat().st_mtime_ns for report in reports] == stamps


SAVES_ITSELF = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stop(*_):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").touch()
time.sleep(60)
"""


def test_stop_of_a_comparison_waits_until_its_run_has_saved_itself(tmp_path) -> None:
    def terminate(*_: object) -> None:
        if (tmp_path / "ready").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Terminated

    before = signal.signal(signal.SIGALRM, terminate)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(Terminated):
            _run([sys.executable, "-c", SAVES_ITSELF, str(tmp_path)])
        assert (tmp_path / "saved").exists()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_equal_steps_are_shared_by_stages_as_minutes_are(recipes, tmp_path) -> None:
    gated = recipes[1].read_text() + "\ngates: {t0.acceptance_length: {min: 2}}\n"
    recipes[1].write_text(gated)
    cold = ["evaluation.temperatures=[1.0]"]  # a gate of another temperature is of no consequence
    resolved = load_recipe(recipes[1], changed(recipes[1], {"steps": 8}, tmp_path, cold))
    assert [stage.training["steps"] for stage in resolved.stages] == [6, 2]
    assert resolved.training.steps == 8 and resolved.training.max_minutes is None


@pytest.mark.parametrize("name", ["1", "0.5", "null", "true"])
def test_changed_keeps_names_and_folders_that_yaml_has_other_words_for(
    name, recipes, tmp_path
) -> None:
    recipes[0].write_text(yaml_text(read(recipes[0]) | {"name": name}))
    out = tmp_path / "compared #1"
    resolved = load_recipe(recipes[0], changed(recipes[0], {"steps": 8}, out, ()))
    assert resolved.name == name
    assert resolved.output_dir == str(out / "eagle3")
    assert resolved.regenerate.cache_dir == str(out / "responses")


def test_compare_refuses_what_cannot_be_compared(recipes, tmp_path) -> None:
    with raises_at(ConfigError, "compare"):
        list(compare_recipes([recipes[0], recipes[0]], {"steps": 9}, tmp_path))
    text = recipes[1].read_text()
    recipes[1].write_text(text.replace("num_speculative_tokens: 2", "num_speculative_tokens: 1"))
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        list(compare_recipes(recipes, {"steps": 9}, tmp_path))
    tree = read(recipes[0])
    tree["data"].pop("validation", None)
    tree["evaluation"].pop("prompts", None)
    recipes[0].write_text(yaml_text(tree))
    with raises_at(ConfigError, recipes[0]):
        list(compare_recipes(recipes, {"steps": 9}, tmp_path))
