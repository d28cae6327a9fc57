"""The processes of a run: how long they wait for one another, and what the first one sends.

Only the first process reads and writes what a run keeps, so that machines need no disk in common;
the others are sent what they need. Where one process works by itself (it merges an adapter, asks
servers for responses), the others wait for as long as it gives signs of life. A single collective
operation, which all processes begin within seconds of one another, has a time-out."""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
    recursively_apply,
)
from rich.console import Console
from torch import Tensor
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from draftsmith.inference.progress import HEARTBEAT
from draftsmith.speculators.errors import ConfigError, DraftsmithError

TIME_OUT = timedelta(minutes=30)  # of a collective operation
BEAT = 5.0  # seconds between two signs of life
SILENCE = 300.0  # seconds without one, after which a process is taken to be gone
GONE = "gone"  # the sign of a process that has ended
AGAIN = "see its output, then run the same command again on all machines, which goes on"

Item = TypeVar("Item")
Result = TypeVar("Result")


class LostProcess(DraftsmithError):
    """Another process of the run has ended, or cannot be reached."""


class Pulse:
    """Signs of life of one of `count` processes in the store that they share, and a meeting that
    all wait for, however long one of them works.

    The signs come from a thread of its own, with its own connection to the store, so that neither
    work nor a wait holds them up."""

    def __init__(
        self, store: Store, process: int, count: int, beat: float = BEAT, silence: float = SILENCE
    ) -> None:
        self.store = store.clone()  # type: ignore[attr-defined]  # torch declares it of some
        self.process = process
        self.count = count
        self.beat = beat
        self.silence = silence
        self.meetings = 0
        self._ended = threading.Event()
        apart = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._give_signs, args=(apart,), daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """The others are told that this process ends."""
        self._ended.set()
        self._thread.join(self.beat)

    def meet(self) -> None:
        """Returns when all processes have come here. LostProcess: one of them will not."""
        self.meetings += 1
        key = f"meeting/{self.meetings}"
        pause = 0.005
        signs: dict[int, tuple[bytes, float]] = {}  # the newest of each process, and when it came
        try:
            self.store.add(key, 1)
            while True:
                # Looked at before the count: who came to the meeting may have gone on and ended.
                lost = self._lost(signs)
                if self.store.add(key, 0) >= self.count:
                    return
                if lost is not None:
                    raise lost
                time.sleep(pause)
                pause = min(2 * pause, self.beat / 5)
        except torch.distributed.DistError as error:
            raise LostProcess(
                f"the first process cannot be reached any more ({error}); {AGAIN}",
                where="processes",
            ) from None

    def _lost(self, signs: dict[int, tuple[bytes, float]]) -> LostProcess | None:
        """Of a process that has ended, or gave no sign for too long; None if there is none."""
        now = time.monotonic()
        for process in range(self.count):
            name = f"sign/{process}"
            sign = self.store.get(name) if self.store.check([name]) else b""
            before, since = signs.get(process, (b"", now))
            signs[process] = (sign, since if sign == before else now)
            silent = now - signs[process][1]
            if sign == GONE.encode():
                return LostProcess(f"process {process} has ended; {AGAIN}", where="processes")
            if silent > self.silence:
                reason = f"gave no sign of life for {silent:.0f} s"
                return LostProcess(f"process {process} {reason}; {AGAIN}", where="processes")
        return None

    def _give_signs(self, store: Store) -> None:
        name = f"sign/{self.process}"
        number = 0
        try:
            while not self._ended.is_set():
                store.set(name, str(number))
                number += 1
                self._ended.wait(self.beat)
            store.set(name, GONE)
        except torch.distributed.DistError:
            pass  # the store has ended with the first process, as a meeting will say


class RunAccelerator(Accelerator):
    """accelerate's, whose processes wait for one that works, and not for one that is gone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIME_OUT)], **options)
        self.pulse: Pulse | None = None
        if self.num_processes > 1:
            self.pulse = Pulse(_get_default_store(), self.process_index, self.num_processes)

    def wait_for_everyone(self) -> None:
        """Returns when all processes have come here. LostProcess: one of them will not."""
        if self.pulse is not None:
            self.pulse.meet()

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """As accelerate's, but a tracker that fails is left out from there on, and the run goes
        on."""
        ask_trackers(self, "log", values, step=step)

    def end_training(self) -> None:
        """Tells the others that this process ends, and ends the trackers."""
        if self.pulse is not None:
            self.pulse.stop()
        ask_trackers(self, "finish")
        self.trackers.clear()
        super().end_training()


def ask_trackers(
    accelerator: Accelerator,
    method: str,
    *values: Any,
    where: Callable[[GeneralTracker], bool] = lambda tracker: True,
    **options: Any,
) -> None:
    """Calls `method` of those trackers of which `where` is true. One that fails is left out from
    there on."""
    for tracker in list(filter(where, accelerator.trackers)):
        try:
            getattr(tracker, method)(*values, **options)
        except Exception as error:  # whatever its service may raise
            accelerator.trackers.remove(tracker)
            HEARTBEAT.print(
                Console(stderr=True),
                f"warning: {tracker.name} has failed and gets no more, the run goes on:"
                f" {type(error).__name__}: {error}",
                style="yellow",
                markup=False,
            )


def on_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """What `work` returns in the first process, in every process. All come here together; a
    DraftsmithError or an OSError of it is raised in all of them."""
    if accelerator.num_processes == 1:
        return work()
    outcomes: list[Any] = [_outcome(work) if accelerator.is_main_process else None]
    accelerator.wait_for_everyone()
    broadcast_object_list(outcomes)
    result, failure = outcomes[0]
    if failure is not None:
        raise failure
    return result


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What `work` returns, and the error of the user that it raises."""
    try:
        return work(), None
    except (DraftsmithError, OSError) as error:
        return None, error


def send_tensors(accelerator: Accelerator, read: Callable[[], Result]) -> Result:
    """`on_first` for a tree of tensors and plain values, which arrives in the host's memory.
    Tensors go one by one, so that a device holds one of them at a time."""
    if accelerator.num_processes == 1:
        return read()
    trees: list[Any] = []

    def outline() -> Any:
        trees.append(read())
        return recursively_apply(lambda t: torch.empty_like(t, device="meta"), trees[0])

    shape = on_first(accelerator, outline)

    def receive(tensor: Tensor) -> Tensor:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
        return broadcast(buffer.to(accelerator.device).contiguous()).cpu()

    return recursively_apply(receive, trees[0] if trees else shape)


def in_turn(accelerator: Accelerator, items: Sequence[Item]) -> list[Item]:
    """The items that fall to this process, which take them in turn: see `gather_in_turn`."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def gather_in_turn(accelerator: Accelerator, results: Sequence[Result], count: int) -> list[Result]:
    """The results of all `count` items in their order, in every process. `results`: those of the
    items that `in_turn` gives this one."""
    processes = accelerator.num_processes
    if processes == 1:
        return list(results)
    parts = gather_object([list(results)])
    return [parts[i % processes][i // processes] for i in range(count)]


def once_per_folder(accelerator: Accelerator, folder: Path, work: Callable[[], Result]) -> Result:
    """What `work`, which writes into `folder`, returns in the first of those processes that see the
    same one, in every one of them. All come here together; an error is raised as by `on_first`."""
    if accelerator.num_processes == 1:
        return work()
    first = _first_there(accelerator, folder)
    outcome: tuple[Any, Exception | None] = (None, None)
    if first == accelerator.process_index:
        outcome = _outcome(work)
    accelerator.wait_for_everyone()
    outcomes = gather_object([outcome])
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return outcomes[first][0]


def _first_there(accelerator: Accelerator, folder: Path) -> int:
    """The first of the processes that see this one's `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f".{uuid.uuid4().hex}.mark"
    (folder / name).touch()
    names = gather_object([name])
    seen = [process for process, mark in enumerate(names) if (folder / mark).exists()]
    accelerator.wait_for_everyone()
    (folder / name).unlink()
    return seen[0]


def require_same(accelerator: Accelerator, value: str, message: str, where: str) -> None:
    """ConfigError in every process if they do not all have the same value."""
    if accelerator.num_processes > 1 and len(set(gather_object([value]))) > 1:
        raise ConfigError(message, where=where)


def is_shared(accelerator: Accelerator, folder: Path) -> bool:
    """True if every process sees the first one's `folder`, which is made if need be."""
    if accelerator.num_processes == 1:
        return True

    def leave_mark() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".{uuid.uuid4().hex}.mark"
        (folder / name).touch()
        return name

    mark = on_first(accelerator, leave_mark)
    seen = gather_object([(folder / mark).exists()])
    if accelerator.is_main_process:
        (folder / mark).unlink()
    return all(seen)


def share_files(accelerator: Accelerator, folder: Path, pattern: str) -> None:
    """Gives every machine the files of `folder` that another has. Files of one name are taken to
    be equal, and to be written no more; where all machines see one folder nothing is sent."""
    if accelerator.num_processes == 1:
        return
    names = gather_object([{path.name for path in folder.glob(pattern)}])
    for name in sorted(set().union(*names)):
        holders = [process for process, known in enumerate(names) if name in known]
        if len(holders) == len(names):
            continue
        contents: list[Any] = [None]
        if accelerator.process_index == holders[0]:
            contents[0] = (folder / name).read_bytes()
        broadcast_object_list(contents, from_process=holders[0])
        if accelerator.process_index not in holders:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = folder / f".{uuid.uuid4().hex}.tmp"
            scratch.write_bytes(contents[0])
            scratch.replace(folder / name)
