"""Random targets of given shapes, made on a device, and what the checks of a GPU measure on them.

A size (`SIZES` of scripts/check_gpu.py) names a Qwen3's config, its dtype, and the shapes of training and decoding.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen3Config

from inference import LLM, SamplingParams
from speculators.export import export_drafter
from speculators.precision import free_memory
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget
from train.data.loss_mask import TokenRow
from train.data.packing import pack
from train.planner.devices import copy_rate, product_rate
from train.planner.memory import memory
from train.planner.outline import outline
from train.planner.token_counts import TokenCount
from train.recipe.drafter_config import drafter_config
from train.recipe.recipe import make_recipe
from train.trainer.trainer import Trainer


class Skipped(Exception):
    """A part that has no meaning on this device, or no room there; the text says why."""


def target_config(config: dict[str, Any]) -> Any:
    return Qwen3Config(**config, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0)


def make_target(config: dict[str, Any], device: Any, dtype: str) -> Any:
    """A random Qwen3, its weights made on the device."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(target_config(config), dtype=getattr(torch, dtype)).eval()


def make_trainer(size: dict[str, Any], device: Any, folder: Path, overlap: bool = True) -> tuple[Any, Any]:
    """An EAGLE-3 head on random rows, and what `draftsmith plan` knows of its recipe. Skipped if that does not fit."""
    target_config(size["config"]).save_pretrained(folder)
    precision = "bf16" if size["dtype"] == "bfloat16" else "no"
    recipe = make_recipe({
        "name": "check",
        "target": {"model": str(folder), "dtype": size["dtype"]},
        "data": {"train": [{"path": "random"}], "max_length": size["max_length"]},
        "drafter": {key: size[key] for key in ("unroll_steps", "draft_vocab_size")},
        "features": {"overlap": overlap},
        "training": {"steps": 1000, "batch_size": size["batch_size"], "mixed_precision": precision},
    })  # fmt: skip
    random, length, count = np.random.default_rng(0), size["max_length"], 32
    supervised = np.arange(length) >= length // 2
    counted = TokenCount("random", count, count, count * length, count * int(supervised.sum()))
    plan = outline(recipe, counted=([counted], []), device=device)
    require_room(planned_bytes(plan, device), device)
    model = make_target(size["config"], device, size["dtype"])
    probe = FrozenTarget(model)
    config = drafter_config(recipe, probe)
    target = FrozenTarget(model, config.tap_layers)
    probe.close()
    torch.manual_seed(0)
    drafter = family_class("eagle3")(config).attach(target).to(device)
    drafter.initialise_from(target, recipe.drafter)
    ids = random.integers(0, size["config"]["vocab_size"], (count, length))
    rows = pack([TokenRow(row, supervised) for row in ids], length)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    return Trainer(recipe, target, drafter, rows, accelerator=accelerator, folder=folder), plan


def planned_bytes(plan: Any, device: Any) -> int:
    """Of training, by `draftsmith plan`."""
    return next(stage.total for stage in memory(plan, device=device.type) if stage.name == "train")


def require_room(needed: float, device: Any) -> None:
    """Skipped if the device's memory, less what others hold of it, is smaller."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    if free < needed:
        raise Skipped(f"needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free; at small shapes: --size tiny")


def timed_steps(trainer: Any, steps: int, device: Any) -> tuple[float, list[float]]:
    """(median seconds of a step, its losses); a step ends with a read of its figures."""
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(trainer.step(0.5)["loss"])
        seconds.append(time.perf_counter() - began)
    return median(seconds), losses


def decoded(
    size: dict[str, Any], device: Any, dtype: str
) -> dict[str, tuple[dict[bool, list[int]], tuple[float, float]]]:
    """way -> (tokens written without and with drafting, seconds per token without and per drafted round)."""
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
            written: dict[bool, list[int]] = {}
            times: dict[bool, list[float]] = {False: [], True: []}
            for speculate in (False, True) * 3:
                llm.reset_metrics()
                began = time.perf_counter()
                (output,) = llm.generate(prompt, params, use_tqdm=False, speculate=speculate)
                rounds = llm.get_metrics().num_drafts if speculate else size["written"]
                times[speculate].append((time.perf_counter() - began) / max(rounds, 1))
                written[speculate] = list(output.outputs[0].token_ids)
            found[name] = (written, (median(times[False]), median(times[True])))
            del llm
            free_memory()
    return found


def parameters(config: dict[str, Any]) -> int:
    """Of the layers and the output head: what a token reads."""
    H, heads, kv, d = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = H * d * (2 * heads + 2 * kv) + 3 * H * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + H * config["vocab_size"]


def rates(device: Any) -> dict[str, float]:
    """Of a large product and of a large copy, measured; TFLOP/s, and GB/s read and written."""
    if device.type == "cpu":
        product, copy = product_rate(torch.float32), copy_rate(count=1 << 24)
    else:
        product, copy = product_rate(torch.bfloat16, width=8192, device=device), copy_rate(count=1 << 28, device=device)
    return {"product_tflops": product / 1e12, "copy_gb_per_second": copy / 1e9}


def require_close(one: list[float], other: list[float], what: str) -> None:
    if any(abs(a - b) > 2e-2 * max(abs(a), 1e-3) for a, b in zip(one, other, strict=True)):
        raise RuntimeError(f"{what} differ: {one} and {other}")
