"""The tables of scripts/bench_draft_length.py, on times that are known."""

from __future__ import annotations

import json

import pytest

from inference.report.measurement import TimedRun
from scripts.bench_draft_length import ADAPTIVE, crossed, keep, rates


def timed(*seconds: float) -> list[TimedRun]:
    return [TimedRun(tokens=100, seconds=each) for each in seconds]


def test_luck_does_not_choose_what_it_is_judged_by():
    """Two lengths that are alike but for one lucky response each, beside one that is never lucky
    and as fast."""
    lucky = {"K=1": [timed(0.5), timed(1.0)], "K=2": [timed(1.0), timed(0.5)]}
    runs = {"w": {**lucky, ADAPTIVE: [timed(1.0), timed(1.0)]}}
    assert rates(runs, min)["w"][ADAPTIVE] < 0.8 * max(
        rates(runs, min)["w"][name] for name in lucky
    )
    found = crossed(
        runs
    )  # K=1 is chosen where it took 0.5, and takes 1.0 in the other half; so does K=2
    assert found["w"][ADAPTIVE] == pytest.approx(1.0) and found["all"] == pytest.approx(found["w"])


def test_what_is_slower_in_every_response_is_so_by_as_much():
    runs = {
        "w": {
            "K=1": [timed(1.0, 1.1), timed(2.0, 2.1)],
            ADAPTIVE: [timed(1.25, 1.375), timed(2.5, 2.625)],
        }
    }
    assert crossed(runs)["w"] == pytest.approx({"K=1": 1.0, ADAPTIVE: 0.8})


def test_times_are_kept(tmp_path):
    keep({"w": {"K=1": [timed(1.0, 1.5)]}}, tmp_path / "a" / "times.json")
    assert json.loads((tmp_path / "a" / "times.json").read_text()) == {
        "rates": {"all": {"K=1": 80.0}, "w": {"K=1": 80.0}},
        "other_half": None,
        "times": {"w": {"K=1": [[[100, 1.0], [100, 1.5]]]}},
    }
