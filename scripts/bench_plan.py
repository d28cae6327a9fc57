"""How far `draftsmith plan` is off: short trainings on this machine's CPU, estimated first and then measured.

Four families, each at two sizes of target, row and batch. The shares of the CPU's peaks (train/planner/devices.py) are
fitted on two of them, and the error is that of the others, which the fit has not seen. One thread, counted in seconds
of the CPU, so that what else the machine does hardly matters; memory is the peak of a process of its own beyond what it
held before the target was loaded.

    python scripts/bench_plan.py
    python scripts/bench_plan.py --families eagle3,medusa --steps 4 --json errors.json
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EMBEDDED = ROOT / "recipes" / "quickstart" / "target"
CONVERSATIONS = str(ROOT / "recipes" / "quickstart" / "data" / "train.jsonl.gz")
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"unroll_steps": 4, "draft_vocab_size": 2048},
    "medusa": {"num_heads": 3, "unroll_steps": 3},
    "draft_model": {"from_target": {"first": 2}},
    "mtp": {"unroll_steps": 3},
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"max_length": 256, "batch_size": 2, "examples": 24, "max_new_tokens": 24, "rows": 8},
    "large": {"max_length": 512, "batch_size": 3, "examples": 32, "max_new_tokens": 32, "rows": 16},
}
MID = {  # of the large runs' target
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "dtype": "float32",
}  # fmt: skip
FITTED = ("eagle3", "draft_model")  # families that the fit sees
FIGURES = ("seconds per step", "seconds per token written", "peak memory", "checkpoint bytes", "export bytes")


def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(OPTIONS),
    steps: Annotated[int, typer.Option(min=3, help="Of each training; the first is not counted.")] = 4,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prints estimated and measured figures, and the error on the runs that the fit has not seen."""
    torch.set_num_threads(1)
    if one:
        print(json.dumps(measure(Path(one), steps)))
        return
    from train.planner.devices import measure_cpu

    device = measure_cpu(time.process_time)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for family, size in itertools.product(families.split(","), SIZES):
            recipe = write_recipe(Path(folder), family, size, steps)
            command = [sys.executable, __file__, "--one", str(recipe), "--steps", str(steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append({"family": family, "size": size, "recipe": recipe, **json.loads(done.stdout.splitlines()[-1])})
            print(f"{family}, {size}: measured", file=sys.stderr)
        outlines = [sized(run["recipe"]) for run in runs]
    shares = fit([pair for pair in zip(outlines, runs) if pair[1]["family"] in FITTED], device)
    fitted = replace(device, **shares)
    for run, plan in zip(runs, outlines):
        run["estimated"] = estimates(plan, fitted)
        del run["recipe"]
    report(runs, fitted)
    if as_json is not None:
        as_json.write_text(json.dumps(runs, indent=2))


# --------------------------------------------------------------------------------------------- the runs


def write_recipe(folder: Path, family: str, size: str, steps: int) -> Path:
    """The recipe of one run, and its target if that is not the embedded one."""
    from train.recipe.recipe import make_recipe

    s, target = SIZES[size], EMBEDDED
    if size == "large":
        target = folder / "mid"
        if not target.exists():
            write_target(target)
    recipe = make_recipe(
        {
            "name": f"{family}-{size}",
            "output_dir": str(folder / f"{family}-{size}"),
            "family": family,
            "target": {"model": str(target)},
            "drafter": OPTIONS[family],
            "data": {"train": [{"path": CONVERSATIONS, "limit": s["examples"]}], "max_length": s["max_length"]},
            "regenerate": {"max_new_tokens": s["max_new_tokens"], "batch_size": s["rows"]},
            "training": {"steps": steps, "batch_size": s["batch_size"], "optimizer": "adamw", "mixed_precision": "no"},
            "evaluation": {"num_speculative_tokens": 3},
        }
    )
    path = folder / f"{family}-{size}.yaml"
    path.write_text(recipe.resolved_yaml())
    return path


def write_target(folder: Path) -> None:
    """A random model with the embedded one's tokenizer; its end of text is out of reach, so that it writes on."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((EMBEDDED / "config.json").read_text()) | MID
    fields["layer_types"] = fields["layer_types"][: MID["num_hidden_layers"]]
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(path: Path, steps: int) -> dict[str, float]:
    """In this process: CPU seconds of a step and of a token written, peak bytes, files."""
    from train.pipeline import data_stage, run
    from train.pipeline.progress import Stages
    from train.recipe.load import load_recipe
    from train.trainer.checkpoint import latest
    from train.trainer.trainer import Trainer

    recipe, spent, written = load_recipe(path), [], {}
    plain_step, plain_responses = Trainer.step, data_stage.DataStage._responses

    def step(self: Trainer, share: float) -> dict[str, Any]:
        began = time.process_time()
        found = plain_step(self, share)
        spent.append(time.process_time() - began)
        return found

    def responses(self: Any, *args: Any, **kwargs: Any) -> list:
        began = time.process_time()
        found = plain_responses(self, *args, **kwargs)
        written["seconds"] = time.process_time() - began
        written["tokens"] = sum(len(r.output_ids) for r in found)
        written["prompt"] = sum(len(r.prompt_ids) for r in found) / len(found)
        return found

    Trainer.step, data_stage.DataStage._responses = step, responses  # type: ignore[method-assign]
    before = peak_bytes()
    trained = run.train(recipe, run.make_accelerator(recipe), Stages(9, enabled=False))
    peak = peak_bytes() - before
    export = run.export(recipe, trained)
    newest = latest(run.checkpoints(recipe))
    assert newest is not None
    return {
        "seconds per step": statistics.median(spent[1:]),
        "seconds per token written": written["seconds"] / written["tokens"],
        "peak memory": peak,
        "checkpoint bytes": bytes_of(newest),
        "export bytes": bytes_of(export),
        "response": written["tokens"] / SIZES["large" if "large" in recipe.name else "small"]["examples"],
        "prompt": written["prompt"],
    }


def peak_bytes() -> int:
    """Of this process so far, resident."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def bytes_of(folder: Path) -> int:
    """Of the tensors' files: what grows with the drafter."""
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".pt"))


# --------------------------------------------------------------------------------------------- the estimates


def sized(path: Path) -> Any:
    """The outline of a recipe; the files of a run may be gone when its figures are asked for."""
    from train.planner.outline import outline
    from train.recipe.load import load_recipe

    return outline(load_recipe(path))


def works(plan: Any) -> tuple[Any, Any]:
    """Of a step, and of a token that is written."""
    from train.planner.phases import generation, phases, texts_of
    from train.planner.work import total

    r = plan.recipe.regenerate
    texts = texts_of(plan.sources, plan.recipe.data.max_length, r.max_new_tokens)
    writing = generation(plan, texts, r.batch_size, r.max_new_tokens)
    return total(p.whole for p in phases(plan, steps=1)), writing * (1 / (texts.count * texts.response))


def estimates(plan: Any, device: Any) -> dict[str, float]:
    """The measured figures, as the plan has them."""
    from train.planner.memory import checkpoint_bytes, disk, memory

    times = [work.seconds(device).likely for work in works(plan)]
    peaks = [stage.total for stage in memory(plan) if not stage.name.startswith("measure")]
    return dict(zip(FIGURES, [*times, max(peaks), checkpoint_bytes(plan), disk(plan)["export"]], strict=True))


def fit(pairs: list[tuple[Any, dict[str, float]]], device: Any) -> dict[str, Any]:
    """Shares of the peaks and the cost of a call with the least squares of log ratios of the times."""
    from train.planner.devices import CALL, Range

    known = [(work, run[name]) for plan, run in pairs for work, name in zip(works(plan), FIGURES)]
    found: list[tuple[float, dict[str, Any]]] = []
    for products, transfers, calls in itertools.product(
        (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0),
        (1.0, 2.0, 3.0, 4.5, 7.0, 10.0, 14.0, 20.0, 28.0),
    ):
        tried = {
            "products": Range(products, products, products),
            "transfers": Range(transfers, transfers, transfers),
            "call_seconds": calls * device.call_seconds / CALL,
        }
        fitted = replace(device, **tried)
        error = sum(math.log(work.seconds(fitted).likely / measured) ** 2 for work, measured in known)
        found.append((error, tried))
    return min(found, key=lambda each: each[0])[1]


def report(runs: list[dict[str, Any]], device: Any) -> None:
    """Ratios, and their error on the large runs."""
    console = Console(width=140)
    exact, half, copied = device.flops["float32"] / 1e9, device.flops["bfloat16"] / 1e9, device.bandwidth / 1e9
    console.print(
        f"measured: {exact:.0f} GFLOP/s in float32, {half:.0f} in bfloat16, {copied:.1f} GB/s; "
        f"fitted: products reach {device.products.likely:.0%}, transfers {device.transfers.likely:.0%}, a call "
        f"{device.call_seconds * 1e6:.1f} us"
    )
    table = Table("run", *FIGURES, title="estimated / measured (measured)", title_justify="left")
    for run in runs:
        cells = [f"{run['estimated'][name] / run[name]:.2f} ({run[name]:.3g})" for name in FIGURES]
        table.add_row(f"{run['family']}, {run['size']}", *cells)
    unseen = [run for run in runs if run["family"] not in FITTED] or runs
    for name, pick in (("median error, not fitted", statistics.median), ("worst error, not fitted", max)):
        errors = [pick([abs(math.log(run["estimated"][n] / run[n])) for run in unseen]) for n in FIGURES]
        table.add_row(name, *(f"x {math.exp(e):.2f}" for e in errors), style="bold")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
