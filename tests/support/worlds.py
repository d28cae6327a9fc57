"""Worlds of 1, 2 and 4 gloo processes on one machine, for tests of what several processes compute
together.

The processes are forked from one that has everything imported; each scenario is a world of the
first few."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.forked import CONTEXT

WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Scenario:
    """`job(folder, **arguments)` in a world of `processes`, under FSDP2 with `sharded`."""

    name: str
    processes: int
    sharded: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def in_worlds(
    job: Callable[..., Any], scenarios: Sequence[Scenario], folder: Path, seconds: float = 300
) -> dict:
    """{name: what `job` returned in the first process}; raises with the traceback of whoever
    failed."""
    results = CONTEXT.SimpleQueue()
    count = max(scenario.processes for scenario in scenarios)
    members = [
        CONTEXT.Process(
            target=_member, args=(rank, job, list(scenarios), str(folder), results), daemon=True
        )
        for rank in range(count)
    ]
    for member in members:
        member.start()
    by_name: dict[str, Any] = {}
    try:
        while len(by_name) < len(scenarios):
            name, failure, result = _next(results, members, seconds)
            assert failure is None, f"{name}: {failure}"
            by_name[name] = result
    finally:
        for member in members:
            member.join(0.1 if len(by_name) < len(scenarios) else 30)
            if member.is_alive():
                member.kill()
    return by_name


def _next(results, members, seconds: float):
    until = time.monotonic() + seconds
    while results.empty():
        assert time.monotonic() < until, "the worlds take too long"
        assert any(member.is_alive() for member in members), "all processes have ended"
        time.sleep(0.05)
    return results.get()


def _member(
    rank: int, job: Callable[..., Any], scenarios: Sequence[Scenario], folder: str, results
) -> None:
    import torch

    torch.set_num_threads(1)
    for number, scenario in enumerate(scenarios):
        if rank >= scenario.processes:
            continue
        try:
            with _world(rank, scenario, Path(folder) / f".rendezvous-{number}"):
                result = job(Path(folder), **scenario.arguments)
        except BaseException:
            results.put((scenario.name, traceback.format_exc(), None))
            return
        if rank == 0:
            results.put((scenario.name, None, result))


@contextmanager
def _world(rank: int, scenario: Scenario, rendezvous: Path) -> Iterator[None]:
    import torch
    from accelerate.state import AcceleratorState, GradientState

    size = scenario.processes
    os.environ |= {"ACCELERATE_USE_CPU": "true"}
    if size > 1:
        numbers = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        os.environ |= numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        where = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": size}
        limit = timedelta(seconds=120)
        torch.distributed.init_process_group("gloo", timeout=limit, **where)
    if scenario.sharded:
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    yield  # after an error nobody comes here, and the process ends
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    for name in (*WORLD, "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        os.environ.pop(name, None)
