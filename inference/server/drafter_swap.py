"""Swaps the drafter of a running server: another one is loaded beside the rounds and takes over
between two of them.

A drafter must see a row from its start. So running requests lose their rows and are computed again
from their committed text with the new drafter, which costs a prefill each and no token. If loading
fails, nothing changes. Off unless the server was started with `enable_drafter_swap`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from inference.engine.engine import Engine
from inference.entrypoints.llm import LLM
from inference.entrypoints.loading import (
    drafter_onto,
    load_target,
    make_draft_length,
    make_proposer,
    taps_of,
)
from inference.entrypoints.speculative_config import SpeculativeConfig, parse_speculative_config
from inference.entrypoints.speculative_defaults import complete
from inference.entrypoints.vllm_options import read_options
from inference.metrics import SpecDecodeCounters
from inference.server.api import schema
from inference.server.api.errors import APIError
from inference.server.api.protocol import Body
from inference.server.async_engine import AsyncEngine
from inference.spec_decode.proposers.ab_split import Arm, SplitProposer
from inference.spec_decode.proposers.base import Proposer
from inference.spec_decode.verification.rejection_sampler import is_lossless
from speculators.drafter import Drafter
from speculators.errors import ConfigError, DraftsmithError
from speculators.target.frozen_target import FrozenTarget

INITIAL = "initial"  # name of the drafter that the server was started with
NO_DRAFTER = "none"
RunInWorker = Callable[[Callable[[], Any]], Awaitable[Any]]


class DrafterChoice(Body):
    """One of several drafters."""

    speculative_config: dict[str, Any] | None = Field(
        description="as --speculative-config; null: no drafter"
    )
    name: str | None = Field(
        None, min_length=1, max_length=256, description="in /metrics; else its model or method"
    )
    share: float = Field(
        1.0, gt=0, description="of new requests, in proportion to the others' shares"
    )


class DrafterRequest(Body):
    """POST /drafter: one drafter, or with `drafters` several side by side."""

    speculative_config: dict[str, Any] | None = Field(
        None, description="as --speculative-config; null: none"
    )
    name: str | None = Field(
        None, min_length=1, max_length=256, description="in /metrics; else its model or method"
    )
    drafters: list[DrafterChoice] | None = Field(
        None, min_length=2, max_length=8, description="an A/B of chains"
    )

    @model_validator(mode="after")
    def _one_way(self) -> DrafterRequest:
        if ("speculative_config" in self.model_fields_set) == (self.drafters is not None):
            raise ValueError(
                "speculative_config (null for no drafter) or drafters; give one of the two"
            )
        return self

    @property
    def choices(self) -> list[DrafterChoice]:
        return self.drafters or [
            DrafterChoice(speculative_config=self.speculative_config, name=self.name)
        ]


@dataclass
class _Candidate:
    """A drafter that was asked for. `taps`: the layers of the target that it reads."""

    name: str
    share: float
    config: SpeculativeConfig
    taps: tuple[int, ...]
    drafter: Drafter | None = None


class DrafterSwap:
    """The drafters of one server.

    counters       of all drafters so far by name; one that returns goes on counting
    most_drafts    the largest num_speculative_tokens of any of them; None: there was none
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, run_in_worker: RunInWorker) -> None:
        self._llm, self._engine, self._run_in_worker = llm, engine, run_in_worker
        self._lock = asyncio.Lock()
        self.counters: dict[str, SpecDecodeCounters] = {}
        self.most_drafts: int | None = None
        self._count_for(INITIAL, llm.engine.proposer)

    async def swap(self, request: DrafterRequest) -> schema.DrafterResponse:
        """Loads the drafters and hands over to them. APIError 400 with the reason if they cannot be
        used; the old drafter then stays."""
        async with self._lock:
            started, llm = perf_counter(), self._llm
            try:
                candidates = await self._run_in_worker(
                    lambda: [self._read(choice) for choice in request.choices]
                )
                _require_comparable(candidates)
                taps = sorted({tap for candidate in candidates for tap in candidate.taps})
                # a new FrozenTarget probes the model, which only the engine's thread may run
                target = await self._engine.between_rounds(
                    lambda: load_target(llm.engine.target, taps)
                )
                try:
                    for candidate in candidates:
                        load = partial(drafter_onto, target, candidate.config, llm.get_tokenizer())
                        candidate.drafter = await self._run_in_worker(load)
                    preempted = await self._engine.between_rounds(
                        lambda: self._switch(candidates, target)
                    )
                finally:
                    await self._engine.between_rounds(lambda: self._close_unless_used(target))
            except APIError:
                raise
            except Exception as error:  # a folder may hold anything; the server goes on
                reason = (
                    str(error)
                    if isinstance(error, DraftsmithError)
                    else f"{type(error).__name__}: {error}"
                )
                field = "speculative_config" if request.drafters is None else "drafters"
                raise APIError(400, f"the drafter was not changed: {reason}", field) from error
            total = sum(c.share for c in candidates)
            settings = [(c, c.config.method, c.config.num_speculative_tokens) for c in candidates]
            cards = [
                schema.DrafterCard(
                    name=c.name, method=method, num_speculative_tokens=k, share=c.share / total
                )
                for c, method, k in settings
            ]
            seconds = perf_counter() - started
            return schema.DrafterResponse(
                drafters=cards, requests_computed_again=preempted, seconds=seconds
            )

    # ------------------------------------------------------------------ beside the rounds

    def _read(self, choice: DrafterChoice) -> _Candidate:
        """Reads the configuration of a drafter and, of a trained one, that of its folder."""
        target = self._llm.engine.target
        config = parse_speculative_config(
            complete(read_options({}, choice.speculative_config), target)
        )
        if not is_lossless(rule := config.rejection_sample_method):
            raise ConfigError(
                f"rejection_sample_method={rule!r} does not preserve the target's distribution,"
                " which running requests rely on; leave it out, or start a server with it"
            )
        name = choice.name or config.model or config.method or NO_DRAFTER
        return _Candidate(name, choice.share, config, taps_of(config, target))

    # ------------------------------------------------------------------ between two rounds

    def _switch(self, candidates: Sequence[_Candidate], target: FrozenTarget) -> int:
        """Replaces the engine; returns how many running requests lost their rows. ConfigError,
        changing nothing, if a drafter does not fit."""
        old = self._llm.engine
        sizes = old.scheduler.max_num_seqs, old.max_model_len
        arms = [
            Arm(
                c.name,
                make_proposer(c.config, target, c.drafter, *sizes),
                c.share,
                _columns(c.taps, target),
            )
            for c in candidates
        ]
        proposer, draft_length = arms[0].proposer, make_draft_length(candidates[0].config)
        if len(arms) > 1:
            proposer, draft_length = SplitProposer(arms, target.vocab_size), None
            if (
                len(proposer.caches) > 1
                and (limit := old.options.kv_cache_memory_bytes) is not None
            ):
                raise ConfigError(
                    f"drafters: kv_cache_memory_bytes={limit} is a limit for the keys and values of"
                    " a target and one drafter; compare drafters on a server without it"
                )
        options = replace(
            old.options, rejection_sample_method=candidates[0].config.rejection_sample_method
        )
        engine = Engine(target, options, proposer=proposer, draft_length=draft_length)
        for request in (*old.scheduler.running, *old.scheduler.waiting):
            if (reason := engine.refusal(request.num_prompt_tokens, request.end)) is not None:
                raise ConfigError(
                    f"with it a running or waiting request would have no memory: {reason}"
                )
        running = len(old.scheduler.running)
        engine.take_over(old)
        self._llm.engine = engine
        self._close_unless_used(old.target)
        for arm in arms:
            self._count_for(arm.name, arm.proposer)
        return running

    def _close_unless_used(self, target: FrozenTarget) -> None:
        if target is not self._llm.engine.target:
            target.close()

    def _count_for(self, name: str, proposer: Proposer | None) -> None:
        if proposer is not None:
            proposer.counters = self.counters.setdefault(name, proposer.counters)
            self.most_drafts = max(self.most_drafts or 0, proposer.num_speculative_tokens)


def _require_comparable(candidates: Sequence[_Candidate]) -> None:
    """ConfigError for drafters that cannot draft side by side."""
    if len(candidates) == 1:
        return
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"drafters: {', '.join(names)}: two have the same name; give each one of its own"
        )
    if all(candidate.config.method is None for candidate in candidates):
        raise ConfigError("drafters: none of them drafts; give a method or model to one")
    for candidate in candidates:
        name, config = candidate.name, candidate.config
        if config.tree is not None or config.method == "lookahead":
            raise ConfigError(f"drafters: {name} drafts trees; side by side all draft chains")
        if (
            config.enable_adaptive_verification
            or config.num_speculative_tokens_per_batch_size is not None
        ):
            raise ConfigError(
                f"drafters: {name}: side by side all draft num_speculative_tokens in every round"
            )
        if config.rejection_sample_method != candidates[0].config.rejection_sample_method:
            raise ConfigError(
                "drafters: their rejection_sample_method differ; side by side it is the same"
                " for all"
            )


def _columns(taps: Sequence[int], target: FrozenTarget) -> Tensor | None:
    """The columns of the target's features that hold these taps [n·H]; None for a drafter that
    reads all or none."""
    if tuple(taps) == target.tap_layers or not taps:
        return None
    width, device = target.hidden_size, target.device
    starts = [target.tap_layers.index(tap) * width for tap in sorted(taps)]
    return torch.cat([torch.arange(start, start + width, device=device) for start in starts])
