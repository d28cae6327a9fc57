"""EAGLE-3: faults in its files by name, published heads, and attention that is computed again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.config import default_tap_layers
from speculators.errors import CheckpointError, ConfigError
from speculators.export import export_drafter, load_drafter, read_drafter_config
from speculators.target.frozen_target import FrozenTarget


@pytest.fixture
def head(make_drafter, all_cases, tiny_model):
    """(target, head) with half a vocabulary."""
    return make_drafter(all_cases["eagle3"], tiny_model("llama"))


def test_strict_reload_names_every_fault(head, tmp_path):
    """What vLLM swallows is refused here, by name."""
    target, drafter = head
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")

    def broken(change) -> str:
        tensors = dict(weights)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_drafter(folder, target)
        return str(error.value)

    assert "norm.weight is missing" in broken(lambda t: t.pop("norm.weight"))
    assert "d2t is missing" in broken(lambda t: t.pop("d2t"))
    assert "fc.bias is unexpected" in broken(lambda t: t.update({"fc.bias": torch.zeros(3)}))
    assert "expected [40, 32]" in broken(
        lambda t: t.update({"lm_head.weight": torch.zeros(41, 32)})
    )
    assert "offsets" in broken(lambda t: t.update({"d2t": t["d2t"] + torch.arange(40)}))
    assert "not finite" in broken(
        lambda t: t.update({"norm.weight": torch.full((32,), float("nan"))})
    )
    both = broken(lambda t: (t.pop("norm.weight"), t.pop("fc.weight")))
    assert "fc.weight is missing" in both and "norm.weight is missing" in both


def test_wrong_target_pickles_and_foreign_folders_are_refused(head, tiny_model, tmp_path):
    target, drafter = head
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    other = FrozenTarget(tiny_model("llama", vocab_size=77), [1, 2, 3])
    with pytest.raises(ConfigError, match="vocab_size is 101"):
        load_drafter(folder, other)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_drafter(folder, target)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "nowhere at all", target)


def test_failed_export_leaves_the_old_one(head, tmp_path, monkeypatch):
    _, drafter = head
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    before = (folder / "model.safetensors").read_bytes()
    full = OSError("disk full")
    monkeypatch.setattr(
        "speculators.export.layouts.base.save_file", lambda *a, **k: (_ for _ in ()).throw(full)
    )
    with pytest.raises(OSError, match="disk full"):
        export_drafter(drafter, folder, dtype=torch.float32)
    assert (folder / "model.safetensors").read_bytes() == before and len(
        list(tmp_path.iterdir())
    ) == 1


def test_published_heads_without_our_fields_are_read(make_drafter, all_cases, tiny_model, tmp_path):
    """Public EAGLE-3 heads name no tap layers: the convention [2, n/2, n-3] of the paper's code is
    used."""
    case = replace(all_cases["eagle3"], taps=tuple(default_tap_layers(3)))
    _, drafter = make_drafter(case, tiny_model("llama"))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    for field in (
        "draftsmith",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "rope_parameters",
    ):
        fields.pop(field)
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder, 3).tap_layers == tuple(default_tap_layers(3))
    assert default_tap_layers(32) == [2, 16, 29] and default_tap_layers(16) == [2, 8, 13]
