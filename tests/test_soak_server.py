"""The soak: what it must notice, and a few seconds of it."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.soak_server import Found, Tally, app, growth, violations

TARGET = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "target"


def sound() -> Found:
    """One without a violation."""
    exact = Tally(
        complete=3, reasons=Counter(stop=1, length=3), prompt_tokens=40, generation_tokens=30
    )
    exact.drafting = Counter(num_drafts=5, num_draft_tokens=20, num_accepted_tokens=7)
    rough = Tally(complete=2, hung_up=1, hung_up_responses=2, hung_up_tokens=20)
    rough.reasons, rough.generation_tokens = Counter(length=2), 16
    server = {f"request_success {reason}": 0.0 for reason in ("stop", "length", "abort", "error")}
    told = {
        "request_success stop": 1.0,
        "request_success length": 3.0,
        "prompt_tokens": 40,
        "generation_tokens": 30,
    }
    drafted = {f"spec_decode_{name}": count for name, count in exact.drafting.items()}
    whole = {
        "request_success length": 5.0,
        "request_success stop": 1.0,
        "request_success abort": 2.0,
    }
    memory = [(0.0, 50), (40.0, 100), (60.0, 103), (99.0, 101)]
    return Found(
        100.0,
        rough,
        exact,
        server | whole | {"generation_tokens": 50},
        server | told | drafted,
        memory,
        compared=9,
    )


def test_growth_is_that_after_the_warm_up():
    assert growth(sound().memory, 100.0) == pytest.approx(0.03)
    assert violations(sound(), 0.05) == [] and len(violations(sound(), 0.02)) == 1


@pytest.mark.parametrize(
    "harm, named",
    [
        (lambda f: f.rough.lost.append("no answer"), "lost: no answer"),
        (lambda f: f.exact.changed.append("greedy 3"), "changed: greedy 3"),
        (lambda f: f.server.update({"request_success error": 1.0}), "error in the server"),
        (lambda f: f.server_exact.update({"request_success stop": 2.0}), "request_success stop: 2"),
        (
            lambda f: f.server_exact.update({"request_success abort": 1.0}),
            "request_success abort: 1",
        ),
        (lambda f: f.server_exact.update({"prompt_tokens": 41}), "prompt_tokens: 41"),
        (lambda f: f.server_exact.update({"generation_tokens": 29}), "generation_tokens: 29"),
        (lambda f: f.server_exact.pop("spec_decode_num_drafts"), "num_drafts: 0 by the server, 5"),
        (
            lambda f: f.server_exact.update({"spec_decode_num_accepted_tokens": 8}),
            "num_accepted_tokens: 8",
        ),
        (lambda f: f.server.update({"request_success abort": 3.0}), "responses ended"),
        (lambda f: f.server.update({"generation_tokens": 67}), "tokens written"),
        (lambda f: f.memory.append((100.0, 120)), "resident memory"),
    ],
)
def test_what_it_notices(harm, named):
    found = copy.deepcopy(sound())
    harm(found)
    assert any(named in each for each in violations(found, 0.05))


@pytest.mark.slow
def test_a_few_seconds(interpreter, tmp_path, monkeypatch):
    """Memory is judged by the long run: a few seconds are a warm-up."""
    monkeypatch.setattr(sys, "executable", interpreter)
    saved = tmp_path / "soak.json"
    asked = [
        "--model",
        str(TARGET),
        "--seconds",
        "4",
        "--clients",
        "4",
        "--max-num-seqs",
        "3",
        "--tolerance",
        "1",
    ]
    done = CliRunner().invoke(app, [*asked, "--swap-every", "1", "--json", str(saved)])
    assert done.exit_code == 0, done.output
    found = json.loads(saved.read_text())
    assert found["violations"] == [] and found["exact"]["complete"] > 0 and found["compared"] > 0
