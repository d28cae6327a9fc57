"""`auto`: bfloat16 where the CPU multiplies in it, else float32; exports are as ever."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import default_device
from draftsmith.inference.evaluation.engines import Drafting
from draftsmith.inference.vllm_bridge.vllm_engine import VllmEngine, VllmOptions
from draftsmith.speculators.precision import (
    autocast_dtype,
    multiplies_bfloat16,
    own_device,
    running_dtype,
    say_unsupported,
    say_widened,
)
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.planner.plan import make_stage
from draftsmith.train.recipe.sections import TargetSection
from tests.support.models import make_tiny_model
from tests.support.training import recipe_of

TOKENIZER = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target"

OLD = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}
CPUS = {
    "old": (OLD, False),
    "amx": (OLD | {"amx_bf16": True}, True),
    "old arm": ({"architecture": "aarch64", "neon": True, "bf16": False}, False),
    "unheard of": ({"architecture": "riscv64"}, True),
}


@pytest.fixture
def cpu(monkeypatch):
    def be(name: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CPUS[name][0])

    say_widened.cache_clear()
    return be


@pytest.fixture
def folder(tmp_path) -> Path:
    make_tiny_model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, tmp_path / "target" / name)
    return tmp_path / "target"


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_is_known_by_its_instructions(cpu, name):
    cpu(name)
    assert multiplies_bfloat16("cpu") is CPUS[name][1]
    assert multiplies_bfloat16("cuda:0") and multiplies_bfloat16("mps")


def test_only_auto_and_only_bfloat16_are_widened(cpu):
    cpu("old")
    wide, narrow = torch.float32, torch.bfloat16
    assert running_dtype("auto", "bfloat16", "cpu") == running_dtype("auto", None, "cpu") == wide
    assert running_dtype("auto", torch.float16, "cpu") == torch.float16
    assert running_dtype("auto", "torch.bfloat16", "cuda") == narrow
    assert [autocast_dtype(m, "cpu") for m in ("auto", "bf16", "no")] == [wide, narrow, wide]
    assert autocast_dtype("auto", "cuda") == narrow


def test_a_target_runs_wide_and_is_exported_as_it_was(cpu, folder, caplog):
    cpu("old")
    with caplog.at_level(logging.WARNING, "draftsmith.speculators.precision"):
        wide, again = (FrozenTarget.from_pretrained(str(folder)) for _ in range(2))
    assert [str(folder) in record.message for record in caplog.records] == [True]
    assert wide.dtype == again.dtype == torch.float32
    assert wide.checkpoint_dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):
        insisted = FrozenTarget.from_pretrained(str(folder), dtype=dtype)
        assert insisted.dtype == insisted.checkpoint_dtype == dtype
        for weight, other in zip(wide.model.parameters(), insisted.model.parameters(), strict=True):
            assert torch.equal(weight, other.float())
    cpu("amx")
    narrow = FrozenTarget.from_pretrained(str(folder))
    assert narrow.dtype == narrow.checkpoint_dtype == torch.bfloat16


def test_all_who_say_auto_mean_the_same(cpu, folder, monkeypatch):
    cpu("old")
    wide, narrow = torch.float32, torch.bfloat16
    assert LLM(str(folder), device="cpu").engine.target.dtype == wide
    sketch = TargetSection(model=str(folder)).sketch("cpu")
    assert (sketch.dtype, sketch.checkpoint_dtype) == (wide, narrow)
    assert TargetSection(model=str(folder)).sketch("cuda").dtype == narrow
    bridge = "draftsmith.inference.vllm_bridge.vllm_engine"
    monkeypatch.setattr(f"{bridge}.vllm_python", lambda _: "python")  # of some environment
    monkeypatch.setattr(f"{bridge}.vllm_version", lambda _: "0.32.0")
    drafting = Drafting(str(folder), "ngram", None, 4, 1, 0, options={"device": "cpu"})
    assert VllmEngine(drafting, VllmOptions())._dtype == "float32"
    recipe = recipe_of("eagle3", target={"model": str(folder)}, training={"steps": 2})
    assert make_stage(recipe, device=torch.device("cpu")).autocast == wide
    assert make_stage(recipe, device=torch.device("cuda")).autocast == narrow
    if not torch.accelerator.is_available():
        assert make_accelerator(recipe).mixed_precision == "no"


def test_the_accelerator_of_a_mac_is_left_alone_and_named(monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps")
    )
    say_unsupported.cache_clear()
    with caplog.at_level(logging.WARNING, "draftsmith.speculators.precision"):
        devices = [own_device(), own_device(), default_device(None)]
    assert devices == [torch.device("cpu")] * 3
    assert [record.args[0] for record in caplog.records] == ["mps"]
    recipe = recipe_of("eagle3", training={"steps": 2})
    assert make_accelerator(recipe).device == torch.device("cpu")


def test_an_accelerator_that_torch_was_built_for_but_is_not_there_is_not_used(monkeypatch):
    """A CUDA build answers `cuda` unless it is asked whether there is a GPU."""
    gpus: list[torch.device] = []

    def current(check_available: bool = False) -> torch.device | None:
        if gpus:
            return gpus[0]
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert own_device() == torch.device("cpu")
    gpus.append(torch.device("cuda"))
    assert own_device() == torch.device("cuda")
