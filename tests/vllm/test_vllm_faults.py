"""Faults of the vLLM build that the tests run with (docs/serve.md). A test passes while its
fault is there.

One that fails with "fault N is gone" is good news: what was written because of the fault can go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import Case, make, student
from tests.vllm.conftest import PROMPTS
from tests.vllm.process import VLLMError


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
    drafter = student(FrozenTarget(servable_model("llama")), 0.02, from_target=[0, 1, 2])
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
def dflash(servable_model, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a random DFlash drafter of two layers, which norm keys differently."""
    shape = {"num_layers": 2, "block_size": 4, "mask_token_id": 127}
    _, drafter = make(Case("dflash", shape, taps=(1, 2, 3)), servable_model("llama"), noise=0.0)
    for number, layer in enumerate(drafter.layers, 1):
        layer.self_attn.k_norm.weight.data.fill_(number)
    folder = export_drafter(drafter, tmp_path / "dflash", dtype=torch.float32)
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
