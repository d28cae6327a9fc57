"""The loop: schedule -> propose -> verify -> commit.

Between rounds a running row's cache holds all its committed tokens but the last, the anchor. A
round feeds the anchor and the drafts through the target at once, keeps the drafts the rule accepts
plus one token of the target's own, and rolls the rest back by not counting it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from draftsmith.inference.engine.logprobs import record_logprobs
from draftsmith.inference.engine.memory import memory_fault
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.metrics import REST, SAMPLING, VERIFICATION, SpecDecodeCounters
from draftsmith.inference.model_runner.compile_options import (
    CompileOptions,
    compiler_fault,
    read_compilation,
)
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.outputs import JudgedRound, Placed
from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.scheduler import Scheduler
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.inference.spec_decode.logits import process_logits
from draftsmith.inference.spec_decode.proposal import Kept, Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer, TimedMethod
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.inference.spec_decode.tree_attention import along, tree_places
from draftsmith.inference.spec_decode.verification.rejection_sampler import AUTO, verify_and_sample
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.speculators.hub import one_line
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.target.frozen_target import FrozenTarget

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests in at most `max_num_seqs` rows. Not thread-safe: `add`, `step` and `abort` from
    one thread.

    `options`: with max_model_len given. `counters`: totals of drafting since `reset_metrics`.
    `runner`: the target over these rows. `drafting`: the proposer, None while speculation is off.
    `rejection_sample_method`: the verification rule at temperature > 0."""

    def __init__(
        self,
        target: FrozenTarget,
        options: EngineOptions,
        *,
        proposer: Proposer | None = None,
        draft_length: DraftLength | None = None,
        rejection_sample_method: str = AUTO,
    ) -> None:
        if options.max_model_len is None:
            raise ConfigError("an engine needs max_model_len", where="EngineOptions")
        self.compile_options = read_compilation(options, target.device.type)
        compiles = self.compile_options is not None and self.compile_options.asked
        _require_abilities(target, compiles, proposer)
        if not compiles and target.recurrent is not None:
            self.compile_options = None
        self.target = target
        self.options = options
        self.max_model_len = options.max_model_len
        self.proposer = self.drafting = proposer
        self.scheduler = Scheduler(options.max_num_seqs)
        self.runner = ModelRunner(
            target,
            options.max_num_seqs,
            self.max_model_len,
            drafts=proposer.max_width if proposer is not None else 0,
        )
        self.counters = SpecDecodeCounters()
        self.draft_length = draft_length or DraftLength(
            proposer.num_speculative_tokens if proposer is not None else 0
        )
        self._rejection_sample_method = rejection_sample_method
        self._prefilled = False  # in the step before
        if compiles:
            self._compile(self.compile_options)

    # ------------------------------------------------------------------ requests

    @property
    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_unfinished

    def set_speculation(self, on: bool) -> None:
        """Turns drafting on or off; only while nothing runs, since a drafter must have seen a row
        from its start."""
        drafting = self.proposer if on else None
        if drafting is not self.drafting and self.has_unfinished:
            raise DraftsmithError(
                "drafting cannot be turned on or off while requests are unfinished; "
                "finish or abort them first",
                where="engine",
            )
        self.drafting = drafting

    def reset_metrics(self) -> None:
        """The counters of drafting begin anew, at zero."""
        self.counters = SpecDecodeCounters()

    def add(self, request: Request) -> None:
        """The request waits for a row."""
        self.scheduler.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Ends every unfinished response of the request with finish_reason "abort". Unknown ids are
        ignored."""
        waiting = self.scheduler.waiting
        for request in [*waiting, *self.scheduler.running]:
            if request.request_id == request_id and not request.finished:
                request.finish("abort")
        for request in [r for r in waiting if r.finished]:
            waiting.remove(request)
        self._release_finished()

    # ------------------------------------------------------------------ before requests

    @contextmanager
    def rehearsal(self, rows: int, length: int) -> Iterator[list[Request]]:
        """Requests with prompts of `length` tokens in the first `rows` rows, as after prefill; they
        are gone afterwards. While no request waits or runs."""
        self.set_speculation(True)
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        requests = [
            Request(str(row), 0, [0] * length, greedy, generator=None, max_model_len=length + 2)
            for row in range(rows)
        ]
        for request in requests:
            self.add(request)
        self.scheduler.admit()
        self._prefill(0)
        try:
            yield requests
        finally:
            for request in requests:
                request.finish("abort")
            self._release_finished()

    @property
    def compiles(self) -> bool:
        """True if rounds are compiled (docs/runtime.md)."""
        return self.runner.compiled is not None

    def begin_compiling(self) -> bool:
        """Before a warm-up: rounds that are compiled by default are from now on, if all rows fit
        the device's memory at their full length. Returns `compiles`."""
        if self.compile_options is None or self.compiles:
            return self.compiles
        if (fault := memory_fault(self.runner, self.proposer)) is not None:
            logger.warning("rounds run eager: compiled ones need all memory at once; %s", fault)
            return False
        if (fault := compiler_fault(self.compile_options, self.target.device.type)) is not None:
            logger.warning("rounds run eager, since they cannot be compiled: %s", fault)
            return False
        self._compile(self.compile_options)
        return True

    @torch.inference_mode()
    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        """Compiles every shape that a round can have, until then (`perf_counter`). After a round
        with drafting and one without, which show what the steps are given. `longest`: tokens of the
        longest text that is to come.

        ConfigError where the target cannot be compiled and the options ask for it; by default all
        runs eager then, with a warning."""
        assert self.compile_options is not None
        try:
            self.runner.warm_up(deadline, longest)
            if self.proposer is not None:
                self.proposer.warm_up(deadline, longest)
        except (ConfigError, RuntimeError) as error:
            if self.compile_options.asked:
                raise
            logger.warning("rounds run eager, since they cannot be compiled: %s", one_line(error))
            self._compile(None)

    def _compile(self, options: CompileOptions | None) -> None:
        proposer = self.proposer
        self.runner.compile(options, trees=proposer is not None and proposer.drafts_trees)
        if proposer is not None:
            proposer.compile(options)

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Prefills what can be admitted, or does one round for all rows; returns the requests that
        finished. They take turns: first tokens need not wait for a round, nor rows for many
        prefills."""
        running = self.scheduler.running
        first = len(running)
        if not (self._prefilled and running) and self.scheduler.admit():
            self._prefilled = True
            return self._prefill(first)
        self._prefilled = False
        return self._round(running) if running else []

    def _round(self, rows: list[Request]) -> list[Request]:
        """Propose, verify, sample, commit. B = rows in use, K = longest draft of the round."""
        proposer = self.drafting
        plan, proposal = self._propose(rows)
        taps, last_hidden, logits = self._forward(rows, proposal)
        compiled = self.runner.ran_compiled
        if proposer is not None and proposer.reads_logits:
            proposer.see_logits(rows, proposal, logits)
        kept = self._decide(logits, proposal, rows)
        # of each row the anchor and the accepted drafts
        kept_nodes = [[0, *(1 + node for node in row_kept.nodes)] for row_kept in kept]
        self.runner.keep(kept_nodes)
        num_accepted = [len(row_kept.nodes) for row_kept in kept]
        depths = proposal.depths()
        for row, request in enumerate(rows):
            committed = _commit(request, proposal, row, kept[row])
            accepted = min(num_accepted[row], committed)  # what follows the end was not
            drafted = proposal.counts[row]
            depth = max(depths[row][:drafted], default=0)
            method = proposal.methods[row] if proposal.methods else None
            request.count_round(drafted, accepted, depth, method)
            request.num_compiled_rounds += compiled
            self.counters.add(drafted, accepted, depth, method)
        plan.learn(kept)
        if proposer is not None and proposer.reads_features:
            if proposal.parents is not None:
                taps = None if taps is None else along(kept_nodes, taps)
                last_hidden = along(kept_nodes, last_hidden)
            kept_counts = [1 + accepted for accepted in num_accepted]
            proposer.observe(rows, kept_counts, taps, last_hidden)
        return self._release_finished()

    def timed_methods(self) -> list[TimedMethod]:
        """The methods of a round by the part of it that they are; `_round` is all of it."""
        methods = [
            TimedMethod(self, "_round", REST),
            TimedMethod(self, "_forward", VERIFICATION),
            TimedMethod(self, "_decide", SAMPLING),
        ]
        return methods if self.proposer is None else methods + self.proposer.timed_methods()

    def _propose(self, rows: list[Request]) -> tuple[RoundPlan, Proposal]:
        """The plan of a round, and the drafts that are verified by it."""
        if self.drafting is None:
            return RoundPlan([0] * len(rows)), Proposal.empty(len(rows), self.target.device)
        plan = self.draft_length.plan(rows)
        return plan, plan.settle(self.drafting.propose(rows, plan))

    def _forward(
        self, rows: Sequence[Request], proposal: Proposal
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The target over each row's anchor and drafts: taps, last_hidden, logits [B, 1+K, ·]."""
        anchors = [[request.token_ids[-1]] for request in rows]
        inputs = on_device(anchors, self.target.device)  # [B, 1]
        if proposal.width:
            inputs = torch.cat([inputs, proposal.token_ids], dim=1)  # [B, 1+K]
        tree = tree_places(proposal, inputs.device)
        taps, last_hidden = self.runner(0, inputs, tree)
        return taps, last_hidden, self.runner.logits(last_hidden)

    def _prefill(self, first: int) -> list[Request]:
        """Feeds the prompts of the rows from `first` on, longest first, in chunks of at most
        max_num_batched_tokens; then samples the first token of each."""
        new = self.scheduler.running[first:]
        proposer = self.drafting
        if proposer is not None:
            for row in range(first, first + len(new)):
                proposer.reset(row)
        ends: list[Tensor] = []  # last_hidden [H] of the last positions, the shortest prompt first
        done = 0  # tokens of each prompt that is longer
        while done < new[0].num_prompt_tokens:
            rows = [request for request in new if request.num_prompt_tokens > done]
            width = max(1, self.options.max_num_batched_tokens // len(rows))
            width = min(width, rows[0].num_prompt_tokens - done)
            pieces = [request.token_ids[done : done + width] for request in rows]
            counts = [len(piece) for piece in pieces]
            padded = [piece + [0] * (width - len(piece)) for piece in pieces]
            token_ids = on_device(padded, self.target.device)
            taps, last_hidden = self.runner(first, token_ids)
            for i in range(len(rows) - 1, -1, -1):
                if done + counts[i] == rows[i].num_prompt_tokens:
                    ends.append(last_hidden[i, counts[i] - 1].clone())
            self.runner.advance(first, counts)
            if proposer is not None and proposer.reads_features:
                proposer.prefill(first, rows, counts, taps, last_hidden)
            done += width
        logits = self.runner.logits(torch.stack(ends[::-1])[:, None])  # [b, 1, V]
        nothing = Proposal.empty(len(new), self.target.device)
        kept = self._decide(logits, nothing, new)
        now = perf_counter()
        for row, request in enumerate(new):
            request.first_token_time = now
            _commit(request, nothing, row, kept[row])
        return self._release_finished()

    # ------------------------------------------------------------------ its parts

    def _release_finished(self) -> list[Request]:
        """Frees the rows of finished requests and returns these; rows in use stay contiguous."""
        running = self.scheduler.running
        finished = [request for request in running if request.finished]
        for row in range(len(running) - 1, -1, -1) if finished else ():
            if running[row].finished:
                self.runner.reset(row)
                moved = self.scheduler.release(row)
                if moved is not None:
                    self.runner.move(moved, row)
                    if self.drafting is not None:
                        self.drafting.move(moved, row)
        return finished

    def _decide(self, logits: Tensor, proposal: Proposal, rows: Sequence[Request]) -> list[Kept]:
        """Logits [b, 1+K, V] -> the accepted drafts of each row and one token more."""
        processed = process_logits(logits, proposal, rows)
        params = [request.params for request in rows]
        generators = [request.generator for request in rows]
        kept = verify_and_sample(
            processed, proposal, params, generators, self._rejection_sample_method
        )
        record_logprobs(logits, rows, kept)
        return kept


def _commit(request: Request, proposal: Proposal, row: int, kept: Kept) -> int:
    """Commits a row's tokens, and shows what became of its drafts if that is asked for; returns how
    many tokens were committed."""
    committed = request.commit(kept.tokens)
    if request.rounds is not None:
        drafted = proposal.drafted[row]
        depths = proposal.depths()[row]
        tokens = list(zip(kept.tokens, [*range(len(kept.nodes)), None], strict=True))
        rejected: list[Placed] = [
            (drafted[node], depths[node] - 1)
            for node in range(proposal.counts[row])
            if node not in kept.nodes
        ]
        request.rounds.append(JudgedRound(tokens[:committed], rejected, proposal.counts[row]))
    return committed


def _require_abilities(target: FrozenTarget, compiles: bool, proposer: Proposer | None) -> None:
    """UnsupportedTarget for what cannot be decoded; ConfigError for options that recurrent layers
    rule out."""
    target.require_rollback("decoding")
    trees = proposer is not None and proposer.drafts_trees
    if target.recurrent is not None and (trees or compiles):
        raise ConfigError(
            "it has recurrent layers, whose states follow one chain of drafts and are copied around"
            " every forward: a tree cannot be verified, and rounds cannot be compiled; draft chains"
            " (no tree) and set enforce_eager=True",
            where=f"target {target.name_or_path}",
        )
