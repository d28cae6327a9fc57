"""The plugin in real vLLM: MLP speculators served again, and what it repairs on CPUs.

Needs the project in vLLM's environment: `pip install --no-deps -e .` with the Python that DRAFTSMITH_VLLM_PYTHON names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.config import config_for_target
from speculators.families.mlp import MLPSpeculator
from speculators.target import FrozenTarget
from tests.vllm.test_families_in_vllm import _train

SHAPES: dict[str, dict[str, Any]] = {
    "three heads": {},
    "tied, narrow": {"n_predict": 4, "inner_dim": 64, "tie_weights": True},
    "two heads, wide, scaled": {"n_predict": 2, "inner_dim": 192, "scale_input": True},
}


def trained(target: FrozenTarget, features: list[Any], **shape: Any) -> MLPSpeculator:
    torch.manual_seed(0)
    drafter = MLPSpeculator(config_for_target(target, "mlp", **shape)).attach(target)
    drafter.initialise_from(target)
    _train(target, drafter, features)
    return drafter.eval()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("architecture", ["llama"])
def test_trained_heads_draft_the_same(servable_model, own_texts, same_in_vllm, architecture, shape) -> None:
    model = servable_model(architecture)
    target = FrozenTarget(model)
    drafter = trained(target, own_texts(target), **shape)
    k = drafter.config.n_predict
    counters = same_in_vllm(model, drafter, k, method="mlp_speculator")
    assert counters.num_drafts / 8 < counters.num_accepted_tokens < k * counters.num_drafts
