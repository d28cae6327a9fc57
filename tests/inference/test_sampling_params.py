"""Sampling parameters: vLLM's names and defaults; what cannot be honoured is refused where it is
written."""

from dataclasses import replace

import pytest

from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.errors import ConfigError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (
        False,
        False,
        True,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        0.0,
        0.0,
        1.0,
    )
    assert params.logit_bias is params.allowed_token_ids is params.structured_outputs is None
    assert params.logprobs is params.prompt_logprobs is None and params.detokenize
    assert params.stop == () and params.stop_token_ids == () and params.bad_words == ()
    assert not params.greedy and SamplingParams(temperature=0).greedy


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 5]).stop_token_ids == (3, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": "7"},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"stop": [""]},
        {"stop": 3},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": "no"},
        {"detokenize": 0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": [1]},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: 1e300}},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {1: float("-inf")}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"bad_words": "word"},
        {"bad_words": [" "]},
        {"logprobs": -2},
        {"logprobs": True},
        {"prompt_logprobs": 1.0},
        {"structured_outputs": {"json": {}}},
        {"best_of": 2},
        {"use_beam_search": True},
        {"length_penalty": 0.5},
        {"early_stopping": True},
        {"truncate_prompt_tokens": 5},
    ],
)
def test_refuses(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"SamplingParams: {name}="):
        SamplingParams(**wrong)


def test_limits_at_their_edges():
    SamplingParams(
        temperature=1e-5, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=None, min_tokens=10**9
    )
    SamplingParams(max_tokens=1, min_tokens=1)
    SamplingParams(
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=1e-3,
        logprobs=-1,
        prompt_logprobs=0,
    )


def test_stop_strings_need_text():
    with pytest.raises(
        ConfigError, match="detokenize=False; expected True, which stop strings need"
    ):
        SamplingParams(detokenize=False, stop="a")


def test_a_dict_that_was_given_may_change_later():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 1.0
    assert params.logit_bias == {1: 2.0}


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
    with pytest.raises(TypeError):
        SamplingParams(temprature=0)


def test_tiny_temperatures_are_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert "raised to 0.01" in caplog.text
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_a_changed_copy_is_checked_too():
    params = SamplingParams(stop="x")
    assert replace(params, temperature=0).stop == ("x",)
    with pytest.raises(ConfigError):
        replace(params, top_p=2.0)
    params.max_tokens = 7
    copy = params.clone()
    params.max_tokens = 0
    assert copy.max_tokens == 7
    with pytest.raises(ConfigError):
        params.clone()
