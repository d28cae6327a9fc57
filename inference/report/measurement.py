"""One measurement of a drafting method, from the engine to the report.

`Measurement` gathers what was written and timed. A cell of the report is made of one of them, or of
several that are pooled: `all` is made of sums like any other cell, and is no mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.inference.metrics import (
    SpecDecodeCounters,
    acceptance_length,
    influences,
    sum_of_squares,
)
from draftsmith.inference.outputs import RequestMetrics, RequestOutput
from draftsmith.inference.report.round_cost import RoundTimes, round_cost
from draftsmith.inference.report.schema import (
    AUTOREGRESSIVE,
    OUR_ENGINE,
    SPECULATIVE,
    Cell,
    ExpectedAcceptance,
    LosslessCheck,
    PositionBin,
    TimedPass,
)
from draftsmith.inference.report.speed import estimate, num_repeats, rates
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.errors import DataError


@dataclass
class Measurement:
    """One method on one workload at one temperature; what was not measured stays empty.

    requests         responses with drafting, of one pass, with their `metrics`
    replay           one result per response, over the text of `requests`
    passes           by kind (SPECULATIVE, AUTOREGRESSIVE), in the order of repeats
    rounds           timed part by part, in a pass of their own
    suite            of which the workload is a category"""

    workload: str
    temperature: float
    method: str
    num_speculative_tokens: int
    requests: list[RequestOutput] = field(default_factory=list)
    replay: list[ReplayResult] = field(default_factory=list)
    passes: dict[str, list[TimedPass]] = field(default_factory=dict)
    lossless: list[LosslessCheck] = field(default_factory=list)
    rounds: RoundTimes = field(default_factory=RoundTimes)
    engine: str = OUR_ENGINE
    suite: str | None = None

    def cell(self) -> Cell:
        """The report's cell of this measurement alone. Errors as of `make_cell`."""
        return make_cell([self], self.workload)


def make_cell(parts: Sequence[Measurement], workload: str) -> Cell:
    """The report's cell of measurements that differ in their workload alone, with every rate; what
    one of them lacks, the cell lacks. DataError if counters do not fit together."""
    first = parts[0]
    requests = [request for part in parts for request in part.requests]
    metrics = [request.metrics for request in requests]
    where = f"{workload}, T={first.temperature:g}, {first.method}"
    total = _sum_of(metrics, first.num_speculative_tokens, where)
    rounds = sum(len(counters.accepted_per_round) for counters in metrics)
    lengths = [counters.acceptance_length for counters in metrics if counters.num_drafts]
    replayed = all(part.replay for part in parts)
    return Cell(
        workload=workload,
        temperature=first.temperature,
        method=first.method,
        engine=first.engine,
        suite=first.suite,
        prompts=len(requests),
        output_tokens=num_output_tokens(requests),
        num_rounds=rounds,
        **vars(total),
        acceptance_length=total.acceptance_length,
        acceptance_length_macro=sum(lengths) / len(lengths) if lengths else 1.0,
        tokens_per_forward=_tokens_after_the_first(requests) / rounds if rounds else 1.0,
        joint_acceptance_per_position=_known(total.joint_rates()),
        conditional_acceptance_per_position=_known(total.conditional_rates()),
        acceptance_by_position=position_bins(requests),
        round_cost=round_cost([part.rounds for part in parts], first.num_speculative_tokens),
        expected=(
            compare_expected(metrics, [result for part in parts for result in part.replay])
            if replayed
            else None
        ),
        lossless=_sums_of_checks([check for part in parts for check in part.lossless]),
        **_speed(parts),
    )


def _sum_of(
    metrics: Sequence[RequestMetrics], num_speculative_tokens: int, where: str
) -> SpecDecodeCounters:
    """The counters of responses, added up. DataError if there are none, or if drafts were accepted
    at more positions than could be drafted."""
    total = SpecDecodeCounters(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)
    for counters in metrics:
        total.merge(counters)
    positions = len(total.num_accepted_tokens_per_pos)
    if not metrics or positions > num_speculative_tokens:
        raise DataError(
            f"{len(metrics)} requests, drafts accepted at {positions} positions; expected at least"
            f" one, and K = {num_speculative_tokens}",
            where=where,
        )
    return total


def _speed(parts: Sequence[Measurement]) -> dict[str, Any]:
    """The fields of a Cell that come from times."""
    passes: dict[str, list[TimedPass]] = {}
    for kind in parts[0].passes:
        runs = [part.passes.get(kind, []) for part in parts]
        if all(runs):
            passes[kind] = [run for of_part in runs for run in of_part]
    fields: dict[str, Any] = {"passes": passes}
    if SPECULATIVE in passes:
        rate = rates(passes, SPECULATIVE)
        repeats = num_repeats(passes)
        fields["tokens_per_second"] = {
            kind: estimate(draws, repeats) for kind, draws in rate.items()
        }
        if (off := rate.get(AUTOREGRESSIVE)) is not None:
            fields["speedup_vs_autoregressive"] = estimate(rate[SPECULATIVE] / off, repeats)
    return fields


def num_output_tokens(requests: Iterable[RequestOutput]) -> int:
    """Tokens of all responses."""
    return sum(len(output.token_ids) for request in requests for output in request.outputs)


def compiled_rounds(metrics: Sequence[RequestMetrics]) -> float | None:
    """Share of the rounds of some responses that ran compiled; None where it is not known."""
    rounds = sum(len(counters.accepted_per_round) for counters in metrics)
    compiled = [counters.num_compiled_rounds for counters in metrics]
    if not rounds or None in compiled:
        return None
    return sum(count for count in compiled if count is not None) / rounds


def _tokens_after_the_first(requests: Iterable[RequestOutput]) -> int:
    """Tokens that verifications wrote: the first one of a response comes from its prefill, and what
    the last verification gave beyond the end is not written."""
    outputs = [output for request in requests for output in request.outputs]
    return sum(max(len(output.token_ids) - 1, 0) for output in outputs)


def position_bins(requests: Iterable[RequestOutput]) -> list[PositionBin]:
    """Acceptance of the rounds with a draft by the position of their anchor in the whole text, in
    bins [2^i, 2^(i + 1)). Empty bins are left out, and requests that do not say what each round
    drafted.

    Output token 0 comes from prefill and anchors the first round; a round that accepts j drafts
    moves the anchor on by j + 1."""
    bins: dict[int, list[int]] = {}  # drafts accepted in each round, by power of two
    for request in requests:
        drafted_per_round = request.metrics.drafted_per_round
        accepted_per_round = request.metrics.accepted_per_round
        anchor = len(request.prompt_token_ids)
        if not anchor or len(drafted_per_round) != len(accepted_per_round):
            continue
        for drafted, accepted in zip(drafted_per_round, accepted_per_round, strict=True):
            if drafted:
                bins.setdefault(anchor.bit_length() - 1, []).append(accepted)
            anchor += accepted + 1
    return [
        PositionBin(
            start=1 << power,
            rounds=len(counts),
            num_accepted_tokens=sum(counts),
            acceptance_length=acceptance_length(sum(counts), len(counts)),
        )
        for power, counts in sorted(bins.items())
    ]


def compare_expected(
    metrics: Sequence[RequestMetrics], replay: Sequence[ReplayResult]
) -> ExpectedAcceptance:
    """Expected acceptance length over the same texts and how far the measured one lies from it,
    with its standard error.

    Both are ratios of sums over responses (accepted / rounds), so their errors are those of a ratio
    estimator with the response as the unit: the influence of response i is (a_i − ρ·r_i) / Σr. The
    influences of replay i and request i are subtracted before squaring, so that what the texts have
    in common cancels."""
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
    )


def _sums_of_checks(checks: Sequence[LosslessCheck]) -> list[LosslessCheck]:
    """One check for each dtype."""
    sums: dict[str, LosslessCheck] = {}
    for check in checks:
        nothing = LosslessCheck(dtype=check.dtype, checked_prompts=0, mismatches=0, ties=0)
        total = sums.setdefault(check.dtype, nothing)
        total.checked_prompts += check.checked_prompts
        total.mismatches += check.mismatches
        total.ties += check.ties
        total.details += check.details
    return list(sums.values())


def _known(rates: Sequence[float]) -> list[float | None]:
    """NaN, which says "never measured" and which JSON lacks, as None."""
    return [None if math.isnan(rate) else rate for rate in rates]
