"""Int8 exports: every family reads back to the same numbers; what cannot be done is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.export.convert import convert
from draftsmith.speculators.export.inspection import inspect_folder
from draftsmith.speculators.export.layouts.base import WEIGHTS
from draftsmith.speculators.export.quantisation import check_scheme, quantised
from draftsmith.speculators.export.serving_commands import serving
from tests.support.cases import BASE, world_of
from tests.support.contract import all_logits, packed
from tests.support.errors import raises_at


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASE.values(), "draft_model, cut, reduced"])
def test_an_int8_export_reads_back_to_the_same_drafter(name, tmp_path):
    target, drafter = world_of(name)
    small = quantised(drafter, "int8", "export")
    folder = export_drafter(small, tmp_path / "int8", dtype=torch.float32)
    small = small.freeze()
    again = load_drafter(folder, target)
    features = target.features(**packed([24]))
    assert again.config == small.config.model_copy(update={"dtype": "float32"})
    torch.testing.assert_close(all_logits(again, features), all_logits(small, features))
    stored = load_file(folder / WEIGHTS)
    assert any(tensor.dtype == torch.int8 for tensor in stored.values())
    held = [tensor for tensor in again.state_dict().values() if tensor.dtype == torch.int8]
    assert len(held) == sum(tensor.dtype == torch.int8 for tensor in stored.values())
    inspection = inspect_folder(folder, target)
    assert inspection.sound and inspection.config.quantization == "int8"


def test_an_int8_export_with_a_scale_lost_or_a_weight_of_floats_is_refused(tmp_path):
    target, drafter = world_of(BASE["eagle3"])
    folder = export_drafter(quantised(drafter, "int8", "export"), tmp_path, dtype=torch.float32)
    whole = load_file(folder / WEIGHTS)
    lost = {name: x for name, x in whole.items() if name != "fc.weight_scale"}
    for tensors in (lost, whole | {"fc.weight": whole["fc.weight"].float()}):
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        with pytest.raises(CheckpointError, match="fc.weight"):
            load_drafter(folder, target)


def test_quantised_refuses_what_it_cannot_do(tmp_path):
    _, drafter = world_of(BASE["eagle3"])
    with raises_at(ConfigError, "--quantize"):
        check_scheme("int3", "--quantize")
    small = quantised(drafter, "int8", "--quantize")
    with raises_at(ConfigError, "--quantize"):
        quantised(small, "int8", "--quantize")
    folder = export_drafter(small, tmp_path / "int8", dtype=torch.float32)
    with raises_at(ConfigError, "export format speculators"):
        convert(folder, tmp_path / "other", format="speculators")
    assert not (tmp_path / "other").exists()


def test_inspect_says_where_an_int8_export_is_not_served():
    for family, served in (("eagle3", True), ("medusa", False), ("mtp", False)):
        config = world_of(BASE[family])[1].config.model_copy(update={"quantization": "int8"})
        vllm, sglang, ours = serving(family, folder="F", config=config)
        assert (vllm.options is not None) == served
        assert sglang.options is None
        assert ours.command
        assert served or "--quantize" in vllm.note
    config = world_of(BASE["draft_model"])[1].config
    assert "int8" not in serving("draft_model", folder="F", config=config)[1].note
    small = config.model_copy(update={"quantization": "int8"})
    assert "int8" in serving("draft_model", folder="F", config=small)[1].note
