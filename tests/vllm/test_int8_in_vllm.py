"""Int8 exports in real vLLM: loaded, and drafting what ours draft."""

from __future__ import annotations

import pytest

from draftsmith.speculators.export.quantisation import quantised
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import student
from tests.support.vllm import some_accepted
from tests.support.vllm_heads import BLOCK, FITTED, LEAST_SQUARES, trained

TAPS = (1, 2, 3)
CASES = {
    "eagle": ("eagle", (), {}, {"unroll_steps": 3}),
    "eagle3": ("eagle3", TAPS, {"draft_vocab_size": 96, **FITTED}, LEAST_SQUARES),
    "dflash": ("dflash", TAPS, {"num_layers": 1, **BLOCK}, {}),
}


@pytest.mark.parametrize(("family", "taps", "shape", "options"), CASES.values(), ids=CASES)
def test_int8_heads_draft_the_same(
    servable_model, own_texts, same_in_vllm, family, taps, shape, options
):
    model = servable_model("llama")
    target = FrozenTarget(model, taps)
    drafter = trained(family, target, own_texts(target), shape, options)
    assert some_accepted(same_in_vllm(model, quantised(drafter, "int8", "export")))


def test_an_int8_draft_model_drafts_the_same(servable_model, same_in_vllm):
    """Its head has weights of its own, where its embedding was tied to it."""
    model = servable_model("llama", tie_word_embeddings=True)
    drafter = student(FrozenTarget(model), 0.02, from_target=[0, 1, 2])
    assert some_accepted(same_in_vllm(model, quantised(drafter, "int8", "export")))
