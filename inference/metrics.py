"""Counting what drafting gained, under vLLM's names, and the one definition of acceptance length
and rates.

Training, runtime and reports all use these functions. Nothing here knows the engine or how a number
was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

# parts of a round, in the order of reports (docs/evaluate.md)
VERIFICATION = "verification"
DRAFT_FORWARD = "draft_forward"
DRAFT_HEAD = "draft_head"
SAMPLING = "sampling"
REST = "rest"
PARTS = (VERIFICATION, DRAFT_FORWARD, DRAFT_HEAD, SAMPLING, REST)


def acceptance_length(num_accepted: float, num_drafts: float) -> float:
    """Tokens committed per verification, bonus included: 1 + accepted / drafts. 1 without
    drafts."""
    return 1 + num_accepted / num_drafts if num_drafts else 1.0


def influences(totals: Sequence[tuple[float, float]]) -> list[float]:
    """How far each response moves accepted / rounds, of which `totals` holds (rounds, accepted) per
    response."""
    rounds = sum(r for r, _ in totals)
    ratio = sum(a for _, a in totals) / rounds if rounds else 0.0
    return [(a - ratio * r) / rounds if rounds else 0.0 for r, a in totals]


def sum_of_squares(influences: Sequence[float]) -> float:
    """The variance of a ratio of sums over independent units, from their influences. 0 for one
    unit, from which no variance can be estimated."""
    n = len(influences)
    return sum(v * v for v in influences) * (n / (n - 1) if n > 1 else 1.0)


@dataclass(frozen=True)
class Metric:
    """One counter as vLLM's `LLM.get_metrics` lists it: `value`, or `values` of a vector."""

    name: str
    value: int | None = None
    values: list[int] | None = None


@dataclass
class SpecDecodeCounters:
    """Running totals. A draft is one verified proposal; a round without drafted tokens is
    not counted (as in vLLM).

    num_accepted_tokens_per_pos[k] counts the drafts whose first k+1 tokens were all accepted. Only
    tokens that were committed count: what lies after the end of the response was not accepted.
    num_drafts_by_method counts the drafts of each method, where several take turns; else it is
    empty."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_by_method: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        depth: int | None = None,
        method: str | None = None,
    ) -> None:
        """Count one row's round. `depth`: most drafts it could accept, where they are a tree; None:
        all of them. `method`: which drafted, where there are several."""
        if not 0 <= num_accepted_tokens <= num_draft_tokens:
            raise ValueError(
                f"{num_accepted_tokens} accepted of {num_draft_tokens} drafted; expected no more"
                " than drafted"
            )
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        positions = num_draft_tokens if depth is None else depth
        per_pos.extend([0] * (positions - len(per_pos)))
        for k in range(num_accepted_tokens):
            per_pos[k] += 1
        if method is not None:
            self._count_methods({method: 1})

    def _count_methods(self, drafts: Mapping[str, int]) -> None:
        by_method = self.num_drafts_by_method
        for method, number in drafts.items():
            by_method[method] = by_method.get(method, 0) + number

    def merge(self, other: SpecDecodeCounters) -> None:
        """Add another's totals to these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        pairs = zip_longest(
            self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0
        )
        self.num_accepted_tokens_per_pos = [a + b for a, b in pairs]
        self._count_methods(other.num_drafts_by_method)

    def since(self, earlier: SpecDecodeCounters) -> SpecDecodeCounters:
        """The growth from an earlier state of the same counters."""
        grown = SpecDecodeCounters(
            -earlier.num_drafts,
            -earlier.num_draft_tokens,
            -earlier.num_accepted_tokens,
            [-count for count in earlier.num_accepted_tokens_per_pos],
            {method: -count for method, count in earlier.num_drafts_by_method.items()},
        )
        grown.merge(self)
        return grown

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per verification of drafts, bonus included; 1 without any."""
        return acceptance_length(self.num_accepted_tokens, self.num_drafts)

    def joint_rates(self) -> list[float]:
        """P(the first k drafts were all accepted), k = 1..K. NaN without drafts."""
        return [_share(count, self.num_drafts) for count in self.num_accepted_tokens_per_pos]

    def conditional_rates(self) -> list[float]:
        """P(draft k was accepted given that the k-1 before it were), k = 1..K. NaN where those
        never were."""
        counts = self.num_accepted_tokens_per_pos
        return [_share(count, base) for count, base in zip(counts, [self.num_drafts, *counts])]

    def to_dict(self) -> dict[str, int | list[int]]:
        """The totals under vLLM's metric names."""
        return {
            "vllm:spec_decode_num_drafts": self.num_drafts,
            "vllm:spec_decode_num_draft_tokens": self.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "vllm:spec_decode_num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
        }

    def __iter__(self) -> Iterator[Metric]:
        for name, value in self.to_dict().items():
            if isinstance(value, list):
                yield Metric(name, values=value)
            else:
                yield Metric(name, value=value)


def _share(count: float, total: float) -> float:
    return count / total if total else math.nan
