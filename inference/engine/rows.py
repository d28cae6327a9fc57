"""Who holds which row of an engine, and what lies there: requests come, leave, give way, and go on in another engine.

A row is a place in the target's cache and in the drafter's. Its request may finish, be aborted, or give it back to be
computed anew from its committed text: for want of memory, after a step that failed, or for another drafter, which must
have seen it from its start. Runs no model; what a round does is `engine.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inference.kv_cache.memory_limit import KVMemory
from inference.kv_cache.prefix_cache import PrefixReuse
from inference.kv_cache.ragged_cache import RaggedCache
from inference.metrics import EngineCounters
from inference.requests.request import Request
from inference.requests.scheduler import Scheduler
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer
from speculators.errors import ConfigError, DraftsmithError

# What was judged in a round, before it is committed: the requests in their rows, their drafts, the new tokens of each
# (the accepted drafts and one more; what follows the end of a response among them will be dropped).
OnRound = Callable[[Sequence[Request], Proposal, Sequence[Sequence[int]]], None]

PHASES = ("schedule", "draft", "verify", "sample", "commit", "prefill")


class EngineRows:
    """At most `max_num_seqs` rows of `max_len` positions. Not thread-safe.

    `timers`: seconds per phase since `reset_metrics`. `on_round`: who listens to rounds.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_len: int,
        *,
        proposer: Proposer | None,
        on_round: OnRound | None,
        enable_prefix_caching: bool,
        device: torch.device,
    ) -> None:
        self.scheduler = Scheduler(max_num_seqs)
        self.on_round = on_round
        self._proposer, self._speculate = proposer, True
        self._cache = RaggedCache(max_num_seqs, max_len, device=device)
        self._reuse = PrefixReuse(self._cache, enable_prefix_caching)
        self._memory: KVMemory | None = None
        self.reset_metrics()

    @property
    def proposer(self) -> Proposer | None:
        """Who drafts now; None with drafting off."""
        return self._proposer if self._speculate else None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def reset_metrics(self) -> None:
        self.timers: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.counters = EngineCounters()
        self._row_rounds = 0

    @property
    def mean_draft_length(self) -> float:
        """Drafts verified per row and round since `reset_metrics`, rounds without a draft included."""
        return self.counters.num_draft_tokens / max(self._row_rounds, 1)

    def set_speculation(self, on: bool) -> None:
        """Turns drafting on or off; only while nothing runs, since a drafter must have seen a row from its start."""
        if on != self._speculate and self.has_unfinished:
            raise DraftsmithError(
                "engine: drafting cannot be turned on or off while requests are unfinished; "
                "finish or abort them first (a stream that is not exhausted counts: close it)"
            )
        if on != self._speculate:
            self._reuse.forget()  # what lies in the rows was not, or will not be, seen by the drafter
        self._speculate = on

    def reset_prefix_cache(self) -> None:
        """Forgets what could be reused, as must be done when weights of the target or the drafter change."""
        self._reuse.forget()

    def refusal(self, num_prompt_tokens: int, end: int) -> str | None:
        """Why a request of that prompt, which may grow to `end` tokens, can never run; None if it can."""
        memory = self._memory
        if memory is None or end <= memory.most_tokens:
            return None
        return (
            f"prompt and response may have {num_prompt_tokens} + {end - num_prompt_tokens} tokens, whose keys and "
            f"values take {memory.bytes(1, end)} bytes; kv_cache_memory_bytes={memory.limit} holds "
            f"{memory.most_tokens} tokens. Lower max_tokens, shorten the prompt or raise kv_cache_memory_bytes"
        )

    def add(self, request: Request) -> None:
        """The request waits for a row. ConfigError if memory can never hold it."""
        reason = self.refusal(request.num_prompt_tokens, request.end)
        if reason is not None:
            raise ConfigError(f"request {request.request_id}: {reason}")
        self.scheduler.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Ends every unfinished response of the request with finish_reason "abort". Unknown ids are ignored."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        for request in [r for r in waiting if r.request_id == request_id]:
            waiting.remove(request)
            request.finish("abort")
        for request in running:
            if request.request_id == request_id and not request.finished:
                request.finish("abort")
        self._release_finished()

    @torch.inference_mode()
    def preempt_all(self) -> list[Request]:
        """Every running request gives its row back and waits again, to be computed anew from its committed text: the
        way out of a step that failed. Returns those that had finished."""
        finished = self._release_finished()
        while self.scheduler.running:
            row = self.scheduler.youngest()
            self._vacate(row, self.scheduler.preempt(row))
        self._reuse.forget()
        return finished

    def take_over(self, other: EngineRows) -> None:
        """Goes on with what another engine has not finished, computing it anew, and with its totals and its listener;
        the other one is done. Between steps."""
        other.preempt_all()
        self.scheduler, self.on_round = other.scheduler, other.on_round
        self.counters, self.timers, self._row_rounds = other.counters, other.timers, other._row_rounds

    # ------------------------------------------------------------------ into rows and out of them

    def _make_room(self) -> list[Request]:
        """Who is admitted in this step, having preempted whoever came last while the others outgrew the memory."""
        scheduler, memory = self.scheduler, self._memory
        if memory is None:
            return scheduler.candidates()
        running = scheduler.running
        while len(running) > 1 and not memory.fits(len(running), max(len(r.token_ids) for r in running)):
            row = scheduler.youngest()
            self._vacate(row, scheduler.preempt(row))
            self.counters.num_preemptions += 1
        candidates = scheduler.candidates()
        admitted = candidates[: memory.room_for(candidates, running)]
        lengths = [len(r.token_ids) for r in running] + [r.num_prefill_tokens + 1 for r in admitted]
        if lengths:
            memory.hold(len(lengths), max(lengths))
        return admitted

    def _enter(self, row: int, request: Request) -> None:
        """A request takes a free row, with what is known of its text."""
        reused = self._reuse.enter(request, row, self.proposer)
        if not request.output_token_ids and self._reuse.enabled and request.may_reuse:
            request.num_cached_tokens = reused
            self.counters.prefix_cache_queries += request.num_prompt_tokens
            self.counters.prefix_cache_hits += reused

    def _release_finished(self) -> list[Request]:
        """Frees the rows of finished requests, keeping the rows in use contiguous."""
        rows = self.scheduler.running
        finished = [request for request in rows if request.finished]
        if finished:
            for row in range(len(rows) - 1, -1, -1):
                if rows[row].finished:
                    self._vacate(row, self.scheduler.release(row))
        return finished

    def _vacate(self, row: int, moved: int | None) -> None:
        """The request of `row` has left it; that of row `moved` goes on there, and the text left behind changes places
        with it."""
        if self._reuse.enabled:
            self._reuse.leave(row)
        else:
            self._cache.reset(row)
        if moved is not None:
            self._cache.swap(moved, row)
            self._reuse.swap(moved, row)
            if self.proposer is not None:
                self.proposer.move(moved, row)
