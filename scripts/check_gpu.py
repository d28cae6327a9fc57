"""Whether this machine's GPU does what the project expects of one: correctness, memory, and where the time goes.

    make check-gpu                              # every part, within ten minutes, at the shapes of an 8B target
    make check-gpu ARGS="--device cpu"          # the same code at tiny shapes
    python scripts/check_gpu.py --parts training,decoding --again

Each part runs in a process of its own, so that one which runs out of memory takes no other along. What went well stands
in the file --output and is not done again for the same device and size, unless --again. Exit status 1 if a part fails;
one that has no room on the device, or no meaning there, is skipped and says so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils._triton import has_triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.measuring import (
    Skipped,
    decoded,
    make_trainer,
    parameters,
    planned_bytes,
    rates,
    require_close,
    require_room,
    timed_steps,
)
from speculators.precision import free_memory, own_device
from train.features.prefetch import STREAMS
from train.planner.devices import recognised
from train.planner.phases import phases
from train.trainer import parallel as processes

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, Any]] = {
    "8b": {  # Qwen3-8B's
        "config": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
        },
        "dtype": "bfloat16", "draft_vocab_size": 32000, "unroll_steps": 7, "max_length": 2048, "batch_size": 2,
        "steps": 5, "prompt": 128, "written": 64,  # together below 256 keys: one length to compile
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
DATA = "recipes/quickstart/data"
QUICK = (  # the quickstart's job, small enough for a CPU in a hurry
    f"data.train=[{{path: {DATA}/train.jsonl.gz, limit: 40}}]", "training.steps=12",
    f"data.validation=[{{path: {DATA}/validation.jsonl.gz, limit: 6}}]",
    f"evaluation.prompts=[{{path: {DATA}/test.jsonl.gz, limit: 8}}]", "evaluation.prompts_per_workload=1",
    "evaluation.max_tokens=24", "regenerate.max_new_tokens=48", "evaluation.repeats=1", "gates={}",
)  # fmt: skip
Figures = dict[str, Any]


# ------------------------------------------------------------------ the parts


def versions(size: dict[str, Any], device: Any) -> Figures:
    """What is installed, and the device: its rates measured, and by its maker's data sheet where it is known."""
    found: Figures = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    found["compiler"] = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "driver": driver_version(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": properties.total_memory / 1e9,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
            "triton": has_triton(),
        }
        if known := recognised(properties.name, properties.total_memory):
            found |= {"sheet_tflops": known.flops["bfloat16"] / 1e12, "sheet_gb_per_second": known.bandwidth / 1e9}
    return found | rates(device)


def driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None  # ROCm, or a container without it


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
    with tempfile.TemporaryDirectory() as folder:
        trainer, plan = make_trainer(size, device, Path(folder))
        trainer.step(0.5)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, losses = timed_steps(trainer, size["steps"], device)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None  # before rates are measured
        flops = sum(phase.whole.flops for phase in phases(plan, steps=1, device=device.type))
    found: Figures = {
        "step_seconds": seconds,
        "tokens_per_second": size["batch_size"] * size["max_length"] / seconds,
        "losses_finite": all(loss == loss and abs(loss) < 1e4 for loss in losses),
        "planned_gb": planned_bytes(plan, device) / 1e9,
        "share_of_measured_products": flops / seconds / rates(device)["product_tflops"] / 1e12,
    }
    if not found["losses_finite"]:
        raise RuntimeError(f"losses {losses}")
    if peak is not None:
        found |= {"peak_gb": peak / 1e9, "peak_over_planned": peak / 1e9 / found["planned_gb"]}
    return found


def overlap(size: dict[str, Any], device: Any) -> Figures:
    """The target's forward beside the drafter's work: the same losses, in less time."""
    if device.type not in STREAMS:
        raise Skipped(f"a {device.type} does one thing after the other")
    found: dict[bool, tuple[float, list[float]]] = {}
    for ahead in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            trainer, _ = make_trainer(size, device, Path(folder), overlap=ahead)
            trainer.step(0.5)
            found[ahead] = timed_steps(trainer, size["steps"], device)
            del trainer
        free_memory()
    require_close(found[False][1], found[True][1], "losses with overlap")
    return {"gain": found[False][0] / found[True][0], "step_seconds": found[True][0]}


def sharding(size: dict[str, Any], device: Any) -> Figures:
    """FSDP2 in a world of one: its hooks, its optimizer on shards and its gathering, but no traffic."""
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
        free_memory()
    torch.distributed.destroy_process_group()
    require_close(found[False][1], found[True][1], "losses under FSDP2")
    return {"step_seconds": found[True][0], "over_whole": found[True][0] / found[False][0]}


def decoding(size: dict[str, Any], device: Any) -> Figures:
    """Eager, compiled, and by CUDA graphs, with drafting and without: the same tokens in float32, and the time of a
    token beside the weights'."""
    weights = parameters(size["config"]) * getattr(torch, size["dtype"]).itemsize
    require_room(1.5 * weights, device)  # embeddings, a head and what works beside them
    narrow = {**size["config"], "num_hidden_layers": min(4, size["config"]["num_hidden_layers"])}
    same = {name: written for name, (written, _) in decoded({**size, "config": narrow}, device, "float32").items()}
    plain = same["eager"][False]
    wrong = [
        f"{name} {'with' if drafting else 'without'} drafting"
        for name, written in same.items()
        for drafting, tokens in written.items()
        if tokens != plain
    ]
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: other tokens than eager rounds without drafting, in float32")
    free_memory()
    found: Figures = {"ways_with_the_same_tokens": len(same)}
    for name, (_, (off, drafted)) in decoded(size, device, size["dtype"]).items():
        found |= {f"{name}_ms_per_token": 1e3 * off, f"{name}_ms_per_drafted_round": 1e3 * drafted}
    found["weights_ms"] = weights / rates(device)["copy_gb_per_second"] / 1e6  # what reading them once takes
    return found


PARTS: dict[str, Callable[[dict[str, Any], Any], Figures]] = {
    each.__name__: each for each in (versions, training, decoding, overlap, sharding, quickstart)
}


# ------------------------------------------------------------------ one after the other


def run_part(name: str, size: str, device: str, limit: float) -> dict[str, Any]:
    """In a process of its own: {"state", "seconds", "figures" or "reason"}."""
    command = [sys.executable, __file__, "--one", name, "--size", size, "--device", device]
    began, environment = time.monotonic(), os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as running:
        try:
            out, err = running.communicate(timeout=limit)
            lines = out.strip().splitlines()
            answer = json.loads(lines[-1]) if running.returncode == 0 and lines else None
            found = answer or {"state": "failed", "reason": (out + err)[-3000:].strip()}
        except subprocess.TimeoutExpired:
            found = {"state": "failed", "reason": f"took longer than {limit:.0f} s"}
        finally:
            if running.poll() is None:  # with all that it started, which holds the device's memory
                os.killpg(running.pid, signal.SIGKILL)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def one_part(name: str, size: str, device: str) -> dict[str, Any]:
    try:
        return {"state": "ok", "figures": PARTS[name](SIZES[size], torch.device(device))}
    except Skipped as reason:
        return {"state": "skipped", "reason": str(reason)}


def device_name(device: str) -> str:
    """The GPU's, asked by another process: who asks holds memory there from then on."""
    if device == "cpu":
        return device
    command = [sys.executable, "-c", f"import torch; print(torch.cuda.get_device_name({device!r}))"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        raise typer.BadParameter(f"--device {device}: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return asked.stdout.strip().splitlines()[-1]


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
    device = own_device().type if device == "auto" else device
    size = ("8b" if device == "cuda" else "tiny") if size == "auto" else size
    if one:
        print(json.dumps(one_part(one, size, device)))
        return
    wanted = parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise typer.BadParameter(f"--parts: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    key, console = f"{device_name(device)}/{size}", Console()
    done = json.loads(output.read_text()) if output.exists() else {}
    results = done.setdefault(key, {})
    for part in wanted:
        if again or results.get(part, {}).get("state") != "ok":
            with console.status(f"{part} ({key})"):
                results[part] = run_part(part, size, device, limit)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(done, indent=1) + "\n")
    table = Table("part", "state", "seconds", "figures", title=key)
    for part in wanted:
        found = results[part]
        figures = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.get("figures", {}).items()]
        table.add_row(part, found["state"], f"{found['seconds']:.0f}", escape("\n".join(figures) or found["reason"]))
    console.print(table, f"figures: {output}")
    raise typer.Exit(any(results[part]["state"] == "failed" for part in wanted))


if __name__ == "__main__":
    typer.run(main)
