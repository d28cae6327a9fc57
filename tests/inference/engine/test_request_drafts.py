"""A request says how many tokens are drafted for it; its neighbours, and what it writes, do not
notice."""

from __future__ import annotations

import pytest

from inference import LLM, SamplingParams
from inference.spec_decode.costs import RoundCosts
from inference.spec_decode.draft_length import AdaptiveDraftLength

K, LIMIT = 3, 96
ASKED = [None, 0, 1, 2, 7]
KINDS = [
    "ngram",
    "right",
    "ragged",
    "sampled",
    "fake",
    "static",
    "dynamic",
    "lookahead",
    "suffix",
    "adaptive",
]
PROMPTS = [[5 + (3 * i + j) % 11 for i in range(9 + j)] for j in range(len(ASKED))]


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model(
        "qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=LIMIT, num_hidden_layers=2
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def llm_of(drafting_llm, model):
    plain = drafting_llm("off", model, max_num_seqs=1)
    (*outputs,) = plain.generate(asked(), SamplingParams(temperature=0, max_tokens=40), False)
    texts = {tuple(each.prompt_token_ids): each.outputs[0].token_ids for each in outputs}

    def make(kind: str) -> LLM:
        if kind in ("lookahead", "suffix"):
            config = {"method": kind, "num_speculative_tokens": K}
            return LLM(model, drafting_llm("off", model).get_tokenizer(), speculative_config=config)
        llm = drafting_llm("fake" if kind == "adaptive" else kind, model, texts)
        if kind == "adaptive":
            costs = RoundCosts.given({"verify": [10, 10.5, 11, 11.5], "draft": [0.3, 0.6, 0.9]}, K)
            llm.engine.draft_length = AdaptiveDraftLength(K, costs)
            llm.engine.draft_length.attach(llm.engine.proposer, llm.engine._rehearse)
        return llm

    return make


def asked() -> list[dict]:
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


def params_of(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=16 + 3 * i, num_speculative_tokens=most
        )
        for i, most in enumerate(ASKED)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_batch_has_as_many_as_it_asks_for(kind, llm_of, drafting_llm, model):
    llm = llm_of(kind)
    seen: dict[int, list[int]] = {i: [] for i in range(len(ASKED))}

    def look(requests, proposal, tokens):
        for request, depths, count in zip(
            requests, proposal.depths(), proposal.counts, strict=True
        ):
            seen[PROMPTS.index(request.token_ids[: request.num_prompt_tokens])].append(
                max(depths[:count], default=0)
            )

    llm.engine.on_round = look
    outputs = llm.generate(asked(), params_of(0.0), False)
    for i, most in enumerate(ASKED):
        assert seen[i] and max(seen[i]) <= (K if most is None else min(most, K))
        assert outputs[i].metrics.num_drafts == sum(depth > 0 for depth in seen[i])
    assert max(seen[0]) > 0 and outputs[1].metrics.num_draft_tokens == 0
    totals = llm.get_metrics()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(totals, name) == sum(getattr(each.metrics, name) for each in outputs)
    plain = drafting_llm("off", model).generate(asked(), params_of(0.0), False)
    assert [each.outputs[0].token_ids for each in outputs] == [
        each.outputs[0].token_ids for each in plain
    ]


@pytest.mark.parametrize("kind", ["sampled", "fake", "static", "dynamic", "adaptive", "ngram"])
def test_a_request_without_drafts_is_written_as_by_the_target_alone(
    kind, llm_of, drafting_llm, model
):
    """Sampled, too: it uses its seed as if there were no drafter. The others do not notice it."""
    llm, params = llm_of(kind), params_of(1.0)
    outputs = llm.generate(asked(), params, False)
    plain = drafting_llm("off", model).generate(asked(), params, False)
    assert outputs[1].outputs[0].token_ids == plain[1].outputs[0].token_ids
    if kind != "adaptive":  # whose lengths depend on the batch
        alone = [
            llm_of(kind).generate(each, one, False)[0]
            for each, one in zip(asked(), params, strict=True)
        ]
        assert [each.outputs[0].token_ids for each in outputs] == [
            each.outputs[0].token_ids for each in alone
        ]
