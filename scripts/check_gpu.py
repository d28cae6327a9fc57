"""Checks what the project does on this machine's GPU: correctness, memory, and speed.

    make check-gpu                              # every part, within ten minutes, at the shapes of
    an 8B target make check-gpu ARGS="--device cpu"          # the same code at tiny shapes python
    scripts/check_gpu.py --parts training,decoding --again

Each part runs in a process of its own, so that running out of memory in one does not end the
others. Parts that succeeded are kept in the file --output and are not repeated for the same device
and size, unless with --again. Exit status 1 if a part fails; a part that does not apply or does not
fit into the memory is skipped with a reason."""

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
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference import LLM, SamplingParams
from scripts import measuring
from speculators.export import export_drafter
from speculators.precision import free_memory, own_device
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget
from train.data.loss_mask import TokenRow
from train.features.prefetch import STREAMS
from train.planner.devices import copy_rate, product_rate, recognised
from train.planner.memory import training_memory
from train.planner.outline import outline
from train.planner.phases import phases
from train.planner.token_counts import TokenCount
from train.recipe.recipe import make_recipe
from train.trainer import parallel as processes

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, Any]] = {
    "8b": {  # Qwen3-8B's
        "config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
        },
        "dtype": "bfloat16",
        "draft_vocab_size": 32000,
        "unroll_steps": 7,
        "max_length": 2048,
        "batch_size": 2,
        "steps": 5,
        "prompt": 128,
        "written": 64,  # together below 256 keys: one length to compile
    },
    "tiny": {
        "config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
            "max_position_embeddings": 512,
        },
        "dtype": "float32",
        "draft_vocab_size": 128,
        "unroll_steps": 3,
        "max_length": 128,
        "batch_size": 2,
        "steps": 3,
        "prompt": 16,
        "written": 16,
    },
}
DATA = "recipes/quickstart/data"
QUICK = (  # the quickstart's job, reduced for a CPU
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
Figures = dict[str, Any]


class Skipped(Exception):
    """A part does not apply to this device, or does not fit into its memory; the text gives the
    reason."""


# ------------------------------------------------------------------ random models


def target_config(config: dict[str, Any]) -> Qwen3Config:
    return Qwen3Config(**config, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0)


def make_target(config: dict[str, Any], device: torch.device, dtype: str) -> Any:
    """A random Qwen3, its weights made on the device."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(
            target_config(config), dtype=getattr(torch, dtype)
        ).eval()


def make_trainer(
    size: Figures, device: torch.device, folder: Path, overlap: bool = True
) -> tuple[Any, Any]:
    """An EAGLE-3 head on random rows, and its recipe's outline by `draftsmith plan`. Skipped if it
    does not fit."""
    target_config(size["config"]).save_pretrained(folder)
    precision = "bf16" if size["dtype"] == "bfloat16" else "no"
    recipe = make_recipe(
        {
            "name": "check",
            "target": {"model": str(folder), "dtype": size["dtype"]},
            "data": {"train": [{"path": "random"}], "max_length": size["max_length"]},
            "drafter": {key: size[key] for key in ("unroll_steps", "draft_vocab_size")},
            "training": {
                "steps": 1000,
                "batch_size": size["batch_size"],
                "mixed_precision": precision,
            },
        }
    )
    random, length, count = np.random.default_rng(0), size["max_length"], 32
    supervised = np.arange(length) >= length // 2
    counted = TokenCount("random", count, count, count * length, count * int(supervised.sum()))
    plan = outline(recipe, counted=([counted], []), device=device)
    require_room(training_memory(plan).total, device)
    model = make_target(size["config"], device, size["dtype"])
    rows = [
        TokenRow(row, supervised)
        for row in random.integers(0, size["config"]["vocab_size"], (count, length))
    ]
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    trainer = measuring.make_trainer(recipe, model, rows, accelerator, folder)
    trainer.ahead = trainer.ahead if overlap else None
    return trainer, plan


def require_room(needed: float, device: torch.device) -> None:
    """Raises Skipped if the device has less free memory, in bytes."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    if free < needed:
        raise Skipped(
            f"needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free; at small shapes: --size"
            " tiny"
        )


def timed_steps(trainer: Any, steps: int) -> tuple[float, list[float]]:
    """(median seconds of a step, the losses); a step ends with a read of its figures."""
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        record, _ = trainer.step(0.5).read(len(trainer.depth_weights))
        losses.append(record["loss"])
        seconds.append(time.perf_counter() - began)
    return median(seconds), losses


def rates(device: torch.device) -> dict[str, float]:
    """Measured rates: TFLOP/s of a large product, and GB/s read and written by a large copy."""
    if device.type == "cpu":
        product, copy = product_rate(torch.float32), copy_rate(count=1 << 24)
    else:
        product, copy = (
            product_rate(torch.bfloat16, width=8192, device=device),
            copy_rate(count=1 << 28, device=device),
        )
    return {"product_tflops": product / 1e12, "copy_gb_per_second": copy / 1e9}


# ------------------------------------------------------------------ the parts


def versions(size: Figures, device: torch.device) -> Figures:
    """Installed versions, and the device's rates: measured, and from its data sheet where the
    device is known."""
    figures: Figures = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }
    figures["compiler"] = next(
        (name for name in ("g++", "clang++", "c++") if shutil.which(name)), None
    )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "device": properties.name,
            "driver": driver_version(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": properties.total_memory / 1e9,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
        }
        if known := recognised(properties.name, properties.total_memory):
            figures |= {
                "sheet_tflops": known.flops["bfloat16"] / 1e12,
                "sheet_gb_per_second": known.bandwidth / 1e9,
            }
    return figures | rates(device)


def driver_version() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None  # ROCm, or a container without it


def quickstart(size: Figures, device: torch.device) -> Figures:
    """The job of `make quickstart`, with its gates; the speedup's is 1."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--quiet",
            "--num_processes",
            "1",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            str(ROOT / "train" / "eagle.py"),
            str(ROOT / "recipes/quickstart/eagle3.yaml"),
            f"output_dir={folder}",
        ]
        overrides = (
            QUICK if device.type == "cpu" else ("gates.t0.speedup_vs_autoregressive={min: 1.0}",)
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if device.type == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        ran = subprocess.run(
            [*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError(f"exit status {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
        summary = json.loads((Path(folder) / "acceptance.json").read_text())["summary"]
    names = (
        "t0.acceptance_length",
        "t1.acceptance_length",
        "t0.speedup_vs_autoregressive",
        "lossless_mismatches",
    )
    return {name: summary[name] for name in names if name in summary}


def training(size: Figures, device: torch.device) -> Figures:
    """Tokens per second, peak memory against the plan's, and the share of a measured product's
    rate."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, plan = make_trainer(size, device, Path(folder))
        trainer.step(0.5)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, losses = timed_steps(trainer, size["steps"])
        peak = (
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        )  # before rates are measured
        flops = sum(phase.whole.flops for phase in phases(plan, steps=1))
    if not all(abs(loss) < 1e4 for loss in losses):  # false for nan too
        raise RuntimeError(f"losses {losses}")
    figures: Figures = {
        "step_seconds": seconds,
        "tokens_per_second": size["batch_size"] * size["max_length"] / seconds,
        "losses_finite": True,
        "planned_gb": training_memory(plan).total / 1e9,
        "share_of_measured_products": flops / seconds / rates(device)["product_tflops"] / 1e12,
    }
    if peak is not None:
        figures |= {"peak_gb": peak / 1e9, "peak_over_planned": peak / 1e9 / figures["planned_gb"]}
    return figures


def steps_of(
    size: Figures, device: torch.device, warm_up: int = 0, **options: Any
) -> tuple[float, list[float], bool]:
    """(median seconds, losses, whether the parameters are sharded) of the steps of a new
    trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = make_trainer(size, device, Path(folder), **options)
        for _ in range(warm_up):
            trainer.step(0.5)
        sharded = all(isinstance(p, torch.distributed.tensor.DTensor) for p in trainer.parameters)
        figures = *timed_steps(trainer, size["steps"]), sharded
        del trainer
    free_memory()
    return figures


def require_close(losses: list[float], other: list[float], name: str) -> None:
    if any(abs(a - b) > 2e-2 * max(abs(a), 1e-3) for a, b in zip(losses, other, strict=True)):
        raise RuntimeError(f"losses {name} differ: {losses} and {other}")


def overlap(size: Figures, device: torch.device) -> Figures:
    """The target's forward overlapped with the drafter's work: the same losses, in less time."""
    if device.type not in STREAMS:
        raise Skipped(f"a {device.type} has no streams")
    plain, ahead = (
        steps_of(size, device, warm_up=1, overlap=overlapped) for overlapped in (False, True)
    )
    require_close(plain[1], ahead[1], "with overlap")
    return {"gain": plain[0] / ahead[0], "step_seconds": ahead[0]}


def sharding(size: Figures, device: torch.device) -> Figures:
    """FSDP2 in a world of one process: its hooks, its sharded optimizer and its gathering, without
    traffic."""
    whole = steps_of(size, device)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29577")
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # by default a world of one is not sharded, and the planner's rehearsal stays so
    processes.wants_shards = lambda accelerator: isinstance(accelerator, Accelerator)
    shards = steps_of(size, device)
    torch.distributed.destroy_process_group()
    if whole[2] or not shards[2]:
        raise RuntimeError(f"parameters are sharded: {whole[2]} alone and {shards[2]} under FSDP2")
    require_close(whole[1], shards[1], "under FSDP2")
    return {"step_seconds": shards[0], "over_whole": shards[0] / whole[0]}


def decoded(
    size: Figures, device: torch.device, dtype: str
) -> dict[str, tuple[dict[bool, list[int]], list[float]]]:
    """Decodes one prompt in every compilation mode, by name: (tokens without and with drafting,
    [seconds per token without drafting, seconds per drafted round])."""
    modes: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "compiled": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}},
    }
    if device.type == "cuda":
        modes |= {"cuda_graphs": {"enforce_eager": False}, "default": {}}
    model, figures = make_target(size["config"], device, dtype), {}
    prompt = {
        "prompt_token_ids": [
            3 + 7 * i % (size["config"]["vocab_size"] - 3) for i in range(size["prompt"])
        ]
    }
    params = SamplingParams(temperature=0, max_tokens=size["written"], ignore_eos=True)
    config = config_for_target(
        FrozenTarget(model), "eagle3", draft_vocab_size=size["draft_vocab_size"]
    )
    target = FrozenTarget(model, config.tap_layers)
    torch.manual_seed(0)
    drafter = family_class("eagle3")(config).attach(target).to(device)
    drafter.initialise_from(target)
    with tempfile.TemporaryDirectory() as folder:
        export_drafter(drafter, Path(folder) / "head", dtype=model.dtype)
        drafting = {"model": str(Path(folder) / "head"), "num_speculative_tokens": 4}
        limits = {"max_num_seqs": 1, "max_model_len": size["prompt"] + size["written"] + 8}
        for name, options in modes.items():
            llm = LLM(target, speculative_config=drafting, **limits, **options)
            llm.warm_up()
            tokens: dict[bool, list[int]] = {}
            times: dict[bool, list[float]] = {False: [], True: []}
            for speculate in (False, True) * 3:
                llm.reset_metrics()
                began = time.perf_counter()
                (output,) = llm.generate(prompt, params, use_tqdm=False, speculate=speculate)
                rounds = llm.get_metrics().num_drafts if speculate else size["written"]
                times[speculate].append((time.perf_counter() - began) / max(rounds, 1))
                tokens[speculate] = list(output.outputs[0].token_ids)
            figures[name] = (tokens, [median(times[speculate]) for speculate in (False, True)])
            del llm
            free_memory()
    return figures


def weight_count(config: dict[str, Any]) -> int:
    """Parameters that one token reads: the layers' and the output head's."""
    H, heads, kv, d = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = H * d * (2 * heads + 2 * kv) + 3 * H * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + H * config["vocab_size"]


def decoding(size: Figures, device: torch.device) -> Figures:
    """Eager, compiled and CUDA-graph rounds, with drafting and without: the same tokens in float32,
    and the time of a token beside the time of reading the weights."""
    weights = weight_count(size["config"]) * getattr(torch, size["dtype"]).itemsize
    require_room(1.5 * weights, device)  # the rest: embeddings, a head, activations
    shallow = {**size["config"], "num_hidden_layers": min(4, size["config"]["num_hidden_layers"])}
    exact = decoded({**size, "config": shallow}, device, "float32")
    same = {name: tokens for name, (tokens, _) in exact.items()}
    wrong = [
        f"{name} {'with' if drafting else 'without'} drafting"
        for name, by_drafting in same.items()
        for drafting, tokens in by_drafting.items()
        if tokens != same["eager"][False]
    ]
    if wrong:
        raise RuntimeError(
            f"{', '.join(wrong)}: other tokens than eager rounds without drafting, in float32"
        )
    free_memory()
    figures: Figures = {"ways_with_the_same_tokens": len(same)}
    is_timed = (shallow, "float32") == (size["config"], size["dtype"])  # the same model already
    timed = exact if is_timed else decoded(size, device, size["dtype"])
    for name, (_, (plain, drafted)) in timed.items():
        figures |= {
            f"{name}_ms_per_token": 1e3 * plain,
            f"{name}_ms_per_drafted_round": 1e3 * drafted,
        }
    figures["weights_ms"] = weights / rates(device)["copy_gb_per_second"] / 1e6
    return figures


PARTS: dict[str, Callable[[Figures, torch.device], Figures]] = {
    part.__name__: part for part in (versions, training, decoding, overlap, sharding, quickstart)
}


# ------------------------------------------------------------------ running the parts


def run_part(name: str, size: str, device: str, limit: float) -> dict[str, Any]:
    """Runs a part in a process of its own: {"state", "seconds", "figures" or "reason"}."""
    command = [sys.executable, __file__, "--one", name, "--size", size, "--device", device]
    began, environment = time.monotonic(), os.environ | {"PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, **pipes
    ) as running:
        try:
            out, err = running.communicate(timeout=limit)
            lines = out.strip().splitlines()
            answer = json.loads(lines[-1]) if running.returncode == 0 and lines else None
            result = answer or {"state": "failed", "reason": (out + err)[-3000:].strip()}
        except subprocess.TimeoutExpired:
            result = {"state": "failed", "reason": f"took longer than {limit:.0f} s"}
        finally:
            if (
                running.poll() is None
            ):  # its child processes hold the device's memory: end the whole session
                os.killpg(running.pid, signal.SIGKILL)
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def one_part(name: str, size: str, device: str) -> dict[str, Any]:
    try:
        return {"state": "ok", "figures": PARTS[name](SIZES[size], torch.device(device))}
    except Skipped as reason:
        return {"state": "skipped", "reason": str(reason)}


def device_name(device: str) -> str:
    """The GPU's name, read in another process: a process that uses CUDA holds memory there until it
    ends."""
    try:
        return (
            device
            if device == "cpu"
            else measuring.in_fresh_process(torch.cuda.get_device_name, device)
        )
    except (AssertionError, RuntimeError) as error:
        raise typer.BadParameter(f"--device {device}: {error}") from None


def main(
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: the GPU if there is one.")
    ] = "auto",
    size: Annotated[
        str, typer.Option(help=f"{' or '.join(SIZES)}; auto: 8b on a GPU, tiny on a CPU.")
    ] = "auto",
    parts: Annotated[str, typer.Option(help=f"Some of {','.join(PARTS)}.")] = ",".join(PARTS),
    again: Annotated[bool, typer.Option("--again", help="Repeat parts that succeeded.")] = False,
    output: Annotated[Path, typer.Option(help="File of the results.")] = ROOT
    / "runs"
    / "check_gpu.json",
    limit: Annotated[float, typer.Option(help="Seconds a part may take.")] = 300,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check what the project does on this machine's GPU, part by part."""
    device = own_device().type if device == "auto" else device
    size = ("8b" if device == "cuda" else "tiny") if size == "auto" else size
    if one:
        print(json.dumps(one_part(one, size, device)))
        return
    chosen = parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise typer.BadParameter(
            f"--parts: {', '.join(unknown)}; expected some of {', '.join(PARTS)}"
        )
    key, console = f"{device_name(device)}/{size}", Console()
    done = json.loads(output.read_text()) if output.exists() else {}
    results = done.setdefault(key, {})
    shown = measuring.table(key, "part", "state", "seconds", "figures", left=4)
    for part in chosen:
        if again or results.get(part, {}).get("state") != "ok":
            with console.status(f"{part} ({key})"):
                results[part] = run_part(part, size, device, limit)
            measuring.save_json(output, done)
        result = results[part]
        figures = [
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in result.get("figures", {}).items()
        ]
        shown.add_row(
            part,
            result["state"],
            f"{result['seconds']:.0f}",
            escape("\n".join(figures) or result["reason"]),
        )
    console.print(shown, f"figures: {output}")
    raise typer.Exit(any(results[part]["state"] == "failed" for part in chosen))


if __name__ == "__main__":
    typer.run(main)
