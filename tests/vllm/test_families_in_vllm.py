"""Exports of the other families in real vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.config import config_for_target
from speculators.drafter import family_class
from speculators.target import FrozenTarget

TAPS = (1, 2, 3)
FITTED = {"norm_before_residual": True, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {  # family, architecture, shape, options
    "eagle3": ("eagle3", "llama", {"draft_vocab_size": 96, **FITTED}, {"init": "least_squares"}),
    "eagle3, 3.1, qwen3": ("eagle3", "qwen3", {"fc_norm": True, "norm_output": True, **FITTED}, {}),
    "medusa": ("medusa", "llama", {"num_heads": 3}, {"init": "least_squares"}),
    "medusa, two blocks, no bias": (
        "medusa", "qwen3", {"num_heads": 3, "num_layers": 2, "fc_bias": False}, {"init": "least_squares"},
    ),
    "mtp": ("mtp", "llama", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "architecture", "shape", "options"), CASES.values(), ids=CASES.keys())
def test_vllm_drafts_the_same(servable_model, own_texts, same_in_vllm, family, architecture, shape, options):
    """Heads trained on the very texts for a few steps, so that some drafts are accepted and some are not."""
    cls, model = family_class(family), servable_model(architecture)
    target = FrozenTarget(model, TAPS if cls.reads_taps and family == "eagle3" else ())
    torch.manual_seed(0)
    drafter = cls(config_for_target(target, family, tap_layers=target.tap_layers or None, **shape)).attach(target)
    if drafter.draft_to_target is not None:
        drafter.draft_to_target.copy_(torch.arange(96) + 16)
    features = own_texts(target)
    chosen = cls.options.model_validate(
        {**{k: v for k, v in shape.items() if k in cls.options.model_fields}, **options}
    )
    drafter.initialise_from(target, chosen, features if drafter.start_terms(chosen) else None)
    _train(target, drafter, features)
    engine = {"hf_overrides": {"num_nextn_predict_layers": 1}} if family == "mtp" else None
    counters = same_in_vllm(model, drafter.eval(), 3, engine=engine)
    assert counters.num_drafts / 8 < counters.num_accepted_tokens < 3 * counters.num_drafts


def _train(target: FrozenTarget, drafter: Any, features: list[Any], steps: int = 12) -> None:
    """Cross-entropy on what the target wrote, over three depths."""
    optimizer = torch.optim.AdamW(drafter.trainable_parameters(), lr=3e-3)
    ids = drafter.draft_to_target
    for step in range(steps):
        f, loss = features[step % len(features)], torch.zeros(())
        for depth in drafter.unroll(f, 3):
            labels = f.input_ids.flatten()[depth.target_index + 1]
            if ids is not None:
                kept = torch.isin(labels, ids)
                labels, hidden = torch.searchsorted(ids, labels[kept]), depth.hidden[kept]
            else:
                hidden = depth.hidden
            loss = loss + torch.nn.functional.cross_entropy(drafter.head(hidden, depth.depth), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
