"""`draftsmith compare`: several recipes at the same budget of training time, in one table.

Every recipe is run as it stands but for its budget, its folder and its gates; the results are those
of its own acceptance report. A run that is done already is not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.run_folder import REPORT, checkpoints
from draftsmith.train.trainer import checkpoint

FILE = "comparison.json"
FIGURES = ("expected_acceptance_length", "acceptance_length", "speedup_vs_autoregressive")
Entry = dict[str, Any]  # of one recipe: name, family, seconds, steps, and its report's summary


def compare_recipes(
    paths: Sequence[Path], minutes: float, out: Path, overrides: Sequence[str] = ()
) -> list[Entry]:
    """Runs every recipe for `minutes` of training, one after the other, and writes FILE into `out`.

    ConfigError if two have the same file name, or measure other numbers of drafts or temperatures;
    DraftsmithError names a run that failed."""
    if len({path.stem for path in paths}) < len(paths):
        raise ConfigError("recipes need different file names", where="compare")
    changes = [budget(path, minutes, out, overrides) for path in paths]
    recipes = [load_recipe(path, change) for path, change in zip(paths, changes, strict=True)]
    sections = [recipe.evaluation for recipe in recipes]
    if len({(e.num_speculative_tokens, tuple(e.temperatures)) for e in sections}) > 1:
        raise ConfigError(
            "num_speculative_tokens and temperatures must be the same in all recipes (--set)",
            where="evaluation",
        )
    for path, change, recipe in zip(paths, changes, recipes, strict=True):
        if not is_done(recipe):
            train(path, change)
    entries = [entry(path.stem, recipe) for path, recipe in zip(paths, recipes, strict=True)]
    (out / FILE).write_text(json.dumps({"minutes": minutes, "entries": entries}, indent=2) + "\n")
    return entries


def budget(path: Path, minutes: float, out: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides that give a recipe its minutes and its folder. Stages share the minutes in
    proportion to their steps, or equally."""
    recipe = load_recipe(path, overrides)
    changes = [*overrides, f"name={recipe.name}", f"output_dir={out / path.stem}", "gates={}"]
    changes += [f"regenerate.cache_dir={out / 'responses'}", f"training.max_minutes={minutes:g}"]
    changes += ["training.steps=null", "training.epochs=null"]
    steps = [stage.training.get("steps") or 0 for stage in recipe.stages]
    for i, stage in enumerate(recipe.stages):
        share = steps[i] / sum(steps) if all(steps) else 1 / len(steps)
        bound = {"steps": None, "epochs": None, "max_minutes": round(share * minutes, 4)}
        changes.append(f"stages.{i}.training={json.dumps(stage.training | bound)}")
    return changes


def is_done(recipe: Recipe) -> bool:
    path = Path(recipe.output_dir) / REPORT
    return path.exists() and load_report(path).provenance.recipe_sha256 == recipe.recipe_hash()


def train(path: Path, changes: Sequence[str]) -> None:
    """In a process of its own, since accelerate keeps its state for the life of a process."""
    command = [sys.executable, "-m", "draftsmith.train.cli", "train", str(path), *changes]
    if code := subprocess.run(command, check=False).returncode:
        raise DraftsmithError(f"{path} ended with status {code}", where="compare")


def entry(name: str, recipe: Recipe) -> Entry:
    folders = [checkpoints(recipe, stage) for stage, _ in recipe.training_stages()]
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
