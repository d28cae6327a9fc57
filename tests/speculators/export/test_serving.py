"""How a drafter is served: one answer per engine, and where there is none, the reason."""

from __future__ import annotations

import pytest

from inference.entrypoints.speculative_config import parse_speculative_config
from inference.entrypoints.vllm_options import read_speculative_config
from inference.spec_decode.proposers.methods import TRAINING_FREE
from speculators.errors import ConfigError
from speculators.export.formats import FAMILIES
from speculators.export.serving_commands import serving
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget


def by_engine(*args, **kwargs):
    return {way.engine: way for way in serving(*args, **kwargs)}


SHAPES = {"peagle": {"num_depths": 4, "mask_token_id": 1}}  # fields without a default
SHAPES |= {
    family: {"block_size": 8, "mask_token_id": 1} for family in ("dflash", "dspark", "dflash2")
}


def config(tiny_model, family, **shape):
    target = FrozenTarget(tiny_model("llama", num_hidden_layers=4))
    if family == "draft_model":
        shape = {**target_fields(tiny_model), **shape}
    return config_for_target(target, family, tap_layers=(1, 2), **SHAPES.get(family, {}), **shape)


def target_fields(tiny_model):
    from speculators.families.draft_model.model import DraftModelOptions

    options = DraftModelOptions.model_validate({"from_target": {"first": 1}})
    return options.shape({}, FrozenTarget(tiny_model("llama")))


@pytest.mark.parametrize("family", FAMILIES)
def test_this_runtime_takes_what_is_printed_for_it_and_for_vllm(tiny_model, family) -> None:
    ways = by_engine(family, folder="head", target="T", config=config(tiny_model, family))
    assert parse_speculative_config(ways["Draftsmith"].options).method == family
    theirs = ways["vLLM"].options
    if family == "mlp":  # no recent vLLM has a model for it
        assert theirs is None and ways["vLLM"].note
        return
    assert theirs is not None
    if family not in (
        "peagle",
        "dflash2",
    ):  # vLLM names another method, and reads the family from the export
        assert parse_speculative_config(read_speculative_config(theirs)).method == family
    assert "head" in ways["vLLM"].command and " T " in ways["vLLM"].command


@pytest.mark.parametrize("method", TRAINING_FREE)
def test_training_free_methods(method) -> None:
    own = parse_speculative_config({"method": method})
    assert by_engine(method, training_free=own)["Draftsmith"].options == {
        "method": method,
        "num_speculative_tokens": own.num_speculative_tokens,
    }
    ways = by_engine(method, tokens=4, training_free=own)
    assert parse_speculative_config(ways["Draftsmith"].options).method == method
    if (options := ways["vLLM"].options) is not None:
        assert (
            parse_speculative_config(read_speculative_config(options)).num_speculative_tokens == 4
        )
    assert all(way.command or way.note for way in ways.values())
    assert (ways["SGLang"].options is not None) == (method == "ngram")


def test_a_folder_in_another_engines_format_is_not_offered(tiny_model) -> None:
    own = config(tiny_model, "eagle3")
    native, sglang = (
        by_engine("eagle3", config=own),
        by_engine("eagle3", config=own, format="sglang"),
    )
    assert native["vLLM"].options and "--format sglang" in native["SGLang"].note
    assert sglang["SGLang"].options["speculative-num-draft-tokens"] == 6
    assert "one layer too early" in sglang["vLLM"].note and sglang["vLLM"].options is None
    assert (
        by_engine("eagle3", folder="d", config=own, format="speculators")["vLLM"].command
        == "vllm serve d"
    )


def test_what_engines_do_not_serve_of_block_drafters_is_said(tiny_model) -> None:
    spark = by_engine("dspark", config=config(tiny_model, "dspark", markov_head_type="rnn"))
    assert spark["vLLM"].options is None and "this one is rnn" in spark["vLLM"].note
    assert spark["SGLang"].options["speculative-num-draft-tokens"] == 9
    assert "on a GPU" in by_engine("dflash2", config=config(tiny_model, "dflash2"))["vLLM"].note
    told = by_engine("dflash", config=config(tiny_model, "dflash"), format="speculators")
    assert told["vLLM"].command == "vllm serve DRAFTER" and "--format sglang" in told["SGLang"].note


def test_heads_bound_the_drafts(tiny_model) -> None:
    assert (
        by_engine("medusa", config=config(tiny_model, "medusa", num_heads=3), tokens=7)[
            "vLLM"
        ].options["num_speculative_tokens"]
        == 3
    )


def test_what_sglang_lacks_is_said(tiny_model) -> None:
    ways = by_engine("eagle3", config=config(tiny_model, "eagle3", norm_before_residual=True))
    assert ways["SGLang"].options is None and "norm_before_residual" in ways["SGLang"].note
    assert "no medusa" in by_engine("medusa", config=config(tiny_model, "medusa"))["SGLang"].note
    with pytest.raises(ConfigError, match="training-free method"):
        serving("eagle3")
