"""A step over a ragged cache, compiled by torch.compile once per shape; what cannot be compiled is
named and runs eager. Knows no model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, padded
from inference.kv_cache.ragged_cache import RaggedCache
from speculators.errors import ConfigError
from speculators.precision import on_device

logger = logging.getLogger(__name__)

MOST_GRAPHS = 512  # of one step; torch's own limit is 8


class CachedStep:
    """A step over new tokens of the first rows of `cache`, compiled once per shape.

    make    of a shape, the function (placed [2, R], keys, values, *inputs) -> outputs. `placed`:
            each row's length before it, and how many of its new tokens are no padding
    ahead   slots that it fills after those of its inputs
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Shape], Callable[..., Any]],
        cache: RaggedCache,
        buckets: Buckets,
        compilation: Compilation,
        ahead: int = 0,
    ) -> None:
        self.buckets = buckets
        self.failure: str | None = None  # why it runs eager
        self._name = name
        self._make = make
        self._cache = cache
        self._compilation = compilation
        self._ahead = ahead
        self._compiled: dict[Shape, Callable[..., Any]] = {}
        self._example: tuple[Tensor, ...] | None = None  # one token of one row of each input

    def __len__(self) -> int:
        """Shapes it was compiled for."""
        return len(self._compiled)

    def forget(self) -> None:
        """Every shape is compiled again when it is next met."""
        self._compiled.clear()

    def __call__(
        self, rows: int, *inputs: Tensor, counts: Sequence[int] = ()
    ) -> tuple[Tensor | None, ...] | None:
        """inputs [b, T, …] each -> outputs of all rows of the shape. None: not compiled, and
        nothing was done, for the keys and values have no memory yet, or for the reason that was
        warned of."""
        cache = self._cache
        keys, values = cache.memory()
        if not keys or self.failure is not None:
            return None
        if not self._compiled:
            for memory in (*keys, *values):
                torch._dynamo.mark_static_address(memory)
        longest = max(cache.lengths[:rows]) + self._ahead
        shape = self.buckets.shape(rows, inputs[0].shape[1], longest)
        cache.reserve(0, shape.rows, shape.width + self._ahead)
        self._example = self._example or tuple(each[:1, :1].clone() for each in inputs)
        return self._run(shape, cache.lengths[: shape.rows], inputs, counts)

    def warm_up(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Compiles every shape while `go_on()`. No row holds anything: keys and values are written
        over. Nothing if it was never called, or cannot be compiled."""
        for shape in self.buckets.shapes if self._example else ():
            lengths = [max(shape.keys - shape.width - self._ahead, 0)] * shape.rows
            if not go_on() or self._run(shape, lengths, self._example or ()) is None:
                return

    def _run(
        self,
        shape: Shape,
        lengths: Sequence[int],
        inputs: Sequence[Tensor],
        counts: Sequence[int] = (),
    ) -> tuple[Tensor | None, ...] | None:
        step = self._compiled.get(shape)
        new = step is None
        if step is None:
            options = {"triton.cudagraphs": True} if self._replays else None
            step = torch.compile(
                self._make(shape),
                fullgraph=True,
                dynamic=False,
                backend=self._compilation.backend,
                options=options if self._compilation.backend == "inductor" else None,
            )
        counted = [*counts, *[1] * (shape.rows - len(counts))]
        placed = on_device([lengths, counted], self._cache.device)
        full = [padded(each, shape.rows, shape.width) for each in inputs]
        started = perf_counter()
        try:
            with (
                warnings.catch_warnings(),
                torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS),
            ):
                # the cache of a function of two constants is passed over: nothing to worry about
                warnings.filterwarnings("ignore", message="(?s).*lru_cache.*")
                outputs = step(placed, *self._cache.memory(), *full)
        except TorchDynamoException as error:
            if not new:
                raise
            self._refuse(error)
            return None
        if new:
            logger.info("compiled %s for %s in %.1f s", self._name, shape, perf_counter() - started)
            self._compiled[shape] = step
        if self._replays:  # the next replay writes over the outputs
            return tuple(None if x is None else x.clone() for x in outputs)
        return outputs

    @property
    def _replays(self) -> bool:
        return self._compilation.cudagraphs and self._cache.device.type == "cuda"

    def _refuse(self, error: Exception) -> None:
        if "InvalidCxxCompiler" in str(error):
            raise ConfigError(
                f"LLM: enforce_eager=False: {self._name} is compiled with torch's inductor, which"
                " needs a C++ compiler. Install one (g++ or clang), name it in CXX, or leave"
                " enforce_eager=True"
            ) from error
        self.failure = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"LLM: {self._name} cannot be compiled and runs eager; outputs are the same."
            f" {type(error).__name__}: {self.failure}",
            stacklevel=2,
        )
