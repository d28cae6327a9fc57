"""Medusa: published heads are read, and the start in closed form is one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.families.medusa import MedusaOptions
from draftsmith.speculators.target.frozen_target import TargetFeatures
from tests.support.cases import world_of


def test_published_names_are_read(tmp_path) -> None:
    """FasterDecoding's list per head: blocks, then the projection; sizes are the base model's."""
    target, drafter = world_of("medusa")
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind, head, *rest = name.split(".")
        renamed[f"{head}.0.linear.{rest[-1]}" if kind == "blocks" else f"{head}.1.weight"] = tensor
    save_file(renamed, folder / "model.safetensors")
    fields = {"base_model_name_or_path": "x", "medusa_num_heads": 3, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="hidden_size, vocab_size"):
        load_drafter(folder, target)
    (folder / "config.json").write_text(
        json.dumps(fields | {"hidden_size": 32, "vocab_size": target.vocab_size})
    )
    again = load_drafter(folder, target)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("shared", [False, True])
def test_a_linear_world_is_solved_before_the_first_step(shared) -> None:
    target, drafter = world_of("medusa, one projection" if shared else "medusa")
    turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.manual_seed(0))).Q
    if shared:  # one map serves all only if it is 1
        turn = torch.eye(32)
    state, states = torch.randn(1, 32, generator=torch.manual_seed(1)), []
    for _ in range(400):
        states.append(state + shared * torch.randn(1, 1))
        state = state @ turn + (not shared) * 0.2 * torch.randn(1, 32)
    last, zeros = torch.cat(states)[None], torch.zeros(1, 400, dtype=torch.long)
    features = TargetFeatures(zeros, zeros, zeros, zeros == 0, None, last)
    options = MedusaOptions.model_validate({"num_heads": 3, "init": "least_squares"})
    assert drafter.start_terms(options) >= 8192
    drafter.initialise_from(target, options, [features])
    with torch.no_grad():
        for step in drafter.unroll(features, 3):
            logits = drafter.head(step.hidden, step.depth)
            expected = target.logits(last[0, step.target_index])
            unfitted = target.logits(last[0, step.anchor_index])
            error = (logits - expected).square().mean()
            before = (unfitted - expected).square().mean()
            assert error < (0.8 if shared else 0.5) * before
