"""Heads that are trained for a few steps on the very texts that vLLM is asked for."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids

FITTED = {"norm_before_residual": True, "num_key_value_heads": 4}
LEAST_SQUARES = {"init": "least_squares"}
BLOCK = {"block_size": 4, "mask_token_id": 3}
DEPTHS = {"num_depths": 3, "mask_token_id": 3}


def trained(
    family: str, target: FrozenTarget, features: list[Any], shape: dict, options: dict
) -> Any:
    """A head trained on the very texts for a few steps, so that some drafts are accepted and some
    are not."""
    cls = family_class(family)
    torch.manual_seed(0)
    config = config_for_target(target, family, tap_layers=target.tap_layers or None, **shape)
    drafter = cls(config).attach(target)
    if drafter.draft_to_target is not None:
        drafter.draft_to_target.copy_(torch.arange(96) + 16)
    known = {key: value for key, value in shape.items() if key in cls.options.model_fields}
    chosen = cls.options.model_validate(known | options)
    drafter.initialise_from(target, chosen, features if drafter.start_terms(chosen) else None)
    # a block knows nothing at first, and several layers learn a text by heart
    steps = 80 // drafter.config.num_layers if family == "dflash" else 12
    _train(target, drafter, features, steps)
    return drafter.eval()


def _train(target: FrozenTarget, drafter: Any, features: list[Any], steps: int) -> None:
    """Cross-entropy on what the target wrote, over three depths."""
    optimizer = torch.optim.AdamW(drafter.trainable_parameters(), lr=3e-3)
    ids = drafter.draft_to_target
    for step in range(steps):
        f = features[step % len(features)]
        loss = torch.zeros(())
        for depth in drafter.unroll(f, 3):
            labels = f.input_ids.flatten()[depth.target_index + 1]
            labels = to_draft_ids(labels, ids)  # -1: not in its vocabulary
            logits = drafter.head(depth.hidden, depth.depth)
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
