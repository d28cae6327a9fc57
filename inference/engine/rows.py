"""RowManager: which request holds which row of an engine, and what the row keeps of earlier texts.

A row is a place in the target's cache and in the drafter's. Its request may finish, be aborted, or
be preempted: it gives the row back and is computed again from its committed text, for want of
memory or after a step that failed."""

from __future__ import annotations

from inference.kv_cache.memory_limit import KVMemory
from inference.kv_cache.prefix_cache import PrefixReuse
from inference.kv_cache.ragged_cache import RaggedCache
from inference.metrics import EngineCounters
from inference.requests.request import Request
from inference.requests.scheduler import Scheduler
from inference.spec_decode.proposers.base import Proposer


class RowManager:
    """Admits requests to rows and frees their rows; rows in use stay contiguous. Runs no model.

    memory_limit   most memory for keys and values; None, as at first: as much as the scheduler's
                   rows need
    proposer       keeps drafter state per row; None while speculation is off
    counters       the engine's: preemptions and prefix-cache hits are counted here
    """

    def __init__(
        self,
        cache: RaggedCache,
        prefix_cache: PrefixReuse,
        scheduler: Scheduler,
        proposer: Proposer | None,
    ) -> None:
        self.cache, self.prefix_cache, self.scheduler = cache, prefix_cache, scheduler
        self.proposer = proposer
        self.memory_limit: KVMemory | None = None
        self.counters = EngineCounters()

    def admit(self) -> list[Request]:
        """The requests to admit in this step. Preempts the youngest ones first while the rows
        outgrow the memory."""
        scheduler, memory = self.scheduler, self.memory_limit
        if memory is None:
            return scheduler.candidates()
        running = scheduler.running
        while len(running) > 1 and not memory.fits(
            len(running), max(len(r.token_ids) for r in running)
        ):
            self._preempt_youngest()
            self.counters.num_preemptions += 1
        candidates = scheduler.candidates()
        admitted = candidates[: memory.room_for(candidates, running)]
        lengths = [len(r.token_ids) for r in running] + [r.num_prefill_tokens + 1 for r in admitted]
        if lengths:
            memory.hold(len(lengths), max(lengths))
        return admitted

    def enter(self, row: int, request: Request) -> None:
        """Gives a free row to an admitted request and reuses what is cached of its text."""
        reused = self.prefix_cache.enter(request, row, self.proposer)
        if not request.output_token_ids and self.prefix_cache.enabled and request.may_reuse:
            request.num_cached_tokens = reused
            self.counters.prefix_cache_queries += request.num_prompt_tokens
            self.counters.prefix_cache_hits += reused

    def release_finished(self) -> list[Request]:
        """Frees the rows of finished requests and returns these."""
        rows = self.scheduler.running
        finished = [request for request in rows if request.finished]
        if finished:
            for row in range(len(rows) - 1, -1, -1):
                if rows[row].finished:
                    self._vacate(row, self.scheduler.release(row))
        return finished

    def abort(self, request_id: str) -> None:
        """Ends every unfinished response of the request with finish_reason "abort". Unknown ids are
        ignored."""
        waiting = self.scheduler.waiting
        for request in [*waiting, *self.scheduler.running]:
            if request.request_id == request_id and not request.finished:
                request.finish("abort")
        for request in [r for r in waiting if r.finished]:
            waiting.remove(request)
        self.release_finished()

    def _preempt_youngest(self) -> None:
        row = self.scheduler.youngest()
        self._vacate(row, self.scheduler.preempt(row))

    def _vacate(self, row: int, moved: int | None) -> None:
        """Frees `row`. The request of row `moved` moves there, and the text left behind takes its
        old row."""
        if self.prefix_cache.enabled:
            self.prefix_cache.leave(row)
        else:
            self.cache.reset(row)
        if moved is not None:
            self.cache.swap(moved, row)
            self.prefix_cache.swap(moved, row)
            if self.proposer is not None:
                self.proposer.move(moved, row)
