"""Trackers besides the run's folder: wandb, trackio and tensorboard, through accelerate.

A run that is continued goes on under the same id, which is kept in the run's folder. At the end the
acceptance report is attached: figures as a summary, the page and its data as files, a table and a
chart, as far as each tracker has them."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate import Accelerator

from inference.report.schema import AcceptanceReport, load_report
from inference.report.table import TERMINAL, table_of
from speculators.errors import ConfigError
from train.recipe.recipe import Recipe
from train.recipe.run_folder import PAGE, REPORT
from train.regeneration.store import write_json

IDS = "trackers.json"  # in the run's folder
PREFIX = "acceptance/"  # of the report's figures


def require(recipe: Recipe) -> None:
    """ConfigError names a tracker that is not installed."""
    for name in recipe.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} is not installed; pip install 'draftsmith[{name}]' or remove it"
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


def attach_report(recipe: Recipe, accelerator: Accelerator, step: int) -> None:
    """The acceptance report of a run that is done, to all trackers of the main process."""
    folder = Path(recipe.output_dir)
    if (
        not accelerator.trackers
        or not accelerator.is_main_process
        or not (folder / REPORT).is_file()
    ):
        return
    report = load_report(folder / REPORT)
    for tracker in accelerator.trackers:
        _ATTACH[tracker.name](tracker.tracker, report, [folder / PAGE, folder / REPORT], step)


def summary_of(report: AcceptanceReport) -> dict[str, float]:
    """The report's summary, and the acceptance length of every workload: names that all trackers
    take."""
    figures = {
        f"{PREFIX}{k}": float(v) for k, v in report.summary.items() if isinstance(v, int | float)
    }
    for cell in report.own_cells():
        figures[f"{PREFIX}t{cell.temperature:g}/{cell.workload}"] = float(cell.acceptance_length)
    return figures


# --------------------------------------------------- each tracker; `files`: the page and its data


def _to_wandb(run: Any, report: AcceptanceReport, files: Sequence[Path], step: int) -> None:
    import wandb

    figures = summary_of(report)
    run.summary.update(figures)
    run.log(
        {"acceptance/report": wandb.Html(files[0].read_text(encoding="utf-8"), inject=False)},
        step=step,
    )
    artifact = wandb.Artifact(f"acceptance-{run.id}", type="acceptance-report", metadata=figures)
    for path in files:
        artifact.add_file(str(path))
    run.log_artifact(artifact)


def _to_tensorboard(run: Any, report: AcceptanceReport, files: Sequence[Path], step: int) -> None:
    for name, value in summary_of(report).items():
        run.add_scalar(name, value, step)
    run.add_text("acceptance/report", as_markdown(report), step)
    run.flush()


def _to_trackio(run: Any, report: AcceptanceReport, files: Sequence[Path], step: int) -> None:
    import trackio

    run.log(
        {**summary_of(report), "acceptance/report": trackio.Markdown(as_markdown(report))},
        step=step,
    )


_ATTACH = {"wandb": _to_wandb, "tensorboard": _to_tensorboard, "trackio": _to_trackio}


def as_markdown(report: AcceptanceReport) -> str:
    """A line per workload and temperature, and the gates."""
    gates = [f"- {'passed' if gate.passed else '**missed**'}: {gate.name}" for gate in report.gates]
    return "\n".join([table_of(report.own_cells(), TERMINAL), "", *gates])


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
