"""The front door: prompts in every shape, wrong options and prompts refused by name, everything
loaded from disk."""

from __future__ import annotations

import inspect
import threading
import time
from dataclasses import replace

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.requests.request import Request
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.speculators.export import export_drafter
from tests.support.engines import ids_of, make_llm
from tests.support.errors import raises_at

LIMIT, VOCAB, TAPS = 64, 94, (1, 2)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def test_signature_of_llm_has_the_options_of_an_engine_with_their_defaults():
    keywords = dict(inspect.signature(LLM).parameters)
    assert [keywords.pop("model").default, keywords.popitem()[1].kind.description] == [
        inspect.Parameter.empty,
        "variadic keyword",
    ]
    defaults = {name: keyword.default for name, keyword in keywords.items()}
    assert defaults == EngineOptions().model_dump()
    assert [*keywords] == [*EngineOptions.model_fields]
    described = inspect.getdoc(LLM) or ""  # without the indentation, as Python 3.13 keeps it
    assert [name for name in keywords if f"\n{name} " not in described] == []


def test_threads_that_generate_at_once_get_their_own_texts(model, monkeypatch):
    """An engine runs for one of them at a time: rows of the others were lost, and they waited."""
    llm = make_llm(model, max_model_len=LIMIT, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5 + i, 6, 7] for i in range(4)]
    expected = ids_of(llm.generate(prompts, params, False))
    step = llm.engine.step

    def slow() -> list[Request]:
        time.sleep(0.002)  # another thread goes on
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    written: dict[int, list[int]] = {}

    def write(number: int) -> None:
        (written[number],) = ids_of(llm.generate([prompts[number]], params, False))

    threads = [threading.Thread(target=write, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [written.get(i) for i in range(len(prompts))] == expected


@pytest.mark.parametrize("name", [*EngineOptions.model_fields])
def test_every_option_of_llm_reaches_the_engine_options(name, model):
    """Each is in a place of its own between signature and options, where it could be lost."""
    wrong = {"tokenizer": "no such folder", "dtype": "int", "device": "cuda:99"}
    with pytest.raises(DraftsmithError) as error:
        LLM(model, **{name: wrong.get(name, object())})
    assert name in f"{error.value}"


def test_everything_from_disk(model, tiny_eagle3, byte_tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    drafter = tiny_eagle3(model, TAPS)
    export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    options = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    limits = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    llm = LLM(str(tmp_path / "target"), speculative_config=options, **limits)
    in_memory = make_llm(model, drafter=drafter, num_speculative_tokens=3)
    prompts = [{"prompt_token_ids": [5] * 9}, {"prompt_token_ids": list(range(40))}]
    loaded, expected = (
        engine.generate(prompts, SamplingParams(max_tokens=16, seed=1), False)
        for engine in (llm, in_memory)
    )
    for one, other in zip(loaded, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids and one.outputs[0].text
        assert one.metrics.accepted_per_round == other.metrics.accepted_per_round
    assert llm.engine.target.tap_layers == TAPS


def test_text_prompts_and_chat(byte_tokenizer, tiny_model):
    llm = LLM(
        tiny_model("qwen3", vocab_size=len(byte_tokenizer)),
        byte_tokenizer,
        speculative_config=NGRAM,
    )
    params = SamplingParams(temperature=0, max_tokens=6)
    shapes = ("abc", {"prompt": "abc"}, [{"prompt_token_ids": byte_tokenizer("abc").input_ids}])
    same = [llm.generate(shape, params, False)[0] for shape in shapes]
    assert len({tuple(o.outputs[0].token_ids) for o in same}) == 1 and same[0].prompt == "abc"
    assert same[0].outputs[0].text == byte_tokenizer.decode(same[0].outputs[0].token_ids)
    ids = byte_tokenizer("abc").input_ids
    lists = [*llm.generate([ids], params, False), *llm.generate(ids, params, False)]
    assert [o.outputs[0].token_ids for o in lists] == [same[0].outputs[0].token_ids] * 2
    default = llm.get_default_sampling_params()
    default.max_tokens = 2
    assert len(llm.generate("abc", default, False)[0].outputs[0].token_ids) <= 2
    assert llm.get_default_sampling_params() == SamplingParams()
    (silent,) = llm.generate("abc", replace(params, detokenize=False), False)
    assert silent.outputs[0].token_ids == same[0].outputs[0].token_ids
    assert silent.outputs[0].text == ""
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], params, False)
    assert chat.prompt == "<s>user:hi</s><s>"
    assert chat.prompt_token_ids[0] == byte_tokenizer.bos_token_id


def test_every_faulty_prompt_is_named_before_any_is_run(model, byte_tokenizer):
    llm = LLM(model, byte_tokenizer)
    prompts = [[65], [], [65] * LIMIT, [VOCAB]]
    with pytest.raises(ConfigError) as error:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(), False)
    faults = (
        "prompt 1 is empty",
        f"prompt 2 has {LIMIT} tokens, max_model_len is {LIMIT}",
        "prompt 3 has token ids",
    )
    assert all(fault in str(error.value) for fault in faults)
    assert not llm.engine.has_unfinished
    shapes = [
        ({"prompt_token_ids": [1.7]}, "whole numbers"),
        ([[1, 2], [True]], "prompt 1: token ids"),
        (3, "expected a string"),
        (["a", {"text": "b"}], "prompt 1"),
    ]
    for prompts, message in shapes:  # the prompt at fault is in the message
        with pytest.raises(ConfigError, match=message):
            llm.generate(prompts, SamplingParams(), False)
    with pytest.raises(ConfigError, match="2 sampling params for 1"):
        llm.generate("a", [SamplingParams()] * 2, False)
    with pytest.raises(ConfigError, match=f"stop_token_ids.*{VOCAB}"):
        llm.generate("a", SamplingParams(stop_token_ids=[VOCAB]), False)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        LLM(model).generate({"prompt_token_ids": [1]}, SamplingParams(stop="a"), False)


def test_interrupt_while_prompts_are_submitted_leaves_nothing_queued(model, monkeypatch):
    llm = LLM(model, speculative_config=NGRAM)
    added = []

    def interrupted(request, add=llm.engine.add):
        add(request)
        added.append(request)
        if len(added) == 3:
            raise KeyboardInterrupt

    prompts = [{"prompt_token_ids": [5] * n} for n in (3, 4, 5)]
    params = SamplingParams(temperature=0, max_tokens=2, n=2)
    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, False)
    monkeypatch.undo()
    assert len(added) == 3 and not llm.engine.has_unfinished
    llm.generate(prompts, params, False, speculate=False)


WRONG_DRAFTING = [
    ({"num_speculative_tokens": 2}, "method is missing"),
    ({"method": "eagle3", "num_speculative_tokens": 2}, "model is missing"),
    ({"method": "magic", "num_speculative_tokens": 2}, "'magic'; expected one of"),
    (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    (NGRAM | {"modle": 1}, "modle: unknown option"),
    (NGRAM | {"rejection_sample_method": "greedy"}, "expected one of auto, token"),
    (NGRAM | {"suffix_decoding_max_tree_depth": 8}, "max_tree_depth belongs to suffix"),
    (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4"),
]
WRONG_OPTIONS = [
    (dict(max_model_len=LIMIT + 1), "max_position_embeddings"),
    *((dict(speculative_config=config), message) for config, message in WRONG_DRAFTING),
]


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": 5},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [1], "prompt": 5},
        {1: 2, "prompt": "a"},
        "\ud800",
        ["a", "b\udfff"],
    ],
)
def test_prompt_that_is_none_is_an_error_of_the_user(prompts, model, byte_tokenizer):
    llm = LLM(model, byte_tokenizer)
    with raises_at(ConfigError, "prompts"):
        llm.generate(prompts, SamplingParams(), False)


@pytest.mark.parametrize(("params", "where"), [(5, "sampling_params"), ([5], "sampling_params[0]")])
def test_sampling_params_that_are_none_are_an_error_of_the_user(params, where, model):
    with raises_at(ConfigError, where):
        LLM(model).generate({"prompt_token_ids": [1]}, params, False)


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused(options, message, model):
    with pytest.raises(ConfigError, match=message):
        LLM(model, **options)
