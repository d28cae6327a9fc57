"""Raw measurements of an evaluation, before any statistic: counted per request, timed per run,
pooled.

evaluation/evaluate.py makes one `CellMeasurement` per (workload, temperature, method). `pool` joins
the workloads of one temperature and method into one measurement of the same kind, so that the
report's `all` is built from sums like any other cell and can never be a mean of means. This module
imports nothing of the report that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from inference.spec_decode.replay import ReplayResult

ALL_WORKLOADS = "all"
OUR_ENGINE = "draftsmith"  # this project's runtime
PHASES = ("draft", "verify", "sample", "schedule", "commit", "prefill", "other")


class Record(BaseModel):
    """Base of every part of the report: no unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class TokenDifference(Record):
    """The first difference between an output and its reference, and whether it is a tie."""

    prompt: str = Field(description="Which prompt: an id or its place in the workload.")
    position: int = Field(description="Output index of the first difference.")
    reference_token: int | None = Field(
        description="Token id of the reference, null if it had ended."
    )
    token: int | None = Field(
        description="Token id that was produced, null if the output had ended."
    )
    top_two_gap: float | None = Field(
        default=None,
        description="The target's top-two logit gap there, teacher-forced on the common prefix.",
    )
    noise: float | None = Field(
        default=None,
        description=(
            "Largest change of the gap between two leading logits when the same position is run at "
            "another batch shape."
        ),
    )
    tie: bool = Field(
        description="True if the gap is below the noise: arithmetic, not drafting, decided."
    )


class LosslessCheck(Record):
    """Greedy outputs with drafting against a reference without, token for token."""

    dtype: str = Field(
        description="Weights' dtype during this check; float32 must be equal, bfloat16 may tie."
    )
    reference: str = Field(
        description="What was compared with: `autoregressive` or `transformers_generate`."
    )
    checked_prompts: int = Field(description="Prompts compared.")
    mismatches: int = Field(
        description="Prompts that differ by more than a tie. Anything but 0 is a failure."
    )
    ties: int = Field(description="Prompts whose first difference is a tie.")
    details: list[TokenDifference] = Field(
        default=[], description="One entry per differing prompt."
    )


@dataclass(frozen=True)
class RequestRounds:
    """Counters of one request.

    accepted_per_round  one entry per round after prefill (0 for a round without a proposal); empty
    if unknown prompt_tokens       length of the prompt; None: unknown past_end            accepted
    drafts that are counted but lie past the end of the response; None: unknown"""

    output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    accepted_per_pos: Sequence[int]  # [K]
    accepted_per_round: Sequence[int] = ()
    past_end: int | None = 0
    prompt_tokens: int | None = None

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_pos)

    @classmethod
    def of(cls, output: Any, num_speculative_tokens: int) -> RequestRounds:
        """From a `RequestOutput`; positions that were never reached count as 0, so the list has K
        entries."""
        metrics = output.metrics
        per_pos = list(metrics.num_accepted_tokens_per_pos)
        return cls(
            output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
            num_drafts=metrics.num_drafts,
            num_draft_tokens=metrics.num_draft_tokens,
            accepted_per_pos=per_pos + [0] * (num_speculative_tokens - len(per_pos)),
            accepted_per_round=list(metrics.accepted_per_round),
            past_end=metrics.num_accepted_past_end,
            prompt_tokens=len(output.prompt_token_ids),
        )


@dataclass(frozen=True)
class TimedRun:
    """One pass over the cell's prompts: output tokens, wall seconds, and the drafting rounds it
    took (0: none)."""

    tokens: int
    seconds: float
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class Costs:
    """Isolated times in milliseconds (see cost_model): V(1), V(K+1) and D(K), the whole draft
    phase."""

    target_step_ms: float
    verify_ms: float
    draft_ms: float
    batch_size: int | None = None
    context_length: int | None = None


@dataclass(frozen=True)
class CellMeasurement:
    """Everything measured for one (workload, temperature, method, engine); what was not measured
    stays empty.

    Runs are in repeat order: run i of `speculative` was interleaved with run i of the others.
    Tokens of a run are output tokens, its seconds include prefill. `requests` are those of one
    pass. `phase_seconds` (keys: PHASES without `other`) are summed over all speculative runs."""

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
    suite: str | None = None  # the workload is a category of it


def pool(group: Sequence[CellMeasurement]) -> CellMeasurement:
    """Every workload of one temperature, method, engine and suite as one; what one of them lacks,
    the pool lacks."""
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
        replay_own_text=(
            [r for m in group for r in m.replay_own_text]
            if all(m.replay_own_text for m in group)
            else ()
        ),
        lossless=_pool_lossless([check for m in group for check in m.lossless]),
        engine=group[0].engine,
        suite=group[0].suite,
    )


def _pool_runs(runs: Sequence[Sequence[TimedRun]]) -> list[TimedRun]:
    return [
        TimedRun(*map(sum, zip(*map(astuple, same), strict=True)))
        for same in zip(*runs, strict=False)
    ]


def _pool_phases(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    if not all(phases):
        return {}
    return {
        name: sum(seconds.get(name, 0.0) for seconds in phases)
        for name in PHASES
        if name != "other"
    }


def _pool_costs(group: Sequence[CellMeasurement]) -> Costs | None:
    """V(1) weighted by committed tokens, V(K+1) and D(K) by rounds: then the pooled limit is
    exactly the ratio of the pooled times, Σ τ_w r_w V_w(1) / Σ r_w (V_w(K+1) + D_w(K))."""
    weighted = [
        (m.costs, sum(r.num_drafts for r in m.requests), sum(r.accepted for r in m.requests))
        for m in group
    ]
    costs = [
        (cost, rounds, rounds + accepted) for cost, rounds, accepted in weighted if cost is not None
    ]
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
    alike: dict[tuple[str, str], list[LosslessCheck]] = {}
    for check in checks:
        alike.setdefault((check.dtype, check.reference), []).append(check)
    return [
        LosslessCheck(
            dtype=dtype,
            reference=reference,
            checked_prompts=sum(check.checked_prompts for check in group),
            mismatches=sum(check.mismatches for check in group),
            ties=sum(check.ties for check in group),
            details=[detail for check in group for detail in check.details],
        )
        for (dtype, reference), group in alike.items()
    ]
