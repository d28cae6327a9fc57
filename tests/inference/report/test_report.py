"""The acceptance report: cells agree with their counters, files round-trip, page and table are
complete."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inference.report.build import (
    build_cells,
    build_report,
    check_gates,
    position_bins,
)
from inference.report.cell import Cell
from inference.report.html import render_html, write_html
from inference.report.measurement import (
    CellMeasurement,
    Costs,
    LosslessCheck,
    TokenDifference,
)
from inference.report.merge_engines import lay_beside
from inference.report.progress import training_progress
from inference.report.schema import (
    SUMMARY_KEYS,
    AcceptanceReport,
    Bound,
    Provenance,
    SuiteFacts,
    SuiteFile,
    load_report,
    save_report,
)
from inference.report.speed import Speeds, TimedPass
from inference.report.table import print_report
from inference.spec_decode.replay import ReplayResult
from speculators.errors import ConfigError, DataError

WORKLOADS = {
    "arithmetic": 0.86,
    "python": 0.83,
    "json": 0.93,
    "rewrite": 0.9,
    "table-qa": 0.78,
    "chat": 0.66,
}
K = 4


def provenance(**changes) -> Provenance:
    fields = dict(
        draftsmith_version="0.1.0",
        git_commit="0123456789abcdef0123",
        python_version="3.11.7",
        torch_version="2.13.0+cpu",
        transformers_version="5.19.0",
        platform="Linux-x86_64",
        cpu_model="Example CPU 3.0 GHz",
        cpu_cores=2,
        threads=1,
        device="cpu",
        dtype="bfloat16",
        recipe_name="quickstart/eagle3",
        recipe_sha256="ab" * 32,
        chat_template_sha256="cd" * 32,
        target_name="recipes/quickstart/target",
        target_weights_sha256="ef" * 32,
        drafter_method="eagle3",
        drafter_path="runs/quickstart/eagle3/export",
        drafter_config={"tap_layers": [2, 8, 13]},
        num_speculative_tokens=K,
        max_num_seqs=1,
        created_at="2025-01-02T03:04:05Z",
        duration_s=93.2,
        seeds=[0],
    )
    return Provenance(**(fields | changes))


def request(
    accepted: list[int], drafted: list[int] | None = None, *, prompt: int = 100, tokens: int = 0
) -> RequestOutput:
    """A response by the accepted drafts of its rounds; by default every round drafted K."""
    drafted = [K] * len(accepted) if drafted is None else drafted
    metrics = RequestMetrics(
        num_drafts=sum(count > 0 for count in drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=[sum(a > k for a in accepted) for k in range(K)],
        accepted_per_round=accepted,
        drafted_per_round=drafted,
    )
    written = tokens or 1 + sum(accepted) + len(accepted)
    completion = CompletionOutput(index=0, text="", token_ids=[7] * written)
    return RequestOutput("", None, [5] * prompt, [completion], True, metrics)


def make_request(rng: random.Random, rate: float, length: int = 96) -> RequestOutput:
    """A request whose drafts are each accepted with probability `rate`."""
    accepted: list[int] = []
    written = 1
    while written < length:
        count = 0
        while count < K and written + count < length and rng.random() < rate:
            count += 1
        accepted.append(count)
        written += count + 1
    return request(accepted, tokens=min(written, length))


def passes(workload: str, tokens: int, seconds: list[float], **counts: int) -> list[TimedPass]:
    return [
        TimedPass(workload=workload, repeat=i, tokens=tokens, seconds=s, **counts)
        for i, s in enumerate(seconds)
    ]


def replay_of(outputs: list[RequestOutput], factor=lambda: 1.0) -> list[ReplayResult]:
    return [
        ReplayResult(
            o.metrics.num_drafts * factor(),
            [float(n) for n in o.metrics.num_accepted_tokens_per_pos],
        )
        for o in outputs
    ]


def make_measurement(
    workload: str, temperature: float, rate: float, method: str = "eagle3"
) -> CellMeasurement:
    rng = random.Random(f"{workload}{temperature}{method}")
    requests = [make_request(rng, rate) for _ in range(12)]
    tokens = sum(len(output.outputs[0].token_ids) for output in requests)
    rounds = sum(output.metrics.num_drafts for output in requests)
    off = [tokens * 0.004 * rng.uniform(0.95, 1.05) for _ in range(5)]
    on = [rounds * 0.0059 * rng.uniform(0.95, 1.05) for _ in range(5)]
    hugging = [tokens * 0.0052 * rng.uniform(0.9, 1.1) for _ in range(5)]
    shares = {
        "draft": 0.2,
        "verify": 0.6,
        "sample": 0.05,
        "schedule": 0.01,
        "commit": 0.03,
        "prefill": 0.08,
    }
    check = LosslessCheck(
        dtype="float32", reference="autoregressive", checked_prompts=12, mismatches=0, ties=0
    )
    tie = TokenDifference(
        prompt="3", position=17, reference_token=5, token=9, top_two_gap=0.01, noise=0.03, tie=True
    )
    half = LosslessCheck(
        dtype="bfloat16",
        reference="autoregressive",
        checked_prompts=12,
        mismatches=0,
        ties=1,
        details=[tie],
    )
    return CellMeasurement(
        workload=workload,
        temperature=temperature,
        method=method,
        num_speculative_tokens=K,
        requests=requests,
        passes={
            "speculative": passes(workload, tokens, on),
            "autoregressive": passes(workload, tokens, off),
            "transformers_generate": passes(workload, tokens, hugging),
        },
        phase_seconds=Counter({name: share * sum(on) for name, share in shares.items()}),
        costs=Costs(
            target_step_ms=3.8, verify_ms=4.2, draft_ms=1.1, batch_size=1, context_length=128
        ),
        replay=replay_of(requests, lambda: rng.uniform(0.97, 1.03)),
        lossless=[check, half] if temperature == 0 else [],
    )


def make_report(**gates: Bound) -> AcceptanceReport:
    measurements = [
        make_measurement(workload, temperature, rate - 0.08 * temperature)
        for temperature in (0.0, 1.0)
        for workload, rate in WORKLOADS.items()
    ]
    measurements += [make_measurement("chat", t, 0.4, method="ngram") for t in (0.0, 1.0)]
    bounds = {name.replace("__", "."): bound for name, bound in gates.items()}
    return build_report(measurements, provenance(), bounds)


def history() -> list[dict]:
    return [
        {
            "step": 50 * i,
            "loss": 4 * math.exp(-i / 6) + 0.6 + 0.05 * math.sin(i),
            "expected_acceptance_length": 1 + 2.6 * (1 - math.exp(-i / 7)) if i % 3 == 0 else None,
            "acceptance_rate": [(0.9 - 0.04 * k) * (1 - math.exp(-i / 5)) for k in range(5)],
            "learning_rate": 1e-4,
        }
        for i in range(1, 31)
    ]


@pytest.fixture(scope="module")
def report() -> AcceptanceReport:
    return make_report(
        lossless_mismatches=Bound(max=0),
        t0__acceptance_length=Bound(min=3.0),
        t1__efficiency=Bound(min=2),
    )


def test_the_pool_is_made_of_sums_not_of_means(report: AcceptanceReport) -> None:
    pooled = report.cell("all", 0.0)
    parts = [report.cell(workload, 0.0) for workload in WORKLOADS]
    assert pooled.num_drafts == sum(part.num_drafts for part in parts)
    assert pooled.acceptance_length == 1 + sum(p.num_accepted_tokens for p in parts) / sum(
        p.num_drafts for p in parts
    )
    assert pooled.prompts == 12 * len(WORKLOADS)
    assert [check.checked_prompts for check in pooled.lossless] == [72, 72]


def test_the_pooled_limit_is_the_ratio_of_pooled_times() -> None:
    slow = make_measurement("slow", 0.0, 0.5)
    fast = make_measurement("fast", 0.0, 0.9)
    slow.costs = Costs(target_step_ms=10.0, verify_ms=12.0, draft_ms=4.0)
    cells = {cell.workload: cell for cell in build_cells([slow, fast])}
    parts = [cells["slow"], cells["fast"]]
    without = sum(c.acceptance_length * c.num_drafts * c.costs.target_step_ms for c in parts)
    with_drafts = sum(c.num_drafts * (c.costs.verify_ms + c.costs.draft_ms) for c in parts)
    assert cells["all"].limit_speedup == pytest.approx(without / with_drafts)


# ---------------------------------------------------------------------------------- speed

ON = {"a": 1.0, "b": 2.0, "c": 4.0}  # seconds of 200 tokens
OFF = {"a": 2.0, "b": 3.0, "c": 9.0}


def speed_report(stalls: dict[tuple[str, str, int], float]) -> AcceptanceReport:
    """Three workloads, three repeats; `stalls`: (kind, workload, repeat) -> seconds longer."""
    measured = []
    for workload in ON:
        kinds = {}
        for kind, seconds in (("speculative", ON), ("autoregressive", OFF)):
            times = [seconds[workload] + stalls.get((kind, workload, i), 0.0) for i in range(3)]
            kinds[kind] = passes(workload, 200, times)
        kinds["transformers_generate"] = passes(workload, 200, [3 * OFF[workload]] * 3)
        measured.append(
            CellMeasurement(workload, 0.0, "eagle3", K, [request([2, 1, 0])], passes=kinds)
        )
    return build_report(measured, provenance())


def test_a_stalled_repeat_moves_no_figure_and_is_reported() -> None:
    calm = speed_report({})
    stalls = {("autoregressive", "a", 0): 60.0, ("speculative", "b", 2): 45.0}
    shaken = speed_report(stalls)
    for workload in (*ON, "all"):
        assert shaken.cell(workload, 0).tokens_per_second.speculative.value == pytest.approx(
            calm.cell(workload, 0).tokens_per_second.speculative.value
        )
    pooled = shaken.cell("all", 0)
    assert pooled.tokens_per_second.speculative.value == pytest.approx(600 / 7)
    assert pooled.tokens_per_second.autoregressive.value == pytest.approx(600 / 14)
    assert pooled.speedup_vs_autoregressive.value == pytest.approx(2.0)
    assert calm.stalled_passes() == []
    words = ["a, drafting off, repeat 1", "b, drafting, repeat 3"]
    assert [word in line for word, line in zip(words, shaken.stalled_passes())] == [True] * 2
    assert len(shaken.stalled_passes()) == 2
    assert all(line in render_html(shaken) for line in shaken.stalled_passes())
    shown = " ".join(printed(shaken).split())
    assert all(line in shown for line in shaken.stalled_passes())


def test_every_speedup_is_the_quotient_of_the_rates_beside_it(report: AcceptanceReport) -> None:
    for cell in [*report.results, *speed_report({("autoregressive", "c", 1): 30.0}).results]:
        rates = cell.tokens_per_second
        for speedup, other in (
            (cell.speedup_vs_autoregressive, rates.autoregressive),
            (cell.speedup_vs_transformers, rates.transformers_generate),
        ):
            assert speedup.value == pytest.approx(rates.speculative.value / other.value)
            assert speedup.low <= speedup.value <= speedup.high
    pooled = report.cell("all", 0.0)
    text = render_html(report)
    rates = pooled.tokens_per_second
    pair = f"{rates.speculative.value:.1f} against {rates.autoregressive.value:.1f} tokens/s"
    assert pair in text and f"{pooled.speedup_vs_autoregressive.value:.2f}" in text
    shown = printed_speeds(report)
    assert len(shown) >= 14
    for speedup, on, off in shown:
        assert speedup == pytest.approx(on / off, rel=0.01)


def printed_speeds(report: AcceptanceReport) -> list[tuple[float, float, float]]:
    """(speedup, tokens/s, tokens/s without) of the rows that the terminal shows."""
    number = r"(\d+\.\d+)"
    row = rf"{number} +{number} +{number} \(\d"
    return [(float(s), float(on), float(off)) for on, off, s in re.findall(row, printed(report))]


def test_the_spread_is_that_of_the_repeats_and_the_machines_drift_cancels() -> None:
    """Both kinds slow down alike from repeat to repeat: rates vary, their quotient does not."""
    speeds = Speeds(
        {"on": passes("w", 100, [1.0, 2.0, 4.0]), "off": passes("w", 100, [2.0, 4.0, 8.0])}, "on"
    )
    ratio = speeds.ratio("on", "off")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    rate = speeds.rate("on")
    assert (rate.value, rate.low, rate.high) == pytest.approx((50.0, 25.0, 100.0))
    assert speeds.rate("hugging") is None and speeds.ratio("on", "hugging") is None
    with pytest.raises(DataError, match="w"):
        Speeds({"on": passes("w", 9, [1.0, 1.0]), "off": passes("w", 9, [1.0])}, "on")


# ---------------------------------------------------------------------------------- acceptance


def test_the_histogram_holds_every_round_and_every_accepted_draft(report: AcceptanceReport) -> None:
    for cell in report.results:
        assert sum(cell.histogram) == cell.num_drafts
        assert sum(j * count for j, count in enumerate(cell.histogram)) == cell.num_accepted_tokens


def test_rounds_without_a_draft_count_for_tokens_per_forward_alone() -> None:
    """One τ: the bins' rounds are those of the headline, so no part can lie below the whole."""
    one = request([4, 0, 0, 2, 0], [4, 0, 0, 4, 0], prompt=60)
    measured = CellMeasurement("x", 0.0, "ngram", K, [one, request([0, 0], [0, 0], prompt=9)])
    cell = build_cells([measured])[0]
    assert (cell.num_rounds, cell.num_drafts, cell.num_accepted_tokens) == (7, 2, 6)
    assert cell.acceptance_length == 4.0
    assert cell.tokens_per_forward == pytest.approx(1 + 6 / 7)
    assert cell.drafted_share == pytest.approx(2 / 7)
    bins = cell.acceptance_by_position
    assert sum(b.rounds for b in bins) == cell.num_drafts
    assert [(b.start, b.acceptance_length) for b in bins] == [(32, 5.0), (64, 3.0)]
    whole = build_report([measured], provenance(drafter_method="ngram"))
    assert "drafted in 29 % of the rounds" in printed(whole)
    assert "drafted in 29 % of the rounds: 1.86 tokens per forward" in render_html(whole)


def test_positions_follow_the_anchors_from_the_prompts_start() -> None:
    known = request([3, 0, 2], prompt=60)  # anchors at output tokens 0, 4, 5
    silent = request([3, 0, 2], prompt=60)
    silent.metrics.drafted_per_round = []  # an engine that does not tell
    bins = position_bins([known, silent])
    assert [(b.start, b.stop, b.rounds, b.acceptance_length) for b in bins] == [
        (32, 64, 1, 4.0),
        (64, 128, 2, 2.0),
    ]
    lying = request([3, 0, 2])
    lying.metrics.accepted_per_round = [3, 0, 1]
    with pytest.raises(DataError, match="committed drafts only"):
        position_bins([lying], where="chat")


def test_expected_equals_measured_when_replay_sees_the_same_rounds() -> None:
    same = make_measurement("x", 0.0, 0.7)
    same.replay = replay_of(same.requests)
    cell = build_cells([same])[0]
    assert cell.expected.relative_difference == pytest.approx(0.0, abs=1e-12)
    assert cell.expected.standard_error == pytest.approx(0.0, abs=1e-12)


def test_the_standard_error_is_the_scatter_of_repeated_evaluations() -> None:
    rng = random.Random(1)
    differences, errors = [], []
    for _ in range(150):
        requests = [make_request(rng, 0.7, length=40) for _ in range(30)]
        replay = replay_of([make_request(rng, 0.7, length=40) for _ in range(30)])
        cell = build_cells([CellMeasurement("x", 1.0, "eagle3", K, requests, replay=replay)])[0]
        differences.append(cell.expected.relative_difference)
        errors.append(cell.expected.standard_error)
    scatter = math.sqrt(sum(d * d for d in differences) / len(differences))
    assert scatter == pytest.approx(sum(errors) / len(errors), rel=0.2)


def test_gates(report: AcceptanceReport) -> None:
    verdicts = {gate.name: gate.passed for gate in report.gates}
    assert verdicts == {
        "lossless_mismatches": True,
        "t0.acceptance_length": True,
        "t1.efficiency": False,
    }
    assert not report.passed
    edge = check_gates({"a": 3.0}, {"a": Bound(min=3.0, max=3.0)})
    assert edge[0].passed
    with pytest.raises(ConfigError, match=r"gates\.speed: no such figure.*t0\.acceptance_length"):
        check_gates(report.summary, {"speed": Bound(min=1)})
    with pytest.raises(ValidationError, match="cannot fail"):
        Bound()


def test_summary_holds_the_headline_figures(report: AcceptanceReport) -> None:
    wanted = {
        "lossless_mismatches",
        "t0.acceptance_length",
        "t1.acceptance_length",
        "t0.speedup_vs_autoregressive",
    }
    assert wanted | {"t0.efficiency", "expected_measured_gap"} <= set(report.summary)
    gaps = [abs(report.cell("all", t).expected.relative_difference) for t in (0.0, 1.0)]
    assert report.summary["expected_measured_gap"] == max(gaps)


def both_engines(report: AcceptanceReport) -> list[AcceptanceReport]:
    """The report, and the same figures as those of vLLM."""
    tree, made = report.model_dump(), []
    for engine in ("draftsmith", "vllm"):
        facts = {
            "engine": engine,
            "engines": [{"name": engine, "version": "1"}],
            "prompts_sha256": "ab" * 32,
        }
        results = [cell | {"engine": engine} for cell in tree["results"]]
        made.append(
            AcceptanceReport.model_validate(
                tree | {"results": results, "provenance": tree["provenance"] | facts}
            )
        )
    return made


def test_summary_keys_are_those_documented(report: AcceptanceReport) -> None:
    keys = lay_beside(*both_engines(report)).summary
    assert {re.sub(r"^t[\d.]+\.", "t<T>.", key) for key in keys} == set(SUMMARY_KEYS)


def test_round_trip(report: AcceptanceReport, tmp_path: Path) -> None:
    path = save_report(report, tmp_path / "deep" / "acceptance.json")
    assert load_report(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["acceptance.json"]
    assert "NaN" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema_version="9.9"), "schema_version.*'9.9'"),
        (lambda raw: raw.update(extra=1), "extra"),
        (lambda raw: raw["provenance"].pop("dtype"), "provenance.dtype"),
    ],
)
def test_what_is_no_report_of_this_version_does_not_load(
    report: AcceptanceReport, tmp_path: Path, change, message
) -> None:
    raw = json.loads(report.model_dump_json())
    change(raw)
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match=message):
        load_report(path)


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text("{")
    with pytest.raises(DataError, match=r"acceptance\.json: cannot be read as JSON"):
        load_report(path)


def test_rates_are_computed_anew_from_the_counters_of_a_file(
    report: AcceptanceReport, tmp_path: Path
) -> None:
    raw = json.loads(report.model_dump_json())
    raw["results"][0] |= {"acceptance_length": 9.0, "tokens_per_second": None}
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps(raw))
    assert load_report(path) == report


def test_time_shares_must_fit_the_wall_time() -> None:
    measured = make_measurement("x", 0.0, 0.5)
    shares = build_cells([measured])[0].time_shares
    assert sum(shares.values()) == pytest.approx(1) and shares["other"] == pytest.approx(0.03)
    for phases, words in (({"verify": 1e6}, "overlap"), ({"nap": 0.1}, "unknown phases")):
        with pytest.raises(DataError, match=words):
            build_cells([replace(measured, phase_seconds=Counter(phases))])


def bare_report() -> AcceptanceReport:
    """Only counters, and one workload that never drafted: everything optional is absent."""
    silent = CellMeasurement("silent", 0.0, "eagle3", K, [request([0] * 4, [0] * 4)])
    busy = CellMeasurement("busy <b> $x$", 0.0, "eagle3", K, [request([3, 0, 2])])
    return build_report([silent, busy], provenance(recipe_name=None, git_commit=None))


@pytest.mark.slow
def test_the_page_is_self_contained_and_complete(report: AcceptanceReport, tmp_path: Path) -> None:
    page = write_html(report, tmp_path / "report.html", history()).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//cdn|@import|<link|<script|src=\"(?!data:)", page)
    for name in [
        *WORKLOADS,
        "ngram",
        "Training",
        "Provenance",
        "vllm serve",
        "t1.efficiency",
        "1 of 3 gates missed",
    ]:
        assert name in page
    assert f"{report.cell('all', 0.0).acceptance_length:.2f}" in page
    assert "By position in the text" in page and "<th>64–127</th>" in page
    for encoded in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page):
        assert not re.search(rb"<image|@import|<script|url\(http", base64.b64decode(encoded))
    assert len(page) < 1_000_000


def test_page_and_table_survive_missing_measurements() -> None:
    bare = bare_report()
    page = render_html(bare)
    assert "busy &lt;b&gt; $x$" in page and "<b>" not in page
    assert "not timed" in page
    assert "silent" in printed(bare)


def printed(report: AcceptanceReport, width: int = 80) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def test_the_table_fits_a_terminal(report: AcceptanceReport) -> None:
    text = printed(report)
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in WORKLOADS:
        assert re.search(rf"^\W*{name} ", text, re.MULTILINE), f"{name} is cut or missing"
    assert "missed" in text and "…" not in text
    assert re.search(
        r"position in the text at T=0 \(rounds\): 64 to 127 \d\.\d\d \(\d+\), 128",
        " ".join(text.split()),
    )


def with_suites(report: AcceptanceReport, *names: str) -> AcceptanceReport:
    """The same with suites of two categories each."""
    parts = [
        replace(make_measurement(category, t, rate), suite=name)
        for name in names
        for t in (0.0, 1.0)
        for category, rate in {"summarization": 0.5, "math_reasoning": 0.9}.items()
    ]
    facts = [
        SuiteFacts(
            name=name,
            files=[SuiteFile(path=f"suites/{name}.jsonl", sha256=f"{i}" * 64)],
            conversations=24,
            conversations_in_file=480,
            max_tokens=128,
            num_speculative_tokens=K,
            thinking="off",
            chat_template_kwargs={"enable_thinking": False},
        )
        for i, name in enumerate(names, 1)
    ]
    made = build_report(parts, report.provenance, suites=facts)
    return report.model_copy(
        update={"results": [*report.results, *made.results], "suites": made.suites}
    )


@pytest.mark.slow
def test_suites_stand_beside_the_evaluations_own_prompts(
    report: AcceptanceReport, tmp_path: Path
) -> None:
    """They change no headline figure; each has its own `all`, in the file, the page and the
    table."""
    both = with_suites(report, "spec_bench", "speed_bench")
    assert load_report(save_report(both, tmp_path / "acceptance.json")) == both
    assert both.headline == report.results and both.workloads() == report.workloads()
    part = both.of_suite("speed_bench")
    assert part.workloads() == [
        "summarization",
        "math_reasoning",
        "all",
    ] and part.temperatures() == [0, 1]
    pooled, own = part.cell("all", 0.0), [part.cell(name, 0.0) for name in part.workloads()[:2]]
    assert pooled.num_drafts == sum(cell.num_drafts for cell in own)
    assert pooled.acceptance_length < pooled.acceptance_length_macro, (
        "hard requests take more verifications"
    )
    page, text = render_html(both), printed(both)
    assert max(len(line) for line in text.splitlines()) <= 80
    for facts in both.suites:
        assert f"Suite {facts.name}" in page and facts.files[0].sha256 in page
        assert f"{facts.name}: eagle3" in text and "thinking: off" in text
    assert re.search(
        rf"all +0 +24 +{pooled.acceptance_length:.2f} +{pooled.acceptance_length_macro:.2f} ", text
    )
    rates = " +".join(f"{100 * rate:.1f}" for rate in pooled.conditional_acceptance_per_position)
    assert re.search(rf"conditional +0 +{rates}", text)


def test_a_suite_alone_is_the_headline() -> None:
    alone = build_report(
        [replace(make_measurement("qa", 0.0, 0.7), suite="spec_bench")], provenance()
    )
    assert alone.workloads() == ["qa", "all"]
    assert alone.summary["t0.acceptance_length"] == alone.cell("all", 0.0).acceptance_length


def test_every_field_is_documented() -> None:
    assert all(
        field.description
        for model in (Cell, Provenance, TimedPass)
        for field in [*model.model_fields.values(), *model.model_computed_fields.values()]
    )


@pytest.mark.slow
def test_progress_is_the_slope_per_doubling_of_the_tokens_seen(report: AcceptanceReport) -> None:
    records: list[dict] = [{"step": step, "supervised_tokens": 100} for step in range(1, 65)]
    for step in (4, 16, 23, 32, 45, 64):  # before the last two doublings it was steep
        tau = 2.0 + 0.25 * math.log2(100 * step) - (0.9 if step == 4 else 0.0)
        records[step - 1] |= {"expected_acceptance_length": tau, "expected_standard_error": 0.1}
    made = training_progress(records)
    assert (made.steps, made.supervised_tokens, len(made.held_out)) == (64, 6400, 6)
    assert made.gain_per_doubling == pytest.approx(
        0.25
    ) and made.gain_standard_error == pytest.approx(0, abs=1e-6)
    records[31]["expected_acceptance_length"] += 0.3
    assert training_progress(records).gain_standard_error > 0.05
    assert training_progress(records[:3]).gain_per_doubling is None
    assert training_progress([]) is None and training_progress([{"step": 1}]) is None
    whole = report.model_copy(update={"training": made})
    assert "changed the held-out τ by +0.250 ± 0.000" in render_html(whole, history())
    assert "+0.250 ± 0.000 per doubling" in " ".join(printed(whole).split())
