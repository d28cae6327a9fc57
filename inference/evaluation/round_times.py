"""A short pass in which the rounds of an engine are timed part by part, apart from the passes that
speeds come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.engine.round_clock import RoundClock
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.report.round_cost import RoundTime, RoundTimes
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.draft_length import DraftLength

TOKENS = 32  # of a response
Prompts = Sequence[Sequence[int]]  # token ids


def time_rounds(
    llm: TextGenerator, prompts: Prompts, params: Sequence[SamplingParams], batch: int
) -> RoundTimes:
    """The rounds of the first 2 * `batch` prompts, `batch` at once: without drafting, with it and
    with one draft; then the other way round. Nothing on a device whose clock cannot be read without
    a wait."""
    engine = llm.engine
    times = RoundTimes()
    if engine.proposer is None or engine.target.device.type not in ("cpu", "cuda"):
        return times
    ways: list[tuple[list[RoundTime], int | None]] = [(times.plain, 0), (times.drafting, None)]
    if _single_drafts_tell(engine):
        ways.append((times.single, 1))
    few = [replace(one, max_tokens=min(one.max_tokens or TOKENS, TOKENS)) for one in params]
    first = slice(0, batch)
    second = slice(batch, 2 * batch) if len(prompts) >= 2 * batch else first
    for part, order in ((first, ways), (second, ways[::-1])):
        for into, drafts in order:
            into += _timed(llm, prompts[part], few[part], drafts)
    return times


def _single_drafts_tell(engine: Engine) -> bool:
    """True if rounds of one draft are those of longer chains, shortened: not of a tree, of lengths
    that are chosen anew, or of a step that is compiled for K drafts."""
    chains = engine.proposer is not None and not engine.proposer.drafts_trees
    return chains and type(engine.draft_length) is DraftLength and not engine.compiles


def _timed(
    llm: TextGenerator, prompts: Prompts, params: Sequence[SamplingParams], drafts: int | None
) -> list[RoundTime]:
    """One pass. `drafts`: of each round; None: as many as the engine drafts."""
    engine = llm.engine
    clock = RoundClock(engine)
    usual = engine.draft_length
    if drafts:
        engine.draft_length = DraftLength(drafts)
    try:
        with clock.running():
            inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            llm.generate(inputs, list(params), use_tqdm=False, speculate=drafts != 0)
    finally:
        engine.draft_length = usual
    return clock.times()
