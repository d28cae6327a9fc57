"""The loop: schedule -> propose -> verify -> commit. Everything a round does, in this order, is on
this page.

Between rounds a running row's cache holds all its committed tokens but the last, the anchor. A
round feeds the anchor and the drafts through the target at once, keeps the drafts the rule accepts
plus one token of the target's own, and rolls the rest back by not counting it. No tokenizer and no
particular drafter belongs here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inference.compilation.config import Compilation
from inference.engine.logprobs import record_logprobs, record_prompt_logprobs
from inference.engine.rows import RowManager
from inference.kv_cache.memory_limit import KVMemory
from inference.kv_cache.prefix_cache import PrefixReuse
from inference.kv_cache.ragged_cache import RaggedCache
from inference.metrics import EngineCounters
from inference.plain_decoder import TargetForward
from inference.requests.request import Request
from inference.requests.scheduler import Scheduler
from inference.sampling_params import SamplingParams
from inference.spec_decode.draft_length.policy import DraftLength
from inference.spec_decode.logits import process_logits
from inference.spec_decode.proposal import Kept, Proposal
from inference.spec_decode.proposers.base import Proposer
from inference.spec_decode.tree_drafting import ancestors
from inference.spec_decode.verification.rejection_sampler import AUTO, verify_and_sample
from speculators.errors import ConfigError, DraftsmithError
from speculators.precision import on_device
from speculators.target.frozen_target import FrozenTarget

if TYPE_CHECKING:
    from inference.compilation.compiled_rounds import CompiledRounds

# What was judged in a round, before it is committed: the requests in their rows, their drafts, the
# new tokens of each (the accepted drafts and one more; what follows the end of a response among
# them will be dropped).
OnRound = Callable[[Sequence[Request], Proposal, Sequence[Sequence[int]]], None]

logger = logging.getLogger(__name__)

FREE_SHARE = 0.8  # of a device's free memory, for keys and values that nobody limited
PHASES = ("schedule", "draft", "verify", "sample", "commit", "prefill")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs, whatever it drafts with. The names are those of `LLM`.

    max_num_seqs            rows: responses written at the same time
    max_model_len           longest prompt + response; None: the model's own limit, or its draft
                            model's if less
    max_num_batched_tokens  tokens of one prefill forward; admitted prompts are prefilled whole
                            before the next round
    enable_prefix_caching   a request takes over what another row computed for the same first tokens
                            (of a target with recurrent layers there is nothing to take over)
    kv_cache_memory_bytes   most memory for keys and values (see KVMemory); None: as much as
                            max_num_seqs rows need
    compilation             how rounds are compiled (docs/runtime.md); None: they run eager
    rejection_sample_method  the verification rule at temperature > 0
    seed                    of the requests that bring none: each gets its own from this and its
                            number
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    compilation: Compilation | None = None
    rejection_sample_method: str = AUTO
    seed: int = 0


class Engine:
    """Runs requests in at most `max_num_seqs` rows. Not thread-safe: `add`, `step` and `abort` from
    one thread.

    `options`: with max_model_len given. `on_round`: called after every verification. `timers`:
    seconds per phase since `reset_metrics`. verify is the target's forward, sample the decision
    what to keep; prefill includes the drafter's share of it. On a GPU a phase that only launches
    work is charged to the next one that waits for it (sample, as a rule)."""

    def __init__(
        self,
        target: FrozenTarget,
        options: EngineOptions,
        *,
        proposer: Proposer | None = None,
        draft_length: DraftLength | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        if options.max_num_batched_tokens < 1:
            raise ConfigError(
                f"max_num_batched_tokens={options.max_num_batched_tokens}; expected at least 1"
            )
        if options.max_model_len is None:
            raise ConfigError("EngineOptions: an engine needs max_model_len")
        _require_abilities(target, options, proposer)
        self.target, self.options, self.max_model_len = target, options, options.max_model_len
        self.proposer, self.on_round = proposer, on_round
        self._target_forward = TargetForward(target)
        compilation = options.compilation
        # Compiled rounds write to padding rows too, which may hold a finished text of
        # max_model_len: one token more.
        drafts = proposer.max_places + (compilation is not None) if proposer is not None else 0
        scheduler = Scheduler(options.max_num_seqs)
        cache = RaggedCache(options.max_num_seqs, self.max_model_len + drafts, device=target.device)
        reuses = (
            options.enable_prefix_caching and target.recurrent is None
        )  # a state is that of a whole text
        self.rows = RowManager(cache, PrefixReuse(cache, reuses), scheduler, proposer)
        self.reset_metrics()
        self.draft_length = draft_length or DraftLength(
            proposer.num_speculative_tokens if proposer is not None else 0
        )
        if proposer is not None:
            self.draft_length.attach(proposer, self._rehearse)
        self.compiled: CompiledRounds | None = None
        if options.kv_cache_memory_bytes is not None:
            self._probe()
            self.rows.memory_limit = KVMemory(
                options.kv_cache_memory_bytes, cache, proposer, drafts
            )
        self._slack = drafts
        if compilation is not None and not compilation.when_warm:
            self.compiled = self._compiled_rounds(compilation)

    def start_graphs(self) -> None:
        """From here on rounds run as CUDA graphs where that is the default and waited for this;
        they stay eager, with a warning, if the device has no room for all keys and values at once.
        While no row holds anything."""
        compilation, cache, limit = (
            self.options.compilation,
            self.rows.cache,
            self.rows.memory_limit,
        )
        if self.compiled is not None or compilation is None:
            return
        if limit is None and self.target.device.type == "cuda":
            self._probe()
            self.reset_prefix_cache()
            free = int(FREE_SHARE * torch.cuda.mem_get_info(self.target.device)[0])
            limit = KVMemory(free, cache, self.proposer, self._slack)
        if limit is None or limit.fits(cache.max_rows, cache.max_len):
            self.compiled = self._compiled_rounds(compilation)
            return
        logger.warning(
            "rounds run eager: CUDA graphs keep the keys and values of all %d rows of %d positions"
            " from the start, %d bytes, and there are %d; lower max_model_len or max_num_seqs"
            " (enforce_eager=True: eager without asking)",
            cache.max_rows,
            cache.max_len,
            limit.bytes(cache.max_rows, cache.max_len),
            limit.limit,
        )

    def _compiled_rounds(self, compilation: Compilation) -> CompiledRounds:
        from inference.compilation.compiled_rounds import (
            CompiledRounds,
        )  # torch's compiler takes seconds to import

        memory = self.rows.memory_limit
        return CompiledRounds(
            compilation,
            self.target,
            self._target_forward,
            self.rows.cache,
            self.proposer,
            self.max_model_len,
            memory,
        )

    # ------------------------------------------------------------------ requests

    @property
    def scheduler(self) -> Scheduler:
        return self.rows.scheduler

    @property
    def counters(self) -> EngineCounters:
        return self.rows.counters

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def set_speculation(self, on: bool) -> None:
        """Turns drafting on or off; only while nothing runs, since a drafter must have seen a row
        from its start."""
        proposer = self.proposer if on else None
        if proposer is self.rows.proposer:
            return
        if self.has_unfinished:
            raise DraftsmithError(
                "engine: drafting cannot be turned on or off while requests are unfinished; "
                "finish or abort them first (a stream that is not exhausted counts: close it)"
            )
        # what lies in the rows was not, or will not be, seen by the drafter
        self.reset_prefix_cache()
        self.rows.proposer = proposer

    def reset_metrics(self) -> None:
        self.timers: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.rows.counters = EngineCounters()
        self._row_rounds = 0

    @property
    def mean_draft_length(self) -> float:
        """Drafts verified per row and round since `reset_metrics`, rounds without a draft
        included."""
        return self.counters.num_draft_tokens / max(self._row_rounds, 1)

    def reset_prefix_cache(self) -> None:
        """Forgets what could be reused, as must be done when weights of the target or the drafter
        change."""
        self.rows.prefix_cache.forget()
        self._target_forward.read_weights()

    def refusal(self, num_prompt_tokens: int, end: int) -> str | None:
        """The reason why a request of that prompt, which may grow to `end` tokens, can never run;
        None if it can."""
        memory = self.rows.memory_limit
        if memory is None or end <= memory.most_tokens:
            return None
        return (
            f"prompt and response may have {num_prompt_tokens} + {end - num_prompt_tokens} tokens,"
            f" whose keys and values take {memory.bytes(1, end)} bytes;"
            f" kv_cache_memory_bytes={memory.limit} holds {memory.most_tokens} tokens. Lower"
            " max_tokens, shorten the prompt or raise kv_cache_memory_bytes"
        )

    def add(self, request: Request) -> None:
        """The request waits for a row. ConfigError if memory can never hold it."""
        reason = self.refusal(request.num_prompt_tokens, request.end)
        if reason is not None:
            raise ConfigError(f"request {request.request_id}: {reason}")
        self.scheduler.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Ends every unfinished response of the request with finish_reason "abort". Unknown ids are
        ignored."""
        self.rows.abort(request_id)

    # ------------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Prefills what can be admitted, then does one round for all rows; returns the requests
        that finished."""
        try:
            return self._step()
        except BaseException:
            self.reset_prefix_cache()  # a row may hold half of something
            raise

    def _step(self) -> list[Request]:
        started = perf_counter()
        admitted = self.rows.admit()
        self.timers["schedule"] += perf_counter() - started
        finished: list[Request] = []
        while admitted:
            wave = self.rows.prefix_cache.wave(admitted)
            self.scheduler.admit(wave)
            admitted = [request for request in admitted if request not in wave]
            finished += self._prefill(wave)
        if self.scheduler.running:
            finished += self._round(self.scheduler.running)
        return finished

    def _round(self, rows: list[Request]) -> list[Request]:
        """Propose, verify, sample, commit. B = rows in use, K = longest draft of the round."""
        clock, proposer, cache = perf_counter, self.rows.proposer, self.rows.cache
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
        anchors = on_device(
            [[request.token_ids[-1]] for request in rows], self.target.device
        )  # [B, 1]
        inputs = (
            torch.cat([anchors, proposal.token_ids], dim=1) if proposal.width else anchors
        )  # [B, K+1]
        t2 = clock()
        taps, last_hidden = self._forward(0, len(rows), inputs, proposal)
        logits = self._target_forward.logits(last_hidden)  # [B, 1+K, V]
        t3 = clock()
        if proposer is not None and proposer.reads_logits:
            proposer.see_logits(rows, proposal, logits)
        kept = self._decide(logits, proposal, rows)
        t4 = clock()
        if self.on_round is not None:
            self.on_round(rows, proposal, [each.tokens for each in kept])
        depths, kept_places = (
            proposal.depths(),
            [[0, *(1 + place for place in each.places)] for each in kept],
        )
        cache.keep(kept_places)  # the anchor and the accepted drafts
        for row, (request, each, drafted) in enumerate(
            zip(rows, kept, proposal.counts, strict=True)
        ):
            accepted = min(
                len(each.places), request.commit(each.tokens)
            )  # what follows the end was not accepted
            request.count_round(drafted, accepted, depth := max(depths[row][:drafted], default=0))
            self.counters.add(drafted, accepted, depth)
        self._row_rounds += len(rows)
        if proposer is not None:
            self.draft_length.learn(
                proposal.counts, [len(each.places) for each in kept], t1 - t0, t4 - t1
            )
        if proposer is not None and proposer.reads_features:
            if proposal.parents is not None:
                taps, last_hidden = (
                    _along(kept_places, features) for features in (taps, last_hidden)
                )
            proposer.observe(rows, [len(each.tokens) for each in kept], taps, last_hidden)
        finished = self.rows.release_finished()
        t5 = clock()
        timers = self.timers
        timers["draft"] += t1 - t0
        timers["schedule"] += t2 - t1
        timers["verify"] += t3 - t2
        timers["sample"] += t4 - t3
        timers["commit"] += t5 - t4
        return finished

    def _prefill(self, wave: list[Request]) -> list[Request]:
        """Feeds the texts of the newly added rows, as far as they are not there, in chunks of at
        most max_num_batched_tokens; then samples the first token of each that has none."""
        started = perf_counter()
        if self._target_forward.renew() and self.compiled is not None:
            self.compiled.forget_target()
        rows, cache, proposer = self.scheduler.running, self.rows.cache, self.rows.proposer
        lengths = cache.lengths
        first = len(rows) - len(wave)
        for row, request in enumerate(wave, first):
            self.rows.enter(row, request)
        ends: dict[int, Tensor] = {}  # row -> last_hidden [H] of its last position
        while (chunk := self._next_chunk(first)) is not None:
            start, stop, width = chunk
            texts = [
                request.token_ids[: request.num_prefill_tokens] for request in rows[start:stop]
            ]
            pieces = [
                text[done : done + width]
                for text, done in zip(texts, lengths[start:stop], strict=True)
            ]
            counts = [len(piece) for piece in pieces]
            padded = [piece + [0] * (width - len(piece)) for piece in pieces]
            taps, last_hidden = self._forward(start, stop, on_device(padded, self.target.device))
            for i, (row, count) in enumerate(zip(range(start, stop), counts, strict=True)):
                record_prompt_logprobs(
                    self._target_forward.logits, rows[row], lengths[row], last_hidden[i, :count]
                )
                if lengths[row] + count == len(texts[i]):
                    ends[row] = last_hidden[i, count - 1].clone()
            cache.advance_rows(start, counts)
            if proposer is not None and proposer.reads_features:
                proposer.prefill(start, rows[start:stop], counts, taps, last_hidden)
        begun = [
            (request, ends[row])
            for row, request in enumerate(wave, first)
            if not request.output_token_ids
        ]
        if begun:
            new = [request for request, _ in begun]
            logits = self._target_forward.logits(
                torch.stack([end for _, end in begun])[:, None]
            )  # [b, 1, V]
            first_tokens = self._decide(logits, Proposal.empty(len(new), self.target.device), new)
            now = perf_counter()
            for request, kept in zip(new, first_tokens, strict=True):
                request.first_token_time = now
                request.commit(kept.tokens)
        finished = self.rows.release_finished()
        self.timers["prefill"] += perf_counter() - started
        return finished

    def _next_chunk(self, first: int) -> tuple[int, int, int] | None:
        """(start, stop, width): neighbouring rows from `first` on that are not prefilled yet, and
        how many tokens each is fed now. No row is padded beyond the longest one: that would need
        memory nobody asked for."""
        cache = self.rows.cache
        lengths = cache.lengths
        left = [
            request.num_prefill_tokens - lengths[row]
            for row, request in enumerate(self.scheduler.running)
        ]
        start = next((row for row in range(first, len(left)) if left[row]), None)
        if start is None:
            return None
        stop = next((row for row in range(start, len(left)) if not left[row]), len(left))
        room = max(cache.capacity, *(lengths[row] + left[row] for row in range(start, stop)))
        budget = max(1, self.options.max_num_batched_tokens // (stop - start))
        return start, stop, min(budget, max(left[start:stop]), room - max(lengths[start:stop]))

    # ------------------------------------------------------------------ its parts

    def _forward(
        self, start: int, stop: int, token_ids: Tensor, proposal: Proposal | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """token_ids [b, T], written at each row's own length -> taps [b, T, n·H] or None,
        last_hidden [b, T, H]. `proposal`: what the tokens after the first are, where it is a
        tree."""
        T, cache = token_ids.shape[1], self.rows.cache
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
            first = on_device(lengths, cache.device)[:, None]  # [b, 1]
            position_ids = first + depths
            mask, index = cache.tree_mask(start, stop, lengths, visible)
            key_position_ids = first + torch.where(
                index < 0, index, depths.gather(1, index.clamp(0, T - 1))
            )
        if (
            max(cache.lengths[start:stop]) + T > self.max_model_len
        ):  # padding only: drafts keep to the limit
            position_ids = position_ids.clamp(max=self.max_model_len - 1)
        return self._target_forward(
            token_ids, position_ids, mask, cache.view(start, stop, T), key_position_ids
        )

    def _rehearse(self, rows: int, T: int) -> None:
        """A forward over T tokens of each of the first rows, forgotten: for its time to be
        taken."""
        token_ids = torch.zeros(rows, T, dtype=torch.long, device=self.target.device)
        self._target_forward.logits(self._forward(0, rows, token_ids)[1]).argmax(-1).tolist()

    def _decide(self, logits: Tensor, proposal: Proposal, rows: Sequence[Request]) -> list[Kept]:
        """Logits [b, 1+K, V] -> the accepted drafts of each row and one token more."""
        processed = process_logits(logits, proposal, rows)
        params, generators = (
            [request.params for request in rows],
            [request.generator for request in rows],
        )
        kept = verify_and_sample(
            processed, proposal, params, generators, self.options.rejection_sample_method
        )
        record_logprobs(logits, proposal, rows, [each.tokens for each in kept])
        return kept

    def _probe(self) -> None:
        """Two tokens through target and drafter, in as little memory as can be, for the size of
        keys and values."""
        request = Request(
            "probe", 0, [0, 0], SamplingParams(), generator=None, max_model_len=self.max_model_len
        )
        proposer = self.proposer
        for cache in (self.rows.cache, proposer.cache if proposer is not None else None):
            if cache is not None:
                cache.resize(1, min(4, cache.max_len))
        with torch.inference_mode():
            features = self._forward(
                0, 1, torch.zeros(1, 2, dtype=torch.long, device=self.target.device)
            )
            if proposer is not None and proposer.reads_features:
                proposer.reset(0)
                proposer.prefill(0, [request], [2], *features)
                proposer.reset(0)


def _require_abilities(
    target: FrozenTarget, options: EngineOptions, proposer: Proposer | None
) -> None:
    """UnsupportedTarget for what cannot be decoded; ConfigError for options that recurrent layers
    rule out."""
    target.require_rollback("decoding")
    if target.recurrent is None:
        return
    layers = f"target {target.name_or_path} has recurrent layers, whose states"
    if proposer is not None and proposer.drafts_trees:
        raise ConfigError(
            f"{layers} follow one chain of drafts: a tree cannot be verified; draft chains (no"
            " tree)"
        )
    if options.compilation is not None:
        raise ConfigError(
            f"{layers} are copied around every forward, which is not compiled; set"
            " enforce_eager=True"
        )


def _along(places: Sequence[Sequence[int]], features: Tensor | None) -> Tensor | None:
    """Features [b, 1+K, ·] of the last committed token and of every place -> [b, T, ·] at the
    places kept."""
    if features is None:
        return None
    width = max(map(len, places))
    index = on_device([[*row, *[0] * (width - len(row))] for row in places], features.device)
    return features.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
