"""Formats in real vLLM: a folder that names its target; faults that vLLM notices or not, as
`inspect` says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.inspection import inspect_folder
from draftsmith.speculators.export.layouts.base import minor
from draftsmith.speculators.export.serving_commands import serving, vllm_method
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import Case, make
from tests.support.vllm import PROMPTS
from tests.support.vllm_heads import BLOCK, DEPTHS, FITTED, LEAST_SQUARES, trained

SHAPE = {**FITTED, "draft_vocab_size": 96}


def job(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "prompts": PROMPTS, "max_tokens": 24, **more}


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", SHAPE),
    "peagle": ("peagle", {**SHAPE, **DEPTHS}),
    "dflash, causal": ("dflash", {"num_layers": 1, "is_causal": True, **BLOCK}),
    "dflash, sliding window": ("dflash", {"num_layers": 1, "sliding_window": 8, **BLOCK}),
}


@pytest.mark.parametrize(("family", "shape"), HEADS.values(), ids=HEADS)
def test_vllm_drafts_from_a_folder_of_the_speculators_format(
    servable_model, own_texts, serve, installed_vllm, tmp_path, family, shape
) -> None:
    """The same drafts and counts as with the native folder, also without a speculative_config in
    the versions that take a local target from config.json."""
    model, target = servable_model("llama"), tmp_path / "target"
    model.save_pretrained(target)
    frozen = FrozenTarget(model, (1, 2, 3))
    start = {} if family == "dflash" else LEAST_SQUARES
    drafter = trained(family, frozen, own_texts(frozen), shape, start)
    provenance = {"target": {"name_or_path": str(target), "architectures": []}}
    provenance["num_speculative_tokens"] = 3
    fields = {"dtype": torch.float32, "provenance": provenance}
    head = export_drafter(drafter, tmp_path / "head", **fields)
    whole = export_drafter(drafter, tmp_path / "whole", format="speculators", **fields)
    how = {"target": str(target), "tokens": 3, "config": drafter.config}
    native, other = (
        serve(job(target, speculative_config=serving(family, **how, **written)[0].options))
        for written in ({"folder": str(head)}, {"folder": str(whole), "format": "speculators"})
    )
    same = [other]
    if minor(installed_vllm) < (0, 33):
        same.append(serve(job(whole)))
    for answer in same:
        assert answer["token_ids"] == native["token_ids"]
        assert answer["counters"] == native["counters"]
    assert native["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


def prefixed(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    for name in list(t):
        t["model." + name] = t.pop(name)


ONE, WINDOW = {"num_layers": 1, **BLOCK}, {"num_layers": 1, "sliding_window": 8, **BLOCK}
# place of the fault, family, shape, change
FAULTS: list[tuple[str, str, dict[str, Any], Any]] = [
    ("d2t", "eagle3", SHAPE, lambda c, t: t.pop("d2t")),
    ("norm.weight", "eagle3", SHAPE, lambda c, t: t.pop("norm.weight")),
    ("fc.bias", "eagle3", SHAPE, lambda c, t: t.update({"fc.bias": torch.ones(128)})),
    ("stray.weight", "eagle3", SHAPE, lambda c, t: t.update({"stray.weight": torch.ones(3)})),
    ("num_aux_hidden_states", "eagle3", SHAPE, lambda c, t: c.update(num_aux_hidden_states=2)),
    ("sliding_window", "eagle3", {"sliding_window": 8}, lambda c, t: c.pop("layer_types")),
    ("mask_hidden", "peagle", DEPTHS, lambda c, t: t.pop("mask_hidden")),
    ("fc.weight", "dflash", ONE, lambda c, t: t.pop("fc.weight")),
    ("stray.weight", "dflash", ONE, lambda c, t: t.update({"stray.weight": torch.ones(3)})),
    ("model.", "dflash", ONE, prefixed),
    ("is_causal", "dflash", ONE, lambda c, t: c["dflash_config"].update(causal=True)),
    ("use_sliding_window", "dflash", WINDOW, lambda c, t: c.pop("use_sliding_window")),
]


@pytest.mark.parametrize(
    ("where", "family", "shape", "change"), FAULTS, ids=[f"{f[1]} {f[0]}" for f in FAULTS]
)
def test_vllm_makes_of_a_fault_what_the_layout_says(
    servable_model, serve, tmp_path, where, family, shape, change
) -> None:
    """A published folder: inspect names the fault, and whether vLLM serves it."""
    model, target = servable_model("llama"), tmp_path / "target"
    model.save_pretrained(target)
    _, drafter = make(Case(family, shape, taps=(1, 2, 3)), model, noise=0.0)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    fields.pop("draftsmith")
    change(fields, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    inspection = inspect_folder(folder, FrozenTarget.from_pretrained(str(target)))
    says = next(fault.engines for fault in inspection.faults if fault.where == where)
    options = vllm_method(family) | {"model": str(folder), "num_speculative_tokens": 3}
    # where vLLM refuses it says why, or its process is gone
    fails = pytest.raises(VllmError) if "refuse" in says else nullcontext()
    with fails:
        serve(job(target, speculative_config=options))
