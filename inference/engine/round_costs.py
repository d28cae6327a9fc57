"""Times what rounds cost in an engine, for draft lengths that go by it. Before any request, as a
measurement takes half a second for each batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.requests.request import Request
from draftsmith.inference.spec_decode.costs import CostsBySize, RoundCosts, sizes_to_measure
from draftsmith.inference.spec_decode.proposers.base import Proposer

CONTEXT = 64  # tokens of each row, if the rows hold so many, while it is timed
MEASURING_SECONDS = 0.5  # per batch size, unless MIN_REPEATS of each part take longer
MIN_REPEATS = 3
MAX_REPEATS = 9

Part = tuple[str, int]  # "verify" or "draft", and the number of drafts


class RoundSeconds(NamedTuple):
    """plain: V(1), a step without drafts; verification: V(K + 1); drafts: D(K)."""

    plain: float
    verification: float
    drafts: float


@torch.inference_mode()
def measure_costs(engine: Engine) -> None:
    """Times rounds of 1, 2, 4, … rows, up to as many as the engine has, for a draft length that
    goes by their costs; nothing for others. While no request waits or runs."""
    if engine.proposer is None or not engine.draft_length.needs_costs:
        return
    by_size = {}
    for size in sizes_to_measure(engine.options.max_num_seqs):
        with _rehearsal(engine, size) as rows:
            by_size[size] = _costs_of(engine.runner, engine.proposer, rows)
    engine.draft_length.use_costs(CostsBySize(by_size))


@torch.inference_mode()
def time_round(engine: Engine, size: int) -> RoundSeconds:
    """The parts of a round of `size` rows with all drafts, while no request waits or runs. Each is
    as it was timed: `measure_costs` makes costs rise with the length, and a CPU may be slower at 3
    tokens than at 5."""
    proposer = engine.proposer
    assert proposer is not None, "an engine that drafts nothing has no such round"
    k = proposer.num_speculative_tokens
    with _rehearsal(engine, size) as rows:
        parts: dict[Part, Callable[[], object]] = {
            ("verify", drafts): partial(engine.runner.rehearse, size, 1 + drafts)
            for drafts in (0, k)
        }
        parts["draft", k] = partial(proposer.rehearse, rows, k)
        seconds = _least_seconds(parts)
    return RoundSeconds(seconds["verify", 0], seconds["verify", k], seconds["draft", k])


def _rehearsal(engine: Engine, size: int) -> AbstractContextManager[list[Request]]:
    """`size` rows of CONTEXT tokens."""
    return engine.rehearsal(size, min(CONTEXT, engine.max_model_len // 2))


def _costs_of(runner: ModelRunner, proposer: Proposer, rows: Sequence[Request]) -> RoundCosts:
    """Forwards of several widths are timed over these rows, and chains of several depths; the costs
    between them are interpolated."""
    most = proposer.num_speculative_tokens
    widths = sorted({0, 1, 2, 3, most // 2, (3 * most) // 4, most} & set(range(most + 1)))
    depths = sorted({1, most})
    parts: dict[Part, Callable[[], object]] = {
        ("verify", width): partial(runner.rehearse, len(rows), width + 1) for width in widths
    }
    drafting_takes_time = proposer.rehearse(rows, most)
    if drafting_takes_time:
        for depth in depths:
            parts["draft", depth] = partial(proposer.rehearse, rows, depth)
    seconds = _least_seconds(parts)
    verify = _between(most, widths, [seconds["verify", width] for width in widths])
    if not drafting_takes_time:
        return RoundCosts(verify, [0.0] * (most + 1))
    draft = _between(most, depths, [seconds["draft", depth] for depth in depths])
    return RoundCosts(verify, [0.0, *draft[1:]])


def _least_seconds(parts: dict[Part, Callable[[], object]]) -> dict[Part, float]:
    """The best of interleaved repeats, as a disturbance only ever makes a part longer."""
    for run in parts.values():
        run()  # warms up
    best = dict.fromkeys(parts, math.inf)
    deadline = perf_counter() + MEASURING_SECONDS
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and perf_counter() > deadline:
            break
        for part, run in parts.items():
            started = perf_counter()
            run()
            best[part] = min(best[part], perf_counter() - started)
    return best


def _between(most: int, known: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Interpolates the seconds at `known` to 0 … most, never falling."""
    return np.interp(range(most + 1), known, np.maximum.accumulate(seconds)).tolist()
