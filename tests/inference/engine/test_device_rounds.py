"""Rounds of every drafter on a device, as far as an emulation shows them: nothing is mixed with the
host, the text is the one written on a CPU, and the host waits for the device as often for sixteen
rows as for one. In bfloat16 what drafting changes in a text is a tie, and no product is in
float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.evaluation.lossless import compare_greedy
from draftsmith.inference.spec_decode.draft_length import AdaptiveDraftLength
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from tests.support.cases import make
from tests.support.configurations import FAMILIES
from tests.support.engines import drafting_llm, make_llm
from tests.support.other_tokenizers import other_tokens
from tests.support.wide_products import WideProducts

K, VOCAB, EOS = 3, 260, 257
STATIC = StaticTree.parse([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
DYNAMIC = DynamicTree(topk=3, depth=3, budget=7)
PROCESSORS = dict(
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    logit_bias={3: 1.0},
    min_tokens=8,
    stop_token_ids=[4],
    allowed_token_ids=list(range(90)),
    bad_words=["ab", "c"],
)


@dataclass(frozen=True)
class Way:
    """`waits`: the most that a round may have, however many rows there are."""

    drafter: str
    waits: int
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


HOT, COLD = {"temperature": 1.0}, {"temperature": 0}
FILTERED = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
MATCHED = {"rejection_sample_method": "sample_match", "draft_sample_method": "greedy"}
WAYS = {
    # what was decided, and what was drafted: the host commits both
    "off, filtered": Way("off", 1, FILTERED),
    "ngram, block": Way("ngram", 2, FILTERED, {"rejection_sample_method": "block"}),
    "suffix": Way("suffix", 1, HOT),
    "lookahead": Way("lookahead", 2, HOT),
    **{f"{family}, greedy": Way(family, 2, COLD) for family in FAMILIES},
    # whether every draft could be drawn, how many are kept, what follows them, and the drafts
    **{f"{family}, block": Way(family, 4, HOT) for family in ("eagle3", "dspark", "draft_model")},
    # how long drafts are in its tokens
    "draft_model, another tokenizer": Way("other_tokens", 4 + 2 * K, HOT),
    # a tree is read once; what of it is refused is asked for in as many steps as the row has that
    # refuses most
    "eagle3, grown tree": Way("eagle3", 4 + DYNAMIC.budget, HOT, {"tree": DYNAMIC}),
    "eagle3, tree, greedy": Way("eagle3", 3, COLD, {"tree": STATIC}),
    "eagle3, tree, matched": Way("eagle3", 3, HOT, {"tree": STATIC, **MATCHED}),
    "adaptive": Way("adaptive", 3, COLD),
    "adaptive, blocks at once": Way("adaptive dflash", 5, HOT),
    # the drafts so far, depth by depth, and where nothing is left
    "eagle3, processors, tree": Way(
        "eagle3", 5 + 2 + DYNAMIC.budget, {**HOT, **PROCESSORS}, {"tree": DYNAMIC}
    ),
    "eagle3, logprobs": Way("eagle3", 3, {**COLD, "logprobs": 2}),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request) -> Way:
    return request.param


def llm_of(way: Way, model, tokenizer, rows: int) -> LLM:
    model.generation_config.eos_token_id = EOS
    options = {"max_num_seqs": rows, "max_model_len": 200, "tokenizer": tokenizer, **way.options}
    adaptive, _, block = way.drafter.partition(" ")
    family = block or {"adaptive": "eagle3"}.get(way.drafter, way.drafter)
    if family == "other_tokens":
        target, drafter = other_tokens(model, 240, [4])
    elif family in FAMILIES:
        target, drafter = make(FAMILIES[family], model)
    else:
        return drafting_llm(family, model.to("cuda"), **options)
    if adaptive == "adaptive":
        costs = {"verify": [1 + 0.1 * w for w in range(K + 1)], "draft": [0.1] * K}
        options["draft_length"] = AdaptiveDraftLength(K, costs)
    drafter = drafter.to("cuda").freeze()
    return make_llm(target.to("cuda"), drafter=drafter, num_speculative_tokens=K, **options)


@pytest.mark.slow
def test_waits_do_not_grow_with_the_rows(way, claimed_gpu, tiny_model, byte_tokenizer):
    rows = 16
    llm = llm_of(way, tiny_model("qwen3", vocab_size=VOCAB), byte_tokenizer, rows)
    responses = [
        llm.submit(
            Prompt(None, [40, 41, 50, 51] * 5 + [60 + row] * (1 + row % 4)),
            SamplingParams(max_tokens=60, ignore_eos=True, seed=row, **way.params),
        )
        for row in range(rows)  # they begin alike and write to the end
    ]
    llm.engine.step()
    for _ in range(2):
        with claimed_gpu.waits() as waits:
            llm.engine.step()
        assert waits.total() <= way.waits, claimed_gpu.sites
    assert not any(response.finished for response in responses)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["draft_model", "eagle3", "dspark"])
def test_rounds_in_bfloat16_change_ties_alone_and_multiply_in_bfloat16(
    family, claimed_gpu, tiny_model, byte_tokenizer
):
    target, drafter = make(FAMILIES[family], tiny_model("qwen3", vocab_size=VOCAB))
    target.to(torch.bfloat16).to("cuda")
    drafter.to(torch.bfloat16).to("cuda").freeze()
    options = {"max_num_seqs": 2, "max_model_len": 200, "tokenizer": byte_tokenizer}
    llm = make_llm(target, drafter=drafter, num_speculative_tokens=K, **options)
    prompts = [{"prompt_token_ids": [40, 41, 50, 51] * 2 + [60] * row} for row in range(2)]
    params = SamplingParams(max_tokens=10, ignore_eos=True, **COLD)
    plain = llm.generate(prompts, params, use_tqdm=False, speculate=False)
    with WideProducts() as wide:
        drafted = llm.generate(prompts, params, use_tqdm=False)
    shapes = {"num_speculative_tokens": K, "rows": 2}
    check = compare_greedy(llm.engine.runner, plain, drafted, **shapes)
    assert (check.dtype, check.mismatches) == ("bfloat16", 0)
    assert llm.get_metrics().num_drafts > 0
    assert wide.products > 10 and wide.shapes == []
