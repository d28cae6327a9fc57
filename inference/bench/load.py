"""When requests are sent: arrivals drawn from a seed, and a limit of how many are under way. Knows no HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from inference.bench.client import Outcome

Item = TypeVar("Item")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests arrive, [count].

    Gaps are gamma distributed with shape `burstiness` and mean 1/rate: a Poisson process at 1, bursts below, ever more
    even above; as in vLLM they are scaled so that the last request arrives after count/rate seconds, which makes the
    offered rate that of the option. An infinite rate: all at once.
    """
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1.0)
    else:
        gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


async def offer(
    items: Sequence[Item], arrivals: Sequence[float], max_concurrency: int | None,
    send: Callable[[Item], Awaitable[Outcome]],
) -> tuple[list[Outcome], float]:  # fmt: skip
    """Sends every item when it arrives, at most `max_concurrency` at a time and in their order; the outcomes in that
    order, and the seconds it took. What waits for its turn has that time in `queue_time`, not in its latencies."""
    turns = asyncio.Semaphore(max_concurrency or max(1, len(items)))
    start = time.perf_counter()

    async def one(item: Item, arrival: float) -> Outcome:
        if (ahead := start + arrival - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        asked = time.perf_counter()
        async with turns:
            waited = time.perf_counter() - asked
            return replace(await send(item), queue_time=waited)

    outcomes = await asyncio.gather(*(one(item, at) for item, at in zip(items, arrivals, strict=True)))
    return list(outcomes), time.perf_counter() - start
