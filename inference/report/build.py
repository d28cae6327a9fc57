"""Builds the cells, summary and gates of the acceptance report from raw measurements.

Each `CellMeasurement` becomes a `Cell`. One `all` per (temperature, method, engine, suite) is built
by the same function from the pooled measurements. Acceptance rates are those of inference.metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inference.metrics import (
    acceptance_length,
    conditional_rates,
    influences,
    joint_rates,
    sum_of_squares,
)
from inference.report.cell import (
    Cell,
    CostModel,
    ExpectedAcceptance,
    OutputPositionBin,
    Spread,
    TextPositionBin,
    TimeShares,
    TokensPerSecond,
    accepted_histogram,
    headline_cells,
    known,
)
from inference.report.cost_model import efficiency, speedup_limit
from inference.report.measurement import (
    ALL_WORKLOADS,
    PHASES,
    CellMeasurement,
    Costs,
    RequestRounds,
    TimedRun,
    pool,
)
from inference.report.schema import AcceptanceReport, Bound, Gate, Provenance, SuiteFacts
from inference.spec_decode.replay import ReplayResult
from speculators.errors import ConfigError, DataError


def build_report(
    measurements: Sequence[CellMeasurement],
    provenance: Provenance,
    gates: Mapping[str, Bound] | None = None,
    suites: Sequence[SuiteFacts] = (),
) -> AcceptanceReport:
    """Cells (with `all` appended per temperature, method and suite), summary and gates."""
    cells = build_cells(measurements)
    summary = summarise(cells, provenance.drafter_method, provenance.engine)
    checked = check_gates(summary, gates or {})
    return AcceptanceReport(
        provenance=provenance, summary=summary, gates=checked, suites=list(suites), results=cells
    )


def build_cells(measurements: Sequence[CellMeasurement]) -> list[Cell]:
    """One cell per measurement, then one `all` per (temperature, method, engine, suite) pooled from
    the raw ones."""
    width = bin_width(max((r.output_tokens for m in measurements for r in m.requests), default=0))
    groups: dict[tuple[float, str, str, str | None], list[CellMeasurement]] = {}
    for measurement in measurements:
        key = (measurement.temperature, measurement.method, measurement.engine, measurement.suite)
        groups.setdefault(key, []).append(measurement)
    pooled = [pool(group) for group in groups.values()]
    return [build_cell(measurement, width) for measurement in [*measurements, *pooled]]


def build_cell(measured: CellMeasurement, width: int) -> Cell:
    """One cell; `width` is the size of the output-position bins."""
    where = f"{measured.workload}, T={measured.temperature:g}, {measured.method}"
    requests = measured.requests
    if len({len(request.accepted_per_pos) for request in requests}) != 1:
        raise DataError(
            f"{where}: requests need accepted_per_pos of one common length K and at least one"
            " request"
        )
    per_pos = [sum(counts) for counts in zip(*(r.accepted_per_pos for r in requests), strict=True)]
    drafts = sum(request.num_drafts for request in requests)
    past_end = [request.past_end for request in requests]
    tau = acceptance_length(sum(per_pos), drafts)
    own = [
        acceptance_length(request.accepted, request.num_drafts)
        for request in requests
        if request.num_drafts
    ]
    speedup = paired_ratio(measured.speculative, measured.autoregressive)
    return Cell(
        workload=measured.workload,
        temperature=measured.temperature,
        method=measured.method,
        engine=measured.engine,
        suite=measured.suite,
        prompts=len(requests),
        output_tokens=sum(request.output_tokens for request in requests),
        num_drafts=drafts,
        num_draft_tokens=sum(request.num_draft_tokens for request in requests),
        num_accepted_tokens=sum(per_pos),
        num_accepted_past_end=None if None in past_end else sum(filter(None, past_end)),
        num_accepted_tokens_per_pos=per_pos,
        acceptance_length=tau,
        acceptance_length_macro=sum(own) / len(own) if own else tau,
        joint_acceptance_per_position=known(joint_rates(per_pos, drafts)),
        conditional_acceptance_per_position=known(conditional_rates(per_pos, drafts)),
        histogram=accepted_histogram(per_pos, drafts),
        acceptance_by_output_position=output_position_bins(requests, width, where),
        acceptance_by_text_position=text_position_bins(requests, where),
        tokens_per_second=_throughput(measured),
        speedup_vs_autoregressive=speedup,
        speedup_vs_transformers=paired_ratio(measured.speculative, measured.transformers_generate),
        time_shares=_time_shares(measured, where),
        cost_model=_cost_model(measured.costs, tau, speedup, measured.speculative),
        expected=_expected(measured),
        lossless=list(measured.lossless),
    )


def bin_width(longest_output: int, bins: int = 8) -> int:
    """Smallest power of two, at least 16, that covers the longest output in `bins` bins."""
    return max(16, 1 << (math.ceil(longest_output / bins) - 1).bit_length())


def output_position_bins(
    requests: Iterable[RequestRounds], width: int, where: str = ""
) -> list[OutputPositionBin]:
    """Acceptance length of the rounds by the output index of their anchor.

    Output token 0 comes from prefill and anchors the first round; a round that accepts j drafts
    moves the anchor on by j + 1. Empty bins are left out."""
    return [
        OutputPositionBin(
            start=place * width, stop=(place + 1) * width, rounds=rounds, acceptance_length=tau
        )
        for place, rounds, tau in _by_anchor(
            requests, lambda request, anchor: anchor // width, where
        )
    ]


def text_position_bins(requests: Iterable[RequestRounds], where: str = "") -> list[TextPositionBin]:
    """Acceptance length of the rounds by the position of their anchor in the whole text, in bins
    [2^i, 2^(i + 1))."""
    known = [request for request in requests if request.prompt_tokens]
    bins = _by_anchor(
        known, lambda request, anchor: (request.prompt_tokens + anchor).bit_length() - 1, where
    )
    return [
        TextPositionBin(start=1 << power, stop=2 << power, rounds=rounds, acceptance_length=tau)
        for power, rounds, tau in bins
    ]


def _by_anchor(
    requests: Iterable[RequestRounds], place: Callable[[Any, int], int], where: str
) -> list[tuple[int, int, float]]:
    """(place, rounds, τ) by the `place` of (request, output index of the anchor), ascending."""
    totals: dict[int, tuple[int, int]] = {}
    for index, request in enumerate(requests):
        if request.accepted_per_round and sum(request.accepted_per_round) != request.accepted:
            both = (
                f"{request.accepted} drafts by position, {sum(request.accepted_per_round)} by round"
            )
            raise DataError(
                f"{where}: request {index} accepted {both}: both must count committed drafts only"
            )
        anchor = 0
        for accepted in request.accepted_per_round:
            rounds, before = totals.get(key := place(request, anchor), (0, 0))
            totals[key] = (rounds + 1, before + accepted)
            anchor += accepted + 1
    return [
        (key, rounds, acceptance_length(accepted, rounds))
        for key, (rounds, accepted) in sorted(totals.items())
    ]


def _expected(measured: CellMeasurement) -> ExpectedAcceptance | None:
    """Against independent text, with the sharper comparison on its own text beside it."""
    expected = expected_acceptance(
        measured.requests, measured.replay, paired=measured.replay_paired
    )
    own = expected_acceptance(measured.requests, measured.replay_own_text, paired=True)
    if expected is None or own is None:
        return expected
    return expected.model_copy(
        update={
            "own_text_acceptance_length": own.acceptance_length,
            "own_text_relative_difference": own.relative_difference,
            "own_text_standard_error": own.standard_error,
        }
    )


def expected_acceptance(
    requests: Sequence[RequestRounds], replay: Sequence[ReplayResult], *, paired: bool
) -> ExpectedAcceptance | None:
    """Expected acceptance length and how far the measured one lies from it, with its standard
    error.

    Both are ratios of sums over responses (accepted / rounds), so their errors are those of a ratio
    estimator with the response as the unit: the influence of response i is (a_i − ρ·r_i) / Σr. If
    replay i and request i share their prompt, the influences are subtracted before squaring and
    what the prompts have in common cancels."""
    if not replay:
        return None
    measured = acceptance_length(
        sum(r.accepted for r in requests), sum(r.num_drafts for r in requests)
    )
    expected = acceptance_length(sum(r.accepted for r in replay), sum(r.rounds for r in replay))
    of_measured = [v / expected for v in influences([(r.num_drafts, r.accepted) for r in requests])]
    of_expected = [
        v * measured / expected**2 for v in influences([(r.rounds, r.accepted) for r in replay])
    ]
    if paired:
        if len(of_measured) != len(of_expected):
            raise DataError(
                f"replay_paired: {len(of_expected)} replayed responses of {len(of_measured)}"
                " requests"
            )
        variance = sum_of_squares([a - b for a, b in zip(of_measured, of_expected, strict=True)])
    else:
        variance = sum_of_squares(of_measured) + sum_of_squares(of_expected)
    return ExpectedAcceptance(
        acceptance_length=expected,
        relative_difference=measured / expected - 1.0,
        standard_error=math.sqrt(variance),
        responses=len(replay),
    )


def tokens_per_second(run: TimedRun) -> float:
    """Output tokens per second of one run. DataError if it wrote none, or took no time."""
    if run.seconds <= 0 or run.tokens <= 0:
        raise DataError(
            f"a timed run has {run.tokens} tokens in {run.seconds} s: both must be positive"
        )
    return run.tokens / run.seconds


def _throughput(measured: CellMeasurement) -> TokensPerSecond | None:
    engines = (measured.speculative, measured.autoregressive, measured.transformers_generate)
    spreads = [
        Spread.of([tokens_per_second(run) for run in runs]) if runs else None for runs in engines
    ]
    if spreads[0] is None:
        return None
    return TokensPerSecond(
        speculative=spreads[0], autoregressive=spreads[1], transformers_generate=spreads[2]
    )


def paired_ratio(runs: Sequence[TimedRun], reference: Sequence[TimedRun]) -> Spread | None:
    """Rate of run i over rate of reference i, which ran right beside it, for every i both have."""
    pairs = list(zip(runs, reference, strict=False))
    return (
        Spread.of([tokens_per_second(run) / tokens_per_second(other) for run, other in pairs])
        if pairs
        else None
    )


def _time_shares(measured: CellMeasurement, where: str) -> TimeShares | None:
    if not measured.phase_seconds:
        return None
    if unknown := sorted(set(measured.phase_seconds) - set(PHASES)):
        raise DataError(f"{where}: unknown phases {unknown}; the phases are {', '.join(PHASES)}")
    wall = sum(run.seconds for run in measured.speculative)
    claimed = sum(seconds for name, seconds in measured.phase_seconds.items() if name != "other")
    if claimed > 1.05 * wall:
        raise DataError(
            f"{where}: phases take {claimed:.3f} s of the runs' {wall:.3f} s: they must not overlap"
        )
    total = max(wall, claimed)
    shares = {
        name: measured.phase_seconds.get(name, 0.0) / total for name in PHASES if name != "other"
    }
    return TimeShares(**shares, other=max(0.0, 1.0 - sum(shares.values())))


def _cost_model(
    costs: Costs | None, tau: float, speedup: Spread | None, timed: Sequence[TimedRun]
) -> CostModel | None:
    """The limit at the acceptance length of the timed runs themselves (`tau`, of all requests, if
    nothing was timed): a speedup is only comparable with the limit of the very rounds it was
    measured on."""
    if costs is None:
        return None
    rounds = sum(run.num_drafts for run in timed)
    if rounds:
        tau = acceptance_length(sum(run.num_accepted for run in timed), rounds)
    limit = speedup_limit(
        tau, step_cost=costs.target_step_ms, verify_cost=costs.verify_ms, draft_cost=costs.draft_ms
    )
    ratio = efficiency(speedup.median, limit) if speedup else None
    return CostModel(**vars(costs), limit_speedup=limit, efficiency=ratio)


def summarise(cells: Sequence[Cell], method: str, engine: str) -> dict[str, float]:
    """The headline figures of `method` in `engine` over all workloads of the evaluation's prompts
    (of the first suite, if there are no others); a figure that was not measured is absent."""
    summary: dict[str, float] = {}
    pooled = sorted(
        (
            c
            for c in headline_cells(cells)
            if (c.workload, c.method, c.engine) == (ALL_WORKLOADS, method, engine)
        ),
        key=lambda c: c.temperature,
    )
    checks = [check for cell in pooled for check in cell.lossless]
    if checks:
        summary["lossless_mismatches"] = sum(check.mismatches for check in checks)
        summary["lossless_ties"] = sum(check.ties for check in checks)
    gaps = [cell.expected.gap[0] for cell in pooled if cell.expected]
    if gaps:
        summary["expected_measured_gap"] = max(gaps)
    for cell in pooled:
        throughput, cost = cell.tokens_per_second, cell.cost_model
        figures = {
            "acceptance_length": cell.acceptance_length,
            "expected_acceptance_length": (
                cell.expected.acceptance_length if cell.expected else None
            ),
            "expected_measured_gap": cell.expected.gap[0] if cell.expected else None,
            "tokens_per_second": throughput.speculative.median if throughput else None,
            "speedup_vs_autoregressive": (
                cell.speedup_vs_autoregressive and cell.speedup_vs_autoregressive.median
            ),
            "speedup_vs_transformers": (
                cell.speedup_vs_transformers and cell.speedup_vs_transformers.median
            ),
            "limit_speedup": cost.limit_speedup if cost else None,
            "efficiency": cost.efficiency if cost else None,
        }
        for name, value in figures.items():
            if value is not None:
                summary[f"t{cell.temperature:g}.{name}"] = float(value)
    return summary


def check_gates(summary: Mapping[str, float], bounds: Mapping[str, Bound]) -> list[Gate]:
    """Each bound against its figure. ConfigError if a gate names a figure the evaluation did not
    produce."""
    gates = []
    for name, bound in bounds.items():
        if name not in summary:
            measured = ", ".join(sorted(summary)) or "nothing"
            raise ConfigError(
                f"gates.{name}: no such figure in this evaluation; measured were: {measured}"
            )
        value = summary[name]
        passed = (bound.min is None or value >= bound.min) and (
            bound.max is None or value <= bound.max
        )
        gates.append(Gate(name=name, value=value, min=bound.min, max=bound.max, passed=passed))
    return gates
