"""Faults of the CPU build of vLLM that are worked around (docs/serve.md). A test passes while its
fault is there; one that fails with "the fault is gone" is good news: the work-around can go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.speculators.export import export_drafter
from tests.support.cases import Case, make
from tests.vllm.conftest import PROMPTS


def gone(work_around: str) -> str:
    return f"the fault is gone: remove {work_around}, and its line in docs/serve.md"


@pytest.fixture
def target(servable_model, tmp_path: Path) -> Path:
    servable_model("llama").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def job(target: Path) -> dict[str, Any]:
    """Written without drafting."""
    return {"model": str(target), "prompts": PROMPTS, "max_tokens": 24, "options": {}}


def test_temperatures_of_drafted_tokens_are_not_written(serve) -> None:
    """Two calls, since a right answer may happen to lie in the memory that is handed out."""
    values, counts = [[0.8125, 0.4375], [0.3125, 0.6875]], [2, 1]
    expanded = serve({"probe": "expand_floats", "values": values, "counts": counts})["expanded"]
    assert expanded != [[v[0], v[0], v[1]] for v in values], gone(
        "expand in inference/vllm_bridge/worker.py"
    )


def test_dflash_norms_all_context_keys_by_its_first_layer(dflash, serve, job) -> None:
    answer = serve(job | {"probe": "normed_keys", "speculative_config": dflash})
    first, second = (torch.tensor(row) for row in answer["normed"])
    weights = [torch.tensor(row) for row in answer["weights"]]
    torch.testing.assert_close(first, weights[0])
    assert not torch.allclose(second, weights[1]), gone(
        "norm_keys in inference/vllm_bridge/worker.py"
    )


def test_no_engine_starts_in_a_process_that_has_numba(serve, job) -> None:
    """If it does, `serve(alone=True)` in tests/vllm can go."""
    with pytest.raises(VllmError, match="_lib_fn_wrapper"):
        serve(job | {"probe": "engine_beside_numba"}, alone=True)


@pytest.fixture
def dflash(servable_model, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a random DFlash drafter of two layers, which norm keys differently."""
    shape = {"num_layers": 2, "block_size": 4, "mask_token_id": 127}
    _, drafter = make(Case("dflash", shape, taps=(1, 2, 3)), servable_model("llama"), noise=0.0)
    for number, layer in enumerate(drafter.layers, 1):
        layer.self_attn.k_norm.weight.data.fill_(number)
    folder = export_drafter(drafter, tmp_path / "dflash", dtype=torch.float32)
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
