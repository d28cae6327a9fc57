"""Conversions keep what is stored, and refuse what cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.export.convert import convert, write_back
from tests.support.cases import Case, make


@pytest.fixture
def head(tiny_model, tmp_path):
    """A head in float32, whose config.json names float16; its target and its folder."""
    target, drafter = make(Case("eagle3", {}, {}, taps=(1, 2, 3)), tiny_model("llama"))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16"}))
    return target, folder


def dtypes(folder: Path) -> set[torch.dtype]:
    tensors = load_file(folder / "model.safetensors").values()
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def test_precision_is_that_of_the_tensors_unless_another_is_asked_for(head, tmp_path):
    _, folder = head
    assert dtypes(convert(folder, tmp_path / "same")) == {torch.float32}
    assert dtypes(convert(folder, tmp_path / "half", dtype="bfloat16")) == {torch.bfloat16}


def test_values_that_a_dtype_has_not_are_refused(head, tmp_path):
    _, folder = head
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"][0] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="norm.weight .* float16"):
        convert(folder, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    convert(folder, tmp_path / "wide", dtype="bfloat16")


def test_a_tensor_that_is_there_twice_is_refused(head):
    target, folder = head
    again = {"fc.weight": torch.zeros_like(load_file(folder / "model.safetensors")["fc.weight"])}
    save_file(again, folder / "zz.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="fc.weight is in model.safetensors and in zz"):
        load_drafter(folder, target)


def test_a_folder_without_a_module_is_not_written_back(head, tmp_path):
    _, folder = head
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        write_back(tmp_path / "nothing", folder, tmp_path / "out")
