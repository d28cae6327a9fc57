"""Whether this machine's GPU does what the project expects of one: correctness, memory, and where the time goes.

    make check-gpu                              # every part, within ten minutes, at the shapes of an 8B target
    make check-gpu ARGS="--device cpu"          # the same code at tiny shapes
    python scripts/check_gpu.py --parts training,decoding --again

Each part runs in a process of its own, so that one which runs out of memory takes no other along. What is done stands
in the file --output and is not done again for the same device and size, unless --again. Exit status 1 if a part fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, Any]] = {
    "8b": {  # Qwen3-8B's
        "config": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
        },
        "dtype": "bfloat16", "draft_vocab_size": 32000, "unroll_steps": 7, "max_length": 2048, "batch_size": 2,
        "steps": 5, "prompt": 256, "written": 64,
    },
    "tiny": {
        "config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 512,
        },
        "dtype": "float32", "draft_vocab_size": 128, "unroll_steps": 3, "max_length": 128, "batch_size": 2,
        "steps": 3, "prompt": 16, "written": 16,
    },
}  # fmt: skip
QUICK = (  # the quickstart's job, small enough for a CPU in a hurry
    "data.train=[{demo: {split: train, count: 40}}]", "data.validation=[{demo: {split: validation, count: 6}}]",
    "training.steps=12", "evaluation.prompts=[{demo: {split: test, count: 8}}]", "evaluation.prompts_per_workload=1",
    "evaluation.max_tokens=24", "regenerate.max_new_tokens=48", "evaluation.repeats=1", "gates={}",
)  # fmt: skip
Figures = dict[str, Any]


class Skipped(Exception):
    """A part that has no meaning on this device; the text says why."""


# ------------------------------------------------------------------ the parts


def versions(size: dict[str, Any], device: Any) -> Figures:
    import shutil

    import torch
    import transformers

    found: Figures = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    found["compiler"] = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": properties.total_memory / 1e9,
            "bfloat16": torch.cuda.is_bf16_supported(),
            "triton": bool(torch.utils._triton.has_triton()),
        }
    return found | rates(device)


def quickstart(size: dict[str, Any], device: Any) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1",
                   "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                   str(ROOT / "train" / "eagle.py"), str(ROOT / "recipes/quickstart/eagle3.yaml"),
                   f"output_dir={folder}"]  # fmt: skip
        overrides = QUICK if device.type == "cpu" else ("gates.t0.speedup_vs_autoregressive={min: 1.0}",)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if device.type == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        ran = subprocess.run([*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"exit status {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
        summary = json.loads((Path(folder) / "acceptance.json").read_text())["summary"]
    names = ("t0.acceptance_length", "t1.acceptance_length", "t0.speedup_vs_autoregressive", "lossless_mismatches")
    return {name: summary[name] for name in names if name in summary}


def training(size: dict[str, Any], device: Any) -> Figures:
    """Tokens per second, the peak of memory beside the plan's, and the share of a measured product's rate."""
    import torch

    from train.memory_estimate import memory
    from train.phases import phases

    with tempfile.TemporaryDirectory() as folder:
        trainer, plan = make_trainer(size, device, Path(folder))
        trainer.step(0.5)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, losses = timed_steps(trainer, size["steps"], device)
        (planned,) = (each for each in memory(plan, device=device.type) if each.name == "train")
        work = phases(plan, steps=1, device=device.type)
    flops = sum(phase.whole.flops for phase in work)
    found: Figures = {
        "step_seconds": seconds,
        "tokens_per_second": size["batch_size"] * size["max_length"] / seconds,
        "losses_finite": all(loss == loss and abs(loss) < 1e4 for loss in losses),
        "planned_gb": planned.total / 1e9,
        "share_of_measured_products": flops / seconds / rates(device)["product_tflops"] / 1e12,
    }
    if not found["losses_finite"]:
        raise RuntimeError(f"losses {losses}")
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        found["peak_over_planned"] = found["peak_gb"] / found["planned_gb"]
    return found


def overlap(size: dict[str, Any], device: Any) -> Figures:
    """The target's forward beside the drafter's work: the same losses, in less time."""
    from train.features_ahead import STREAMS

    if device.type not in STREAMS:
        raise Skipped(f"a {device.type} does one thing after the other")
    found: dict[bool, tuple[float, list[float]]] = {}
    for ahead in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            trainer, _ = make_trainer(size, device, Path(folder), overlap=ahead)
            trainer.step(0.5)
            found[ahead] = timed_steps(trainer, size["steps"], device)
            del trainer
        free()
    require_close(found[False][1], found[True][1], "losses with overlap")
    return {"gain": found[False][0] / found[True][0], "step_seconds": found[True][0]}


def sharding(size: dict[str, Any], device: Any) -> Figures:
    """FSDP2 in a world of one: its hooks, its optimizer on shards and its gathering, but no traffic."""
    import torch
    import torch.distributed.tensor

    from train import processes

    found = {}
    for sharded in (False, True):
        if sharded:
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ.setdefault("MASTER_PORT", "29577")
            torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            processes.wants_shards = lambda accelerator: True  # a world of one would stay whole
        with tempfile.TemporaryDirectory() as folder:
            trainer, _ = make_trainer(size, device, Path(folder))
            if sharded != all(isinstance(p, torch.distributed.tensor.DTensor) for p in trainer.parameters):
                raise RuntimeError(f"parameters are {'not ' if sharded else ''}sharded")
            found[sharded] = timed_steps(trainer, size["steps"], device)
            del trainer
        free()
    torch.distributed.destroy_process_group()
    require_close(found[False][1], found[True][1], "losses under FSDP2")
    return {"step_seconds": found[True][0], "over_whole": found[True][0] / found[False][0]}


def decoding(size: dict[str, Any], device: Any) -> Figures:
    """Eager, compiled, and by CUDA graphs: the same tokens in float32, and the time of a token beside the weights'."""
    import torch

    narrow = {**size["config"], "num_hidden_layers": min(4, size["config"]["num_hidden_layers"])}
    same = {name: written for name, (written, _) in decoded({**size, "config": narrow}, device, "float32").items()}
    wrong = [name for name, written in same.items() if written != same["eager"]]
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: other tokens than eager rounds in float32")
    free()
    found: Figures = {"ways_with_the_same_tokens": len(same)}
    itemsize, rate = getattr(torch, size["dtype"]).itemsize, rates(device)["copy_gb_per_second"]
    for name, (_, (off, drafted)) in decoded(size, device, size["dtype"]).items():
        found |= {f"{name}_ms_per_token": 1e3 * off, f"{name}_ms_per_drafted_round": 1e3 * drafted}
    weights = parameters(size["config"]) * itemsize
    found["weights_ms"] = weights / rate / 1e6  # what reading them once takes
    return found


PARTS: dict[str, Callable[[dict[str, Any], Any], Figures]] = {
    each.__name__: each for each in (versions, training, decoding, overlap, sharding, quickstart)
}


# ------------------------------------------------------------------ what they are made of


def make_target(config: dict[str, Any], device: Any, dtype: str) -> Any:
    """A random Qwen3, its weights made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with device:
        made = Qwen3Config(**config, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0)
        return AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype)).eval()


def make_trainer(size: dict[str, Any], device: Any, folder: Path, overlap: bool = True) -> tuple[Any, Any]:
    """An EAGLE-3 head on random rows, and what `draftsmith plan` knows of its recipe."""
    import numpy as np
    import torch
    from accelerate import Accelerator

    from speculators.drafter import family_class
    from speculators.target import FrozenTarget
    from train.data import pack
    from train.estimate import outline
    from train.loop import Trainer
    from train.masks import TokenRow
    from train.recipe import make_recipe
    from train.run_drafter import drafter_config

    model = make_target(size["config"], device, size["dtype"])
    model.config.save_pretrained(folder)
    precision = "bf16" if size["dtype"] == "bfloat16" else "no"
    recipe = make_recipe({
        "name": "check",
        "target": {"model": str(folder), "dtype": size["dtype"]},
        "data": {"train": [{"path": "random"}], "max_length": size["max_length"]},
        "drafter": {key: size[key] for key in ("unroll_steps", "draft_vocab_size")},
        "features": {"overlap": overlap},
        "training": {"steps": 1000, "batch_size": size["batch_size"], "mixed_precision": precision},
    })  # fmt: skip
    plan = outline(recipe, counted=([], []), device=device)
    probe = FrozenTarget(model)
    config = drafter_config(recipe, probe)
    target = FrozenTarget(model, config.tap_layers)
    probe.close()
    torch.manual_seed(0)
    drafter = family_class("eagle3")(config).attach(target).to(device)
    drafter.initialise_from(target, recipe.drafter)
    random, length = np.random.default_rng(0), size["max_length"]
    ids = random.integers(0, size["config"]["vocab_size"], (32, length))
    rows = pack([TokenRow(row, np.arange(length) >= length // 2) for row in ids], length)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    return Trainer(recipe, target, drafter, rows, accelerator=accelerator, folder=folder), plan


def timed_steps(trainer: Any, steps: int, device: Any) -> tuple[float, list[float]]:
    """(median seconds of a step, its losses); a step ends with a read of its figures."""
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(trainer.step(0.5)["loss"])
        seconds.append(time.perf_counter() - began)
    return median(seconds), losses


def decoded(size: dict[str, Any], device: Any, dtype: str) -> dict[str, tuple[list[int], tuple[float, float]]]:
    """way -> (tokens written with drafting, seconds per token without drafting and per drafted round)."""
    import torch

    from inference import LLM, SamplingParams
    from speculators.config import config_for_target
    from speculators.drafter import family_class
    from speculators.export import export_drafter
    from speculators.target import FrozenTarget

    model = make_target(size["config"], device, dtype)
    ways: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "compiled": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}},
    }
    if device.type == "cuda":
        ways["cuda_graphs"] = {"enforce_eager": False}
    found = {}
    prompt = {"prompt_token_ids": [3 + 7 * i % (size["config"]["vocab_size"] - 3) for i in range(size["prompt"])]}
    params = SamplingParams(temperature=0, max_tokens=size["written"], ignore_eos=True)
    length = size["prompt"] + size["written"] + 8
    with tempfile.TemporaryDirectory() as folder:
        config = config_for_target(FrozenTarget(model), "eagle3", draft_vocab_size=size["draft_vocab_size"])
        target = FrozenTarget(model, config.tap_layers)
        torch.manual_seed(0)
        drafter = family_class("eagle3")(config).attach(target).to(device)
        drafter.initialise_from(target)
        export_drafter(drafter, Path(folder) / "head", dtype=model.dtype)
        drafting = {"model": str(Path(folder) / "head"), "num_speculative_tokens": 4}
        for name, options in ways.items():
            llm = LLM(target, speculative_config=drafting, max_num_seqs=1, max_model_len=length, **options)
            llm.warm_up()
            times: dict[bool, list[float]] = {False: [], True: []}
            for speculate in (False, True) * 3:
                llm.reset_metrics()
                began = time.perf_counter()
                (output,) = llm.generate(prompt, params, use_tqdm=False, speculate=speculate)
                rounds = llm.get_metrics().num_drafts if speculate else size["written"]
                times[speculate].append((time.perf_counter() - began) / max(rounds, 1))
            found[name] = (list(output.outputs[0].token_ids), (median(times[False]), median(times[True])))
            del llm
            free()
    return found


def parameters(config: dict[str, Any]) -> int:
    """Of the layers and the output head: what a token reads."""
    H, heads, kv, d = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = H * d * (2 * heads + 2 * kv) + 3 * H * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + H * config["vocab_size"]


def rates(device: Any) -> dict[str, float]:
    """Of a large product and of a large copy, measured; TFLOP/s, and GB/s read and written."""
    import torch

    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x, y = (torch.empty(1 << 28 if device.type == "cuda" else 1 << 24, device=device) for _ in range(2))
    product, copy = (least_seconds(work, device) for work in (lambda: a @ b, lambda: y.copy_(x)))
    return {"product_tflops": 2 * n**3 / product / 1e12, "copy_gb_per_second": 2 * 4 * x.numel() / copy / 1e9}


def least_seconds(work: Callable[[], Any], device: Any, repeats: int = 5) -> float:
    import torch

    best = float("inf")
    for _ in range(repeats + 1):
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def require_close(one: list[float], other: list[float], what: str) -> None:
    if any(abs(a - b) > 2e-2 * max(abs(a), 1e-3) for a, b in zip(one, other, strict=True)):
        raise RuntimeError(f"{what} differ: {one} and {other}")


def free() -> None:
    from speculators.precision import free_memory

    free_memory()


# ------------------------------------------------------------------ one after the other


def run_part(name: str, size: str, device: str, limit: float) -> dict[str, Any]:
    """In a process of its own: {"state", "seconds", "figures" or "reason"}."""
    command = [sys.executable, __file__, "--one", name, "--size", size, "--device", device]
    began, environment = time.monotonic(), os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        lines = ran.stdout.strip().splitlines()
        answer = json.loads(lines[-1]) if ran.returncode == 0 and lines else None
        found = answer or {"state": "failed", "reason": (ran.stdout + ran.stderr)[-3000:].strip()}
    except subprocess.TimeoutExpired:
        found = {"state": "failed", "reason": f"took longer than {limit:.0f} s"}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def one_part(name: str, size: str, device: str) -> dict[str, Any]:
    import torch

    try:
        return {"state": "ok", "figures": PARTS[name](SIZES[size], torch.device(device))}
    except Skipped as reason:
        return {"state": "skipped", "reason": str(reason)}


def main(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: the GPU if there is one.")] = "auto",
    size: Annotated[str, typer.Option(help=f"{' or '.join(SIZES)}; auto: 8b on a GPU, tiny on a CPU.")] = "auto",
    parts: Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")] = ",".join(PARTS),
    again: Annotated[bool, typer.Option("--again", help="Do what is done already once more.")] = False,
    output: Annotated[Path, typer.Option(help="Where figures are kept.")] = ROOT / "runs" / "check_gpu.json",
    limit: Annotated[float, typer.Option(help="Seconds a part may take.")] = 300,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check what the project does on this machine's GPU, part by part."""
    from rich.console import Console
    from rich.table import Table

    from speculators.precision import own_device

    device = own_device().type if device == "auto" else device
    size = ("8b" if device == "cuda" else "tiny") if size == "auto" else size
    if one:
        print(json.dumps(one_part(one, size, device)))
        return
    wanted = parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise typer.BadParameter(f"--parts: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    key, console = f"{device}/{size}", Console()
    done = json.loads(output.read_text()) if output.exists() else {}
    results = done.setdefault(key, {})
    for part in wanted:
        if again or results.get(part, {}).get("state") not in ("ok", "skipped"):
            with console.status(f"{part} ({key})"):
                results[part] = run_part(part, size, device, limit)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(done, indent=1) + "\n")
    table = Table("part", "state", "seconds", "figures", title=key)
    for part in wanted:
        found = results[part]
        figures = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.get("figures", {}).items()]
        table.add_row(part, found["state"], f"{found['seconds']:.0f}", "\n".join(figures) or found.get("reason", ""))
    console.print(table, f"figures: {output}")
    raise typer.Exit(any(results[part]["state"] == "failed" for part in wanted))


if __name__ == "__main__":
    typer.run(main)
