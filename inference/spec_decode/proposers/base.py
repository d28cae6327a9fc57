"""Proposer: the interface that the engine gets drafts from. A proposer knows no verification rule
and commits nothing.

A method overrides `propose`, and of the others what it needs. A trained head is given features: of
the prompt by `prefill`, of what a round keeps by `observe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.metrics import DRAFT_FORWARD
from draftsmith.inference.model_runner.compile_options import CompileOptions
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.round_plan import RoundPlan


class TimedMethod(NamedTuple):
    """A method of a round, and the part of the round that its time counts as (`metrics.PARTS`),
    but for the methods within it that have a part of their own."""

    owner: Any
    name: str
    part: str


class Proposer:
    """Drafts for the rows of an engine.

    num_speculative_tokens  most drafts per row and round
    num_unverified_tokens     most nodes per row that a proposal has beside its drafts
    reads_features          the engine calls `prefill` and `observe`
    reads_logits            the engine calls `see_logits`
    drafts_trees            its proposals may have several tokens after one
    stops_early             it drafts one depth after the other without waiting for a device, and
                            asks a plan that reads confidences before each depth is drawn. Others
                            report `Proposal.confidence`.
    cache                   its own keys and values, if it has any
    rows                    what it remembers of the request in each of the engine's rows
    """

    num_unverified_tokens: int = 0
    reads_features: bool = False
    reads_logits: bool = False
    drafts_trees: bool = False
    stops_early: bool = False
    cache: RaggedCache | None = None

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.rows: dict[int, Any] = {}

    @property
    def max_width(self) -> int:
        """Nodes of its longest proposal, unverified included."""
        return self.num_speculative_tokens + self.num_unverified_tokens

    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        """Drafts at most plan.limits[b] tokens, of a tree as many nodes, to follow the token_ids of
        each request in rows 0..B-1. A row's drafts and its use of its generator must not depend on
        the other rows, but for the answers of `plan.go_on`."""
        raise NotImplementedError

    def prefill(
        self,
        start: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        """Features of the next counts[i] prompt positions of row start + i, padded to the longest:
        taps [b, T, n·H] (None without taps), last_hidden [b, T, H]."""

    def observe(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        """After a round the same of the counts[b] positions kept in rows 0..B-1; their next tokens
        are committed."""

    def see_logits(self, requests: Sequence[Request], proposal: Proposal, logits: Tensor) -> None:
        """The target's logits [B, 1+K, V] over its own proposal before verification: entry 0 after
        the committed text, entry 1+k after node k, unverified included."""

    def rehearse(self, requests: Sequence[Request], depth: int) -> bool:
        """Drafts `depth` tokens for every row and forgets them, to be timed; False if drafting
        takes no time."""
        return False

    def timed_methods(self) -> list[TimedMethod]:
        """Its methods by the part of a round that they are."""
        return [TimedMethod(self, "propose", DRAFT_FORWARD)]

    def compile(self, options: CompileOptions | None) -> None:
        """Drafts by compiled steps from now on, where it has any; None: no more. While there is no
        request."""

    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        """Compiles every shape of these steps until then, once requests have run; `longest`: tokens
        of the longest text that is to come."""

    def bytes_per_row(self) -> int:
        """Memory of its own keys and values of a row at its full length."""
        return 0

    def reset(self, row: int) -> None:
        """A new request enters the row, or the last one has left it."""
        self.rows.pop(row, None)

    def move(self, src_row: int, dst_row: int) -> None:
        """The request of `src_row` goes on in `dst_row`: rows in use are the first."""
        self.reset(dst_row)
        if src_row in self.rows:
            self.rows[dst_row] = self.rows.pop(src_row)
