"""Raw measurements of an evaluation, before any statistic.

evaluation/evaluate.py fills one `CellMeasurement` per (workload, temperature). `pool` joins the
workloads of one temperature and method into one measurement of the same kind, so that the report's
`all` is built from sums like any other cell and can never be a mean of means. This module imports
nothing of the report that is made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from inference.outputs import RequestOutput
from inference.report.record import Record
from inference.report.speed import TimedPass
from inference.spec_decode.replay import ReplayResult

ALL_WORKLOADS = "all"
OUR_ENGINE = "draftsmith"  # this project's runtime
PHASES = ("draft", "verify", "sample", "schedule", "commit", "prefill")
SPECULATIVE = "speculative"  # kinds of timed passes
AUTOREGRESSIVE = "autoregressive"
TRANSFORMERS = "transformers_generate"


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


class Costs(Record):
    """Times of the parts of a round, each measured alone; formulas in
    `inference/report/cost_model.py`."""

    target_step_ms: float = Field(
        description="V(1): one target forward over one token per row, lm_head included."
    )
    verify_ms: float = Field(
        description="V(K+1): one target forward over K+1 tokens per row, lm_head included."
    )
    draft_ms: float = Field(
        description="D(K): one whole draft phase of K tokens per row (not per token)."
    )
    batch_size: int | None = Field(
        default=None, description="Rows in the forwards that were timed."
    )
    context_length: int | None = Field(
        default=None, description="Tokens already in the cache of each timed row."
    )


@dataclass
class CellMeasurement:
    """Everything measured for one (workload, temperature, method, engine); what was not measured
    stays empty.

    requests         responses with drafting, of one pass, with their `metrics`
    passes           by kind (SPECULATIVE, AUTOREGRESSIVE, TRANSFORMERS), in the order of repeats
    phase_seconds    keys of PHASES, summed over all speculative passes
    replay           one result per response, over the text of `requests`
    suite            of which the workload is a category"""

    workload: str
    temperature: float
    method: str
    num_speculative_tokens: int
    requests: list[RequestOutput] = field(default_factory=list)
    passes: dict[str, list[TimedPass]] = field(default_factory=dict)
    phase_seconds: Counter[str] = field(default_factory=Counter)
    costs: Costs | None = None
    replay: list[ReplayResult] = field(default_factory=list)
    lossless: list[LosslessCheck] = field(default_factory=list)
    engine: str = OUR_ENGINE
    suite: str | None = None

    @property
    def num_drafts(self) -> int:
        return sum(request.metrics.num_drafts for request in self.requests)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(request.metrics.num_accepted_tokens for request in self.requests)


def pool(group: Sequence[CellMeasurement]) -> CellMeasurement:
    """Every workload of one temperature, method, engine and suite as one; what one of them lacks,
    the pool lacks."""
    first = group[0]
    kinds = [kind for kind in first.passes if all(kind in m.passes for m in group)]
    complete = all(m.phase_seconds for m in group)
    return CellMeasurement(
        ALL_WORKLOADS,
        first.temperature,
        first.method,
        first.num_speculative_tokens,
        requests=[request for m in group for request in m.requests],
        passes={kind: [run for m in group for run in m.passes[kind]] for kind in kinds},
        phase_seconds=sum((m.phase_seconds for m in group), Counter()) if complete else Counter(),
        costs=_pool_costs(group),
        replay=[r for m in group for r in m.replay] if all(m.replay for m in group) else [],
        lossless=_pool_lossless([check for m in group for check in m.lossless]),
        engine=first.engine,
        suite=first.suite,
    )


def _pool_costs(group: Sequence[CellMeasurement]) -> Costs | None:
    """V(1) weighted by committed tokens, V(K+1) and D(K) by rounds: then the pooled limit is
    exactly the ratio of the pooled times, Σ τ_w r_w V_w(1) / Σ r_w (V_w(K+1) + D_w(K))."""
    costs = [
        (m.costs, m.num_drafts, m.num_drafts + m.num_accepted_tokens) for m in group if m.costs
    ]
    rounds = sum(r for _, r, _ in costs)
    tokens = sum(t for _, _, t in costs)
    if len(costs) < len(group) or not rounds:
        return None
    batches = {cost.batch_size for cost, _, _ in costs}
    contexts = {cost.context_length for cost, _, _ in costs}
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
