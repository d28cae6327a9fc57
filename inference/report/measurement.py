"""One measurement of a drafting method, from the engine to the report.

`Measurement` gathers what was written and timed. Measurements are added, so that the report's `all`
is made of sums like any other cell and can never be a mean of means; `cell` derives every rate,
once.

The cost model says how fast speculative decoding could be, given what its parts cost alone. One
round costs V(K+1) + D(K) and commits τ tokens, which without drafting cost τ · V(1):

    limit = τ · V(1) / (V(K+1) + D(K))            efficiency = measured speedup / limit

V(n) is one target forward over n new tokens per row, D(K) the whole draft phase. The limit counts
nothing but forwards: sampling, scheduling, committing, prefill, rounds cut short by the end of a
text and rows that wait for others are left out, and the efficiency is what they cost. It is no
strict bound: they also slow the run without drafting, so that the efficiency may exceed 1."""

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
from draftsmith.inference.report.schema import (
    ALL_WORKLOADS,
    AUTOREGRESSIVE,
    OUR_ENGINE,
    SPECULATIVE,
    TRANSFORMERS,
    Cell,
    Costs,
    ExpectedAcceptance,
    LosslessCheck,
    PositionBin,
    TimedPass,
)
from draftsmith.inference.report.speed import Speeds, stalled
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.errors import DataError

KINDS = {  # of timed passes, in words
    SPECULATIVE: "drafting",
    AUTOREGRESSIVE: "drafting off",
    TRANSFORMERS: "transformers.generate",
}


@dataclass
class Measurement:
    """One method on one workload at one temperature; what was not measured stays empty.

    requests         responses with drafting, of one pass, with their `metrics`
    baseline         the responses to the same prompts without drafting
    replay           one result per response, over the text of `requests`
    passes           by kind (SPECULATIVE, AUTOREGRESSIVE, TRANSFORMERS), in the order of repeats
    suite            of which the workload is a category"""

    workload: str
    temperature: float
    method: str
    num_speculative_tokens: int
    requests: list[RequestOutput] = field(default_factory=list)
    baseline: list[RequestOutput] = field(default_factory=list)
    replay: list[ReplayResult] = field(default_factory=list)
    passes: dict[str, list[TimedPass]] = field(default_factory=dict)
    costs: Costs | None = None
    lossless: list[LosslessCheck] = field(default_factory=list)
    engine: str = OUR_ENGINE
    suite: str | None = None

    @property
    def counters(self) -> SpecDecodeCounters:
        """The sum over the requests, of at least K positions."""
        total = SpecDecodeCounters(
            num_accepted_tokens_per_pos=[0] * self.num_speculative_tokens,
        )
        for request in self.requests:
            total.merge(request.metrics)
        return total

    def __add__(self, other: Measurement) -> Measurement:
        """Both workloads as one, `all`; what one of them lacks, the sum lacks."""
        kinds = [kind for kind in self.passes if kind in other.passes]
        return Measurement(
            ALL_WORKLOADS,
            self.temperature,
            self.method,
            self.num_speculative_tokens,
            self.requests + other.requests,
            self.baseline + other.baseline,
            self.replay + other.replay if self.replay and other.replay else [],
            {kind: self.passes[kind] + other.passes[kind] for kind in kinds},
            _sum_of_costs(self, other),
            _sum_of_checks([*self.lossless, *other.lossless]),
            self.engine,
            self.suite,
        )

    def cell(self) -> Cell:
        """The report's cell, with every rate. DataError if counters or times do not fit
        together."""
        where = f"{self.workload}, T={self.temperature:g}, {self.method}"
        if not self.requests:
            raise DataError("no request was measured", where=where)
        metrics = [request.metrics for request in self.requests]
        rounds = sum(len(m.accepted_per_round) for m in metrics)
        total = self.counters
        accepted = total.num_accepted_tokens
        if any(total.num_accepted_tokens_per_pos[self.num_speculative_tokens :]):
            raise DataError(
                f"drafts were accepted at {len(total.num_accepted_tokens_per_pos)}"
                f" positions, K is {self.num_speculative_tokens}",
                where=where,
            )
        del total.num_accepted_tokens_per_pos[self.num_speculative_tokens :]
        of_requests = [m.acceptance_length for m in metrics if m.num_drafts]
        return Cell(
            workload=self.workload,
            temperature=self.temperature,
            method=self.method,
            engine=self.engine,
            suite=self.suite,
            prompts=len(metrics),
            output_tokens=num_output_tokens(self.requests),
            num_rounds=rounds,
            **vars(total),
            acceptance_length=total.acceptance_length,
            acceptance_length_macro=sum(of_requests) / len(of_requests) if of_requests else 1.0,
            tokens_per_forward=acceptance_length(accepted, rounds),
            joint_acceptance_per_position=_known(total.joint_rates()),
            conditional_acceptance_per_position=_known(total.conditional_rates()),
            acceptance_by_position=position_bins(self.requests, where),
            passes=self.passes,
            expected=expected_acceptance(metrics, self.replay),
            lossless=self.lossless,
            costs=self.costs,
            **self._speed(),
        )

    def _speed(self) -> dict[str, Any]:
        """The fields of a Cell that come from times."""
        limit = self._limit()
        if not self.passes.get(SPECULATIVE):
            return {"limit_speedup": limit}
        speeds = Speeds(self.passes, SPECULATIVE)
        speedup = speeds.ratio(SPECULATIVE, AUTOREGRESSIVE)
        slow = [
            f"{run.workload}, {KINDS[kind]}, repeat {run.repeat + 1}:"
            f" {run.tokens / run.seconds:.0f} tokens/s, median {usual:.0f}"
            for kind, some in self.passes.items()
            for run, usual in stalled(some)
        ]
        return {
            "tokens_per_second": speeds.rates(),
            "speedup_vs_autoregressive": speedup,
            "speedup_vs_transformers": speeds.ratio(SPECULATIVE, TRANSFORMERS),
            "stalled_passes": slow,
            "limit_speedup": limit,
            "efficiency": speedup.value / limit if speedup and limit else None,
        }

    def _limit(self) -> float | None:
        """τ · V(1) / (V(K+1) + D(K)), with τ of the timed passes, or of all if none was timed."""
        if self.costs is None:
            return None
        timed = self.passes.get(SPECULATIVE, [])
        drafts = sum(run.num_drafts for run in timed)
        accepted = sum(run.num_accepted_tokens for run in timed)
        if not drafts:
            drafts, accepted = self.counters.num_drafts, self.counters.num_accepted_tokens
        round_ms = self.costs.verify_ms + self.costs.draft_ms
        return acceptance_length(accepted, drafts) * self.costs.target_step_ms / round_ms


def num_output_tokens(requests: Iterable[RequestOutput]) -> int:
    """Tokens of all responses."""
    return sum(len(one.token_ids) for request in requests for one in request.outputs)


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
                f"request {index} accepted {m.num_accepted_tokens} drafts by position,"
                f" {sum(m.accepted_per_round)} by round: both must count committed drafts only",
                where=where,
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
        PositionBin(
            start=1 << power,
            stop=2 << power,
            rounds=rounds,
            num_accepted_tokens=accepted,
            acceptance_length=acceptance_length(accepted, rounds),
        )
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
        raise DataError(
            f"{len(replay)} replayed responses of {len(metrics)} requests", where="replay"
        )
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


def _sum_of_costs(*measurements: Measurement) -> Costs | None:
    """V(1) weighted by committed tokens, V(K+1) and D(K) by rounds: then the limit of the sum is
    exactly the ratio of the summed times, Σ τ_w r_w V_w(1) / Σ r_w (V_w(K+1) + D_w(K))."""
    counters = [m.counters for m in measurements]
    rounds = [c.num_drafts for c in counters]
    tokens = [c.num_drafts + c.num_accepted_tokens for c in counters]
    costs = [m.costs for m in measurements if m.costs is not None]
    if len(costs) < len(measurements) or not sum(rounds):
        return None

    def mean(name: str, weights: Sequence[int]) -> float:
        values = [getattr(cost, name) for cost in costs]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

    return Costs(
        target_step_ms=mean("target_step_ms", tokens),
        verify_ms=mean("verify_ms", rounds),
        draft_ms=mean("draft_ms", rounds),
    )


def _sum_of_checks(checks: Sequence[LosslessCheck]) -> list[LosslessCheck]:
    sums: dict[tuple[str, str], LosslessCheck] = {}
    for check in checks:
        key = (check.dtype, check.reference)
        before = sums.get(key)
        sums[key] = (
            check
            if before is None
            else LosslessCheck(
                dtype=check.dtype,
                reference=check.reference,
                checked_prompts=before.checked_prompts + check.checked_prompts,
                mismatches=before.mismatches + check.mismatches,
                ties=before.ties + check.ties,
                details=before.details + check.details,
            )
        )
    return list(sums.values())


def _known(rates: Sequence[float]) -> list[float | None]:
    """NaN, which says "never measured" and which JSON lacks, as None."""
    return [None if math.isnan(rate) else rate for rate in rates]
