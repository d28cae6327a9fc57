"""`draftsmith compare`: several recipes at the same budget of training, in one table. The budget is
minutes, or optimizer steps: of recipes with the same data and batch size, the same tokens.

Every recipe is run as it stands but for its budget, its folder and its gates; the results are those
of its own acceptance report. A run that is done already is not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.inference.console import Terminated
from draftsmith.inference.progress import HEARTBEAT
from draftsmith.inference.report.schema import load_report
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe.load import load_recipe, override_text
from draftsmith.train.recipe.recipe import REPORT, Recipe
from draftsmith.train.trainer import checkpoint

FILE = "comparison.json"
FIGURES = ("expected_acceptance_length", "acceptance_length", "speedup_vs_autoregressive")
Budget = dict[str, int | float]  # {"max_minutes": 4.0} or {"steps": 300}
Entry = dict[str, Any]  # of one recipe: name, family, seconds, steps, and its report's summary


def compare_recipes(
    paths: Sequence[Path], budget: Budget, out: Path, overrides: Sequence[str] = ()
) -> Iterator[Entry]:
    """Trains every recipe for `budget`, one after the other, and writes FILE into `out` after each.

    ConfigError if two have the same file name, one measures nothing, or they measure other numbers
    of drafts or temperatures; DraftsmithError names a run that failed."""
    if len({path.stem for path in paths}) < len(paths):
        raise ConfigError("recipes need different file names", where="compare")
    changes = [changed(path, budget, out, overrides) for path in paths]
    recipes = [load_recipe(path, change) for path, change in zip(paths, changes, strict=True)]
    for path, recipe in zip(paths, recipes, strict=True):
        if not recipe.measured:
            raise ConfigError(
                "the recipe measures nothing that could be compared; set evaluation.prompts,"
                " evaluation.suites or data.validation",
                where=f"{path}",
            )
    sections = [recipe.evaluation for recipe in recipes]
    if len({(e.num_speculative_tokens, tuple(e.temperatures)) for e in sections}) > 1:
        raise ConfigError(
            "num_speculative_tokens and temperatures must be the same in all recipes (--set)",
            where="evaluation",
        )
    entries: list[Entry] = []
    for path, change, recipe in zip(paths, changes, recipes, strict=True):
        report = Path(recipe.output_dir) / REPORT
        done = report.exists() and load_report(report).provenance.recipe_sha256
        if done != recipe.recipe_hash():
            # In a process of its own, since accelerate keeps its state.
            command = [sys.executable, "-m", "draftsmith.train.cli", "train", str(path), *change]
            print(f"compare: {path}, {len(entries) + 1} of {len(paths)}", flush=True)
            if code := _run(command):
                raise DraftsmithError(f"{path} ended with status {code}", where="compare")
        entries.append(entry(path.stem, recipe))
        write_whole(out / FILE, json.dumps(budget | {"entries": entries}, indent=2) + "\n")
        yield entries[-1]


def _run(command: Sequence[str]) -> int:
    """Runs a process that tells of itself; its exit status. A stop waits until it has saved
    itself: Ctrl-C reaches it from the terminal, SIGTERM is passed on."""
    with (
        HEARTBEAT.activity("compare", Console(stderr=True), shown=True),
        subprocess.Popen(command) as process,
    ):
        try:
            return process.wait()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Terminated):
                process.terminate()
            process.wait()
            raise


def changed(path: Path, budget: Budget, out: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides that give a recipe its budget and its folder. Stages share the budget in
    proportion to their steps, or equally."""
    changes = [*overrides, "gates={}"]
    recipe = load_recipe(path, changes)
    changes.append(override_text("name", recipe.name))
    changes.append(override_text("output_dir", str(out / path.stem)))
    changes.append(override_text("regenerate.cache_dir", str(out / "responses")))
    bounds: dict[str, Any] = {"steps": None, "epochs": None, "max_minutes": None}
    for key, bound in (bounds | budget).items():
        changes.append(override_text(f"training.{key}", bound))
    steps = [stage.training.get("steps") or 0 for stage in recipe.stages]
    for i, stage in enumerate(recipe.stages):
        share = steps[i] / sum(steps) if all(steps) else 1 / len(steps)
        part = {key: type(bound)(round(share * bound, 4)) for key, bound in budget.items()}
        changes.append(override_text(f"stages.{i}.training", stage.training | bounds | part))
    return changes


def entry(name: str, recipe: Recipe) -> Entry:
    """The row of one recipe, from its newest checkpoints and its report."""
    folders = [recipe.checkpoints(stage) for stage, _ in recipe.training_stages()]
    newest = [file for folder in folders if (file := checkpoint.latest(folder)) is not None]
    states = [checkpoint.read_state(folder) for folder in newest]
    return {
        "name": name,
        "family": recipe.family,
        "training_seconds": round(sum(state.seconds for state in states), 1),
        "training_steps": sum(state.step for state in states),
        "temperatures": [f"{t:g}" for t in recipe.evaluation.temperatures],
        "summary": load_report(Path(recipe.output_dir) / REPORT).summary,
    }


def rows(entries: Sequence[Entry]) -> list[list[str]]:
    """The table's head and a row for each recipe: name, steps, and FIGURES at each temperature."""
    heads = [f"{n} T={t}" for t in entries[0]["temperatures"] for n in ("expected", "τ", "speedup")]
    table = [["drafter", "steps", *heads]]
    for e in entries:
        values = [e["summary"].get(f"t{t}.{name}") for t in e["temperatures"] for name in FIGURES]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        table.append([e["name"], f"{e['training_steps']:,}", *cells])
    return table
