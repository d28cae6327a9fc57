"""The README's table of results names figures that reports have, and takes them from a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.report.schema import SUMMARY_KEYS
from scripts.measuring import put_between
from scripts.readme_results import ROW, fill

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_every_row_names_a_figure_of_the_summary():
    keys = [match["key"] for match in ROW.finditer(README)]
    assert len(keys) >= 7 and set(keys) <= set(SUMMARY_KEYS)


def test_rows_are_filled_by_key_and_nothing_else_changes():
    summary = {key.replace("<T>", str(t)): 2.5 + t for key in SUMMARY_KEYS for t in (0, 1)}
    filled = fill(README, summary)
    assert "| acceptance length τ, measured | 2.50 | 3.50 | `t<T>.acceptance_length` |" in filled
    assert fill(filled, summary) == filled and len(filled.splitlines()) == len(README.splitlines())
    with pytest.raises(KeyError):
        fill(README, {})


def test_a_comparison_stands_between_its_marks():
    once = put_between(README, "comparison", "| a |\n")
    assert "| a |" in once and put_between(once, "comparison", "| b |\n") == put_between(
        README, "comparison", "| b |\n"
    )
    with pytest.raises(ValueError, match="comparison:begin"):
        put_between("no marks", "comparison", "")
