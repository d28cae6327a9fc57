"""A second CUDA stream, on which the features of the next rows are computed while a head trains.

Work on it begins once all that the stream in use was asked for before is done, and is waited for by
the device alone, where its results are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class SideStream:
    """A stream of a CUDA device beside the one in use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def launch(self, work: Callable[[], Result], reads: Iterable[Tensor]) -> Launched[Result]:
        """Launches what `work` asks of the device. `reads`: tensors of the stream in use that it
        reads, whose memory is not used again before it has."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in reads:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            result = work()
            done = self._stream.record_event()
        return Launched(self.device, result, done)


class Launched(Generic[Result]):
    """What a side stream was asked for, which may not be there yet."""

    def __init__(self, device: torch.device, result: Result, done: torch.cuda.Event) -> None:
        self.device = device
        self._result = result
        self._done = done

    def take(self, tensors: Callable[[Result], Iterable[Tensor]]) -> Result:
        """The result, which the stream in use may read from now on. `tensors`: those in it; their
        memory is not used again before that stream has read them."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._done)
        for tensor in tensors(self._result):
            tensor.record_stream(stream)
        return self._result
