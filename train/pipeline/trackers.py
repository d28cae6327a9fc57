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
from accelerate.tracking import GeneralTracker

from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.processes import ask_trackers, on_first
from draftsmith.train.recipe.data_sections import CREDENTIALS
from draftsmith.train.recipe.recipe import PAGE, REPORT, Recipe, yaml_text
from draftsmith.train.recipe.sections import RunTraining
from draftsmith.train.regeneration.store import write_json

IDS = "trackers.json"  # in the run's folder
PREFIX = "acceptance/"  # of the report's results
CONFIGURE = "store_init_configuration"  # accelerate's name


def require(recipe: Recipe) -> None:
    """ConfigError names a tracker that is not installed."""
    for name in recipe.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed; pip install 'draftsmith[{name}]' or remove it",
                where="trackers",
            )


def start(recipe: Recipe, accelerator: Accelerator) -> None:
    """Begins the recipe's trackers, or goes on with those of an earlier start of this run. wandb is
    offline where it has no key, for which it would ask. ConfigError: one of them does not start."""
    if not recipe.trackers:
        return
    if not (os.environ.get("WANDB_API_KEY") or os.path.exists(os.path.expanduser("~/.netrc"))):
        os.environ.setdefault("WANDB_MODE", "offline")
    folder = Path(recipe.output_dir)
    options: dict[str, dict[str, Any]] = {}
    if accelerator.is_main_process:
        if not (folder / IDS).is_file():
            write_json(folder / IDS, {"run": uuid4().hex[:12]})
        run = json.loads((folder / IDS).read_text())["run"]
        name = f"{recipe.name} {run}"
        options = {
            "wandb": {"id": run, "name": recipe.name, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": name, "resume": "allow", "embed": False, "auto_log_gpu": False},
        }
    project = os.environ.get("WANDB_PROJECT", "draftsmith")

    def begin() -> None:
        try:
            accelerator.init_trackers(project, init_kwargs=options)
        except Exception as error:  # whatever their services may raise
            raise ConfigError(
                f"{', '.join(recipe.trackers)}: cannot be started: {type(error).__name__}: {error};"
                " mend that, or leave it out (trackers=none). WANDB_MODE=offline keeps wandb's"
                " files in the run's folder",
                where="trackers",
            ) from error

    on_first(accelerator, begin)


def log_recipe(recipe: Recipe, accelerator: Accelerator) -> None:
    """The recipe of a run: its values key by key, by which runs are filtered and grouped; its text
    for tensorboard, whose hyperparameters have no parts."""
    tree = _without_passwords(recipe.model_dump(mode="json"))
    facts = {"recipe_hash": recipe.recipe_hash()}
    ask_trackers(accelerator, CONFIGURE, facts | tree, where=_takes_parts)
    text = facts | {"recipe": yaml_text(tree)}
    ask_trackers(accelerator, CONFIGURE, text, where=lambda t: not _takes_parts(t))


def log_training(stage: str, training: RunTraining, accelerator: Accelerator) -> None:
    """How a stage of the training trains, with the values of its preset, which the recipe leaves
    open where they depend on the number of rows. `stage`: its name; empty if it is the only one."""
    key = f"training_{stage}" if stage else "training"
    values = {key: training.model_dump(mode="json")}
    ask_trackers(accelerator, CONFIGURE, values, where=_takes_parts)


def _takes_parts(tracker: GeneralTracker) -> bool:
    return tracker.name != "tensorboard"


def _without_passwords(value: Any) -> Any:
    """Plain data without the names and passwords that addresses have before their host."""
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_passwords(item) for item in value]
    return CREDENTIALS.sub("***@", value) if isinstance(value, str) else value


def log_report(recipe: Recipe, accelerator: Accelerator, step: int) -> None:
    """The acceptance report of a run that is done: its summary, the acceptance length of every
    workload, and the path of its page."""
    folder = Path(recipe.output_dir)
    if not (accelerator.is_main_process and recipe.trackers and (folder / REPORT).is_file()):
        return
    report = load_report(folder / REPORT)
    results: dict[str, Any] = {f"{PREFIX}{name}": value for name, value in report.summary.items()}
    for cell in report.own_cells():
        results[f"{PREFIX}t{cell.temperature:g}/{cell.workload}"] = cell.acceptance_length
    results[f"{PREFIX}report"] = str((folder / PAGE).resolve())
    accelerator.log(results, step=step)
