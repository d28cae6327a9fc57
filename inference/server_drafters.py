"""Who drafts for a running server: another drafter is loaded beside the rounds, and takes over between two of them.

A drafter must have seen a row from its start. So the rows in flight give way, and are computed anew from their
committed text with the new drafter: they lose a prefill and not a token. What cannot be loaded changes nothing.
Off unless the server was started with it (`enable_drafter_swap`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from fastapi import FastAPI
from pydantic import Field

from inference import protocol_responses as told
from inference.async_engine import AsyncEngine
from inference.draft_length import make_draft_length
from inference.engine import Engine
from inference.llm import LLM
from inference.llm_loading import load_drafter_for, load_target, make_proposer
from inference.metrics import SpecDecodeCounters
from inference.protocol import Body
from inference.server_errors import APIError
from inference.speculative_config import SpeculativeConfig, parse_speculative_config
from inference.speculative_defaults import complete
from inference.vllm_options import read_options
from speculators.drafter import Drafter
from speculators.errors import ConfigError, DraftsmithError
from speculators.export import read_drafter_config
from speculators.target import FrozenTarget

FIRST = "initial"  # the name of the drafter that the server was started with
Aside = Callable[[Callable[[], Any]], Awaitable[Any]]


class DrafterRequest(Body):
    """POST /drafter."""

    speculative_config: dict[str, Any] | None = Field(description="as --speculative-config has it; null: no drafter")
    name: str | None = Field(
        None, min_length=1, max_length=256, description="in /metrics; its model or method if not given"
    )


class Drafters:
    """Of one server. `aside`: runs something in a worker thread.

    name           of the one that drafts now; None: nobody does
    counters       of each that ever drafted, by its name; one that comes again goes on counting
    most_drafts    the most num_speculative_tokens that any of them had; None: there was none
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, aside: Aside) -> None:
        self._llm, self._engine, self._aside = llm, engine, aside
        self._one_at_a_time = asyncio.Lock()
        self.counters: dict[str, SpecDecodeCounters] = {}
        self.name: str | None = None
        self.most_drafts: int | None = None
        if llm.engine.proposer is not None:
            self._note(FIRST, llm.engine)

    async def swap(self, request: DrafterRequest) -> told.DrafterResponse:
        """APIError 400 with the reason if there is something to mend; the old drafter then drafts on."""
        async with self._one_at_a_time:
            started = perf_counter()
            try:
                config = await self._aside(lambda: self._config(request.speculative_config))
                taps = await self._aside(lambda: self._taps(config))
                # a new target asks the model for a few tokens, which only one thread may do at a time
                target = await self._engine.between_rounds(lambda: load_target(self._llm.engine.target, taps))
                try:
                    tokenizer = self._llm.get_tokenizer()
                    _, drafter = await self._aside(lambda: load_drafter_for(target, config, tokenizer))
                    name = None if config.method is None else request.name or config.model or config.method
                    again = await self._engine.between_rounds(lambda: self._switch(name, config, target, drafter))
                finally:
                    await self._engine.between_rounds(lambda: self._close_unless_used(target))
            except APIError:
                raise
            except Exception as error:  # whatever a folder holds, the old drafter goes on, and its owner is told
                reason = str(error) if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"
                raise APIError(400, f"the drafter was not changed: {reason}", "speculative_config") from error
            return told.DrafterResponse(
                name=name,
                method=config.method,
                num_speculative_tokens=config.num_speculative_tokens,
                requests_computed_again=again,
                seconds=perf_counter() - started,
            )

    # ------------------------------------------------------------------ beside the rounds

    def _config(self, options: dict[str, Any] | None) -> SpeculativeConfig:
        return parse_speculative_config(complete(read_options({}, options), self._llm.engine.target))

    def _taps(self, config: SpeculativeConfig) -> tuple[int, ...]:
        if not config.trained:
            return ()
        assert config.model is not None
        return tuple(read_drafter_config(config.model, self._llm.engine.target.num_layers).tap_layers)

    # ------------------------------------------------------------------ between two rounds

    def _switch(
        self, name: str | None, config: SpeculativeConfig, target: FrozenTarget, drafter: Drafter | None
    ) -> int:
        """How many rows gave way. ConfigError, changing nothing, if the drafter does not fit in here."""
        old = self._llm.engine
        proposer = make_proposer(config, target, drafter, old.scheduler.max_num_seqs, old.max_model_len)
        draft_length, rule = make_draft_length(config), config.rejection_sample_method
        engine = Engine(target, proposer=proposer, draft_length=draft_length, rule=rule, **old.options)
        unfinished = [*old.scheduler.running, *old.scheduler.waiting]
        for request in unfinished:
            if (reason := engine.refusal(request.num_prompt_tokens, request.end)) is not None:
                raise ConfigError(f"with it a request that is being answered has no memory any more: {reason}")
        running = len(old.scheduler.running)
        engine.take_over(old)
        self._llm.engine = engine
        self._close_unless_used(old.target)
        self._note(name, engine)
        return running

    def _close_unless_used(self, target: FrozenTarget) -> None:
        if target is not self._llm.engine.target:
            target.close()

    def _note(self, name: str | None, engine: Engine) -> None:
        self.name, proposer = name, engine.proposer
        if name is not None and proposer is not None:
            proposer.counters = self.counters.setdefault(name, proposer.counters)
            self.most_drafts = max(self.most_drafts or 0, proposer.num_speculative_tokens)


def add_drafters(app: FastAPI, drafters: Drafters, errors: dict[int | str, dict[str, Any]]) -> None:
    """`errors`: as FastAPI documents them."""

    @app.post("/drafter", responses=errors)
    async def swap(request: DrafterRequest) -> told.DrafterResponse:
        return await drafters.swap(request)
