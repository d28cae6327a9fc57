"""What the project expects of a GPU, at the shapes of an 8B target: finite losses, the same losses
when work overlaps or parameters are sharded, the same tokens compiled and eager, and the
quickstart."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.inference import LLM, SamplingParams
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.precision import free_memory
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.trainer import parallel
from scripts import measuring
from tests.support.training import recipe_of

ROOT = Path(__file__).resolve().parents[2]
DATA = "recipes/quickstart/data"
SHORT = (  # the quickstart's job, reduced for a CPU
    f"data.train=[{{path: {DATA}/train.jsonl.gz, limit: 40}}]",
    "training.steps=12",
    f"data.validation=[{{path: {DATA}/validation.jsonl.gz, limit: 6}}]",
    f"evaluation.prompts=[{{path: {DATA}/test.jsonl.gz, limit: 8}}]",
    "evaluation.prompts_per_workload=1",
    "evaluation.max_tokens=24",
    "regenerate.max_new_tokens=48",
    "evaluation.repeats=1",
    "gates={}",
)
pytestmark = pytest.mark.gpu


def make_trainer(shapes: Any, device: torch.device, folder: Path) -> Any:
    """An EAGLE-3 head and its Trainer over random rows, whose second halves are supervised."""
    precision = "bf16" if shapes.dtype == "bfloat16" else "no"
    length, training = shapes.max_length, {"steps": 1000, "batch_size": shapes.batch_size}
    recipe = recipe_of(
        "eagle3",
        data={"train": [{"path": "random"}], "max_length": length},
        drafter={"unroll_steps": shapes.unroll_steps, "draft_vocab_size": shapes.draft_vocab_size},
        training={"mixed_precision": precision, **training},
    )
    model = measuring.random_target(shapes.config, device, shapes.dtype)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (32, length))
    rows = [TokenRow(row, np.arange(length) >= length // 2) for row in ids]
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    return measuring.make_trainer(recipe, model, rows, accelerator, folder)


def timed_steps(trainer: Any, steps: int) -> tuple[float, list[float]]:
    """(median seconds of a step, losses) after one step that warms up."""
    seconds, losses = [], []
    for _ in range(steps + 1):
        began = time.perf_counter()
        record, _ = trainer.step(0.5).read(trainer.loss.depths)
        losses.append(record["loss"])
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:]), losses


def test_training_step_losses_are_finite(shapes, device, tmp_path, report) -> None:
    trainer = make_trainer(shapes, device, tmp_path)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses = timed_steps(trainer, shapes.steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan
    tokens = shapes.batch_size * shapes.max_length
    report(step_seconds=seconds, tokens_per_second=tokens / seconds, peak_gb=peak / 1e9)
    assert all(math.isfinite(loss) for loss in losses)


def test_sharded_parameters_give_the_same_losses(
    shapes, device, tmp_path, monkeypatch, report
) -> None:
    """FSDP2 in a world of one process: its hooks, optimizer and gathering, without traffic."""
    whole, expected = timed_steps(make_trainer(shapes, device, tmp_path), shapes.steps)
    free_memory()
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29577}
    for name, value in (world | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        # by default a world of one is not sharded
        monkeypatch.setattr(
            parallel, "wants_shards", lambda accelerator: isinstance(accelerator, Accelerator)
        )
        trainer = make_trainer(shapes, device, tmp_path)
        assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in trainer.parameters)
        sharded, losses = timed_steps(trainer, shapes.steps)
    finally:
        torch.distributed.destroy_process_group()
    report(sharded_over_whole=sharded / whole)
    assert losses == pytest.approx(expected, rel=2e-2)


def test_compiled_objective_and_layers_give_the_losses_of_eager_ones(
    shapes, device, tmp_path, monkeypatch, report
) -> None:
    """With no more memory; on a CPU both are eager."""
    peaks, steps = [], []
    for compiled, parts in enumerate(("attention", "attention,objective,layers")):
        monkeypatch.setenv("DRAFTSMITH_KERNELS", parts)
        trainer = make_trainer(shapes, device, tmp_path)
        began = time.perf_counter()
        steps.append(timed_steps(trainer, shapes.steps))
        whole = time.perf_counter() - began
        peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            trainer.step(0.5).read(trainer.loss.depths)
            peak = torch.cuda.max_memory_allocated(device)
        peaks.append(peak)
        seconds = steps[-1][0]
        first = whole - seconds * shapes.steps
        times = {"step_seconds": seconds, "first_step_seconds": first}
        report(compiled=compiled, peak_gb=peak / 1e9, **times)
        del trainer
        free_memory()
    assert steps[1][1] == pytest.approx(steps[0][1], rel=2e-2)
    assert peaks[1] <= 1.02 * peaks[0]


def test_compiled_rounds_write_the_tokens_of_eager_decoding(
    shapes, device, tmp_path, report
) -> None:
    """In float32, over a few of the target's layers; with drafting and without."""
    layers = min(4, shapes.config["num_hidden_layers"])
    model = measuring.random_target(
        shapes.config | {"num_hidden_layers": layers}, device, "float32"
    )
    vocab = shapes.draft_vocab_size
    config = config_for_target(FrozenTarget(model), "eagle3", draft_vocab_size=vocab)
    target = FrozenTarget(model, config.tap_layers)
    drafter = family_class("eagle3")(config).attach(target).to(device)
    drafter.initialise_from(target)
    export_drafter(drafter, tmp_path / "head", dtype=model.dtype)
    drafting = {"model": str(tmp_path / "head"), "num_speculative_tokens": 4}
    limits = {"max_num_seqs": 1, "max_model_len": shapes.prompt + shapes.written + 8}
    ids = [3 + 7 * i % (model.vocab_size - 3) for i in range(shapes.prompt)]
    params = SamplingParams(temperature=0, max_tokens=shapes.written, ignore_eos=True)

    def tokens(llm: LLM, speculate: bool, compiled: bool = False) -> list[int]:
        began = time.perf_counter()
        (output,) = llm.generate({"prompt_token_ids": ids}, params, False, speculate=speculate)
        seconds = time.perf_counter() - began
        report(compiled=compiled, drafting=speculate, ms_per_token=1e3 * seconds / shapes.written)
        if device.type == "cuda":
            rounds = len(output.metrics.accepted_per_round)
            assert output.metrics.num_compiled_rounds == (rounds if compiled else 0)
        return list(output.outputs[0].token_ids)

    eager = LLM(target, speculative_config=drafting, enforce_eager=True, **limits)
    expected = tokens(eager, speculate=False)
    assert tokens(eager, speculate=True) == expected
    del eager
    free_memory()
    compiled = LLM(target, speculative_config=drafting, **limits)  # the default on CUDA
    compiled.warm_up()
    for speculate in (False, True):
        assert tokens(compiled, speculate, compiled=True) == expected


def test_quickstart_passes_its_gates(device, tmp_path, report) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", str(ROOT / "train" / "eagle.py")]
    command += [str(ROOT / "recipes/quickstart/eagle3.yaml"), f"output_dir={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    if device.type == "cpu":
        command += SHORT
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    summary = json.loads((tmp_path / "acceptance.json").read_text())["summary"]
    names = ("t0.acceptance_length", "t1.acceptance_length", "t0.speedup_vs_autoregressive")
    report(**{name: summary[name] for name in names if summary.get(name) is not None})
    assert summary["lossless_mismatches"] == 0
