"""Drafting without a checkpoint: real vLLM's methods `ngram` and `suffix`, and ours of the same
names.

Compared context by context, at those that vLLM drafted at: where several drafts are as good as one
another the two may settle for different ones, and so come to different contexts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.bench.advice import SCHEDULE, advised_lengths
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposers.ngram import NgramIndex
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from tests.support.engines import proposer_of
from tests.support.vllm import PROMPTS, WRITTEN, rounds

SIZE = 2  # of the matches of ngram
NGRAM = {"method": "ngram", "prompt_lookup_min": SIZE, "prompt_lookup_max": SIZE}
Context = tuple[list[int], list[int]]  # what was written before, and the drafts
SUFFIX = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}


@pytest.fixture
def drafted(servable_model, serve, plain_in_vllm, tmp_path: Path):
    """`drafted(config)`: of every prompt the contexts that vLLM drafted at, and the drafts. The
    target listens little to what came before its last token, so its text goes in circles, and
    leaves them again."""
    model = servable_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                module.weight.mul_(0.003)
    model.save_pretrained(tmp_path / "target")
    job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN}
    job["options"] = {}

    def run(config: dict[str, Any], *, alone: bool = False) -> list[list[Context]]:
        answer = serve(job | {"speculative_config": config}, alone=alone)
        assert answer["token_ids"] == plain_in_vllm(job)
        drafted = answer["counters"]["vllm:spec_decode_num_draft_tokens"]
        assert 20 < answer["counters"]["vllm:spec_decode_num_accepted_tokens"] < drafted
        requests = []
        for prompt, text, rows in zip(PROMPTS, answer["token_ids"], answer["drafts"], strict=True):
            # after the last round vLLM drafts once more, for a text that is longer than what it
            # returns
            within = [verified for verified in rounds(rows, text) if verified.written < WRITTEN]
            requests.append([(prompt + text[: v.written], v.row) for v in within])
        return requests

    return run


def occurrences(pattern: list[int], context: list[int]) -> list[int]:
    """Where the context goes on after the pattern."""
    size = len(pattern)
    return [i + size for i in range(len(context) - size) if context[i : i + size] == pattern]


def test_ngram_drafts_the_same(drafted) -> None:
    """The same contexts have a match. Of several vLLM takes the first and ours the latest, and
    vLLM's draft ends with the text (docs/families/training-free.md): so the drafts are the same up
    to there for a match that is the only one."""
    counts = []
    config = NGRAM | {"num_speculative_tokens": 4}
    for context, row in chain(*drafted(config, alone=True)):  # numba stays in the process (fault 3)
        ours = NgramIndex(SIZE, SIZE).lookup(context, 4)
        positions = occurrences(context[-SIZE:], context)
        assert bool(row) == bool(ours) == bool(positions)
        if positions:
            first, last = positions[0], positions[-1]
            assert row == context[first : first + 4]
            assert ours[: len(context) - last] == context[last : last + 4]
        counts.append(len(positions))
    assert counts.count(1) > 10 and sum(count > 1 for count in counts) > 10


def test_vllm_follows_the_advice(drafted) -> None:
    """What `bench` advises is taken as it is: none of four requests has more drafts than its K for
    them."""
    gains = {4: {4: 0.8, 2: 1.1}, 16: {4: 2.0, 2: 1.5}}
    config = NGRAM | advised_lengths(gains)
    assert config["num_speculative_tokens"] == 4 and config[SCHEDULE] == [[1, 8, 2], [9, 512, 4]]
    assert max(len(row) for _, row in chain(*drafted(config, alone=True))) == 2


def test_suffix_drafts_the_same(drafted) -> None:
    """Of each request's own text, since vLLM opens running responses to one another
    (docs/families/training-free.md). Where they differ one draft is as good as the other."""
    try:
        requests = drafted({"method": "suffix", "num_speculative_tokens": 8, **SUFFIX})
    except VllmError as error:
        if "Arctic Inference is required" not in str(error):
            raise
        pytest.skip("arctic-inference is not in vLLM's environment; scripts/setup_vllm.py says why")
    pairs = [
        (theirs, ours)
        for contexts in requests
        for (_, theirs), ours in zip(contexts, ours_of(contexts), strict=True)
    ]
    assert sum(theirs == ours for theirs, ours in pairs) > 0.9 * len(pairs) > 0


def ours_of(contexts: list[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """What our proposer drafts at each of the contexts of one request."""
    proposer = proposer_of("suffix", 8, **SUFFIX)
    request = Request("0", 0, contexts[0][0], SamplingParams(), generator=None, max_model_len=256)
    for context, _ in contexts:
        request.token_ids[:] = context
        proposal = proposer.propose([request], RoundPlan([8]))
        yield proposal.token_ids[0, : proposal.counts[0]].tolist()
