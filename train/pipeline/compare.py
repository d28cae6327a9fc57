"""`draftsmith compare`: several recipes at the same budget of training time, one table and one
picture.

Every recipe is run as it stands but for its budget, its folder and its gates; the figures are those
of its own acceptance report. A run that is done already is not repeated."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inference.report.charts import GRID, INK, PALETTE
from inference.report.measurement import ALL_WORKLOADS
from inference.report.schema import AcceptanceReport, load_report
from speculators.errors import ConfigError, DraftsmithError
from speculators.export.headers import FLOATS, read_headers
from train.pipeline.run import checkpoints
from train.recipe.load import load_recipe
from train.recipe.recipe import Recipe
from train.recipe.run_folder import EXPORT, REPORT
from train.trainer import checkpoint

FILE, PICTURE = "comparison.json", "comparison.png"


class Record(BaseModel):
    """Base of the models of comparison.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AtTemperature(Record):
    """Figures over all workloads at one temperature."""

    expected_acceptance_length: float = Field(
        description="by replay of the text that drafting wrote"
    )
    acceptance_length: float = Field(description="measured in the runtime")
    expected_measured_gap: float = Field(
        description="|expected - measured| / measured, over the text of the measured runs"
    )
    speedup_vs_autoregressive: float | None = Field(description="same engine with drafting off")
    draft_share: float | None = Field(description="of the drafted runs' time")


class Entry(Record):
    """One drafter."""

    name: str
    family: str
    recipe: str
    recipe_sha256: str
    parameters: int = Field(description="numbers in the exported weights")
    training_seconds: float = Field(description="spent in training steps, all stages")
    training_steps: int
    temperatures: dict[str, AtTemperature]


class Comparison(Record):
    """The whole of `comparison.json`."""

    schema_version: Literal["1.0"] = "1.0"
    created_at: str
    minutes: float | None = Field(
        description="budget of training time given to each; null: the recipes' own"
    )
    num_speculative_tokens: int
    entries: list[Entry]


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison: a recipe with overrides."""

    name: str
    recipe: Path
    overrides: tuple[str, ...] = ()


def run_all(candidates: Sequence[Candidate], minutes: float | None, out: Path) -> Comparison:
    """Runs every candidate for `minutes` of training (None: its recipe's own budget), one after the
    other, gathers the figures and writes them to `out`.

    ConfigError if two of them have the same name, or measure another number of drafts or other
    temperatures; DraftsmithError names a run that failed."""
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"compare: recipes are told apart by their file names, got {', '.join(names)}"
        )
    planned = [(candidate, *_budgeted(candidate, minutes, out)) for candidate in candidates]
    measured = {
        (r.evaluation.num_speculative_tokens, tuple(r.evaluation.temperatures))
        for _, _, r in planned
    }
    if len(measured) > 1:
        raise ConfigError(
            "compare: evaluation.num_speculative_tokens and evaluation.temperatures must be the"
            f" same in all recipes, got {sorted(measured)}; give one as an override"
        )
    for candidate, changes, recipe in planned:
        if not _is_done(recipe):
            _run(candidate.recipe, changes)
    comparison = Comparison(
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        minutes=minutes,
        num_speculative_tokens=planned[0][2].evaluation.num_speculative_tokens,
        entries=[_entry(candidate, recipe) for candidate, _, recipe in planned],
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(comparison.model_dump_json(indent=2) + "\n")
    draw(comparison, out / PICTURE)
    return comparison


def _budgeted(candidate: Candidate, minutes: float | None, out: Path) -> tuple[list[str], Recipe]:
    """The overrides that give a recipe its budget and folder, and the recipe with them. Stages
    share the budget in proportion to their steps, or equally."""
    path, overrides = candidate.recipe, candidate.overrides
    given = load_recipe(path, overrides)
    changes = [
        *overrides,
        f"name={given.name}",
        f"output_dir={out / candidate.name}",
        f"regenerate.cache_dir={out / 'responses'}",
        "gates={}",
    ]
    if minutes is None:
        return changes, load_recipe(path, changes)
    changes += ["training.steps=null", "training.epochs=null", f"training.max_minutes={minutes:g}"]
    steps = [stage.training.get("steps") for stage in given.stages]
    fractions = [s / sum(steps) for s in steps] if all(steps) else [1 / len(steps)] * len(steps)
    for i, fraction in enumerate(fractions):
        budget = {"steps": None, "epochs": None, "max_minutes": round(fraction * minutes, 4)}
        changes.append(f"stages.{i}.training={json.dumps(given.stages[i].training | budget)}")
    return changes, load_recipe(path, changes)


def _is_done(recipe: Recipe) -> bool:
    path = Path(recipe.output_dir) / REPORT
    return path.exists() and load_report(path).provenance.recipe_sha256 == recipe.recipe_hash()


def _run(path: Path, changes: Sequence[str]) -> None:
    """Trains in a process of its own, since accelerate keeps its state for the life of a
    process."""
    code = subprocess.run(
        [sys.executable, "-m", "train.cli", "train", str(path), *changes], check=False
    ).returncode
    if code != 0:
        raise DraftsmithError(
            f"compare: {path} ended with status {code}; mend it and run the same command again"
        )


def _entry(candidate: Candidate, recipe: Recipe) -> Entry:
    folder = Path(recipe.output_dir)
    report, headers = load_report(folder / REPORT), read_headers(folder / EXPORT)
    states = [
        checkpoint.read_state(newest)
        for name, _ in recipe.training_stages()
        if (newest := checkpoint.latest(checkpoints(recipe, name or None))) is not None
    ]
    return Entry(
        name=candidate.name,
        family=recipe.family,
        recipe=candidate.recipe.as_posix(),
        recipe_sha256=recipe.recipe_hash(),
        parameters=sum(math.prod(h.shape) for h in headers.values() if h.dtype in FLOATS.values()),
        training_seconds=round(sum(state.seconds for state in states), 1),
        training_steps=sum(state["step"] for state in states),
        temperatures={f"{t:g}": _at(report, t) for t in report.temperatures()},
    )


def _at(report: AcceptanceReport, temperature: float) -> AtTemperature:
    cell, prefix = report.cell(ALL_WORKLOADS, temperature), f"t{temperature:g}."
    assert cell is not None and cell.expected is not None
    return AtTemperature(
        expected_acceptance_length=cell.expected.acceptance_length,
        acceptance_length=cell.acceptance_length,
        expected_measured_gap=report.summary[f"{prefix}expected_measured_gap"],
        speedup_vs_autoregressive=report.summary.get(f"{prefix}speedup_vs_autoregressive"),
        draft_share=cell.time_shares["draft"] if cell.time_shares else None,
    )


def _columns(comparison: Comparison, expected: str, speedup: str) -> list[str]:
    return [
        f"{name} T={t}"
        for t in comparison.entries[0].temperatures
        for name in (expected, "τ", speedup)
    ]


def rows(comparison: Comparison) -> list[list[str]]:
    """For every drafter: name, parameters, steps, three figures per temperature, the fraction of
    time in drafting."""
    table = []
    for entry in comparison.entries:
        cells = [entry.name, f"{entry.parameters / 1e6:.2f} M", f"{entry.training_steps:,}"]
        for at in entry.temperatures.values():
            speedup = at.speedup_vs_autoregressive
            cells += [f"{at.expected_acceptance_length:.2f}", f"{at.acceptance_length:.2f}"]
            cells += [f"{speedup:.2f}" if speedup else "-"]
        fraction = next(iter(entry.temperatures.values())).draft_share
        table.append([*cells, f"{100 * fraction:.0f} %" if fraction is not None else "-"])
    return table


def markdown(comparison: Comparison) -> str:
    """The table as Markdown."""
    heads = [
        "drafter",
        "parameters",
        "steps",
        *_columns(comparison, "τ expected", "speedup"),
        "draft share",
    ]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows(comparison)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _title(comparison: Comparison) -> str:
    budget = (
        f"{comparison.minutes:g} minutes of training each, "
        if comparison.minutes is not None
        else ""
    )
    return f"{budget}K = {comparison.num_speculative_tokens}"


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table on a terminal, within 80 columns for two temperatures: exp is τ expected, × the
    speedup."""
    title = _title(comparison)
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for i, heading in enumerate(
        ["drafter", "size", "steps", *_columns(comparison, "exp", "×"), "draft"]
    ):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows(comparison):
        table.add_row(*row)
    console.print(table)


def draw(comparison: Comparison, path: Path) -> None:
    """Acceptance length (bars: measured, dots: expected) and speedup of every drafter, best
    first."""
    temperatures = list(comparison.entries[0].temperatures)
    entries = sorted(
        comparison.entries, key=lambda e: e.temperatures[temperatures[0]].acceptance_length
    )
    figure = Figure(figsize=(9.6, 1.4 + 0.55 * len(entries)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(temperatures)
    for i, t in enumerate(temperatures):
        places = [y + 0.4 - (i + 0.5) * height for y in range(len(entries))]
        at = [entry.temperatures[t] for entry in entries]
        left.barh(
            places,
            [a.acceptance_length for a in at],
            height,
            color=PALETTE[i % 4],
            label=f"T = {t}",
        )
        left.plot(
            [a.expected_acceptance_length for a in at], places, "o", ms=4, mfc="white", mec=INK
        )
        right.barh(
            places, [a.speedup_vs_autoregressive or 0.0 for a in at], height, color=PALETTE[i % 4]
        )
    left.set_yticks(range(len(entries)), [f"{e.name}\n{e.parameters / 1e6:.1f} M" for e in entries])
    left.set_xlabel("acceptance length (dots: expected)")
    right.set_xlabel("speedup over no drafting")
    for axes in (left, right):
        axes.axvline(1.0, color=INK, lw=0.8, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=GRID, lw=0.6)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside upper right",
        ncols=len(temperatures),
        frameon=False,
    )
    figure.suptitle(_title(comparison), x=0.02, ha="left")
    figure.savefig(path)
