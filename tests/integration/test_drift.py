"""`draftsmith drift` on a tiny target: what is measured by what, and the exit code."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.progress import Stages
from draftsmith.inference.report.schema import save_report
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.inference.traffic_log.records import LoggedCounters, LoggedExchange
from draftsmith.speculators.digests import weights_sha256
from draftsmith.speculators.export import load_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline.drift import DriftSettings, drift
from draftsmith.train.pipeline.refresh import JUDGED_SINCE
from draftsmith.train.recipe.load import load_recipe
from tests.support.cli import call, refused
from tests.support.reports import make_report
from tests.support.traffic import write_counters, write_log

HOUR = 3600.0
DAY = 24 * HOUR
PER_DAY = 40


@pytest.fixture
def log(tmp_path):
    """`log(exchanges)`: the folder of a log of them alone."""
    return lambda exchanges: write_log(tmp_path / "log", exchanges)


def counted(exchanges, *accepted: int) -> list[LoggedExchange]:
    """Days of answers with counters: of ten rounds so many drafts were accepted, on each day."""
    return [
        dataclasses.replace(
            exchanges[i],
            time=day * DAY + (i + 1) * HOUR / 2,
            prompt_token_ids=None,
            messages=[{"role": "user", "content": f"{day} {i} {'apples' if i % 2 else 'garden'}"}],
            spec_decode=SpecDecodeCounters(10, 20, count + i % 2, [count + i % 2, 0]),
        )
        for day, count in enumerate(accepted)
        for i in range(PER_DAY)
    ]


def rows(output: str) -> list[list[str]]:
    """Of the table by day: requests, units, tokens, τ, its error, K, source."""
    lines = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d +(.*)", output)
    return [line.replace("±", "").split() for line in lines]


def served_since(run: Path, time: float) -> None:
    os.utime(run / "export" / "model.safetensors", (time, time))


def refreshed(run: Path, judged_since: float | None) -> None:
    """Says in the provenance of the run's head that it is of a refresh; None: of none."""
    file = run / "export" / "config.json"
    config = json.loads(file.read_text())
    config["draftsmith"][JUDGED_SINCE] = judged_since
    file.write_text(json.dumps(config))


@pytest.mark.integration
def test_counters_of_answers_are_taken_by_day_and_a_loss_is_drift(recipe, run, exchanges, log):
    served_since(run, 0.0)
    command = ("drift", recipe, "--sample", 0, "--log")
    code, output = call(*command, log(counted(exchanges, 8, 8, 8)))
    assert code == 0 and "nothing to do" in output, output
    expected = ["40", "40", "740", "1.850", "0.008", "2", "answers"]
    assert rows(output) == [expected] * 3
    code, output = call(*command, log(counted(exchanges, 8, 8, 4)))
    assert code == 1 and "47 % below the first day's" in output, output
    assert [row[3] for row in rows(output)] == ["1.850", "1.850", "1.450"]
    # of the two last days
    code, output = call(*command, log(counted(exchanges, 8, 4, 4)), "--days", 2)
    assert code == 0 and len(rows(output)) == 2, output


@pytest.mark.integration
def test_days_of_an_earlier_head_are_replayed_and_not_compared_with_counters(
    recipe, run, exchanges, log
):
    served_since(run, 2 * DAY)
    days = counted(exchanges, 8, 8, 4, 4)
    code, output = call("drift", recipe, "--log", log(days))
    assert code == 0, output
    assert [row[-1] for row in rows(output)] == ["replay", "replay", "answers", "answers"]
    assert [row[3] for row in rows(output)][2:] == ["1.450", "1.450"]


@pytest.mark.integration
def test_replay_is_of_a_sample_of_each_day(recipe, run, tiny_target, exchanges, log):
    days = [
        dataclasses.replace(exchange, time=i // 80 * DAY + i * 60.0, key=i % 80 / 80)
        for i, exchange in enumerate(exchanges)
    ]
    code, output = call("drift", recipe, "--log", log(days), "--sample", 35)
    assert [(row[0], row[1], row[-1]) for row in rows(output)] == [("80", "35", "replay")] * 2
    assert code == 0 and "nothing to do" in output, output
    target = FrozenTarget.from_pretrained(str(tiny_target), tap_layers=[1, 2, 3])
    texts = [(one.prompt_token_ids, one.token_ids) for one in exchanges[80:115]]
    head = load_drafter(run / "export", target)
    whole = sum(expected_acceptance(target, head, texts, 1.0, 2), ReplayResult())
    assert rows(output)[1][3] == f"{whole.expected_acceptance_length:.3f}"


@pytest.mark.integration
def test_words_of_prompts_are_shown_on_a_terminal_alone(recipe, run, exchanges, log):
    served_since(run, 0.0)
    settings = DriftSettings(f"{log(counted(exchanges, 8, 8))}")
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
        assert drift(load_recipe(recipe), settings, Stages(console=console)) == 0
        shown[terminal] = console.file.getvalue()
    for text in shown.values():
        assert "by cluster of prompts" in text
        assert "1.8" in text and "1.9" in text  # one of each kind of prompt
    assert "apples" in shown[True] and "garden" in shown[True]
    assert "apples" not in shown[False] and "garden" not in shown[False]


@pytest.mark.integration
def test_metrics_of_the_server_are_taken_where_answers_have_none(recipe, run, exchanges, log):
    served_since(run, 0.0)
    folder = log([dataclasses.replace(exchanges[0], time=2 * DAY)])
    grown = [
        LoggedCounters(minute * 1800.0 + 120, 60.0, SpecDecodeCounters(100, 300, count, [count]))
        for minute in range(96)
        for count in [120 if minute < 48 else 80]
    ]
    write_counters(folder, grown)
    code, output = call("drift", recipe, "--log", folder, "--sample", 0)
    assert code == 1, output
    assert [row[3] for row in rows(output)] == ["2.200", "1.800"]
    assert rows(output)[0][-1] == "/metrics"


@pytest.mark.integration
def test_what_a_refresh_trained_on_is_not_measured(recipe, run, exchanges, log):
    served_since(run, 0.0)
    folder = log(counted(exchanges, 8, 8, 4, 4))
    refreshed(run, 2 * DAY)
    code, output = call("drift", recipe, "--log", folder, "--sample", 0)
    assert code == 0 and [row[3] for row in rows(output)] == ["1.450", "1.450"], output
    refreshed(run, None)
    assert call("drift", recipe, "--log", folder, "--sample", 0)[0] == 1


@pytest.mark.integration
def test_head_that_was_not_refreshed_is_held_to_its_own_prompts(recipe, run, exchanges, log):
    """By a report of these very weights, at as many drafts a round."""
    served_since(run, 0.0)
    command = ("drift", recipe, "--sample", 0, "--log", log(counted(exchanges, 8)))
    report = make_report()
    right = {"drafter_weights_sha256": weights_sha256(run / "export"), "num_speculative_tokens": 2}

    def measured(**changes: object) -> None:
        provenance = report.provenance.model_copy(update=right | changes)
        changed = report.model_copy(update={"provenance": provenance})
        save_report(changed, run / "acceptance.json")

    measured()
    code, output = call(*command)
    assert code == 1 and "below its own prompts' at T = 1 in acceptance.json" in output, output
    for other in ({"drafter_weights_sha256": "0" * 64}, {"num_speculative_tokens": 3}):
        measured(**other)
        assert "nothing to compare" in refused(*command)
    measured()
    refreshed(run, 0.0)
    assert "nothing to compare" in refused(*command)


@pytest.mark.integration
def test_log_that_says_too_little_is_an_error(recipe, run, exchanges, log):
    served_since(run, 0.0)
    few = log(counted(exchanges, 8)[:20])
    assert "30 conversations" in refused("drift", recipe, "--log", few, "--sample", 0)
    one = log(counted(exchanges, 8))
    assert "nothing to compare" in refused("drift", recipe, "--log", one, "--sample", 0)
    other = log([dataclasses.replace(e, model="x") for e in counted(exchanges, 8)])
    assert "--served-model-name" in refused("drift", recipe, "--log", other)
    code, output = call("drift", recipe, "--log", other, "--sample", 0, "--served-model-name", "x")
    assert code == 2 and len(rows(output)) == 1
