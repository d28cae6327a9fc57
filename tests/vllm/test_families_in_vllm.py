"""Exports of trained heads in real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.convert import write_back
from draftsmith.speculators.export.formats import LAYOUTS, NATIVE
from draftsmith.speculators.export.layouts.base import WEIGHTS
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.vllm import some_accepted, with_head
from tests.support.vllm_heads import BLOCK, DEPTHS, FITTED, LEAST_SQUARES, trained

TAPS = (1, 2, 3)
LLAMA3 = {  # every frequency is in one of its three bands, at any length
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = ("llama", {"rope_parameters": LLAMA3})
READS_TAPS = ("eagle3", "peagle", "dflash")
# Queries share keys and values two by two, in the targets and where a case says nothing else.
Target = tuple[str, dict[str, Any]]
LLAMA, QWEN2, QWEN3 = (("llama", {}), ("qwen2", {}), ("qwen3", {}))
ONE, REDUCED, WINDOW = {"num_layers": 1, **BLOCK}, {"draft_vocab_size": 96}, {"sliding_window": 8}
CAUSAL, HEADS, TWO = {"is_causal": True}, {"num_heads": 3}, {"num_layers": 2, **BLOCK}
EAGLE = {"num_layers": 2, "own_embeddings": True, "attention_bias": True}
OLDER = {"norm_before_fc": True, "qk_norm": True, "num_layers": 2, **REDUCED}
NEWER = {"fc_norm": True, "norm_output": True, **FITTED}
WIDE = {"num_layers": 2, "own_embeddings": True, "fc_norm": True, **REDUCED, **DEPTHS}
CASES: dict[str, tuple[str, Target, dict[str, Any], dict[str, Any]]] = {
    # family, target, shape, options
    "eagle, scaled llama": ("eagle", SCALED, {}, {"unroll_steps": 3}),
    "eagle, two layers, biases, qwen3": ("eagle", QWEN3, EAGLE, {"unroll_steps": 3}),
    "eagle3, scaled llama": ("eagle3", SCALED, {}, {}),
    "eagle3, reduced vocabulary": ("eagle3", LLAMA, {**REDUCED, **FITTED}, LEAST_SQUARES),
    "eagle3, 3.1, qwen3": ("eagle3", QWEN3, NEWER, {}),
    "eagle3, norm_before_fc, two qwen3 layers, qwen2": ("eagle3", QWEN2, OLDER, {}),
    "eagle3, sliding window": ("eagle3", LLAMA, {"num_layers": 2, **WINDOW, **REDUCED}, {}),
    "medusa": ("medusa", LLAMA, HEADS, LEAST_SQUARES),
    "medusa, two blocks, no bias, qwen3": (
        "medusa",
        QWEN3,
        {**HEADS, "num_layers": 2, "fc_bias": False},
        LEAST_SQUARES,
    ),
    "medusa, one projection, qwen2": ("medusa", QWEN2, {**HEADS, "shared_lm_head": True}, {}),
    "mtp, folder of its own, scaled llama": ("mtp", SCALED, {}, {}),
    "mtp, folder of its own, qwen2": ("mtp", QWEN2, {}, {}),
    "dflash, qwen3": ("dflash", QWEN3, ONE, {}),
    "dflash, causal, reduced vocabulary": ("dflash", LLAMA, {**ONE, **CAUSAL, **REDUCED}, {}),
    "dflash, three layers": ("dflash", LLAMA, {"num_layers": 3, **BLOCK}, {}),
    "dflash, sliding window": ("dflash", QWEN3, {**TWO, **WINDOW}, {}),
    "dflash, causal, sliding window": ("dflash", LLAMA, {**TWO, **CAUSAL, **WINDOW}, {}),
    "peagle": ("peagle", LLAMA, {**DEPTHS, **FITTED}, LEAST_SQUARES),
    "peagle, two layers, own embeddings, qwen3": ("peagle", QWEN3, WIDE, {}),
    "peagle, sliding window": ("peagle", LLAMA, {**WINDOW, **DEPTHS, **FITTED}, LEAST_SQUARES),
}


@pytest.mark.parametrize(
    ("family", "architecture", "shape", "options"), CASES.values(), ids=CASES.keys()
)
def test_vllm_drafts_the_same(
    servable_model, own_texts, same_in_vllm, installed_vllm, family, architecture, shape, options
):
    if why := LAYOUTS[NATIVE, family].layout.dropped(installed_vllm):
        pytest.skip(why)
    name, overrides = architecture
    model = servable_model(name, **overrides)
    target = FrozenTarget(model, TAPS if family in READS_TAPS else ())
    drafter = trained(family, target, own_texts(target), shape, options)
    engine = {"hf_overrides": {"num_nextn_predict_layers": 1}} if family == "mtp" else None
    assert some_accepted(same_in_vllm(model, drafter, engine))


def test_a_target_that_hands_out_no_states_drafts_the_same_as_transformers_model(
    servable_model, own_texts, same_in_vllm
) -> None:
    """vLLM's own class of Gemma 3 has no states for taps."""
    model = servable_model("gemma3")
    target = FrozenTarget(model, TAPS)
    drafter = trained("eagle3", target, own_texts(target), {}, {})
    assert same_in_vllm(model, drafter, {"model_impl": "transformers"}).num_accepted_tokens > 0


def test_mtp_inside_its_target_drafts_the_same(
    servable_model, own_texts, same_as_ours, tmp_path: Path
) -> None:
    """As MiMo ships it: one checkpoint, the module reads the state before the final norm. It is
    trained, and written back where it came from."""
    model = servable_model("qwen2", tie_word_embeddings=False)
    layers = model.config.num_hidden_layers
    target = FrozenTarget(model, (layers,))
    drafter = trained("mtp", target, own_texts(target), {"hidden_state": "residual"}, {})
    head = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    whole = tmp_path / "mimo"
    model.save_pretrained(whole)
    fields = json.loads((whole / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (whole / "config.json").write_text(json.dumps(fields))
    tensors, module = load_file(whole / WEIGHTS), load_file(head / WEIGHTS)
    blank = {name: torch.zeros_like(tensor) for name, tensor in module.items()}
    save_file(tensors | blank, whole / WEIGHTS, metadata={"format": "pt"})
    served = write_back(head, whole, tmp_path / "served")
    config = {"method": "mtp", "num_speculative_tokens": 3}
    assert some_accepted(same_as_ours(served, config, with_head(model, head, 3)))
