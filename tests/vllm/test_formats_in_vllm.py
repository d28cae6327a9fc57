"""Formats in real vLLM: a folder that names its target; faults that vLLM notices or not, as their
table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.drafter import Drafter
from speculators.export import export_drafter
from speculators.export.faults import CRASHES, REFUSES, SWALLOWS
from speculators.export.inspection import inspect_folder
from speculators.export.serving_commands import serving, vllm_method
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget
from tests.vllm.process import VLLMError
from tests.vllm.test_families_in_vllm import BLOCK, DEPTHS, LEAST_SQUARES, trained

PROMPTS = [[3 + (i * i * 7 + n) % 120 for i in range(n)] for n in (9, 14)]
SHAPE = {"norm_before_residual": True, "num_key_value_heads": 4, "draft_vocab_size": 96}


@pytest.fixture
def world(servable_model, own_texts, tmp_path: Path) -> tuple[Path, Drafter]:
    """The target's folder, and a head that was fitted to it."""
    model = servable_model("llama")
    target = FrozenTarget(model, (1, 2, 3))
    cls = family_class("eagle3")
    drafter = cls(
        config_for_target(target, "eagle3", tap_layers=target.tap_layers, **SHAPE)
    ).attach(target)
    drafter.draft_to_target.copy_(torch.arange(96) + 16)
    options = cls.options.model_validate({"norm_before_residual": True, "init": "least_squares"})
    drafter.initialise_from(target, options, own_texts(target))
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target", drafter.eval()


def job(model: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "prompts": PROMPTS, "max_tokens": 24, **more}


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", SHAPE),
    "peagle": ("peagle", {**SHAPE, **DEPTHS}),
    "dflash": ("dflash", {"num_layers": 1, **BLOCK}),
    "dflash, causal, reduced vocabulary": (
        "dflash",
        {"num_layers": 1, "is_causal": True, "draft_vocab_size": 96, **BLOCK},
    ),
    "dflash, sliding window": ("dflash", {"num_layers": 1, "sliding_window": 8, **BLOCK}),
}


@pytest.mark.parametrize(("family", "shape"), HEADS.values(), ids=HEADS)
def test_a_folder_of_the_speculators_format_is_all_that_vllm_needs(
    servable_model, own_texts, serve, tmp_path, family, shape
) -> None:
    """The same drafts and counts as with the native folder and a speculative_config."""
    model, target = servable_model("llama"), tmp_path / "target"
    model.save_pretrained(target)
    frozen = FrozenTarget(model, (1, 2, 3))
    drafter = trained(
        family, frozen, own_texts(frozen), shape, {} if family == "dflash" else LEAST_SQUARES
    )
    told = {
        "target": {"name_or_path": str(target), "architectures": []},
        "num_speculative_tokens": 3,
    }
    folders = {
        name: export_drafter(
            drafter, tmp_path / name, dtype=torch.float32, format=name, provenance=told
        )
        for name in ("vllm", "speculators")
    }
    options = next(
        way.options
        for way in serving(family, folder=str(folders["vllm"]), tokens=3, config=drafter.config)
    )
    native = serve(job(target, speculative_config=options))
    alone = serve(job(folders["speculators"]))
    assert alone["token_ids"] == native["token_ids"]
    assert alone["counters"] == native["counters"]
    assert native["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


FAULTS: dict[str, Any] = {
    "missing_d2t": lambda c, t: t.pop("d2t"),
    "missing_norm": lambda c, t: t.pop("norm.weight"),
    "missing_lm_head": lambda c, t: t.pop("lm_head.weight"),
    "dropped_bias": lambda c, t: t.update({"fc.bias": torch.ones(128)}),
    "unexpected_tensor": lambda c, t: t.update({"stray.weight": torch.ones(3)}),
    "tap_count": lambda c, t: c.update(num_aux_hidden_states=2),
    "taps_out_of_range": lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 99]),
    "architecture": lambda c, t: c.update(architectures=["LlamaForCausalLMEagle"]),
}


def section(**values: Any) -> Any:
    return lambda c, t: c["dflash_config"].update(values)


def prefixed(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    for name in list(t):
        t["model." + name] = t.pop(name)


ONE = {"num_layers": 1, **BLOCK}
OTHER_FAULTS: dict[str, tuple[str, dict[str, Any], Any]] = {  # kind -> family, shape, change
    "missing_tensor": ("dflash", ONE, lambda c, t: t.pop("fc.weight")),
    "unexpected_tensor": ("dflash", ONE, lambda c, t: t.update({"stray.weight": torch.ones(3)})),
    "prefix": ("dflash", ONE, prefixed),
    "mask_token_range": ("dflash", ONE, section(mask_token_id=1000)),
    "taps_out_of_range": ("dflash", ONE, section(target_layer_ids=[0, 1, 9])),
    "causal_disagrees": ("dflash", ONE, section(causal=True)),
    "window_dropped": (
        "dflash",
        {**ONE, "sliding_window": 8},
        lambda c, t: c.pop("use_sliding_window"),
    ),
    "window_ignored": ("eagle3", {"sliding_window": 8}, lambda c, t: c.pop("layer_types")),
    "missing_mask_hidden": ("peagle", DEPTHS, lambda c, t: t.pop("mask_hidden")),
}


@pytest.mark.parametrize("kind", OTHER_FAULTS)
def test_vllm_makes_of_a_fault_of_another_drafter_what_the_table_says(
    servable_model, serve, tmp_path, kind
) -> None:
    family, shape, change = OTHER_FAULTS[kind]
    model = servable_model("llama")
    target = FrozenTarget(model, (1, 2, 3))
    drafter = family_class(family)(
        config_for_target(target, family, tap_layers=(1, 2, 3), **shape)
    ).attach(target)
    model.save_pretrained(tmp_path / "target")
    judged(
        serve,
        tmp_path / "target",
        drafter.initialise_from(target).eval(),
        tmp_path / "head",
        kind,
        change,
    )


@pytest.mark.parametrize("kind", FAULTS)
def test_vllm_makes_of_a_fault_what_the_table_says(world, serve, tmp_path, kind) -> None:
    judged(serve, *world, tmp_path / "head", kind, FAULTS[kind])


def judged(serve, target: Path, drafter: Drafter, head: Path, kind: str, change: Any) -> None:
    """Makes the fault in a published folder; inspect names it, and vLLM does what faults.yaml
    says."""
    folder = export_drafter(drafter, head, dtype=torch.float32)
    fields, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    fields.pop("draftsmith")
    change(fields, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = inspect_folder(folder, FrozenTarget.from_pretrained(str(target)))
    verdict = next(each.vllm for each in found.faults if each.kind == kind)
    assert verdict in (REFUSES, CRASHES, SWALLOWS)
    config = vllm_method(drafter.config.family) | {
        "model": str(folder),
        "num_speculative_tokens": 3,
    }
    if verdict == SWALLOWS:
        serve(job(target, speculative_config=config))
    else:
        with pytest.raises((VLLMError, AssertionError)):  # it says why, or its process is gone
            serve(job(target, speculative_config=config))
