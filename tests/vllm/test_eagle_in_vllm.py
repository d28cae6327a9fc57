"""EAGLE-1 exports in real vLLM."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.families.eagle import Eagle, EagleOptions
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget


@pytest.mark.parametrize(
    "architecture, shape",
    [
        ("llama", {}),
        ("qwen3", {"num_layers": 2, "own_embeddings": True, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
    ],
    ids=["one layer", "two layers, own embeddings, biases, qwen3", "scaled rotation"],
)
def test_vllm_drafts_the_same(servable_model, own_texts, same_in_vllm, architecture, shape):
    """A head fitted to the very texts, so that some of its drafts are accepted, and disturbed, so
    that some are not."""
    model = servable_model(architecture)
    target = FrozenTarget(model)
    torch.manual_seed(0)
    drafter = Eagle(config_for_target(target, "eagle", **shape)).attach(target)
    drafter.initialise_from(
        target, EagleOptions.model_validate({"unroll_steps": 3}), own_texts(target)
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.mul_(3)  # attention, and with it positions, must matter
    counters = same_in_vllm(model, drafter.eval(), 3)
    assert counters.num_drafts / 4 < counters.num_accepted_tokens < 2 * counters.num_drafts
