"""EAGLE-3: its residual, faults in its files by name, and published heads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from draftsmith.speculators.config import default_tap_layers
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter, read_drafter_config
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import CASES, make, world_of
from tests.support.contract import packed
from tests.support.errors import raises_at


@pytest.fixture
def head():
    return world_of("eagle3")


def test_a_head_for_another_target_is_refused(head, tiny_model):
    with raises_at(ConfigError, "drafter of family eagle3"):
        head[1].attach(FrozenTarget(tiny_model("llama", vocab_size=77), [1, 2, 3]))


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_unroll_of_a_layer_that_adds_nothing_is_the_projection_of_the_taps(normed, tiny_model):
    """With `norm_before_residual` its norm, whose place in the layer is the switch's meaning."""
    case = CASES["eagle3"]
    case = replace(case, shape={**case.shape, "norm_before_residual": normed})
    target, drafter = make(case, tiny_model("llama"))
    (layer,) = drafter.layers
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    features = target.features(**packed([9]))
    projected = drafter.fc(features.taps)
    expected = layer.hidden_norm(projected) if normed else projected
    (step,) = drafter.unroll(features, 1)
    torch.testing.assert_close(step.hidden, expected.flatten(0, 1)[step.anchor_index])


def test_failed_export_leaves_the_old_one(head, tmp_path, monkeypatch):
    _, drafter = head
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    before = (folder / "model.safetensors").read_bytes()

    def full(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("draftsmith.speculators.export.layouts.base.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        export_drafter(drafter, folder, dtype=torch.float32)
    assert (folder / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == [folder]


def test_published_heads_without_our_fields_are_read(tiny_model, tmp_path):
    """Public heads name no tap layers: the convention [2, n/2, n-3] of the paper's code is used."""
    case = replace(CASES["eagle3"], taps=tuple(default_tap_layers(3)))
    _, drafter = make(case, tiny_model("llama"))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    fields["eagle_aux_hidden_state_layer_ids"].reverse()  # engines tap in the order of the layers
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder).tap_layers == tuple(default_tap_layers(3))
    for field in ("draftsmith", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        fields.pop(field)
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder, 3).tap_layers == tuple(default_tap_layers(3))
    assert default_tap_layers(32) == [2, 16, 29] and default_tap_layers(16) == [2, 8, 13]
