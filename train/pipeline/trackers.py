"""Trackers besides the run's folder: wandb, trackio and tensorboard, through accelerate.

A run that is continued goes on under the same id, which is kept in the run's folder. At the end it
gets the results of the acceptance report, and the path of its page."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate import Accelerator

from draftsmith.inference.report.schema import AcceptanceReport, load_report
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.run_folder import PAGE, REPORT
from draftsmith.train.regeneration.store import write_json

IDS = "trackers.json"  # in the run's folder
PREFIX = "acceptance/"  # of the report's results


def require(recipe: Recipe) -> None:
    """ConfigError names a tracker that is not installed."""
    for name in recipe.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed; pip install 'draftsmith[{name}]' or remove it",
                where="trackers",
            )


def start(recipe: Recipe, accelerator: Accelerator) -> None:
    """Begins the recipe's trackers, or goes on with those of an earlier start of this run."""
    if not recipe.trackers:
        return
    offline_without_a_key()
    folder = Path(recipe.output_dir)
    options: dict[str, dict[str, Any]] = {}
    if accelerator.is_main_process:
        known = json.loads((folder / IDS).read_text()) if (folder / IDS).is_file() else {}
        run = known.get("run") or uuid4().hex[:12]
        if not known:
            write_json(folder / IDS, {"run": run})
        name = f"{recipe.name} {run}"
        options = {
            "wandb": {"id": run, "name": recipe.name, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": name, "resume": "allow", "embed": False, "auto_log_gpu": False},
        }
    accelerator.init_trackers(recipe.project, config=_flat(recipe), init_kwargs=options)


def offline_without_a_key() -> None:
    """Sets wandb offline where it has no key: it would ask for one, or fail."""
    if not (os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()):
        os.environ.setdefault("WANDB_MODE", "offline")


def log_report(recipe: Recipe, accelerator: Accelerator, step: int) -> None:
    """The acceptance report of a run that is done: its results, and the path of its page."""
    folder = Path(recipe.output_dir)
    if accelerator.is_main_process and accelerator.trackers and (folder / REPORT).is_file():
        page = {f"{PREFIX}report": str((folder / PAGE).resolve())}
        accelerator.log(summary_of(load_report(folder / REPORT)) | page, step=step)


def summary_of(report: AcceptanceReport) -> dict[str, Any]:
    """The report's summary, and the acceptance length of every workload: names that all trackers
    take."""
    results = {
        f"{PREFIX}{k}": float(v) for k, v in report.summary.items() if isinstance(v, int | float)
    }
    for cell in report.own_cells():
        results[f"{PREFIX}t{cell.temperature:g}/{cell.workload}"] = float(cell.acceptance_length)
    return results


def _flat(recipe: Recipe) -> dict[str, int | float | str | bool]:
    """Every key of the recipe under its dotted name; lists and nulls as JSON."""
    flat: dict[str, int | float | str | bool] = {"recipe_hash": recipe.recipe_hash()}

    def put(name: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                put(f"{name}.{key}" if name else str(key), inner)
        else:
            flat[name] = value if isinstance(value, int | float | str | bool) else json.dumps(value)

    put("", recipe.model_dump(mode="json"))
    return flat
