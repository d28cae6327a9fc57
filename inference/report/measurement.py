"""Raw measurements of an evaluation, before any statistic: counted per request, timed per run, pooled.

evaluation/evaluate.py fills one `CellMeasurement` per (workload, temperature, method). `pool` joins the workloads of
one temperature and method into one measurement of the same kind, so that the report's `all` is built from sums like any
other cell and can never be a mean of means.

It must not know how a model is run, nor what the report does with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.report.cell import ALL_WORKLOADS, OUR_ENGINE, PHASES, LosslessCheck
from inference.spec_decode.replay import ReplayResult


@dataclass(frozen=True)
class RequestRounds:
    """What one request's rounds did. `accepted_per_round` has one entry per round after prefill (0 for a
    round without a proposal); empty if the engine does not tell. `past_end`: accepted drafts that are counted and lie
    past the end of the response; None: the engine counts them and does not tell how many."""

    output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    accepted_per_pos: Sequence[int]  # [K]
    accepted_per_round: Sequence[int] = ()
    past_end: int | None = 0

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_pos)

    @classmethod
    def of(cls, output: Any, num_speculative_tokens: int) -> RequestRounds:
        """From a `RequestOutput`; positions that were never reached count as 0, so the list has K entries."""
        metrics = output.metrics
        per_pos = list(metrics.num_accepted_tokens_per_pos)
        return cls(
            output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
            num_drafts=metrics.num_drafts,
            num_draft_tokens=metrics.num_draft_tokens,
            accepted_per_pos=per_pos + [0] * (num_speculative_tokens - len(per_pos)),
            accepted_per_round=list(metrics.accepted_per_round),
            past_end=metrics.num_accepted_past_end,
        )


@dataclass(frozen=True)
class TimedRun:
    """One pass over the cell's prompts: output tokens, wall seconds, and the drafting rounds it took (0: none)."""

    tokens: int
    seconds: float
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class Costs:
    """Isolated times in milliseconds (see cost_model): V(1), V(K+1) and D(K), the whole draft phase."""

    target_step_ms: float
    verify_ms: float
    draft_ms: float
    batch_size: int | None = None
    context_length: int | None = None


@dataclass(frozen=True)
class CellMeasurement:
    """Everything measured for one (workload, temperature, method, engine); what was not measured stays empty.

    Runs are in repeat order: run i of `speculative` was interleaved with run i of the others. Their
    tokens are output tokens, their seconds include prefill. `requests` are those of one pass. `phase_seconds`
    (names of report_cell.PHASES, without `other`) are summed over all the speculative runs.
    """

    workload: str
    temperature: float
    method: str
    requests: Sequence[RequestRounds]
    speculative: Sequence[TimedRun] = ()
    autoregressive: Sequence[TimedRun] = ()
    transformers_generate: Sequence[TimedRun] = ()
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    costs: Costs | None = None
    replay: Sequence[ReplayResult] = ()  # one per response
    replay_paired: bool = False  # replay[i] is of the same prompt as requests[i]
    replay_own_text: Sequence[ReplayResult] = ()  # over the very text of requests[i]
    lossless: Sequence[LosslessCheck] = ()
    engine: str = OUR_ENGINE


def pool(group: Sequence[CellMeasurement]) -> CellMeasurement:
    """Every workload of one temperature, method and engine as one measurement; what one lacks, the pool lacks."""
    return CellMeasurement(
        workload=ALL_WORKLOADS,
        temperature=group[0].temperature,
        method=group[0].method,
        requests=[request for m in group for request in m.requests],
        speculative=_pool_runs([m.speculative for m in group]),
        autoregressive=_pool_runs([m.autoregressive for m in group]),
        transformers_generate=_pool_runs([m.transformers_generate for m in group]),
        phase_seconds=_pool_phases([m.phase_seconds for m in group]),
        costs=_pool_costs(group),
        replay=[r for m in group for r in m.replay] if all(m.replay for m in group) else (),
        replay_paired=all(m.replay_paired for m in group),
        replay_own_text=[r for m in group for r in m.replay_own_text] if all(m.replay_own_text for m in group) else (),
        lossless=_pool_lossless([check for m in group for check in m.lossless]),
        engine=group[0].engine,
    )


def _pool_runs(runs: Sequence[Sequence[TimedRun]]) -> list[TimedRun]:
    repeats = min(len(each) for each in runs)
    return [
        TimedRun(
            sum(each[i].tokens for each in runs),
            sum(each[i].seconds for each in runs),
            sum(each[i].num_drafts for each in runs),
            sum(each[i].num_accepted for each in runs),
        )
        for i in range(repeats)
    ]


def _pool_phases(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not all(phases):
        return {}
    return {name: sum(each.get(name, 0.0) for each in phases) for name in PHASES if name != "other"}


def _pool_costs(group: Sequence[CellMeasurement]) -> Costs | None:
    """V(1) weighted by committed tokens, V(K+1) and D(K) by rounds: then the pooled limit is exactly the
    ratio of the pooled times, Σ τ_w r_w V_w(1) / Σ r_w (V_w(K+1) + D_w(K))."""
    weighted = [(m.costs, sum(r.num_drafts for r in m.requests), sum(r.accepted for r in m.requests)) for m in group]
    costs = [(cost, rounds, rounds + accepted) for cost, rounds, accepted in weighted if cost is not None]
    rounds, tokens = sum(r for _, r, _ in costs), sum(t for _, _, t in costs)
    if len(costs) < len(group) or not rounds:
        return None
    batches, contexts = (
        {cost.batch_size for cost, _, _ in costs},
        {cost.context_length for cost, _, _ in costs},
    )
    return Costs(
        target_step_ms=sum(cost.target_step_ms * t for cost, _, t in costs) / tokens,
        verify_ms=sum(cost.verify_ms * r for cost, r, _ in costs) / rounds,
        draft_ms=sum(cost.draft_ms * r for cost, r, _ in costs) / rounds,
        batch_size=batches.pop() if len(batches) == 1 else None,
        context_length=contexts.pop() if len(contexts) == 1 else None,
    )


def _pool_lossless(checks: Sequence[LosslessCheck]) -> list[LosslessCheck]:
    kinds = dict.fromkeys((check.dtype, check.reference) for check in checks)
    pooled = []
    for kind in kinds:
        alike = [check for check in checks if (check.dtype, check.reference) == kind]
        pooled.append(
            LosslessCheck(
                dtype=kind[0],
                reference=kind[1],
                checked_prompts=sum(check.checked_prompts for check in alike),
                mismatches=sum(check.mismatches for check in alike),
                ties=sum(check.ties for check in alike),
                details=[detail for check in alike for detail in check.details],
            )
        )
    return pooled
