"""Which engines a run is measured in: what a recipe may ask, what happens without vLLM, the
command's options."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftsmith.inference.evaluation.engines import RuntimeEngine
from draftsmith.inference.vllm_bridge.vllm_engine import VllmOptions, child_environment
from draftsmith.inference.vllm_python import PYTHON
from draftsmith.speculators.errors import ConfigError, UnsupportedTarget
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline import acceptance_stage
from draftsmith.train.pipeline.acceptance_stage import engines_of, gate_bounds, settings_of
from draftsmith.train.pipeline.run import run
from draftsmith.train.pipeline.run_target import require_abilities
from draftsmith.train.recipe.drafter_config import sketch_drafter
from tests.support.cli import refused
from tests.support.errors import raises_at
from tests.support.quickstart_data import source as quickstart
from tests.support.training import recipe_of

SOURCES = [quickstart("test", 2)]
BOTH = {"engines": ["draftsmith", "vllm"]}


def recipe(gates: dict | None = None, regenerate: dict | None = None, **evaluation):
    sections = {"evaluation": evaluation, "gates": gates or {}, "regenerate": regenerate or {}}
    return recipe_of("eagle3", data={"train": SOURCES, "validation": SOURCES}, **sections)


def test_without_vllm_a_run_is_measured_here_alone_unless_a_gate_needs_it(monkeypatch, tmp_path):
    """The gate stops it before it trains."""
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    lines: list[str] = []
    ours = {"draftsmith": RuntimeEngine}
    assert engines_of(recipe(), lines.append) == ours and not lines
    assert engines_of(recipe(**BOTH), lines.append) == ours and len(lines) == 1
    with pytest.raises(ConfigError, match=PYTHON):
        engines_of(recipe(engines=["vllm"]))
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe({"vllm_gap": {"max": 0.02}}, **BOTH).resolved_yaml())
    with pytest.raises(ConfigError, match=PYTHON):
        run(written, [f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_drafting_of_this_runtime_is_measured_in_it_and_expected_by_nobody() -> None:
    tree = {"speculative_config": {"speculative_eagle_topk": 2}}
    assert settings_of(recipe(**tree)).speculative_config == tree["speculative_config"]
    with pytest.raises(ValidationError, match="speculative_config"):
        recipe(**tree, **BOTH)
    with pytest.raises(ValidationError, match="expected_measured_gap"):
        recipe({"t0.expected_measured_gap": {"max": 0.1}}, **tree)


@pytest.mark.parametrize(
    "further",
    [
        {"speculative_eagle_topk": 0},
        {"lookahead_window_size": 5},
        {"method": "ngram"},
    ],
)
def test_drafting_that_the_head_cannot_do_is_refused_before_training(further, tiny_model) -> None:
    target = FrozenTarget(tiny_model("llama"))
    config = config_for_target(target, "medusa", num_heads=2)
    asked = recipe_of(
        "medusa", evaluation={"num_speculative_tokens": 2, "speculative_config": further}
    )
    with raises_at(ConfigError, "evaluation.speculative_config"):
        sketch_drafter(asked, config)


def test_a_tree_deeper_than_the_head_is_refused_before_training(tiny_model) -> None:
    deep = {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}
    asked = recipe_of(
        "medusa", evaluation={"num_speculative_tokens": 2, "speculative_config": deep}
    )
    config = config_for_target(FrozenTarget(tiny_model("llama")), "medusa", num_heads=2)
    with pytest.raises(ConfigError, match="evaluation.speculative_config is 3"):
        sketch_drafter(asked, config)


def test_a_vllm_that_is_started_does_not_inherit_its_parents_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "FSDP_VERSION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "somewhere")
    environment = child_environment()
    assert environment["HF_HOME"] == "somewhere"
    prefixes = ("RANK", "WORLD_", "MASTER_", "TORCHELASTIC", "FSDP")
    assert not [name for name in environment if name.startswith(prefixes)]


def test_gates_without_a_temperature_hold_at_every_one_that_has_none_of_its_own() -> None:
    gates = {
        "acceptance_length": {"min": 0.5},
        "t0.acceptance_length": {"min": 0.8},
        "vllm_gap": {"max": 0.02},
        "t0.vllm_gap": {"max": 0.01},
        "lossless_mismatches": {"max": 0},
    }
    bounds = gate_bounds(recipe(gates, **BOTH))
    assert {name: (bound.min, bound.max) for name, bound in bounds.items()} == {
        "t0.acceptance_length": (0.8, None),
        "t1.acceptance_length": (0.5, None),
        "vllm_gap": (None, 0.02),
        "t0.vllm_gap": (None, 0.01),
        "lossless_mismatches": (None, 0),
    }


def test_engines_of_a_recipe_have_its_options(monkeypatch) -> None:
    monkeypatch.setattr(acceptance_stage, "vllm_python", lambda: "python of vLLM")
    section = {"options": {"tensor_parallel_size": 2}, "speculative_config": {"x": 1}}
    engines = engines_of(recipe(**BOTH, vllm=section))
    vllm = VllmOptions("python of vLLM", {"tensor_parallel_size": 2}, {"x": 1})
    assert engines == {"draftsmith": RuntimeEngine, "vllm": vllm}
    assert list(engines_of(recipe(engines=["vllm"]))) == ["vllm"]


def test_what_needs_a_target_that_decodes_is_refused_before_it_begins(tiny_model) -> None:
    features_alone = FrozenTarget(tiny_model("bloom", n_head=4))
    keys = "data.validation, evaluation.engines: [draftsmith], regenerate.enabled"
    with raises_at(UnsupportedTarget, keys):
        require_abilities(recipe(), features_alone)
    by_server = {"enabled": True, "endpoints": [{"url": "http://x/v1"}]}
    require_abilities(recipe(engines=["vllm"], regenerate=by_server), features_alone)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--engine", "hf"], "--engine"),
        (["--vllm-python", "python"], "--engine vllm"),
        (["--engine", "vllm", "--vllm-options", "[1]"], "--vllm-options"),
        (["--method", "ngram", "--drafter", "d"], "--method"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, option) -> None:
    assert option in refused("evaluate", "--model", "m", *arguments)
