"""Sampling parameters: vLLM's names and defaults; what cannot be honoured is refused where it is
written."""

from dataclasses import replace

import pytest

from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at


def test_defaults_are_vllms():
    params = SamplingParams()
    filters = params.n, params.temperature, params.top_p, params.top_k, params.min_p
    assert filters == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    assert penalties == (0.0, 0.0, 1.0)
    assert params.stop == params.stop_token_ids == params.bad_words == ()


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 5]).stop_token_ids == (3, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"num_speculative_tokens": True},
        {"temperature": float("inf")},
        {"temperature": 1e21},
        {"top_p": 1.01},
        {"top_k": 1.5},
        {"seed": "7"},
        {"min_tokens": 17},
        {"stop": [""]},
        {"stop_token_ids": [-1]},
        {"ignore_eos": "no"},
        {"detokenize": False, "stop": "a"},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: 1e300}},
        {"allowed_token_ids": []},
        {"bad_words": [" "]},
        {"structured_outputs": {"json": {}}},
        {"best_of": 2},
        {"temprature": 0},
    ],
)
def test_params_wrong_value_is_refused_by_name(wrong):
    with raises_at(ConfigError, f"SamplingParams.{next(iter(wrong))}"):
        SamplingParams(**wrong)


def test_harmless_arguments_of_vllm_are_accepted():
    harmless = dict(
        best_of=1,
        use_beam_search=False,
        length_penalty=1.0,
        early_stopping=False,
        spaces_between_special_tokens=True,
        logits_processors=None,
        guided_decoding=None,
        output_kind=None,
        extra_args=None,
        truncate_prompt_tokens=None,
    )
    assert SamplingParams(temperature=0, **harmless) == SamplingParams(temperature=0)


def test_tiny_temperatures_are_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert "raised to 0.01" in caplog.text
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_a_changed_copy_is_checked_too():
    params = SamplingParams(stop="x")
    assert replace(params, temperature=0).stop == ("x",)
    with raises_at(ConfigError, "SamplingParams.top_p"):
        replace(params, top_p=2.0)
    params.max_tokens = 7
    copy = params.clone()
    params.max_tokens = 0
    assert copy.max_tokens == 7
    with raises_at(ConfigError, "SamplingParams.max_tokens"):
        params.clone()


@pytest.mark.parametrize("name, value", [("temprature", 0), ("structured_outputs", {"json": {}})])
def test_assigned_name_that_is_no_parameter_is_refused(name, value):
    params = SamplingParams()
    params.output_kind = 2  # of vLLM, and harmless
    assert params.clone() == params
    setattr(params, name, value)
    with raises_at(ConfigError, f"SamplingParams.{name}"):
        params.clone()
