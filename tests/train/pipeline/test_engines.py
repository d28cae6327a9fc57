"""Which engines a run is measured in: what a recipe may ask, what happens without vLLM, the
command's options."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from draftsmith.inference.evaluation.evaluate import EvaluationSettings
from draftsmith.inference.vllm_bridge.engine import VllmOptions
from draftsmith.inference.vllm_python import PYTHON
from draftsmith.speculators.errors import ConfigError, UnsupportedTarget
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.cli import app
from draftsmith.train.pipeline import acceptance_stage, evaluate_again
from draftsmith.train.pipeline.acceptance_stage import (
    Engines,
    engines_of,
    gate_bounds,
    require_engines,
)
from draftsmith.train.pipeline.run import require_abilities, run
from draftsmith.train.recipe.recipe import make_recipe
from tests.quickstart_data import source as quickstart

SOURCES = [quickstart("test", 2)]
BOTH = {"engines": ["draftsmith", "vllm"]}


def recipe(
    gates: dict | None = None,
    on_policy: dict | None = None,
    regenerate: dict | None = None,
    **evaluation,
):
    return make_recipe(
        {
            "name": "tiny",
            "target": {"model": "somewhere"},
            "data": {"train": SOURCES, "validation": SOURCES},
            "evaluation": evaluation,
            "gates": gates or {},
            "on_policy": on_policy,
            "regenerate": regenerate or {},
        }
    )


@pytest.fixture
def nowhere(monkeypatch) -> None:
    monkeypatch.setenv(PYTHON, "/nowhere/python")


def test_without_vllm_a_run_is_measured_here_alone_and_says_so(nowhere) -> None:
    said: list[str] = []
    assert engines_of(recipe(), said.append) == Engines() and not said
    assert engines_of(recipe(**BOTH), said.append) == Engines()
    assert len(said) == 1 and PYTHON in said[0] and "not measured in vLLM" in said[0]


def test_a_gate_on_vllm_stops_a_run_before_it_trains(nowhere, tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"vllm_gap is set.*{PYTHON}"):
        require_engines(recipe({"t0.vllm_gap": {"max": 0.02}}, **BOTH))
    require_engines(recipe({"t0.acceptance_length": {"min": 1}}, **BOTH))
    with pytest.raises(ConfigError, match=rf"names vllm alone.*{PYTHON}"):
        require_engines(recipe(engines=["vllm"]))
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe({"vllm_gap": {"max": 0.02}}, **BOTH).resolved_yaml())
    with pytest.raises(ConfigError, match="vllm_gap is set"):
        run(written, [f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_the_gap_is_gated_over_the_temperatures_of_both() -> None:
    bounds = gate_bounds(recipe({"vllm_gap": {"max": 0.02}, "t0.vllm_gap": {"max": 0.01}}, **BOTH))
    assert {name: bound.max for name, bound in bounds.items()} == {
        "vllm_gap": 0.02,
        "t0.vllm_gap": 0.01,
    }


@pytest.mark.parametrize("engine", ["draftsmith", "vllm"])
def test_a_gap_between_engines_needs_two(engine) -> None:
    with pytest.raises(ValueError, match=r"gates\.vllm_gap: needs evaluation\.engines"):
        recipe({"vllm_gap": {"max": 0.02}}, engines=[engine])


def test_what_vllm_is_told_comes_from_the_recipe(monkeypatch) -> None:
    monkeypatch.setattr(
        "draftsmith.train.pipeline.acceptance_stage.vllm_python", lambda: "python of vLLM"
    )
    section = {"options": {"tensor_parallel_size": 2}, "speculative_config": {"x": 1}}
    engines = engines_of(recipe(**BOTH, vllm=section))
    assert engines.vllm == VllmOptions("python of vLLM", {"tensor_parallel_size": 2}, {"x": 1})
    assert engines.ours
    assert not engines_of(recipe(engines=["vllm"])).ours


def test_what_needs_a_target_that_decodes_is_refused_before_it_begins(tiny_model) -> None:
    features_alone = FrozenTarget(tiny_model("bloom", n_head=4))
    with pytest.raises(
        UnsupportedTarget,
        match=r"regenerate.enabled, data.validation, evaluation.engines: \[draftsm",
    ):
        require_abilities(recipe(), features_alone)
    there = {"enabled": True, "endpoints": [{"url": "http://x/v1"}]}
    require_abilities(recipe(engines=["vllm"], regenerate=there), features_alone)
    require_abilities(recipe(on_policy={}), FrozenTarget(tiny_model("lfm2")))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--engine", "hf"], "--engine"),
        (["--url", "http://x"], "--url"),
        (["--engine", "vllm", "--baseline-url", "http://x"], "--url"),
        (["--engine", "vllm", "--url", "http://x", "--vllm-python", "p"], "--vllm-python"),
        (["--engine", "vllm", "--vllm-options", "[1]"], "--vllm-options"),
        (["--method", "ngram", "--drafter", "d"], "--method"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, option) -> None:
    result = CliRunner().invoke(
        app, ["evaluate", "--model", "m", *arguments], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2 and option in result.output


def test_without_the_quickstarts_prompts_a_file_must_be_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(evaluate_again, "HELD_OUT", tmp_path / "none")
    with pytest.raises(ConfigError, match="--prompts FILE"):
        evaluate_again.evaluate_folders("somewhere", None, None, tmp_path, [0.0])


def test_compiled_rounds_are_of_the_sizes_that_are_timed():
    settings = EvaluationSettings(batch_size=2, max_tokens=7)
    options = [
        acceptance_stage._compiled(Engines(enforce_eager=eager), settings, {"w": [[1, 2, 3]]}, ())
        for eager in (None, True, False)
    ]
    compiled = {"mode": 3, "cudagraph_capture_sizes": [2]}
    assert options == [
        {},
        {"enforce_eager": True},
        {"enforce_eager": False, "compilation_config": compiled, "max_model_len": 10},
    ]
