"""Which divergence on which data makes the better draft model: every pair for the embedded target, as one table.

One student, cut from the target and taught to write on the responses of the data (`undistilled`), goes on from there
with every pair for the same number of steps, and is measured in the runtime. A run that is there is not run again.

    make distill-table                                     # runs/distill/, and the table of docs/draft_model.md
    python scripts/distill_table.py --only forward_kl,tv

data: `fixed` the responses of the data, `target` those that the target wrote to its prompts, `on_policy` texts of the
student as it is, `mixed` both of the last two, from all the target's to all the student's in a straight line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inference.report.schema import load_report
from train.pipeline.compare import Candidate, Comparison, Entry, run_all

ROOT = Path(__file__).resolve().parents[1]
RECIPES = Path("recipes/quickstart/distill")
LOSSES = {
    "supervised": "cross_entropy",
    "forward_kl": "forward_kl",
    "reverse_kl": "reverse_kl",
    "jsd": "jsd",
    "tv": "tv",
}
TEXTS = "max_new_tokens: 256, prompts: 280, refresh_every: 40"  # each row is read about twice
LONG = "regenerate.max_new_tokens=256"  # as long as those of the data, so that a step has as many tokens to learn from
DATA = {
    "fixed": ("regenerate.enabled=false",),
    "target": (LONG,),
    "on_policy": ("regenerate.enabled=false", f"on_policy={{share: 1.0, {TEXTS}}}"),
    "mixed": (
        LONG,
        f"on_policy={{share: {{start: 0.0, end: 1.0}}, {TEXTS}}}",
    ),
}
BASE = "undistilled"
BEGIN, END = "<!-- distill:begin -->", "<!-- distill:end -->"


def candidates(out: Path, losses: list[str]) -> list[Candidate]:
    """The base, then every pair; supervised learning has a token to learn only where somebody else wrote the text."""
    quick = ("evaluation.lossless_check=false",)
    found = [Candidate(BASE, RECIPES / "base.yaml", quick)]
    for name in losses:
        for data, changes in DATA.items():
            if name == "supervised" and data not in ("fixed", "target"):
                continue
            start = f"drafter.init_from={out / BASE / 'export'}"
            loss = f"loss={{{LOSSES[name]}: 1.0}}"
            found.append(Candidate(f"{name}-{data}", RECIPES / "student.yaml", (*quick, start, loss, *changes)))
    return found


def table(comparison: Comparison, out: Path) -> str:
    """A row a run, and the best of each column in bold."""
    temperatures = list(comparison.entries[0].temperatures)
    heads, figures = ["divergence", "data"], []
    for t in temperatures:
        heads += [f"τ T={t}", f"expected T={t}", f"speedup T={t}", f"limit T={t}"]
    for entry in comparison.entries:
        report = load_report(out / entry.name / "acceptance.json")
        cells: list[float] = []
        for t, at in entry.temperatures.items():
            limit = report.summary[f"t{t}.speedup_vs_autoregressive"] / report.summary[f"t{t}.efficiency"]
            cells += [at.acceptance_length, at.expected_acceptance_length, at.speedup_vs_autoregressive or 0.0, limit]
        figures.append(cells)
    best = [max(column) for column in zip(*figures, strict=True)]
    lines = [" | ".join([*heads, "seconds"]), " | ".join(["---", "---", *["---:"] * (len(best) + 1)])]
    for entry, cells in zip(comparison.entries, figures, strict=True):
        shown = [f"**{x:.2f}**" if x == top else f"{x:.2f}" for x, top in zip(cells, best, strict=True)]
        lines.append(" | ".join([*_labels(entry), *shown, f"{entry.training_seconds:.0f}"]))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _labels(entry: Entry) -> list[str]:
    name, _, data = entry.name.partition("-")
    return [name.replace("_", " "), data.replace("_", "-") or "fixed"]


def put(text: str, made: str) -> str:
    """The page with the table between its marks; ValueError if they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def main(
    only: Annotated[str, typer.Option(help="Divergences, with commas between; empty: all.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/distill"),
    page: Annotated[Path, typer.Option(help="The page to write into.")] = ROOT / "docs/draft_model.md",
) -> None:
    """Run what is missing and write the table."""
    comparison = run_all(candidates(out, only.split(",") if only else list(LOSSES)), None, out)
    made = table(comparison, out)
    typer.echo(made)
    if page.exists() and not only:
        page.write_text(put(page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
