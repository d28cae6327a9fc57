"""How far `draftsmith plan` is off: short trainings on this machine's CPU, estimated and measured.

Four families, each at two sizes of target, row and batch. The shares of the CPU's peaks
(train/planner/devices.py) are fitted on two of them, and the error is that of the others, which the
fit has not seen. Seconds are the CPU's on one thread, so that other work of the machine hardly
matters; memory is the peak of a fresh process above what it held before the target was loaded.

    python scripts/bench_plan.py
    python scripts/bench_plan.py --families eagle3,medusa --steps 4 --json errors.json
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.measuring import in_fresh_process, save_json, table, with_peak_memory
from train.pipeline import data_stage, run
from train.pipeline.progress import Stages
from train.planner.devices import CALL, Device, Range, Work, measure_cpu, total
from train.planner.memory import checkpoint_bytes, disk, memory
from train.planner.outline import Outline, outline
from train.planner.phases import generation, phases, texts_of
from train.recipe.load import load_recipe
from train.recipe.recipe import make_recipe
from train.trainer.checkpoint import latest
from train.trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
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
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "dtype": "float32",
}
FITTED = ("eagle3", "draft_model")  # families that the fit sees
FIGURES = (
    "seconds per step",
    "seconds per token written",
    "peak memory",
    "checkpoint bytes",
    "export bytes",
)
Figures = dict[str, float]


def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(OPTIONS),
    steps: Annotated[
        int, typer.Option(min=3, help="Of each training; the first is not counted.")
    ] = 4,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Where to write all figures.")
    ] = None,
) -> None:
    """Prints estimated and measured figures, and the error on the runs that the fit has not
    seen."""
    torch.set_num_threads(1)
    device, runs = measure_cpu(time.process_time), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for family, size in itertools.product(families.split(","), SIZES):
            path = write_recipe(Path(folder), family, size, steps)
            plan = outline(load_recipe(path))
            measured = in_fresh_process(measure, path)
            runs.append(
                {
                    "family": family,
                    "size": size,
                    "measured": measured,
                    "works": works(plan),
                    "plan": plan,
                }
            )
            print(f"{family}, {size}: measured", file=sys.stderr)
    device = replace(device, **fit([r for r in runs if r["family"] in FITTED], device))
    for each in runs:
        each["estimated"] = estimates(each.pop("plan"), each.pop("works"), device)
    report(runs, device)
    if as_json is not None:
        save_json(as_json, {"runs": [run | {"fitted": run["family"] in FITTED} for run in runs]})


def write_recipe(folder: Path, family: str, size: str, steps: int) -> Path:
    """Writes the recipe of one run, and its target if that is not the embedded one."""
    s, target = SIZES[size], EMBEDDED if size == "small" else folder / "mid"
    if not target.exists():
        write_target(target)
    recipe = make_recipe(
        {
            "name": f"{family}-{size}",
            "output_dir": str(folder / f"{family}-{size}"),
            "family": family,
            "target": {"model": str(target)},
            "drafter": OPTIONS[family],
            "data": {
                "train": [{"path": CONVERSATIONS, "limit": s["examples"]}],
                "max_length": s["max_length"],
            },
            "regenerate": {"max_new_tokens": s["max_new_tokens"], "batch_size": s["rows"]},
            "training": {
                "steps": steps,
                "batch_size": s["batch_size"],
                "optimizer": "adamw",
                "mixed_precision": "no",
            },
            "evaluation": {"num_speculative_tokens": 3},
        }
    )
    path = folder / f"{family}-{size}.yaml"
    path.write_text(recipe.resolved_yaml())
    return path


def write_target(folder: Path) -> None:
    """Writes a random model with the embedded one's tokenizer; it can draw no end of text, so that
    it writes on."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((EMBEDDED / "config.json").read_text()) | MID
    fields["layer_types"] = fields["layer_types"][: MID["num_hidden_layers"]]
    torch.manual_seed(0)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(path: Path) -> Figures:
    """Trains in this process: CPU seconds of a step and of a token written, peak bytes, files."""
    torch.set_num_threads(1)
    recipe = load_recipe(path)
    steps, writing = timed(Trainer, "step"), timed(data_stage.DataStage, "_responses")
    trained, peak = with_peak_memory(
        lambda: run.train(recipe, run.make_accelerator(recipe), Stages(9, enabled=False))
    )
    export, newest = run.export(recipe, trained), latest(run.checkpoints(recipe))
    assert newest is not None
    ((seconds, responses),) = writing
    written = seconds / sum(len(r.output_ids) for r in responses)
    sizes = [
        sum(f.stat().st_size for f in folder.glob("*") if f.suffix in (".safetensors", ".pt"))
        for folder in (newest, export)
    ]
    return dict(
        zip(
            FIGURES,
            [statistics.median(s for s, _ in steps[1:]), written, peak, *sizes],
            strict=True,
        )
    )


def timed(owner: Any, name: str) -> list[tuple[float, Any]]:
    """(CPU seconds, result) of every call of a method from now on."""
    plain, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = plain(*args, **kwargs)
        calls.append((time.process_time() - began, result))
        return result

    setattr(owner, name, call)
    return calls


# --------------------------------------------------------------------------------------------- the
# estimates


def works(plan: Outline) -> tuple[Work, Work]:
    """The work of a step, and of a token that is written."""
    r = plan.recipe.regenerate
    texts = texts_of(plan.sources, plan.recipe.data.max_length, r.max_new_tokens)
    writing = generation(plan, texts, r.batch_size, r.max_new_tokens)
    return total(p.whole for p in phases(plan, steps=1)), writing * (
        1 / (texts.count * texts.response)
    )


def estimates(plan: Outline, works: tuple[Work, Work], device: Device) -> Figures:
    """The measured figures, as the plan has them."""
    times = [work.seconds(device).likely for work in works]
    peak = max(stage.total for stage in memory(plan) if not stage.name.startswith("measure"))
    return dict(
        zip(FIGURES, [*times, peak, checkpoint_bytes(plan), disk(plan)["export"]], strict=True)
    )


def fit(runs: list[dict[str, Any]], device: Device) -> dict[str, Any]:
    """Shares of the peaks and the cost of a call with the least squares of log ratios of the
    times."""
    known = [pair for each in runs for pair in zip(each["works"], each["measured"].values())]
    tried = [
        {
            "products": Range(*[p] * 3),
            "transfers": Range(*[t] * 3),
            "call_seconds": calls * device.call_seconds / CALL,
        }
        for p in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        for t in (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
        for calls in (1.0, 2.0, 3.0, 4.5, 7.0, 10.0, 14.0, 20.0, 28.0)
    ]

    def error(shares: dict[str, Any]) -> float:
        fitted = replace(device, **shares)
        return sum(math.log(work.seconds(fitted).likely / seconds) ** 2 for work, seconds in known)

    return min(tried, key=error)


def report(runs: list[dict[str, Any]], device: Device) -> None:
    """Prints the ratios, and their error on the runs that the fit has not seen."""
    exact, half, copied = (
        device.flops["float32"] / 1e9,
        device.flops["bfloat16"] / 1e9,
        device.bandwidth / 1e9,
    )
    made = table("estimated / measured (measured)", "run", *FIGURES)
    for each in runs:
        ratios = [
            (each["estimated"][name] / figure, figure) for name, figure in each["measured"].items()
        ]
        made.add_row(
            f"{each['family']}, {each['size']}",
            *(f"{ratio:.2f} ({figure:.3g})" for ratio, figure in ratios),
        )
    unseen = [each for each in runs if each["family"] not in FITTED] or runs
    for name, pick in (
        ("median error, not fitted", statistics.median),
        ("worst error, not fitted", max),
    ):
        errors = [
            pick([abs(math.log(e["estimated"][n] / e["measured"][n])) for e in unseen])
            for n in FIGURES
        ]
        made.add_row(name, *(f"x {math.exp(e):.2f}" for e in errors), style="bold")
    console = Console(width=140)
    console.print(
        f"measured: {exact:.0f} GFLOP/s in float32, {half:.0f} in bfloat16, {copied:.1f} GB/s;"
        f" fitted: products reach {device.products.likely:.0%}, transfers"
        f" {device.transfers.likely:.0%}, a call {device.call_seconds * 1e6:.1f} us"
    )
    console.print(made)


if __name__ == "__main__":
    typer.run(main)
