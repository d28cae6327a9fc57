"""Log-probabilities are those of the model at each token's own place, with drafting and without."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.outputs import Logprob

KINDS = ["off", "right", "ragged", "sampled", "static"]
VOCAB = 94
PROMPTS = [[67, 68, 69, 0, 69, 7], [65], [3 + (7 * i) % 50 for i in range(90)], [3, 4, 5] * 6]


@pytest.fixture(scope="module")
def model(tiny_model):
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 160, "num_hidden_layers": 2}
    return tiny_model("qwen3", **sizes)


def prompts():
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


def mixed(**options) -> list[SamplingParams]:
    settings = [
        dict(logprobs=3),
        dict(logprobs=0, frequency_penalty=1.5, top_k=3),
        dict(logprobs=2, logit_bias={5: 20.0}),
        dict(repetition_penalty=1.5),
    ]
    return [SamplingParams(max_tokens=20, **options, **setting) for setting in settings]


def exact(model, ids: list[int]) -> torch.Tensor:
    """[T, V]: the model's own log-probabilities after each of the tokens."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def check(
    reported: dict[int, Logprob], expected: torch.Tensor, token: int, count: int, tokenizer
) -> None:
    """One place, in vLLM's shape: the token that stands there, then the most probable ones."""
    best = expected.topk(count).indices.tolist()
    assert list(reported) == list(dict.fromkeys([token, *best]))
    for reported_token, logprob in reported.items():
        assert logprob.logprob == pytest.approx(float(expected[reported_token]), abs=1e-4)
        assert logprob.rank == int((expected >= expected[reported_token]).sum())
        assert logprob.decoded_token == tokenizer.decode([reported_token])


@pytest.fixture(scope="module")
def undrafted(model, drafting_llm):
    """undrafted(**options): the outputs without drafts."""

    @cache
    def write(**options):
        return drafting_llm("off", model).generate(prompts(), mixed(**options), False)

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 2, "temperature": 0.8}], ids=str)
def test_each_token_has_the_models_logprob_at_its_place(
    kind, options, model, undrafted, drafting_llm, byte_tokenizer
):
    off = undrafted(**options)
    texts = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in off}
    outputs = drafting_llm(kind, model, texts, max_num_seqs=3).generate(
        prompts(), mixed(**options), False
    )
    for output, plain, params in zip(outputs, off, mixed(**options), strict=True):
        (completion,), prompt = output.outputs, output.prompt_token_ids
        expected = exact(model, [*prompt, *completion.token_ids])
        if params.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            assert len(completion.logprobs) == len(completion.token_ids) == 20
            total = 0.0
            for i, (token, entry) in enumerate(
                zip(completion.token_ids, completion.logprobs, strict=True)
            ):
                check(entry, expected[len(prompt) - 1 + i], token, params.logprobs, byte_tokenizer)
                total += entry[token].logprob
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
            if params.greedy:
                assert completion.token_ids == plain.outputs[0].token_ids
                for entry, other in zip(
                    completion.logprobs, plain.outputs[0].logprobs, strict=True
                ):
                    assert list(entry) == list(other)
                    for token in entry:
                        assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("kind", ["off", "right"])
def test_what_is_cut_off_has_no_logprob(kind, model, drafting_llm, byte_tokenizer):
    prompt = {"prompt_token_ids": PROMPTS[0]}
    (whole,) = drafting_llm("off", model).generate(
        prompt, SamplingParams(temperature=0, max_tokens=20), False
    )
    text = whole.outputs[0].token_ids
    llm = drafting_llm(kind, model, {tuple(PROMPTS[0]): text})
    for ending in (
        dict(max_tokens=3),
        dict(stop_token_ids=[text[2]]),
        dict(stop=byte_tokenizer.decode(text[1:3])),
    ):
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, logprobs=1, **ending), False)
        (completion,) = output.outputs
        assert len(completion.logprobs) == len(completion.token_ids) == 3
        total = sum(
            entry[token].logprob for entry, token in zip(completion.logprobs, text[:3], strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)


def test_the_whole_vocabulary_and_several_responses(model, drafting_llm):
    params = SamplingParams(n=2, seed=1, max_tokens=4, logprobs=-1)
    (output,) = drafting_llm("fake", model, tokenizer=None).generate(
        {"prompt_token_ids": PROMPTS[0]}, params, False
    )
    for completion in output.outputs:
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert len(entry) == VOCAB and next(iter(entry)) == token
            assert sum(torch.tensor([e.logprob for e in entry.values()]).exp()) == pytest.approx(
                1.0, abs=1e-4
            )
            assert sorted(e.rank for e in entry.values()) == list(range(1, VOCAB + 1))
            assert entry[token].decoded_token is None
