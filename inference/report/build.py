"""Builds the cells, summary and gates of the acceptance report from raw measurements.

Each `CellMeasurement` becomes a `Cell`. One `all` per (temperature, method, engine, suite) is built
by the same function from the pooled measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from inference.metrics import acceptance_length, influences, sum_of_squares
from inference.outputs import RequestMetrics, RequestOutput
from inference.report.cell import Cell, ExpectedAcceptance, PositionBin, headline_cells
from inference.report.measurement import (
    ALL_WORKLOADS,
    PHASES,
    SPECULATIVE,
    CellMeasurement,
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
    groups: dict[tuple[float, str, str, str | None], list[CellMeasurement]] = {}
    for measurement in measurements:
        key = (measurement.temperature, measurement.method, measurement.engine, measurement.suite)
        groups.setdefault(key, []).append(measurement)
    pooled = [pool(group) for group in groups.values()]
    return [build_cell(measurement) for measurement in [*measurements, *pooled]]


def build_cell(measured: CellMeasurement) -> Cell:
    """One cell. DataError if counters or times do not fit together."""
    where = f"{measured.workload}, T={measured.temperature:g}, {measured.method}"
    if not measured.requests:
        raise DataError(f"{where}: no request was measured")
    _check_phases(measured, where)
    metrics = [request.metrics for request in measured.requests]
    past_end = [m.num_accepted_past_end for m in metrics]
    counted = all(len(m.accepted_per_round) >= m.num_drafts for m in metrics)
    own = [acceptance_length(m.num_accepted_tokens, m.num_drafts) for m in metrics if m.num_drafts]
    return Cell(
        workload=measured.workload,
        temperature=measured.temperature,
        method=measured.method,
        engine=measured.engine,
        suite=measured.suite,
        prompts=len(metrics),
        output_tokens=sum(num_output_tokens(request) for request in measured.requests),
        num_rounds=sum(len(m.accepted_per_round) for m in metrics) if counted else None,
        num_drafts=measured.num_drafts,
        num_draft_tokens=sum(m.num_draft_tokens for m in metrics),
        num_accepted_past_end=None if None in past_end else sum(filter(None, past_end)),
        num_accepted_tokens_per_pos=_per_position(metrics, measured.num_speculative_tokens, where),
        acceptance_length_macro=sum(own) / len(own) if own else 1.0,
        acceptance_by_position=position_bins(measured.requests, where),
        passes=measured.passes,
        phase_seconds=dict(measured.phase_seconds),
        costs=measured.costs,
        expected=expected_acceptance(metrics, measured.replay),
        lossless=measured.lossless,
    )


def num_output_tokens(request: RequestOutput) -> int:
    """Tokens of a request's responses."""
    return sum(len(completion.token_ids) for completion in request.outputs)


def _per_position(metrics: Sequence[RequestMetrics], k: int, where: str) -> list[int]:
    """Accepted drafts by position, [K]: an engine lists only the positions that it reached."""
    total = [0] * k
    for m in metrics:
        counts = m.num_accepted_tokens_per_pos
        if len(counts) > k and any(counts[k:]):
            raise DataError(f"{where}: drafts were accepted at {len(counts)} positions, K is {k}")
        for place, count in enumerate(counts[:k]):
            total[place] += count
    return total


def position_bins(requests: Iterable[RequestOutput], where: str = "") -> list[PositionBin]:
    """Acceptance of the rounds with a draft by the position of their anchor in the whole text, in
    bins [2^i, 2^(i + 1)). Empty bins are left out, and requests that do not say what each round
    drafted.

    Output token 0 comes from prefill and anchors the first round; a round that accepts j drafts
    moves the anchor on by j + 1."""
    totals: dict[int, tuple[int, int]] = {}
    for index, request in enumerate(requests):
        m = request.metrics
        if m.accepted_per_round and sum(m.accepted_per_round) != m.num_accepted_tokens:
            raise DataError(
                f"{where}: request {index} accepted {m.num_accepted_tokens} drafts by position,"
                f" {sum(m.accepted_per_round)} by round: both must count committed drafts only"
            )
        anchor = len(request.prompt_token_ids)
        if not anchor or len(m.drafted_per_round) != len(m.accepted_per_round):
            continue
        for drafted, accepted in zip(m.drafted_per_round, m.accepted_per_round, strict=True):
            if drafted:
                power = anchor.bit_length() - 1
                rounds, before = totals.get(power, (0, 0))
                totals[power] = (rounds + 1, before + accepted)
            anchor += accepted + 1
    return [
        PositionBin(start=1 << power, stop=2 << power, rounds=rounds, num_accepted_tokens=accepted)
        for power, (rounds, accepted) in sorted(totals.items())
    ]


def expected_acceptance(
    metrics: Sequence[RequestMetrics], replay: Sequence[ReplayResult]
) -> ExpectedAcceptance | None:
    """Expected acceptance length over the same texts and how far the measured one lies from it,
    with its standard error.

    Both are ratios of sums over responses (accepted / rounds), so their errors are those of a ratio
    estimator with the response as the unit: the influence of response i is (a_i − ρ·r_i) / Σr. The
    influences of replay i and request i are subtracted before squaring, so that what the texts have
    in common cancels."""
    if not replay:
        return None
    if len(metrics) != len(replay):
        raise DataError(f"replay: {len(replay)} replayed responses of {len(metrics)} requests")
    counts = [(m.num_drafts, m.num_accepted_tokens) for m in metrics]
    measured = acceptance_length(sum(a for _, a in counts), sum(r for r, _ in counts))
    expected = acceptance_length(sum(r.accepted for r in replay), sum(r.rounds for r in replay))
    of_measured = [v / expected for v in influences(counts)]
    of_expected = [
        v * measured / expected**2 for v in influences([(r.rounds, r.accepted) for r in replay])
    ]
    variance = sum_of_squares([a - b for a, b in zip(of_measured, of_expected, strict=True)])
    return ExpectedAcceptance(
        acceptance_length=expected,
        relative_difference=measured / expected - 1.0,
        standard_error=math.sqrt(variance),
        responses=len(replay),
    )


def _check_phases(measured: CellMeasurement, where: str) -> None:
    if unknown := sorted(set(measured.phase_seconds) - set(PHASES)):
        raise DataError(f"{where}: unknown phases {unknown}; the phases are {', '.join(PHASES)}")
    wall = sum(run.seconds for run in measured.passes.get(SPECULATIVE, []))
    claimed = sum(measured.phase_seconds.values())
    if claimed > 1.05 * wall:
        raise DataError(
            f"{where}: phases take {claimed:.3f} s of the passes' {wall:.3f} s: they overlap"
        )


def summarise(cells: Sequence[Cell], method: str, engine: str) -> dict[str, float]:
    """The headline figures of `method` in `engine` over all workloads of the evaluation's prompts
    (of the first suite, if there are no others); a figure that was not measured is absent."""
    pooled = sorted(
        (
            c
            for c in headline_cells(cells)
            if (c.workload, c.method, c.engine) == (ALL_WORKLOADS, method, engine)
        ),
        key=lambda c: c.temperature,
    )
    summary: dict[str, float] = {}
    checks = [check for cell in pooled for check in cell.lossless]
    if checks:
        summary["lossless_mismatches"] = sum(check.mismatches for check in checks)
        summary["lossless_ties"] = sum(check.ties for check in checks)
    gaps = [abs(cell.expected.relative_difference) for cell in pooled if cell.expected]
    if gaps:
        summary["expected_measured_gap"] = max(gaps)
    for cell in pooled:
        rates = cell.tokens_per_second
        off = cell.speedup_vs_autoregressive
        other = cell.speedup_vs_transformers
        expected = cell.expected
        figures = {
            "acceptance_length": cell.acceptance_length,
            "tokens_per_forward": cell.tokens_per_forward,
            "expected_acceptance_length": expected and expected.acceptance_length,
            "expected_measured_gap": expected and abs(expected.relative_difference),
            "tokens_per_second": rates and rates.speculative.value,
            "speedup_vs_autoregressive": off and off.value,
            "speedup_vs_transformers": other and other.value,
            "limit_speedup": cell.limit_speedup,
            "efficiency": cell.efficiency,
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
