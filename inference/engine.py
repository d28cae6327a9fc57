"""The loop: schedule -> propose -> verify -> commit. Everything a round does, in this order, is on this page.

Between rounds a running row's cache holds all its committed tokens but the last, the anchor. A round feeds the anchor
and the drafts through the target at once, keeps the drafts the rule accepts plus one token of the target's own, and
rolls the rest back by not counting it. Knows no tokenizer, no file and no particular drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference.cache import RaggedCache
from inference.compilation_config import Compilation
from inference.draft_length import DraftLength
from inference.kv_memory import KVMemory
from inference.logits_processors import cut_at_dead_ends, process_logits
from inference.logprobs import record_logprobs, record_prompt_logprobs
from inference.metrics import EngineCounters
from inference.prefix_reuse import PrefixReuse
from inference.proposal import Proposal
from inference.proposers.base import Proposer
from inference.rejection_sampler import AUTO, Kept, verify_and_sample
from inference.request import Request
from inference.sampling_params import SamplingParams
from inference.scheduler import Scheduler
from inference.tree import ancestors
from speculators.errors import ConfigError, DraftsmithError
from speculators.target import FrozenTarget

if TYPE_CHECKING:
    from inference.compiled import CompiledRounds

# What was judged in a round, before it is committed: the requests in their rows, their drafts, the new tokens of each
# (the accepted drafts and one more; what follows the end of a response among them will be dropped).
OnRound = Callable[[Sequence[Request], Proposal, Sequence[Sequence[int]]], None]

PHASES = ("schedule", "draft", "verify", "sample", "commit", "prefill")


class Engine:
    """Runs requests in at most `max_num_seqs` rows. Not thread-safe: `add`, `step` and `abort` from one thread.

    max_num_batched_tokens  tokens of one prefill forward; admitted prompts are prefilled whole before the next round
    enable_prefix_caching   a request takes over what another row computed for the same first tokens
    kv_cache_memory_bytes   most memory for keys and values (see KVMemory); None: as much as max_num_seqs rows need
    compilation             how rounds are compiled (docs/runtime.md); None: they run eager

    `options`: those above as they were given, for another engine like this one.
    `timers`: seconds per phase since `reset_metrics`. verify is the target's forward, sample the decision what to keep;
    prefill includes the drafter's share of it. On a GPU a phase that only launches work is charged to the next one
    that waits for it (sample, as a rule).
    """

    def __init__(
        self,
        target: FrozenTarget,
        *,
        max_model_len: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        proposer: Proposer | None = None,
        draft_length: DraftLength | None = None,
        rule: str = AUTO,
        on_round: OnRound | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        compilation: Compilation | None = None,
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens={max_num_batched_tokens}; expected at least 1")
        self.options: dict[str, Any] = dict(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching, kv_cache_memory_bytes=kv_cache_memory_bytes,
            compilation=compilation,
        )  # fmt: skip
        self.target, self.rule, self.max_model_len = target, rule, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = Scheduler(max_num_seqs)
        self._proposer, self.on_round = proposer, on_round
        drafts = proposer.max_places if proposer is not None else 0
        self._cache = RaggedCache(max_num_seqs, max_model_len + drafts, device=target.device)
        self._reuse = PrefixReuse(self._cache, enable_prefix_caching)
        most = proposer.num_speculative_tokens if proposer is not None else 0
        self.draft_length = draft_length or DraftLength(most)
        if proposer is not None:
            self.draft_length.attach(proposer, self._rehearse)
        self._speculate = True
        self.compiled: CompiledRounds | None = None
        self.reset_metrics()
        self._memory = None
        if kv_cache_memory_bytes is not None:
            self._probe()
            self._memory = KVMemory(kv_cache_memory_bytes, self._cache, proposer, self._cache.max_len - max_model_len)
        if compilation is not None:
            from inference.compiled import CompiledRounds  # torch's compiler takes seconds to import

            self.compiled = CompiledRounds(compilation, target, self._cache, proposer, max_model_len, self._memory)

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

    def take_over(self, other: Engine) -> None:
        """Goes on with what another engine has not finished, computing it anew, and with its totals and its listener;
        the other one is done. Between steps."""
        other.preempt_all()
        self.scheduler, self.on_round = other.scheduler, other.on_round
        self.counters, self.timers, self._row_rounds = other.counters, other.timers, other._row_rounds

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Prefills what can be admitted, then does one round for all rows; returns the requests that finished."""
        try:
            return self._step()
        except BaseException:
            self._reuse.forget()  # a row may hold half of something
            raise

    def _step(self) -> list[Request]:
        started = perf_counter()
        admitted = self._make_room()
        self.timers["schedule"] += perf_counter() - started
        finished: list[Request] = []
        while admitted:
            wave = self._reuse.wave(admitted)
            self.scheduler.admit(wave)
            admitted = [request for request in admitted if request not in wave]
            finished += self._prefill(wave)
        if self.scheduler.running:
            finished += self._round(self.scheduler.running)
        return finished

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

    def _round(self, rows: list[Request]) -> list[Request]:
        """Propose, verify, sample, commit. B = rows in use, K = longest draft of the round."""
        clock, proposer = perf_counter, self.proposer
        t0 = clock()
        if proposer is None:
            proposal = Proposal.empty(len(rows), self.target.device)
        else:
            limits = self.draft_length.limits(rows)
            planned = clock()
            self.timers["schedule"] += planned - t0
            t0 = planned
            proposal = self.draft_length.settle(proposer.propose(rows, limits))
        t1 = clock()
        anchors = torch.tensor([[request.token_ids[-1]] for request in rows], device=self.target.device)  # [B, 1]
        inputs = torch.cat([anchors, proposal.token_ids], dim=1) if proposal.width else anchors  # [B, K+1]
        t2 = clock()
        taps, last_hidden = self._forward(0, len(rows), inputs, proposal)
        logits = self.target.logits(last_hidden)  # [B, 1+K, V]
        t3 = clock()
        if proposer is not None and proposer.reads_logits:
            proposer.see_logits(rows, proposal, logits)
        kept = self._decide(logits, proposal, rows)
        t4 = clock()
        if self.on_round is not None:
            self.on_round(rows, proposal, [each.tokens for each in kept])
        depths = proposal.depths()
        for row, (request, each, drafted) in enumerate(zip(rows, kept, proposal.counts, strict=True)):
            self._cache.keep(row, [0, *(1 + place for place in each.places)])  # the anchor and the accepted drafts
            accepted = min(len(each.places), request.commit(each.tokens))  # what follows the end was not accepted
            request.count_round(drafted, accepted, depth := max(depths[row][:drafted], default=0))
            self.counters.add(drafted, accepted, depth)
            if proposer is not None:
                proposer.count(request, drafted, accepted, depth)
        self._row_rounds += len(rows)
        if proposer is not None:
            self.draft_length.learn(proposal.counts, [len(each.places) for each in kept], t1 - t0, t4 - t1)
        if proposer is not None and proposer.reads_features:
            if proposal.parents is not None:
                taps, last_hidden = (_along(kept, features) for features in (taps, last_hidden))
            proposer.observe(rows, [len(each.tokens) for each in kept], taps, last_hidden)
        finished = self._release_finished()
        t5 = clock()
        timers = self.timers
        timers["draft"] += t1 - t0
        timers["schedule"] += t2 - t1
        timers["verify"] += t3 - t2
        timers["sample"] += t4 - t3
        timers["commit"] += t5 - t4
        return finished

    def _prefill(self, wave: list[Request]) -> list[Request]:
        """Feeds the texts of the newly added rows, as far as they are not there, in chunks of at most
        max_num_batched_tokens; then samples the first token of each that has none."""
        started = perf_counter()
        rows, lengths = self.scheduler.running, self._cache.lengths
        first = len(rows) - len(wave)
        for row, request in enumerate(wave, first):
            self._enter(row, request)
        ends: dict[int, Tensor] = {}  # row -> last_hidden [H] of its last position
        while (chunk := self._next_chunk(first)) is not None:
            start, stop, width = chunk
            texts = [request.token_ids[: request.num_prefill_tokens] for request in rows[start:stop]]
            pieces = [text[done : done + width] for text, done in zip(texts, lengths[start:stop], strict=True)]
            counts = [len(piece) for piece in pieces]
            padded = [piece + [0] * (width - len(piece)) for piece in pieces]
            taps, last_hidden = self._forward(start, stop, torch.tensor(padded, device=self.target.device))
            for i, (row, count) in enumerate(zip(range(start, stop), counts, strict=True)):
                record_prompt_logprobs(self.target.logits, rows[row], lengths[row], last_hidden[i, :count])
                self._cache.advance(row, count)
                if lengths[row] == len(texts[i]):
                    ends[row] = last_hidden[i, count - 1].clone()
            if self.proposer is not None and self.proposer.reads_features:
                self.proposer.prefill(start, rows[start:stop], counts, taps, last_hidden)
        begun = [(request, ends[row]) for row, request in enumerate(wave, first) if not request.output_token_ids]
        if begun:
            new = [request for request, _ in begun]
            logits = self.target.logits(torch.stack([end for _, end in begun])[:, None])  # [b, 1, V]
            first_tokens = self._decide(logits, Proposal.empty(len(new), self.target.device), new)
            now = perf_counter()
            for request, kept in zip(new, first_tokens, strict=True):
                request.first_token_time = now
                request.commit(kept.tokens)
        finished = self._release_finished()
        self.timers["prefill"] += perf_counter() - started
        return finished

    def _next_chunk(self, first: int) -> tuple[int, int, int] | None:
        """(start, stop, width): neighbouring rows from `first` on that are not prefilled yet, and how many tokens each
        is fed now. No row is padded beyond the longest one: that would need memory nobody asked for."""
        lengths = self._cache.lengths
        left = [request.num_prefill_tokens - lengths[row] for row, request in enumerate(self.scheduler.running)]
        start = next((row for row in range(first, len(left)) if left[row]), None)
        if start is None:
            return None
        stop = next((row for row in range(start, len(left)) if not left[row]), len(left))
        room = max(self._cache.capacity, *(lengths[row] + left[row] for row in range(start, stop)))
        budget = max(1, self.max_num_batched_tokens // (stop - start))
        return start, stop, min(budget, max(left[start:stop]), room - max(lengths[start:stop]))

    def _enter(self, row: int, request: Request) -> None:
        """A request takes a free row, with what is known of its text."""
        reused = self._reuse.enter(request, row, self.proposer)
        if not request.output_token_ids and self._reuse.enabled and request.may_reuse:
            request.num_cached_tokens = reused
            self.counters.prefix_cache_queries += request.num_prompt_tokens
            self.counters.prefix_cache_hits += reused

    # ------------------------------------------------------------------ its parts

    def _forward(
        self, start: int, stop: int, token_ids: Tensor, proposal: Proposal | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """token_ids [b, T], written at each row's own length -> taps [b, T, n·H] or None, last_hidden [b, T, H].
        `proposal`: what the tokens after the first are, where it is a tree."""
        T, cache = token_ids.shape[1], self._cache
        if self.compiled is not None:
            features = self.compiled.forward(start, stop, token_ids, proposal)
            if features is not None:
                return features
        key_position_ids = None
        if proposal is None or proposal.parents is None or T == 1:
            position_ids, mask = cache.position_ids(start, stop, T), cache.mask(start, stop, T)
        else:
            lengths = cache.lengths[start:stop]
            depths, visible = ancestors(proposal, T - 1, cache.device)
            first = torch.tensor(lengths, device=cache.device)[:, None]  # [b, 1]
            position_ids = first + depths
            mask, index = cache.tree_mask(start, stop, lengths, visible)
            key_position_ids = first + torch.where(index < 0, index, depths.gather(1, index.clamp(0, T - 1)))
        if max(cache.lengths[start:stop]) + T > self.max_model_len:  # padding only: drafts keep to the limit
            position_ids = position_ids.clamp(max=self.max_model_len - 1)
        return self.target(token_ids, position_ids, mask, cache.view(start, stop, T), key_position_ids)

    def _rehearse(self, rows: int, T: int) -> None:
        """A forward over T tokens of each of the first rows, forgotten: for its time to be taken."""
        token_ids = torch.zeros(rows, T, dtype=torch.long, device=self.target.device)
        self.target.logits(self._forward(0, rows, token_ids)[1]).argmax(-1).tolist()

    def _decide(self, logits: Tensor, proposal: Proposal, rows: Sequence[Request]) -> list[Kept]:
        """Logits [b, 1+K, V] -> the accepted drafts of each row and one token more."""
        processed = process_logits(logits, proposal, rows)
        params, generators = [request.params for request in rows], [request.generator for request in rows]
        kept = verify_and_sample(processed, proposal, params, generators, self.rule)
        cut_at_dead_ends(rows, kept)
        record_logprobs(logits, proposal, rows, [each.tokens for each in kept])
        return kept

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

    def _probe(self) -> None:
        """Two tokens through target and drafter, in as little memory as can be, for the size of keys and values."""
        request = Request("probe", 0, [0, 0], SamplingParams(), generator=None, max_model_len=self.max_model_len)
        for cache in (self._cache, self._proposer.cache if self._proposer is not None else None):
            if cache is not None:
                cache.resize(1, min(4, cache.max_len))
        with torch.inference_mode():
            features = self._forward(0, 1, torch.zeros(1, 2, dtype=torch.long, device=self.target.device))
            if self._proposer is not None and self._proposer.reads_features:
                self._proposer.reset(0)
                self._proposer.prefill(0, [request], [2], *features)
                self._proposer.reset(0)


def _along(kept: Sequence[Kept], features: Tensor | None) -> Tensor | None:
    """Features [b, 1+K, ·] of the last committed token and of every place -> [b, T, ·] of it and the kept places."""
    if features is None:
        return None
    width = max(len(each.tokens) for each in kept)
    places = [[0, *(1 + place for place in each.places)] for each in kept]
    index = torch.tensor([row + [0] * (width - len(row)) for row in places], device=features.device)
    return features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
