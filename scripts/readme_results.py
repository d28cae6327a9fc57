"""Writes the figures of an acceptance report, and of a comparison, into the tables of README.md and docs/results.md.

    python scripts/readme_results.py                    # from runs/quickstart/eagle3/acceptance.json

Rows whose last cell is a key of `summary` are filled; `t<T>` stands for the temperature of the column. The table of
runs/compare/comparison.json, if it exists, goes between the `comparison` marks. Everything else stays unchanged.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.report.schema import load_report
from scripts.measuring import put_between
from train.pipeline.compare import Comparison, markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs/results.md")
ROW = re.compile(r"^\| (?P<name>[^|]+) \|[^|]*\|[^|]*\| `(?P<key>[a-z_<>T.]+)` \|$", re.MULTILINE)


def fill(text: str, summary: dict[str, float]) -> str:
    """The README with the figures of `summary`; KeyError for a row whose key is not in it."""

    def cell(key: str) -> str:
        value = summary[key]
        return f"{value:.0f}" if float(value).is_integer() or value >= 100 else f"{value:.2f}"

    def row(match: re.Match[str]) -> str:
        key = match["key"]
        cells = [cell(key.replace("<T>", str(t))) for t in (0, 1)] if "<T>" in key else [cell(key), ""]
        return f"| {match['name']} | {' | '.join(cells)} | `{key}` |".replace("|  |", "| |")

    return ROW.sub(row, text)


def main(
    report: Annotated[Path, typer.Argument(help="acceptance.json of a run.")] = ROOT
    / "runs/quickstart/eagle3/acceptance.json",
    comparison: Annotated[Path, typer.Option(help="comparison.json of `draftsmith compare`.")] = ROOT
    / "runs/compare/comparison.json",
) -> None:
    """Fill the tables of results."""
    summary = load_report(report).summary
    for page in PAGES:
        text = fill(page.read_text(encoding="utf-8"), summary)
        if comparison.exists():
            made = markdown(Comparison.model_validate_json(comparison.read_text(encoding="utf-8")))
            text = put_between(text, "comparison", made)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
