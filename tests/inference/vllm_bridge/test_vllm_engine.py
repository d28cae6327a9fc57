"""vLLM started for an evaluation, up to where vLLM itself is needed: its interpreter, and what it
is told."""

from __future__ import annotations

import importlib.util
import shutil
import sys

import pytest
import torch

from draftsmith.inference.evaluation.engines import Drafting
from draftsmith.inference.evaluation.evaluate import EvaluationSettings, evaluate
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError, Worker, speculative_config
from draftsmith.inference.vllm_python import PYTHON, vllm_python
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.errors import raises_at

without_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM"
)


@without_vllm
def test_an_interpreter_without_vllm_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    for python, where in ((None, str(tmp_path / "python")), (sys.executable, sys.executable)):
        with raises_at(ConfigError, where):
            vllm_python(python)


@without_vllm
@pytest.mark.slow
def test_a_worker_that_fails_says_why_in_its_own_words() -> None:
    with pytest.raises(VllmError, match=r"(?s)No module named 'vllm'.*Traceback"):
        Worker(sys.executable, {"model": "m", "options": {}, "speculative_config": None})


@pytest.mark.parametrize("family", ["eagle", "medusa", "mtp", "mlp"])
def test_family_is_named_and_sampled_as_here(tiny_model, target_folder, tmp_path, family) -> None:
    """vLLM guesses a method from the path, and takes the best draft, where nothing else is said."""
    cls, target = family_class(family), FrozenTarget(tiny_model("llama", vocab_size=259))
    shape = cls.options.model_validate({}).shape(cls.config_class.model_fields, target)
    shape = {name: value for name, value in shape.items() if value is not None}
    drafter = cls(config_for_target(target, family, **shape)).attach(target)
    head = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    if family == "mlp":
        with raises_at(ConfigError, head):
            speculative_config(drafting(target_folder, str(head), None))
        return
    config, needs = speculative_config(drafting(target_folder, str(head), None))
    assert config["method"] == family
    assert (config["model"], config["num_speculative_tokens"]) == (str(head), 3)
    assert ("draft_sample_method" in config) == (family != "medusa")
    assert needs == ({"hf_overrides": {"num_nextn_predict_layers": 1}} if family == "mtp" else {})


def test_a_model_whose_table_vllm_refuses_is_refused_with_the_remedy(
    tiny_model, target_folder, tmp_path
) -> None:
    tiny_model("llama", vocab_size=300).save_pretrained(model := tmp_path / "draft")
    with raises_at(ConfigError, model):
        speculative_config(drafting(target_folder, str(model), None))


def test_a_folder_in_another_engines_format_is_refused(tiny_model, target_folder, tmp_path) -> None:
    """vLLM would read its taps a layer too early, and accept less without a word."""
    target = FrozenTarget(tiny_model("llama", vocab_size=259))
    head = family_class("eagle3")(config_for_target(target, "eagle3", tap_layers=(1, 2))).attach(
        target
    )
    folder = export_drafter(head, tmp_path / "head", dtype=torch.float32, format="sglang")
    with raises_at(ConfigError, folder):
        speculative_config(drafting(target_folder, str(folder), None))


def test_a_module_of_its_target_is_asked_of_the_target(tiny_model, target_folder, tmp_path) -> None:
    """vLLM finds it there."""
    target = FrozenTarget(tiny_model("llama", vocab_size=259))
    module = family_class("mtp")(config_for_target(target, "mtp"))
    alone = export_drafter(module, tmp_path / "alone", dtype=torch.float32)
    whole = shutil.copytree(target_folder, tmp_path / "whole")
    shutil.copy(alone / "model.safetensors", whole / "mtp.safetensors")
    config, _ = speculative_config(drafting(str(whole), str(whole), None))
    assert config["method"] == "mtp" and "model" not in config


def drafting(model: str, drafter: str | None, method: str | None, **further) -> Drafting:
    sizes = {"num_speculative_tokens": 3, "rows": 4, "seed": 0}
    return Drafting.of(model, drafter, method, **sizes, options={}, further=further)


def test_lengths_that_adapt_are_not_asked_of_vllm(target_folder) -> None:
    adaptive = drafting(target_folder, None, "ngram", enable_adaptive_verification=True)
    with raises_at(ConfigError, "--engine vllm"):
        speculative_config(adaptive)


def test_method_without_a_checkpoint_has_the_same_options_everywhere(target_folder) -> None:
    config, needs = speculative_config(drafting(target_folder, None, "ngram"))
    options = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert (config, needs) == ({"method": "ngram", **options}, {})
    for drafter, method in ((None, None), ("x", "ngram")):
        with pytest.raises(ConfigError):
            drafting(target_folder, drafter, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_training_free_method_is_evaluated_in_this_runtime(method, target_folder) -> None:
    settings = EvaluationSettings(max_tokens=12, repeats=1, timed_prompts=1, lossless_prompts=1)
    prompts = {"one": [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 9, 10, 9]]}
    report = evaluate(target_folder, None, prompts, settings, method=method)
    cell, origin = report.cell("all", 0), report.provenance
    assert cell.method == method and cell.expected is None
    assert cell.num_drafts > 0 and report.summary["lossless_mismatches"] == 0
    assert (origin.drafter_path, origin.drafter_config["method"]) == (None, method)
