"""Several recipes side by side: each is run for its share of time, and the figures are those of its
own report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from speculators.errors import ConfigError
from train.pipeline.compare import PICTURE, Candidate, Comparison, markdown, run_all

from .test_pipeline import recipe, tiny_target  # noqa: F401 (fixtures)

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def recipes(recipe, tmp_path) -> list[Path]:
    """eagle3, and Medusa in two stages with a LoRA."""
    tree = yaml.safe_load(recipe.read_text())
    tree["trackers"] = []
    tree["evaluation"]["baseline_transformers"] = False
    other = tree | {"family": "medusa", "drafter": {"num_heads": 2}, "joint": {"r": 2}}
    other["stages"] = [
        {"name": "heads", "training": {"steps": 3}},
        {"name": "joint", "training": {"steps": 1}},
    ]
    paths = []
    for name, content in (("eagle3", tree), ("medusa-2", other)):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(content))
    return paths


def candidates(paths: list[Path]) -> list[Candidate]:
    return [Candidate(path.stem, path) for path in paths]


@pytest.mark.integration
def test_every_recipe_gets_its_time_and_its_row(
    recipes, tmp_path, interpreter, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    out = tmp_path / "compare"
    found = run_all(candidates(recipes), 0.02, out)
    assert [(entry.name, entry.family) for entry in found.entries] == [
        ("eagle3", "eagle3"),
        ("medusa-2", "medusa"),
    ]
    for entry in found.entries:
        assert 1.2 <= entry.training_seconds < 60 and entry.training_steps >= 1
        report = json.loads((out / entry.name / "acceptance.json").read_text())
        for t, at in entry.temperatures.items():
            assert at.acceptance_length == report["summary"][f"t{t}.acceptance_length"]
            assert (
                at.speedup_vs_autoregressive == report["summary"][f"t{t}.speedup_vs_autoregressive"]
            )
            assert 0 < at.draft_share < 1
    heads = 2 * (32 * 32 + 32 + 4096 * 32)
    assert found.entries[1].parameters == heads
    assert Comparison.model_validate_json((out / "comparison.json").read_text()) == found
    assert (out / PICTURE).stat().st_size > 10_000
    assert markdown(found).count("\n") == 4 and "| medusa-2 |" in markdown(found)
    resolved = yaml.safe_load((out / "medusa-2" / "recipe.yaml").read_text())
    assert [s["training"]["max_minutes"] for s in resolved["stages"]] == [0.015, 0.005]

    stamps = [
        (out / name / "acceptance.json").stat().st_mtime_ns for name in ("eagle3", "medusa-2")
    ]
    assert (
        run_all(candidates(recipes), 0.02, out).entries == found.entries
    )  # what is there is not run again
    assert [
        (out / name / "acceptance.json").stat().st_mtime_ns for name in ("eagle3", "medusa-2")
    ] == stamps


def test_what_cannot_be_compared_is_named(recipes, tmp_path) -> None:
    with pytest.raises(ConfigError, match="told apart by their file names"):
        run_all(candidates([recipes[0], recipes[0]]), 1.0, tmp_path)
    recipes[1].write_text(
        recipes[1].read_text().replace("num_speculative_tokens: 2", "num_speculative_tokens: 1")
    )
    with pytest.raises(ConfigError, match="must be the same in all recipes"):
        run_all(candidates(recipes), 1.0, tmp_path)
