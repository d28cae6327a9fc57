"""Drafting without a checkpoint: real vLLM's methods `ngram` and `suffix`, and ours of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference import LLM
from inference.llm_loading import make_proposer
from inference.proposers.ngram import NgramIndex
from inference.speculative_config import parse_speculative_config
from speculators.target import FrozenTarget
from tests.vllm.conftest import PROMPTS, WRITTEN, Round, rounds
from tests.vllm.process import VLLMError

SIZE = 2  # of the matches


def occurrences(context: list[int]) -> int:
    """Of the last SIZE tokens, earlier in the text."""
    last = context[-SIZE:]
    return sum(context[i : i + SIZE] == last for i in range(len(context) - SIZE))


def expected(context: list[int], their: Round) -> list[int]:
    """What our proposer drafts for it. Where it takes the latest match, and goes on with what it has drafted, vLLM takes
    the first one and ends with the text (docs/ngram.md): neither differs for a match that is the only one."""
    drafted = NgramIndex(SIZE, SIZE).lookup(context, 4)
    if occurrences(context) < 2:
        return drafted[: len(their.row)]
    first = next(i for i in range(len(context)) if context[i : i + SIZE] == context[-SIZE:]) + SIZE
    return context[first : first + 4]


def test_ngram_drafts_the_same(servable_model, serve, plain_in_vllm, tmp_path: Path) -> None:
    """Context by context, since the two settle differently which of several matches counts."""
    servable_model("llama").save_pretrained(tmp_path / "target")
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": SIZE, "prompt_lookup_max": SIZE}
    job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN, "options": {}}
    theirs = serve(job | {"speculative_config": config}, alone=True)  # numba stays in the process (fault 3)
    assert theirs["token_ids"] == plain_in_vllm(job)
    single = several = 0
    for prompt, text, drafts in zip(PROMPTS, theirs["token_ids"], theirs["drafts"], strict=True):
        for each in rounds(drafts, text):
            context = prompt + text[: each.written]
            assert each.row == expected(context, each)
            assert bool(each.row) == bool(occurrences(context))
            single, several = single + (occurrences(context) == 1), several + (occurrences(context) > 1)
    assert single > 10 and several > 10
    assert theirs["counters"]["vllm:spec_decode_num_accepted_tokens"] > 10


def test_suffix_drafts_the_same(servable_model, same_as_ours, tmp_path: Path) -> None:
    """Of each request's own text: vLLM opens running responses to one another, which ours does not (docs/suffix.md)."""
    model = servable_model("llama")
    model.save_pretrained(tmp_path / "target")
    config: dict[str, Any] = {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_cached_requests": 0,
    }
    target = FrozenTarget(model)
    proposer = make_proposer(parse_speculative_config(config), target, None, 8, 256)
    try:
        counters = same_as_ours(tmp_path / "target", config, LLM._assemble(target, proposer=proposer))
    except VLLMError as error:
        if "Arctic Inference is required" not in str(error):
            raise
        pytest.skip("arctic-inference is not in vLLM's environment; scripts/setup_vllm.py says why")
    assert 10 < counters.num_accepted_tokens < counters.num_draft_tokens
