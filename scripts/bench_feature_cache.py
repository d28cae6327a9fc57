"""The cost of each encoding of the feature cache: bytes, speed, KL divergence of p, and τ after
training from it.

Every encoding gets the same packed rows of one recipe, written from the same features and read
back. For every seed a head is trained online and from each encoding; τ is the expected acceptance
length by exact replay on held-out texts of the target, so that it depends on the head alone.
Finished measurements are kept in OUT/results.json, the table in OUT/table.md.

    python scripts/bench_feature_cache.py recipes/quickstart/eagle3.yaml training.steps=150 python
    scripts/bench_feature_cache.py RECIPE --encodings bf16,rotated3+rotated6 --seeds 0,1  #
    taps+last hidden
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from accelerate.utils import set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.entrypoints.loading import load_tokenizer
from scripts.measuring import markdown, save_json
from speculators.target.frozen_target import FrozenTarget
from train.data.packing import PackedRow
from train.features.cache import SHARD_BYTES, FeatureCache, ShardWriter, texts_of
from train.features.encodings import make_encoding
from train.features.row_features import RowFeatures
from train.pipeline.data_stage import DataStage, TrainingData
from train.pipeline.drafter_stage import make_drafter
from train.pipeline.features_stage import cache_key
from train.pipeline.progress import Stages
from train.pipeline.run import held_out_evaluation, load_target, make_accelerator
from train.recipe.drafter_config import drafter_config
from train.recipe.load import load_recipe
from train.recipe.recipe import Recipe
from train.trainer.trainer import Trainer

ENCODINGS = "bf16,fp8,int4,rotated4,rotated3,rotated3+rotated6,rotated2+rotated6"
KL_TOKENS = 4096
ONLINE = "online"


class Bench:
    """The rows of a recipe, their features, held-out texts, and the measurements on them."""

    def __init__(self, recipe: Recipe, rows: int, held_out: int, out: Path) -> None:
        self.recipe, self.out, self.stages = recipe, out, Stages(0, enabled=False)
        self.accelerator = make_accelerator(recipe)
        probe = load_target(recipe, self.accelerator, ())
        self.config = drafter_config(recipe, probe)
        self.target = FrozenTarget(probe.model, self.config.tap_layers)
        probe.close()
        self.tokenizer = load_tokenizer(recipe.target.model, None, revision=recipe.target.revision)
        texts = DataStage(recipe, self.target, self.tokenizer, self.accelerator, self.stages)
        self.rows: list[PackedRow] = texts.training_rows()[:rows]
        self.held_out = texts.held_out(held_out)
        self.data = TrainingData(self.rows, [], self.held_out, texts.tokenizer, texts.hashes)
        del texts  # and the engine that wrote them
        self.online = RowFeatures(
            self.target,
            self.rows,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            keep_bytes=float("inf"),
        )
        began = time.monotonic()
        self.made = [self.online.of([i]) for i in range(len(self.rows))]
        self.tokens = sum(map(len, self.rows))
        print(
            f"{len(self.rows)} rows, {self.tokens} tokens, made in"
            f" {time.monotonic() - began:.0f} s",
            flush=True,
        )

    def cache(self, name: str) -> FeatureCache:
        """The cache in an encoding: `taps+last_hidden`, or one name for both."""
        taps, _, last_hidden = name.partition("+")
        key = replace(
            cache_key(self.recipe, self.target, self.data),
            encoding=taps,
            last_hidden_encoding=last_hidden or taps,
        )
        return FeatureCache(self.out / "features", key)

    def measure(self, name: str) -> dict[str, float]:
        """Size, error, and tokens and megabytes per second of one thread's processor time. Writing
        includes a check, reading includes decoding; the files are still in the system's cache."""
        cache, tokens, wrote = self.write(name)
        began = time.process_time()
        for row in self.rows:
            cache.row(row)
        read, width = time.process_time() - began, cache.bytes_per_token
        return {
            "bytes_per_token": width,
            "ratio": self.cache("bf16").bytes_per_token / width,
            "write_tokens": tokens / wrote,
            "write_mb": tokens * width / wrote / 1e6,
            "read_tokens": self.tokens / read,
            "read_mb": tokens * width / read / 1e6,
            "kl": self.divergence(name),
        }

    def write(self, name: str) -> tuple[FeatureCache, int, float]:
        """Writes the features of all rows: (the cache, number of tokens, seconds of processor
        time)."""
        cache = self.cache(name)
        shutil.rmtree(cache.folder, ignore_errors=True)
        began = time.process_time()
        with ShardWriter(cache, SHARD_BYTES) as writer:
            for row, made in zip(self.rows, self.made):
                for text, place in texts_of(row):
                    writer.add(
                        text,
                        None if made.taps is None else made.taps[0, place],
                        made.last_hidden[0, place],
                    )
        wrote = time.process_time() - began
        return cache.scan(), writer.tokens, wrote

    @torch.no_grad()
    def divergence(self, name: str) -> float:
        """Mean KL(p || p from the encoded last hidden state) over the first KL_TOKENS tokens."""
        encoding = make_encoding(
            name.rpartition("+")[2], self.target.hidden_size, self.target.dtype
        )
        states = torch.cat([made.last_hidden[0] for made in self.made])[:KL_TOKENS]
        total = 0.0
        for part in states.split(512):
            p = self.target.logits(part).float().log_softmax(-1)
            q = self.target.logits(encoding.decode(encoding.encode(part))).float().log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
        return total / len(states)

    def train(self, name: str, seed: int) -> dict[str, float]:
        """Trains a head from an encoding: its expected acceptance length by temperature, loss, and
        processor time."""
        training = self.recipe.training.model_copy(
            update={"seed": seed, "eval_every": 10**9, "save_every": 10**9}
        )
        recipe = self.recipe.model_copy(update={"training": training})
        folder = self.out / "runs" / f"{name}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        set_seed(seed)
        features = self.online
        if name != ONLINE:
            cache = self.cache(name).scan()
            if any(text not in cache for row in self.rows for text, _ in texts_of(row)):
                cache, *_ = self.write(name)  # the target's responses have changed since
            features = RowFeatures(self.target, self.rows, cache=cache)
        drafter = make_drafter(recipe, self.config, self.target, features, self.stages, folder)
        trainer = Trainer(
            recipe,
            self.target,
            drafter,
            self.rows,
            accelerator=self.accelerator,
            folder=folder,
            evaluate=held_out_evaluation(recipe, self.target, self.held_out),
            features=features,
        )
        began = time.process_time()
        last = trainer.run().history[-1]
        lengths = {
            key: value
            for key, value in last.items()
            if key.startswith("expected_acceptance_length")
        }
        return lengths | {"loss": last["loss"], "seconds": time.process_time() - began}


def table(results: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> str:
    """A Markdown table. τ is the mean over seeds, its change relative to the same seed online, ±
    the standard error."""
    online = [results[f"{ONLINE}/{seed}"] for seed in seeds]
    temperatures = sorted(
        key for key in online[0] if key.startswith("expected_acceptance_length_t")
    )
    headings = [
        "encoding",
        "bytes/token",
        "bf16 ÷ it",
        "write tokens/s (MB/s)",
        "read tokens/s (MB/s)",
        "KL of p",
    ]
    rows = [[ONLINE, *["-"] * 5]]
    for key in temperatures:
        headings.append(f"τ T={key.rpartition('_t')[2]}")
        rows[0].append(
            f"{mean(run[key] for run in online):.3f}"
            f" ({', '.join(f'{run[key]:.3f}' for run in online)})"
        )
    for name in names:
        m = results[name]
        cells = [name.replace("+", " + "), f"{m['bytes_per_token']:,}", f"{m['ratio']:.2f}"]
        cells += [f"{m[f'{way}_tokens']:,.0f} ({m[f'{way}_mb']:.0f})" for way in ("write", "read")]
        cells.append(f"{m['kl']:.1e}")
        pairs = [
            (results[f"{name}/{s}"], base)
            for s, base in zip(seeds, online)
            if f"{name}/{s}" in results
        ]
        for key in temperatures:
            change = [run[key] / base[key] - 1 for run, base in pairs]
            error = f" ± {stdev(change) / len(change) ** 0.5:.2%}" if len(change) > 1 else ""
            cells.append(
                f"{mean(run[key] for run, _ in pairs):.3f} ({mean(change):+.2%}{error})"
                if pairs
                else "-"
            )
        rows.append(cells)
    return markdown(headings, rows)


def main(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe, such as recipes/quickstart/eagle3.yaml.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides, such as training.steps=150.")
    ] = None,
    encodings: Annotated[
        str, typer.Option(help="Comma-separated; taps+last_hidden, or one name for both.")
    ] = ENCODINGS,
    trained: Annotated[
        str, typer.Option(help="Encodings that a head is trained from; empty: all.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of the trainings, comma-separated.")] = "0,1",
    rows: Annotated[int, typer.Option(help="Packed rows.")] = 160,
    held_out: Annotated[
        int, typer.Option(help="Held-out texts per temperature, workloads in turn.")
    ] = 48,
    out: Annotated[Path, typer.Option(help="Folder of features and results.")] = Path(
        "runs/bench-feature-cache"
    ),
) -> None:
    """Measure what is missing and print the table."""
    torch.set_num_threads(1)
    names, numbers = encodings.split(","), [int(seed) for seed in seeds.split(",")]
    file, bench = out / "results.json", None
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    jobs: list[tuple[str, Callable[[Bench], Any]]] = [
        (name, lambda b, n=name: b.measure(n)) for name in names
    ]
    for seed in numbers:
        heads = (ONLINE, *(trained.split(",") if trained else names))
        jobs += [(f"{name}/{seed}", lambda b, n=name, s=seed: b.train(n, s)) for name in heads]
    for job, work in jobs:
        if job in results:
            continue
        bench = bench or Bench(
            load_recipe(recipe, [*(overrides or ()), f"output_dir={out}"]), rows, held_out, out
        )
        results[job] = work(bench)
        print(job, {key: round(value, 5) for key, value in results[job].items()}, flush=True)
        save_json(file, results)
    made = table(results, names, numbers)
    print(made)
    (out / "table.md").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
