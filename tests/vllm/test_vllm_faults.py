"""Faults of the vLLM build that the tests run with (docs/serve.md). A test passes while its
fault is there.

One that fails with "fault N is gone" is good news: what was written because of the fault can go.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.layouts.base import WEIGHTS
from tests.vllm.conftest import PROMPTS, student
from tests.vllm.process import VLLMError

HEAD, LAYERS = 32, 2  # of the DFlash drafter


def gone(fault: str, work_around: str) -> str:
    return (
        f"fault {fault} is gone: remove the work-around in {work_around}, and its line in"
        " docs/serve.md"
    )


def refusal(serve, job: dict[str, Any], **how: bool) -> str:
    """What vLLM says instead of serving the job; nothing if it serves it."""
    try:
        serve(job, **how)
    except VLLMError as error:
        return str(error)
    return ""


@pytest.fixture
def target(servable_model, tmp_path: Path) -> Path:
    servable_model("llama").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def job(target: Path) -> dict[str, Any]:
    """Written without drafting."""
    return {"model": str(target), "prompts": PROMPTS, "max_tokens": 24, "options": {}}


@pytest.fixture
def drafting(servable_model, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a draft model that is now right, now wrong: the target, disturbed."""
    drafter = student(servable_model("llama"), 0.02, from_target=[0, 1, 2])
    folder = export_drafter(drafter, tmp_path / "student", dtype=torch.float32)
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


# -------------------------------------------------------------------- numbered as in
# docs/serve.md


def test_fault_1_temperatures_of_drafted_tokens_are_not_written(serve) -> None:
    """Two calls, since a right answer may happen to lie in the memory that is handed out."""
    values, counts = [[0.8125, 0.4375], [0.3125, 0.6875]], [2, 1]
    expanded = serve({"probe": "expand_floats", "values": values, "counts": counts})["expanded"]
    assert expanded != [[v[0], v[0], v[1]] for v in values], gone(
        "1", "inference/vllm_bridge/worker.py (expand)"
    )


def test_fault_2_dflash_norms_all_context_keys_by_its_first_layer(dflash, serve, job) -> None:
    answer = serve(job | {"probe": "normed_keys", "speculative_config": dflash})
    first, second = (torch.tensor(row) for row in answer["normed"])
    weights = [torch.tensor(row) for row in answer["weights"]]
    torch.testing.assert_close(first, weights[0])
    assert not torch.allclose(second, weights[1]), gone(
        "2", "inference/vllm_bridge/worker.py (norm_keys)"
    )


def test_fault_3_no_engine_in_a_process_that_has_numba(serve, job) -> None:
    said = refusal(serve, job | {"probe": "engine_beside_numba"}, alone=True)
    assert said, gone("3", "tests/vllm: serve(alone=True)")
    assert "_lib_fn_wrapper" in said


def test_fault_6_min_p_is_refused_while_drafting(serve, job, drafting) -> None:
    sampling = {"temperature": 1.0, "min_p": 0.1}
    said = refusal(serve, job | {"speculative_config": drafting, "sampling": sampling})
    assert said, gone("6", "docs/serve.md")
    assert "not yet supported with speculative decoding" in said


@pytest.fixture
def dflash(tmp_path: Path) -> dict[str, Any]:
    """The configuration of a random DFlash drafter of two layers."""
    folder = tmp_path / "dflash"
    fields = dict(
        model_type="qwen3",
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        vocab_size=128,
        max_position_embeddings=256,
    )
    own = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 1, 2]},
    }
    torch.manual_seed(0)
    layers = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    tensors = layers.model.state_dict()
    del tensors["embed_tokens.weight"]
    tensors["fc.weight"] = 0.1 * torch.randn(128, 3 * 128)
    tensors["hidden_norm.weight"] = torch.ones(128)
    for i in range(LAYERS):
        tensors[f"layers.{i}.self_attn.k_norm.weight"] = torch.full((HEAD,), i + 1.0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(AutoConfig.for_model(**fields).to_dict() | own))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
