"""Trains the draft model of the embedded target with every divergence on every kind of data, and
prints one table.

One student is cut from the target and trained on the responses of the data (`undistilled`). Each
pair continues from it for the same number of steps and is measured in the runtime. Finished runs
are kept.

    make distill-table                                     # runs/distill/
    python scripts/distill_table.py --only forward_kl,tv

data: `fixed` the responses of the data, `target` responses that the target wrote, `on_policy` texts
of the current student, `mixed` both of the last two, moving linearly from the target's to the
student's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.report.schema import load_report
from scripts.measuring import markdown
from train.pipeline.compare import Candidate, Comparison, run_all

RECIPES = Path("recipes/quickstart/distill")
LOSSES = {"supervised": "cross_entropy"} | {
    name: name for name in ("forward_kl", "reverse_kl", "jsd", "tv")
}
TEXTS = "max_new_tokens: 256, prompts: 280, refresh_every: 40"  # each row is read about twice
LONG = (  # the length of the data's responses, so that a step has as many tokens
    "regenerate.max_new_tokens=256"
)
DATA = {
    "fixed": ("regenerate.enabled=false",),
    "target": (LONG,),
    "on_policy": ("regenerate.enabled=false", f"on_policy={{share: 1.0, {TEXTS}}}"),
    "mixed": (LONG, f"on_policy={{share: {{start: 0.0, end: 1.0}}, {TEXTS}}}"),
}
BASE = "undistilled"


def candidates(out: Path, losses: list[str]) -> list[Candidate]:
    """The base, then every pair; supervised learning needs texts of another writer than the
    student."""
    quick = ("evaluation.lossless_check=false",)
    start = f"drafter.init_from={out / BASE / 'export'}"
    pairs = [
        (name, data)
        for name in losses
        for data in DATA
        if name != "supervised" or data in ("fixed", "target")
    ]
    return [Candidate(BASE, RECIPES / "base.yaml", quick)] + [
        Candidate(
            f"{name}-{data}",
            RECIPES / "student.yaml",
            (*quick, start, f"loss={{{LOSSES[name]}: 1.0}}", *DATA[data]),
        )
        for name, data in pairs
    ]


def table(comparison: Comparison, out: Path) -> str:
    """One row per run, with the best value of each column in bold."""
    headings, figures = ["divergence", "data"], []
    for t in comparison.entries[0].temperatures:
        headings += [f"τ T={t}", f"expected T={t}", f"speedup T={t}", f"limit T={t}"]
    for entry in comparison.entries:
        summary, cells = load_report(out / entry.name / "acceptance.json").summary, list[float]()
        for t, at in entry.temperatures.items():
            limit = summary[f"t{t}.speedup_vs_autoregressive"] / summary[f"t{t}.efficiency"]
            cells += [
                at.acceptance_length,
                at.expected_acceptance_length,
                at.speedup_vs_autoregressive or 0.0,
                limit,
            ]
        figures.append(cells)
    best, rows = [max(column) for column in zip(*figures, strict=True)], []
    for entry, cells in zip(comparison.entries, figures, strict=True):
        loss, _, data = entry.name.partition("-")
        shown = [
            f"**{x:.2f}**" if x == top else f"{x:.2f}" for x, top in zip(cells, best, strict=True)
        ]
        names = [loss.replace("_", " "), data.replace("_", "-") or "fixed"]
        rows.append([*names, *shown, f"{entry.training_seconds:.0f}"])
    return markdown([*headings, "seconds"], rows, left=2)


def main(
    only: Annotated[str, typer.Option(help="Divergences, comma-separated; empty: all.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/distill"),
) -> None:
    """Run what is missing and print the table."""
    typer.echo(
        table(run_all(candidates(out, only.split(",") if only else list(LOSSES)), None, out), out)
    )


if __name__ == "__main__":
    typer.run(main)
