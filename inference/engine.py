"""The loop: schedule -> propose -> verify -> commit. Everything a round does, in this order, is on this page.

Between rounds a running row's cache holds all its committed tokens but the last, the anchor. A round feeds the anchor
and the drafts through the target at once, keeps the drafts the rule accepts plus one token of the target's own, and
rolls the rest back by not counting it. Knows no tokenizer, no file and no particular drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from inference.cache import RaggedCache
from inference.logits_processors import cut_at_dead_ends, process_logits
from inference.logprobs import record_logprobs, record_prompt_logprobs
from inference.metrics import SpecDecodeCounters
from inference.proposal import Proposal
from inference.proposers.base import Proposer
from inference.rejection_sampler import AUTO, Kept, verify_and_sample
from inference.request import Request
from inference.scheduler import Scheduler
from inference.tree import ancestors
from speculators.errors import ConfigError, DraftsmithError
from speculators.target import FrozenTarget

# What was judged in a round, before it is committed: the requests in their rows, their drafts, the new tokens of each
# (the accepted drafts and one more; what follows the end of a response among them will be dropped).
OnRound = Callable[[Sequence[Request], Proposal, Sequence[Sequence[int]]], None]

PHASES = ("schedule", "draft", "verify", "sample", "commit", "prefill")


class Engine:
    """Runs requests in at most `max_num_seqs` rows. Not thread-safe: `add`, `step` and `abort` from one thread.

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
        rule: str = AUTO,
        on_round: OnRound | None = None,
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens={max_num_batched_tokens}; expected at least 1")
        self.target, self.rule, self.max_model_len = target, rule, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = Scheduler(max_num_seqs)
        self._proposer, self._on_round = proposer, on_round
        drafts = proposer.max_places if proposer is not None else 0
        self._cache = RaggedCache(max_num_seqs, max_model_len + drafts, device=target.device)
        self._speculate = True
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
        self.counters = SpecDecodeCounters()

    def set_speculation(self, on: bool) -> None:
        """Turns drafting on or off; only while nothing runs, since a drafter must have seen a row from its start."""
        if on != self._speculate and self.has_unfinished:
            raise DraftsmithError(
                "engine: drafting cannot be turned on or off while requests are unfinished; "
                "finish or abort them first (a stream that is not exhausted counts: close it)"
            )
        self._speculate = on

    def add(self, request: Request) -> None:
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

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Prefills what can be admitted, then does one round for all rows; returns the requests that finished."""
        started = perf_counter()
        admitted = self.scheduler.admit()
        self.timers["schedule"] += perf_counter() - started
        finished = self._prefill(admitted) if admitted else []
        if self.scheduler.running:
            finished += self._round(self.scheduler.running)
        return finished

    def _round(self, rows: list[Request]) -> list[Request]:
        """Propose, verify, sample, commit. B = rows in use, K = longest draft of the round."""
        clock, proposer = perf_counter, self.proposer
        t0 = clock()
        if proposer is None:
            proposal = Proposal.empty(len(rows), self.target.device)
        else:
            proposal = proposer.propose(rows, [request.draft_limit for request in rows])
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
        if self._on_round is not None:
            self._on_round(rows, proposal, [each.tokens for each in kept])
        depths = proposal.depths()
        for row, (request, each, drafted) in enumerate(zip(rows, kept, proposal.counts, strict=True)):
            self._cache.keep(row, [0, *(1 + place for place in each.places)])  # the anchor and the accepted drafts
            accepted = min(len(each.places), request.commit(each.tokens))  # what follows the end was not accepted
            request.count_round(drafted, accepted, depth := max(depths[row][:drafted], default=0))
            self.counters.add(drafted, accepted, depth)
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

    def _prefill(self, admitted: list[Request]) -> list[Request]:
        """Feeds the prompts of the newly added rows in chunks of at most max_num_batched_tokens, then samples each
        row's first token. Rows come longest first, so those with prompt left are always the first `b` of them."""
        started = perf_counter()
        first = len(self.scheduler.running) - len(admitted)
        for row in range(first, first + len(admitted)):
            self._cache.reset(row)
            if self.proposer is not None:
                self.proposer.reset(row)
        ends: list[Tensor] = [torch.empty(0)] * len(admitted)  # last_hidden [H] of each prompt's last position
        b, done = len(admitted), 0
        while b:
            width = min(max(1, self.max_num_batched_tokens // b), admitted[0].num_prompt_tokens - done)
            chunks = [request.token_ids[done : done + width] for request in admitted[:b]]
            counts = [len(chunk) for chunk in chunks]
            padded = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
            taps, last_hidden = self._forward(first, first + b, torch.tensor(padded, device=self.target.device))
            for request, count, hidden in zip(admitted[:b], counts, last_hidden, strict=True):
                record_prompt_logprobs(self.target.logits, request, done, hidden[:count])
            done += width
            for i, count in enumerate(counts):
                self._cache.advance(first + i, count)
                if admitted[i].num_prompt_tokens <= done:
                    ends[i] = last_hidden[i, count - 1].clone()
            if self.proposer is not None and self.proposer.reads_features:
                self.proposer.prefill(first, admitted[:b], counts, taps, last_hidden)
            while b and admitted[b - 1].num_prompt_tokens <= done:
                b -= 1
        logits = self.target.logits(torch.stack(ends)[:, None])  # [b, 1, V]
        first_tokens = self._decide(logits, Proposal.empty(len(admitted), self.target.device), admitted)
        now = perf_counter()
        for request, kept in zip(admitted, first_tokens, strict=True):
            request.first_token_time = now
            request.commit(kept.tokens)
        finished = self._release_finished()
        self.timers["prefill"] += perf_counter() - started
        return finished

    # ------------------------------------------------------------------ its parts

    def _forward(
        self, start: int, stop: int, token_ids: Tensor, proposal: Proposal | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """token_ids [b, T], written at each row's own length -> taps [b, T, n·H] or None, last_hidden [b, T, H].
        `proposal`: what the tokens after the first are, where it is a tree."""
        T, cache = token_ids.shape[1], self._cache
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
                    moved = self.scheduler.release(row)
                    if moved is not None:
                        self._cache.move(moved, row)
                        if self.proposer is not None:
                            self.proposer.move(moved, row)
        return finished


def _along(kept: Sequence[Kept], features: Tensor | None) -> Tensor | None:
    """Features [b, 1+K, ·] of the last committed token and of every place -> [b, T, ·] of it and the kept places."""
    if features is None:
        return None
    width = max(len(each.tokens) for each in kept)
    places = [[0, *(1 + place for place in each.places)] for each in kept]
    index = torch.tensor([row + [0] * (width - len(row)) for row in places], device=features.device)
    return features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
