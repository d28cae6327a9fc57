"""How a drafter is served: one answer per engine, and where there is none, the reason."""

from __future__ import annotations

import json

import pytest

from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.entrypoints.vllm_options import read_speculative_config
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export.formats import FAMILIES
from draftsmith.speculators.export.serving_commands import serving
from draftsmith.speculators.families.draft_model.model import DraftModelOptions
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget

BLOCK = {"block_size": 8, "mask_token_id": 1}
SHAPES = {"peagle": {"num_depths": 4, "mask_token_id": 1}}  # fields without a default
SHAPES |= dict.fromkeys(("dflash", "dspark", "dflash2"), BLOCK)


@pytest.fixture
def ways(tiny_model):
    """`ways(family, shape, **options)`: the command of each engine."""

    def find(family, shape=None, **options):
        target = FrozenTarget(tiny_model("llama", num_hidden_layers=4))
        fields = {**SHAPES.get(family, {}), **(shape or {})}
        if family == "draft_model":
            cut = DraftModelOptions.model_validate({"from_target": {"first": 1}})
            fields |= cut.shape({}, FrozenTarget(tiny_model("llama")))
        config = config_for_target(target, family, tap_layers=(1, 2), **fields)
        return {way.engine: way for way in serving(family, config=config, **options)}

    return find


@pytest.mark.parametrize("family", FAMILIES)
def test_this_runtime_takes_what_is_printed_for_it_and_for_vllm(ways, family) -> None:
    by_engine = ways(family, folder="head", target="T")
    assert parse_speculative_config(by_engine["Draftsmith"].options).method == family
    theirs = by_engine["vLLM"].options
    if family == "mlp":  # no recent vLLM has a model for it
        assert theirs is None and by_engine["vLLM"].note
        return
    assert "head" in by_engine["vLLM"].command and " T " in by_engine["vLLM"].command
    if family not in ("peagle", "dflash2"):  # vLLM names another method, and reads the export
        assert parse_speculative_config(read_speculative_config(theirs)).method == family


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_training_free_methods(method) -> None:
    config = parse_speculative_config({"method": method})
    serve_options = {"method": method, "num_speculative_tokens": config.num_speculative_tokens}
    assert serving(method, training_free=config)[-1].options == serve_options
    by_engine = {way.engine: way for way in serving(method, tokens=4, training_free=config)}
    assert parse_speculative_config(by_engine["Draftsmith"].options).method == method
    if (options := by_engine["vLLM"].options) is not None:
        read = parse_speculative_config(read_speculative_config(options))
        assert read.num_speculative_tokens == 4
    assert all(way.command or way.note for way in by_engine.values())
    assert (by_engine["SGLang"].options is not None) == (method == "ngram")


def test_an_adapters_folder_is_served_here_alone(tmp_path) -> None:
    fields = {"base_model_name_or_path": "org/target"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    options = parse_speculative_config({"method": "ngram"})
    ways = serving("ngram", target=str(tmp_path), training_free=options)
    assert [bool(way.command) for way in ways] == [False, False, True]
    assert "joint.export: merged" in ways[0].note


@pytest.mark.parametrize("version, is_noted", [("0.32.1", False), ("0.33", True), (None, True)])
def test_serving_suffix_says_which_vllm_has_a_runner_without_it(version, is_noted) -> None:
    options = parse_speculative_config({"method": "suffix"})
    vllm = serving("suffix", training_free=options, vllm_version=version)[0]
    assert vllm.command and "arctic-inference" in vllm.note
    assert ("V2 runner" in vllm.note) == is_noted


def test_a_folder_in_another_engines_format_is_not_offered(ways) -> None:
    native, sglang = ways("eagle3"), ways("eagle3", format="sglang")
    assert native["vLLM"].options and "--format sglang" in native["SGLang"].note
    assert sglang["SGLang"].options["speculative-num-draft-tokens"] == 6
    assert sglang["vLLM"].note and sglang["vLLM"].options is None
    files = ways("dflash", format="transformers")
    assert not files["vLLM"].command and not files["SGLang"].command
    for family in ("eagle3", "dflash"):
        named = ways(family, folder="d", format="speculators")
        assert named["vLLM"].command == "vllm serve d" and "--format sglang" in named["SGLang"].note


def test_a_local_target_is_named_beside_a_folder_of_the_speculators_format(ways, tmp_path) -> None:
    """vLLM 0.33 refuses a folder in `verifier`."""
    for target in (str(tmp_path), "/models/fine-tuned"):
        local = ways("eagle3", folder="d", format="speculators", target=target)["vLLM"]
        assert local.command.startswith(f"vllm serve {target} ") and local.options["model"] == "d"
    hub = ways("eagle3", folder="d", format="speculators", target="org/name")["vLLM"]
    assert hub.command == "vllm serve d"


def test_sglang_is_told_of_dspark_blocks_that_are_cut_short(ways) -> None:
    """It refuses other numbers of drafts than the block's."""
    short = ways("dspark", format="sglang", tokens=2)["SGLang"].options
    assert short["speculative-dspark-block-size"] == 2
    assert short["speculative-num-draft-tokens"] == 3
    assert "speculative-dspark-block-size" not in ways("dspark", format="sglang")["SGLang"].options


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ({}, ""),
        ({"num_layers": 2}, "0.5.12"),
        ({"norm_before_fc": True}, "0.5.18"),
    ],
)
def test_a_shape_that_older_sglang_drops_names_the_version(ways, shape, first) -> None:
    sglang = ways("eagle3", shape, format="sglang")["SGLang"]
    assert sglang.command and first in sglang.note and bool(sglang.note) == bool(first)


def test_vllm_samples_its_drafts_where_it_can(ways) -> None:
    """As the report measures them; vLLM's default drafts the best token at every temperature."""
    assert ways("eagle3")["vLLM"].options["draft_sample_method"] == "probabilistic"
    assert "draft_sample_method" not in ways("medusa", vllm_version="0.32.1")["vLLM"].options


def test_what_engines_do_not_serve_is_said(ways) -> None:
    assert ways("dspark")["SGLang"].options["speculative-num-draft-tokens"] == 9
    assert "GPU" in ways("dflash2")["vLLM"].note
    normed = ways("eagle3", {"norm_before_residual": True})["SGLang"]
    assert normed.options is None and "norm_before_residual" in normed.note
    three = ways("medusa", {"num_heads": 3}, tokens=7)
    assert three["vLLM"].options["num_speculative_tokens"] == 3
    assert "no medusa" in three["SGLang"].note


def test_serving_a_family_that_a_vllm_dropped_names_the_version(ways) -> None:
    assert ways("medusa", vllm_version="0.32.1")["vLLM"].command
    dropped = ways("medusa", vllm_version="0.33.0")["vLLM"]
    assert not dropped.command and "0.33.0" in dropped.note
    assert ways("eagle3", vllm_version="0.33.0")["vLLM"].command
    with pytest.raises(ConfigError, match="0.x"):
        ways("medusa", vllm_version="0.x")
