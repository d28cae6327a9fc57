"""The acceptance report: cells agree with their counters, files round-trip, page and table are
complete, and two engines are told apart."""

from __future__ import annotations

import io
import json
import math
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from draftsmith.inference.report.build import Bound, build_report, check_gates, lay_beside
from draftsmith.inference.report.html import render_html
from draftsmith.inference.report.measurement import (
    Measurement,
    compiled_rounds,
    make_cell,
    position_bins,
)
from draftsmith.inference.report.schema import (
    SUMMARY_KEYS,
    AcceptanceReport,
    load_report,
    save_report,
)
from draftsmith.inference.report.speed import estimate, rates
from draftsmith.inference.report.table import how_timed, markdown, new_table, notes, print_report
from draftsmith.speculators.errors import ConfigError, DataError
from tests.support.errors import raises_at
from tests.support.reports import (
    WORKLOADS,
    K,
    bare_report,
    in_engine,
    make_measurement,
    make_request,
    passes,
    provenance,
    replay_of,
    request,
    with_suite,
)


def printed(report: AcceptanceReport, width: int = 80) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def test_pool_is_made_of_sums_not_of_means(report: AcceptanceReport) -> None:
    pooled = report.cell("all", 0.0)
    parts = [report.cell(workload, 0.0) for workload in WORKLOADS]
    rounds, accepted = sum(p.num_drafts for p in parts), sum(p.num_accepted_tokens for p in parts)
    assert pooled.num_drafts == rounds and pooled.prompts == 12 * len(WORKLOADS)
    assert pooled.acceptance_length == 1 + accepted / rounds
    assert [check.checked_prompts for check in pooled.lossless] == [pooled.prompts] * 2
    lengths = [part.acceptance_length_macro for part in parts]
    assert pooled.acceptance_length_macro == pytest.approx(sum(lengths) / len(parts))


def test_pool_lacks_what_one_workload_lacks() -> None:
    whole, bare = make_measurement("x", 0.0, 0.5), Measurement("y", 0.0, "eagle3", K)
    bare.requests = whole.requests
    cell = make_cell([whole, bare], "all")
    absent = (cell.expected, cell.speedup_vs_autoregressive)
    assert absent == (None, None) and not cell.passes
    assert cell.num_drafts == 2 * whole.cell().num_drafts


# ---------------------------------------------------------------------------------- speed

ON = {"a": 1.0, "b": 2.0, "c": 4.0}  # seconds of 200 tokens
OFF = {"a": 2.0, "b": 3.0, "c": 9.0}


def speed_report(stalls: dict[tuple[str, str, int], float], repeats: int = 3) -> AcceptanceReport:
    """Three workloads; `stalls`: (kind, workload, repeat) -> seconds longer."""
    measured = []
    for workload in ON:
        kinds = {}
        for kind, seconds in (("speculative", ON), ("autoregressive", OFF)):
            times = [
                seconds[workload] + stalls.get((kind, workload, i), 0.0) for i in range(repeats)
            ]
            kinds[kind] = passes(workload, 200, times)
        measured.append(Measurement(workload, 0.0, "eagle3", K, [request([2, 1, 0])], passes=kinds))
    return build_report(measured, provenance())


def test_repeat_in_which_the_machine_paused_moves_no_result() -> None:
    calm = speed_report({})
    shaken = speed_report({("autoregressive", "a", 0): 60.0, ("speculative", "b", 2): 45.0})
    for workload in (*ON, "all"):
        a, b = (r.cell(workload, 0).tokens_per_second["speculative"] for r in (calm, shaken))
        assert a.value == pytest.approx(b.value)
    pooled = shaken.cell("all", 0)
    assert pooled.tokens_per_second["speculative"].value == pytest.approx(600 / 7)
    assert pooled.tokens_per_second["autoregressive"].value == pytest.approx(600 / 14)
    assert pooled.speedup_vs_autoregressive.value == pytest.approx(2.0)


def test_spread_is_that_of_the_repeats_and_the_machines_drift_cancels() -> None:
    """Both kinds slow down alike from repeat to repeat: rates vary, their quotient does not."""
    seconds = {"on": [1.0, 2.0, 4.0], "off": [2.0, 4.0, 8.0]}
    draws = rates({kind: passes("w", 100, times) for kind, times in seconds.items()}, "on")
    ratio, rate = (estimate(x, 3) for x in (draws["on"] / draws["off"], draws["on"]))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (rate.value, rate.low, rate.high) == pytest.approx((50.0, 25.0, 100.0))
    percent = estimate(np.array([50.0, *range(101)]), 3)  # the estimate, and 101 draws
    assert (percent.value, percent.low, percent.high) == pytest.approx((50.0, 5.0, 95.0))


@pytest.mark.parametrize("repeats", [1, 2])
def test_speedup_below_three_repeats_has_no_interval(repeats: int) -> None:
    report = speed_report({}, repeats)
    cell = report.cell("all", 0)
    for speed in (cell.speedup_vs_autoregressive, *cell.tokens_per_second.values()):
        assert (speed.low, speed.high) == (None, None)
    passes = {1: "one pass", 2: "two passes"}[repeats]
    assert f"2.00 ({passes})" in printed(report)
    page = render_html(report)
    assert page.count(f"2.00 ({passes})") == 2 and f"{passes} · " in page  # a, all; the headline
    assert '"low":null' in report.model_dump_json()


@pytest.mark.parametrize(
    ("drafted", "off", "expected"),
    [
        ([1.0, 1.0], [1.0, 1.0], "rounds: compiled"),
        ([0.0, 0.0], [1.0, 1.0], "rounds: eager with drafting, compiled without"),
        ([0.5, 1.0], [1.0, 1.0], "rounds: 75% compiled with drafting, compiled without"),
        ([None, None], [None, None], ""),
    ],
)
def test_how_timed_rounds_ran_is_in_table_page_and_card(drafted, off, expected) -> None:
    measurement = make_measurement("chat", 0.0, 0.8)
    for kind, shares in (("speculative", drafted), ("autoregressive", off)):
        runs = measurement.passes[kind]
        measurement.passes[kind] = [
            run.model_copy(update={"compiled_rounds": share})
            for run, share in zip(runs, shares, strict=False)
        ]
    report = build_report([measurement], provenance())
    assert how_timed(report) == expected
    page = render_html(report)
    assert any(expected in line for line in notes(report)) and expected in page


def test_compiled_rounds_of_responses_are_a_share() -> None:
    metrics = [request([1, 2, 0, 1]).metrics, request([3, 0]).metrics]
    assert compiled_rounds(metrics) is None
    metrics[0].num_compiled_rounds = 3
    metrics[1].num_compiled_rounds = 0
    assert compiled_rounds(metrics) == 0.5


def test_pass_that_stalled_is_named_with_its_effect() -> None:
    stalls = {("autoregressive", "a", 1): 60.0}
    named = "T=0, a, without drafting: pass 2 of {} took 31.0 times the median of its kind"
    for repeats, effect in ((2, "it counts"), (3, "the median leaves it out")):
        report = speed_report(stalls, repeats)
        (line,) = (line for line in notes(report) if "median of its kind" in line)
        assert named.format(repeats) in line and effect in line
    assert "median of its kind" not in "".join(notes(speed_report({})))


def test_notes_say_how_many_tokens_were_timed() -> None:
    assert any(
        ": 200 tokens per workload and pass; passes: 3" in n for n in notes(speed_report({}))
    )


# ---------------------------------------------------------------------------------- acceptance


def test_rounds_without_a_draft_count_for_tokens_per_forward_alone() -> None:
    """One τ: the bins' rounds are those of the headline, so no part can lie below the whole."""
    one = request([4, 0, 0, 2, 0], [4, 0, 0, 4, 0], prompt=60)
    measured = Measurement("x", 0.0, "ngram", K, [one, request([0, 0], [0, 0], prompt=9)])
    cell = measured.cell()
    assert (cell.num_rounds, cell.num_drafts, cell.num_accepted_tokens) == (7, 2, 6)
    assert cell.acceptance_length == 4.0
    assert cell.tokens_per_forward == pytest.approx(1 + 6 / 7)
    undrafted = Measurement("x", 0.0, "eagle3", K, [request([])]).cell()
    lengths = (undrafted.tokens_per_forward, undrafted.acceptance_length_macro)
    assert lengths == (1, undrafted.acceptance_length) == (1, 1)
    cut = request([4, 1], tokens=7)  # of the last verification one token was written, not two
    assert Measurement("x", 0.0, "eagle3", K, [cut]).cell().tokens_per_forward == 6 / 2
    assert cell.joint_acceptance_per_position == [1.0, 1.0, 0.5, 0.5]
    assert cell.conditional_acceptance_per_position == [1.0, 1.0, 0.5, 1.0]
    bins = cell.acceptance_by_position
    assert sum(b.rounds for b in bins) == cell.num_drafts
    assert [(b.start, b.acceptance_length) for b in bins] == [(32, 5.0), (64, 3.0)]
    whole = build_report([measured], provenance(drafter_method="ngram"))
    assert "drafted in 29 % of the rounds" in printed(whole)


def test_positions_follow_the_anchors_from_the_prompts_start() -> None:
    known = request([3, 0, 2], prompt=60)  # anchors at output tokens 0, 4, 5
    silent = request([3, 0, 2], prompt=60)
    silent.metrics.drafted_per_round = []  # an engine that does not tell
    bins = position_bins([known, silent])
    assert [(b.start, b.rounds, b.acceptance_length) for b in bins] == [(32, 1, 4.0), (64, 2, 2.0)]


def test_standard_error_is_the_scatter_of_repeated_evaluations() -> None:
    rng = random.Random(1)
    differences, errors = [], []
    for _ in range(150):
        requests = [make_request(rng, 0.7, length=40) for _ in range(30)]
        replay = replay_of([make_request(rng, 0.7, length=40) for _ in range(30)])
        cell = Measurement("x", 1.0, "eagle3", K, requests, replay=replay).cell()
        differences.append(cell.expected.relative_difference)
        errors.append(cell.expected.standard_error)
    scatter = math.sqrt(sum(d * d for d in differences) / len(differences))
    assert scatter == pytest.approx(sum(errors) / len(errors), rel=0.2)
    same = make_measurement("x", 0.0, 0.7).cell().expected  # replay sees the same rounds
    assert (same.relative_difference, same.standard_error) == pytest.approx((0, 0), abs=1e-12)


def test_gates_are_met_or_missed(report: AcceptanceReport) -> None:
    verdicts = {gate.name: gate.passed for gate in report.gates}
    assert verdicts == {
        "lossless_mismatches": True,
        "t0.acceptance_length": True,
        "t1.speedup_vs_autoregressive": False,
    }
    assert not report.passed
    assert check_gates({"a": 3.0}, {"a": Bound(min=3.0, max=3.0)})[0].passed
    with raises_at(ConfigError, "gates.speed"):
        check_gates(report.summary, {"speed": Bound(min=1)})


# ---------------------------------------------------------------------------------- file and views


def test_report_is_saved_whole_and_loads(report: AcceptanceReport, tmp_path: Path) -> None:
    path = save_report(report, tmp_path / "deep" / "acceptance.json")
    assert load_report(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["acceptance.json"]
    assert "NaN" not in path.read_text(encoding="utf-8")
    raw = json.loads(report.model_dump_json()) | {"schema_version": "9.9"}
    for text in (json.dumps(raw), "{"):
        path.write_text(text)
        with raises_at(DataError, path):
            load_report(path)


def test_every_summary_key_is_documented(report: AcceptanceReport) -> None:
    keys = lay_beside(in_engine(report), in_engine(report, "vllm")).summary
    assert {re.sub(r"^t[\d.]+\.", "t<T>.", key) for key in keys} == set(SUMMARY_KEYS)


def test_page_is_self_contained_and_complete(report: AcceptanceReport, tmp_path: Path) -> None:
    page = render_html(report)
    assert not re.search(r"https?:|//cdn|@import|<link|<script|src=\"(?!data:)", page)
    for text in [*WORKLOADS, "Provenance", "t1.speedup_vs_autoregressive"]:
        assert text in page
    assert f"{report.cell('all', 0.0).acceptance_length:.2f}" in page
    assert page.count("<img") == 3  # speedup, acceptance by position at two temperatures
    bare = render_html(bare_report())
    assert "busy &lt;b&gt; $x$" in bare and "<b>" not in bare and "not timed" in bare


def test_figures_of_workloads_with_long_names_keep_their_room() -> None:
    """The whole names are in the table."""
    names = [f"{'long ' * 80}{end}" for end in ("one", "two")]
    report = build_report([make_measurement(name, 0.0, 0.8) for name in names], provenance())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, of axes that collapse
        page = render_html(report)
    assert all(name in page for name in names)


def test_markdown_names_are_text_whatever_is_in_them() -> None:
    (*_, line) = markdown(["name", "n"], [["a|<img src=x>\n| b", "1"]]).splitlines()
    assert line == "| a\\|&lt;img src=x&gt; \\| b | 1 |"


def test_page_shows_only_pooled_rows_as_pooled() -> None:
    report = build_report([make_measurement("recall", 0.0, 0.8)], provenance())
    assert render_html(report).count('<tr class="all">') == 1


def test_table_fits_a_terminal(report: AcceptanceReport) -> None:
    text = printed(with_suite(report, "spec_bench"))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in (*WORKLOADS, "math_reasoning"):
        assert re.search(rf"^\W*{name} ", text, re.MULTILINE), f"{name} is cut or missing"
    assert "missed" in text and "…" not in text and "silent" in printed(bare_report())


def test_suites_stand_beside_the_evaluations_own_prompts(report: AcceptanceReport) -> None:
    """They change no headline figure; each has its own `all`, in the file, the page and the
    table."""
    both = with_suite(report, "spec_bench")
    assert both.headline == report.results and both.workloads() == report.workloads()
    part = both.of_suite("spec_bench")
    assert part.workloads() == ["summarization", "math_reasoning", "all"]
    pooled = part.cell("all", 0.0)
    assert pooled.num_drafts == sum(part.cell(w, 0.0).num_drafts for w in part.workloads()[:2])
    assert pooled.acceptance_length < pooled.acceptance_length_macro, (
        "hard requests take more verifications"
    )
    page, text = render_html(both), printed(both)
    (facts,) = both.suites
    assert "spec_bench/summarization" in page and facts.sha256 in page
    assert "spec_bench: eagle3" in text and "enable_thinking: False" in " ".join(text.split())
    rates = " +".join(f"{100 * rate:.1f}" for rate in pooled.conditional_acceptance_per_position)
    assert re.search(rf"conditional +0 +{rates}", text)
    alone = build_report([replace(make_measurement("qa", 0.0, 0.7), suite="s")], provenance())
    assert alone.workloads() == ["qa", "all"]
    assert alone.summary["t0.acceptance_length"] == alone.cell("all", 0.0).acceptance_length


# ---------------------------------------------------------------------------------- two engines


def test_engines_stand_beside_each_other_where_they_sample_alike(report) -> None:
    both = lay_beside(in_engine(report), in_engine(report, "vllm", 1.25))
    assert both.engines() == ["draftsmith", "vllm"] and both.provenance.engine == "draftsmith"
    tau = report.cell("all", 0).acceptance_length
    assert both.cell("all", 0).acceptance_length == tau
    assert both.cell("all", 0, "vllm").acceptance_length == 1.25 * tau
    assert printed(both).count("in vllm") == len(report.results)
    assert "<td>vllm</td>" in render_html(both)
    assert both.summary["t0.vllm_acceptance_length"] == 1.25 * tau
    gaps = ("vllm_gap", "t0.vllm_gap", "t1.vllm_gap")
    assert [both.summary[gap] for gap in gaps] == pytest.approx([0.25] * 3)
    other = lay_beside(in_engine(report), in_engine(report, "vllm", sampled="greedy")).summary
    assert "t0.vllm_gap" in other and "t1.vllm_gap" not in other


def test_new_table_title_wider_than_the_table_stands_in_one_line():
    table = new_table("some/long/folder/of/a/model, custom", "a", "b")
    table.add_row("1", "2")
    written = io.StringIO()
    Console(file=written, width=80).print(table)
    assert written.getvalue().splitlines()[0].strip() == "some/long/folder/of/a/model, custom"
