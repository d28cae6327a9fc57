"""Who drafts for a running server: another drafter is loaded beside the rounds, and takes over between two of them.

A drafter must have seen a row from its start. So the rows in flight give way, and are computed anew from their
committed text with the new drafter: they lose a prefill and not a token. What cannot be loaded changes nothing.
Off unless the server was started with it (`enable_drafter_swap`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import Field, model_validator
from torch import Tensor

from inference.engine.engine import Engine
from inference.entrypoints.llm import LLM
from inference.entrypoints.loading import drafter_onto, load_target, make_draft_length, make_proposer, taps_of
from inference.entrypoints.speculative_config import SpeculativeConfig, parse_speculative_config
from inference.entrypoints.speculative_defaults import complete
from inference.entrypoints.vllm_options import read_options
from inference.metrics import SpecDecodeCounters
from inference.server.api import protocol_responses as told
from inference.server.api.errors import APIError
from inference.server.api.protocol import Body
from inference.server.async_engine import AsyncEngine
from inference.spec_decode.proposers.ab_split import Arm, SplitProposer
from inference.spec_decode.proposers.base import Proposer
from inference.spec_decode.verification.rejection_sampler import is_lossless
from speculators.drafter import Drafter
from speculators.errors import ConfigError, DraftsmithError
from speculators.target.frozen_target import FrozenTarget

FIRST = "initial"  # the name of the drafter that the server was started with
NONE = "none"  # of no drafter
Aside = Callable[[Callable[[], Any]], Awaitable[Any]]


class DrafterChoice(Body):
    """One of several drafters."""

    speculative_config: dict[str, Any] | None = Field(description="as --speculative-config has it; null: no drafter")
    name: str | None = Field(None, min_length=1, max_length=256, description="in /metrics; else its model or method")
    share: float = Field(1.0, gt=0, description="of new requests, in proportion to the others' shares")


class DrafterRequest(Body):
    """POST /drafter: one drafter, or with `drafters` several side by side."""

    speculative_config: dict[str, Any] | None = Field(None, description="as --speculative-config has it; null: none")
    name: str | None = Field(None, min_length=1, max_length=256, description="in /metrics; else its model or method")
    drafters: list[DrafterChoice] | None = Field(None, min_length=2, max_length=8, description="an A/B of chains")

    @model_validator(mode="after")
    def _one_way(self) -> DrafterRequest:
        if ("speculative_config" in self.model_fields_set) == (self.drafters is not None):
            raise ValueError("speculative_config (null for no drafter) or drafters; give one of the two")
        return self

    @property
    def wrong(self) -> str:
        """The field that says what is loaded."""
        return "speculative_config" if self.drafters is None else "drafters"

    @property
    def choices(self) -> list[DrafterChoice]:
        return self.drafters or [DrafterChoice(speculative_config=self.speculative_config, name=self.name)]


@dataclass
class _Loaded:
    name: str
    share: float
    config: SpeculativeConfig
    taps: tuple[int, ...] = ()
    drafter: Drafter | None = None


class Drafters:
    """Of one server. `aside`: runs something in a worker thread.

    counters       of each that ever drafted, by its name; one that comes again goes on counting
    most_drafts    the most num_speculative_tokens that any of them had; None: there was none
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, aside: Aside) -> None:
        self._llm, self._engine, self._aside = llm, engine, aside
        self._one_at_a_time = asyncio.Lock()
        self.counters: dict[str, SpecDecodeCounters] = {}
        self.most_drafts: int | None = None
        if llm.engine.proposer is not None:
            self._note(FIRST, llm.engine.proposer)

    async def swap(self, request: DrafterRequest) -> told.DrafterResponse:
        """APIError 400 with the reason if there is something to mend; the old drafter then drafts on."""
        async with self._one_at_a_time:
            started, llm = perf_counter(), self._llm
            try:
                chosen = await self._aside(lambda: [self._read(each) for each in request.choices])
                _require_comparable(chosen)
                taps = sorted({tap for each in chosen for tap in each.taps})
                # a new target asks the model for a few tokens, which only one thread may do at a time
                target = await self._engine.between_rounds(lambda: load_target(llm.engine.target, taps))
                try:
                    for each in chosen:
                        load = partial(drafter_onto, target, each.config, llm.get_tokenizer())
                        each.drafter = await self._aside(load)
                    again = await self._engine.between_rounds(lambda: self._switch(chosen, target))
                finally:
                    await self._engine.between_rounds(lambda: self._close_unless_used(target))
            except APIError:
                raise
            except Exception as error:  # whatever a folder holds, the old drafter goes on, and its owner is told
                reason = str(error) if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"
                raise APIError(400, f"the drafter was not changed: {reason}", request.wrong) from error
            told_of = [
                told.DrafterCard(
                    name=each.name, method=each.config.method, share=each.share / sum(c.share for c in chosen),
                    num_speculative_tokens=each.config.num_speculative_tokens,
                )
                for each in chosen
            ]  # fmt: skip
            return told.DrafterResponse(
                drafters=told_of, requests_computed_again=again, seconds=perf_counter() - started
            )

    # ------------------------------------------------------------------ beside the rounds

    def _read(self, choice: DrafterChoice) -> _Loaded:
        """What is meant, and what it reads of the target."""
        target = self._llm.engine.target
        config = parse_speculative_config(complete(read_options({}, choice.speculative_config), target))
        if not is_lossless(rule := config.rejection_sample_method):
            raise ConfigError(
                f"rejection_sample_method={rule!r} does not preserve the target's distribution, which requests in "
                "flight were asked for with; leave it out, or start a server with it"
            )
        name = choice.name or config.model or config.method or NONE
        return _Loaded(name, choice.share, config, taps_of(config, target))

    # ------------------------------------------------------------------ between two rounds

    def _switch(self, chosen: Sequence[_Loaded], target: FrozenTarget) -> int:
        """How many rows gave way. ConfigError, changing nothing, if a drafter does not fit in here."""
        old = self._llm.engine
        sizes = old.scheduler.max_num_seqs, old.max_model_len
        arms = [
            Arm(
                each.name,
                make_proposer(each.config, target, each.drafter, *sizes),
                each.share,
                _columns(each.taps, target),
            )
            for each in chosen
        ]
        proposer, draft_length = arms[0].proposer, make_draft_length(chosen[0].config)
        if len(arms) > 1:
            proposer, draft_length = self._side_by_side(arms, target), None
        rule = chosen[0].config.rejection_sample_method
        engine = Engine(target, proposer=proposer, draft_length=draft_length, rule=rule, **old.options)
        for request in (*old.scheduler.running, *old.scheduler.waiting):
            if (reason := engine.refusal(request.num_prompt_tokens, request.end)) is not None:
                raise ConfigError(f"with it a request that is being answered has no memory any more: {reason}")
        running = len(old.scheduler.running)
        engine.take_over(old)
        self._llm.engine = engine
        self._close_unless_used(old.target)
        for arm in arms:
            self._note(arm.name, arm.proposer)
        return running

    def _side_by_side(self, arms: Sequence[Arm], target: FrozenTarget) -> SplitProposer:
        split = SplitProposer(arms, target.vocab_size)
        limit = self._llm.engine.options["kv_cache_memory_bytes"]
        if limit is not None and len(split.caches) > 1:
            raise ConfigError(
                f"drafters: kv_cache_memory_bytes={limit} is a limit for the keys and values of a target and one "
                "drafter; compare drafters on a server without it"
            )
        return split

    def _close_unless_used(self, target: FrozenTarget) -> None:
        if target is not self._llm.engine.target:
            target.close()

    def _note(self, name: str, proposer: Proposer | None) -> None:
        if proposer is not None:
            proposer.counters = self.counters.setdefault(name, proposer.counters)
            self.most_drafts = max(self.most_drafts or 0, proposer.num_speculative_tokens)


def _require_comparable(chosen: Sequence[_Loaded]) -> None:
    """ConfigError for drafters that cannot draft side by side."""
    if len(chosen) == 1:
        return
    names = [each.name for each in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"drafters: {', '.join(names)}: two have the same name; give each one of its own")
    if all(each.config.method is None for each in chosen):
        raise ConfigError("drafters: none of them drafts; give a method or model to one")
    for each in chosen:
        config = each.config
        if config.tree is not None or config.method == "lookahead":
            raise ConfigError(f"drafters: {each.name} drafts trees; side by side all draft chains")
        if config.enable_adaptive_verification or config.num_speculative_tokens_per_batch_size is not None:
            raise ConfigError(f"drafters: {each.name}: side by side all draft num_speculative_tokens in every round")
        if config.rejection_sample_method != chosen[0].config.rejection_sample_method:
            raise ConfigError("drafters: their rejection_sample_method differ; side by side they are judged alike")


def _columns(taps: Sequence[int], target: FrozenTarget) -> Tensor | None:
    """Where the target's features have these taps: [n·H]; None: for who reads all of them, or none."""
    if tuple(taps) == target.tap_layers or not taps:
        return None
    width, device = target.hidden_size, target.device
    starts = [target.tap_layers.index(tap) * width for tap in sorted(taps)]
    return torch.cat([torch.arange(start, start + width, device=device) for start in starts])


def add_drafters(app: FastAPI, drafters: Drafters, errors: dict[int | str, dict[str, Any]]) -> None:
    """`errors`: as FastAPI documents them."""

    @app.post("/drafter", responses=errors)
    async def swap(request: DrafterRequest) -> told.DrafterResponse:
        return await drafters.swap(request)
