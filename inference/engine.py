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
from inference.draft_length import DraftLength
from inference.metrics import SpecDecodeCounters
from inference.proposal import Proposal
from inference.proposers.base import Proposer
from inference.rejection_sampler import verify_and_sample
from inference.request import Request
from inference.scheduler import Scheduler
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
        draft_length: DraftLength | None = None,
        rule: str = "token",
        on_round: OnRound | None = None,
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ConfigError(f"max_num_batched_tokens={max_num_batched_tokens}; expected at least 1")
        self.target, self.rule, self.max_model_len = target, rule, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = Scheduler(max_num_seqs)
        self._proposer, self._on_round = proposer, on_round
        drafts = proposer.num_speculative_tokens if proposer is not None else 0
        self._cache = RaggedCache(max_num_seqs, max_model_len + drafts, device=target.device)
        self.draft_length = draft_length or DraftLength(drafts)
        if proposer is not None:
            self.draft_length.attach(proposer, self._rehearse)
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
            limits = self.draft_length.limits(rows)
            planned = clock()
            self.timers["schedule"] += planned - t0
            t0 = planned
            proposal = self.draft_length.settle(proposer.propose(rows, limits))
        t1 = clock()
        anchors = torch.tensor([[request.token_ids[-1]] for request in rows], device=self.target.device)  # [B, 1]
        inputs = torch.cat([anchors, proposal.token_ids], dim=1) if proposal.width else anchors  # [B, K+1]
        t2 = clock()
        taps, last_hidden = self._forward(0, len(rows), inputs)
        logits = self.target.logits(last_hidden)  # [B, K+1, V]
        t3 = clock()
        new_tokens = self._decide(logits, proposal, rows)
        t4 = clock()
        if self._on_round is not None:
            self._on_round(rows, proposal, new_tokens)
        for row, (request, new, drafted) in enumerate(zip(rows, new_tokens, proposal.counts, strict=True)):
            self._cache.advance(row, len(new))  # the anchor and the accepted drafts
            accepted = min(len(new) - 1, request.commit(new))  # what follows the end of a response was not accepted
            request.count_round(drafted, accepted)
            self.counters.add(drafted, accepted)
        self._row_rounds += len(rows)
        if proposer is not None:
            self.draft_length.learn(proposal.counts, [len(new) - 1 for new in new_tokens], t1 - t0, t4 - t1)
        if proposer is not None and proposer.reads_features:
            proposer.observe(rows, [len(new) for new in new_tokens], taps, last_hidden)
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
        new_tokens = self._decide(logits, Proposal.empty(len(admitted), self.target.device), admitted)
        now = perf_counter()
        for request, new in zip(admitted, new_tokens, strict=True):
            request.first_token_time = now
            request.commit(new)
        finished = self._release_finished()
        self.timers["prefill"] += perf_counter() - started
        return finished

    # ------------------------------------------------------------------ its parts

    def _forward(self, start: int, stop: int, token_ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """token_ids [b, T], written at each row's own length -> taps [b, T, n·H] or None, last_hidden [b, T, H]."""
        T = token_ids.shape[1]
        position_ids = self._cache.position_ids(start, stop, T)
        if max(self._cache.lengths[start:stop]) + T > self.max_model_len:  # padding only: drafts keep to the limit
            position_ids = position_ids.clamp(max=self.max_model_len - 1)
        mask = self._cache.mask(start, stop, T)
        return self.target(token_ids, position_ids, mask, self._cache.view(start, stop, T))

    def _rehearse(self, rows: int, T: int) -> None:
        """A forward over T tokens of each of the first rows, forgotten: for its time to be taken."""
        token_ids = torch.zeros(rows, T, dtype=torch.long, device=self.target.device)
        self.target.logits(self._forward(0, rows, token_ids)[1]).argmax(-1).tolist()

    def _decide(self, logits: Tensor, proposal: Proposal, rows: Sequence[Request]) -> list[list[int]]:
        """Logits [b, K+1, V] -> new tokens per row, the accepted drafts and one more."""
        for i, request in enumerate(rows):
            early = request.may_stop_at - len(request.token_ids)  # places at which min_tokens forbids the end
            if early > 0 and request.stop_ids:
                logits[i, :early, sorted(request.stop_ids)] = -torch.inf
        return verify_and_sample(
            logits, proposal, [request.params for request in rows], [request.generator for request in rows], self.rule
        )

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
