"""Int8 exports in real vLLM: loaded, and drafting what ours draft."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.quantisation import quantised
from draftsmith.speculators.export.serving_commands import vllm_method
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import student
from tests.support.vllm import PROMPTS, WRITTEN, run_ours, some_accepted, with_head
from tests.support.vllm_heads import BLOCK, FITTED, LEAST_SQUARES, trained

TAPS = (1, 2, 3)
DTYPE = torch.float32
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


def test_an_int8_draft_model_drafts_nearly_the_same(servable_model, serve, tmp_path):
    """Its head has weights of its own, where its embedding was tied to it. Inputs are rounded to
    int8, and the last bit of another sum decides some of these roundings: three layers of random
    weights draft one token in eleven otherwise."""
    model = servable_model("llama", tie_word_embeddings=True)
    drafter = student(FrozenTarget(model), 0.02, from_target=[0, 1, 2])
    head = export_drafter(quantised(drafter, "int8", "export"), tmp_path / "head", dtype=DTYPE)
    model.save_pretrained(tmp_path / "target")
    config = vllm_method("draft_model") | {"model": str(head), "num_speculative_tokens": 3}
    job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN}
    theirs = serve(job | {"options": {}, "speculative_config": config, "repaired": False})
    ours = run_ours(with_head(model, head, 3), 3)
    assert theirs["token_ids"] == [text[:WRITTEN] for text in ours.texts]
    same = [
        a == b
        for drafts, others in zip(ours.drafts, theirs["drafts"], strict=True)
        for row, other in zip(drafts, others, strict=False)
        for a, b in zip(row, other, strict=False)
    ]
    assert sum(same) > 0.8 * len(same)
    assert some_accepted(ours.counters)
