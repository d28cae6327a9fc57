"""A draft model runs by the runtime's forward while it is frozen, else by its own."""

from __future__ import annotations

from draftsmith.inference.model_runner.plain_decoder import PlainDecoder
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from tests.support.cases import CASES, make


def test_a_draft_model_decodes_with_few_calls_until_it_thaws(tiny_model) -> None:
    target, drafter = make(CASES["draft_model, cut"], tiny_model("llama"))
    assert drafter._fast_forward is None
    HeadProposer(drafter.freeze(), target, 1, 32, num_speculative_tokens=2)
    assert isinstance(drafter._fast_forward, PlainDecoder)
    drafter.train()
    assert drafter._fast_forward is None
