"""Rounds of every drafter on a device, as far as an emulation shows them: nothing is mixed with the
host, the text is the one written on a CPU, and the host waits for the device as often for sixteen
rows as for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.spec_decode.costs import RoundCosts
from draftsmith.inference.spec_decode.draft_length import AdaptiveDraftLength
from draftsmith.inference.spec_decode.proposers.lookahead import LookaheadProposer
from draftsmith.inference.spec_decode.proposers.ngram import NgramProposer
from draftsmith.inference.spec_decode.proposers.suffix import SuffixProposer
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from tests.lossless.configurations import FAMILIES
from tests.speculators.families.draft_model.test_draft_model_vocabulary import other_tokens
from tests.support.cases import make
from tests.support.engines import make_llm

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


HOT, COLD, FILTERED = (
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
)
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
    "draft_model, another tokenizer": Way(
        "other_tokens", 4 + 2 * K, HOT
    ),  # how long drafts are in its tokens
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


def llm_of(way: Way, model, tokenizer, device: str, rows: int) -> LLM:
    model.generation_config.eos_token_id = EOS
    options = {
        "max_num_seqs": rows,
        "max_model_len": 200,
        "num_speculative_tokens": K,
        "tokenizer": tokenizer,
    }
    adaptive, _, block = way.drafter.partition(" ")
    family = block or {"adaptive": "eagle3"}.get(way.drafter, way.drafter)
    if family == "other_tokens":
        target, drafter = other_tokens(model, 240, [4])
    else:
        target, drafter = make(FAMILIES.get(family, FAMILIES["mlp"]), model)
    target.to(device)
    drafter = drafter.to(device).freeze()
    if way.drafter in (*FAMILIES, "other_tokens"):
        return make_llm(target, drafter=drafter, **options | way.options)
    if adaptive == "adaptive":
        costs = {"verify": [1 + 0.1 * w for w in range(K + 1)], "draft": [0.1] * K}
        length = AdaptiveDraftLength(K, RoundCosts.given(costs, K))
        return make_llm(target, drafter=drafter, draft_length=length, **options | way.options)
    options.pop("num_speculative_tokens")
    proposer = {
        "off": lambda: None,
        "ngram": lambda: NgramProposer(K, 1, 3, device=device),
        "suffix": lambda: SuffixProposer(
            K,
            max_tree_depth=12,
            max_cached_requests=0,
            max_spec_factor=1.0,
            min_token_prob=0.05,
            device=device,
        ),
        "lookahead": lambda: LookaheadProposer(
            6, window_size=4, ngram_size=3, num_guesses=3, pool_from_prompt=True, device=device
        ),
    }[way.drafter]()
    return make_llm(target, proposer=proposer, **options | way.options)


def requests_of(way: Way, rows: int, max_tokens: int) -> list[tuple[Prompt, SamplingParams]]:
    """That write to the end, with prompts that begin alike."""
    return [
        (
            Prompt(None, [40, 41, 50, 51] * 5 + [60 + row] * (1 + row % 4)),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=row, **way.params),
        )
        for row in range(rows)
    ]


@pytest.mark.slow
def test_waits_do_not_grow_with_the_rows(way, claimed_gpu, tiny_model, byte_tokenizer):
    rows = 16
    llm = llm_of(way, tiny_model("qwen3", vocab_size=VOCAB), byte_tokenizer, "cuda", rows)
    responses = [llm.submit(*asked) for asked in requests_of(way, rows, 60)]
    llm.engine.step()
    for _ in range(2):
        with claimed_gpu.waits() as waits:
            llm.engine.step()
        assert waits.total() <= way.waits, claimed_gpu.sites
    assert not any(response.finished for response in responses)
