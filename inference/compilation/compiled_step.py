"""One function compiled by torch.compile, once per key; what torch cannot compile is named and runs eager.

Knows no model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, padded
from inference.kv_cache.ragged_cache import RaggedCache
from speculators.errors import ConfigError
from speculators.precision import on_device

logger = logging.getLogger(__name__)

GoOn = Callable[[], bool]  # asked before each compilation of a warm-up
Report = Callable[[int, int], None]  # of graphs: how many there are, and how many there can be


class Compiled:
    """One function, compiled once per key. `what` names it in messages."""

    def __init__(self, what: str, compilation: Compilation) -> None:
        self.what, self._compilation = what, compilation
        self._found: dict[Hashable, Callable[..., Any]] = {}
        self._made = 0  # compiled so far, those forgotten included
        self.seconds = 0.0  # that compiling took
        self.failure: str | None = None  # why it runs eager

    def __len__(self) -> int:
        """Keys it was compiled for."""
        return len(self._found)

    def forget(self) -> None:
        """Every key is compiled again when it is next asked for."""
        self._found.clear()

    def run(self, key: Hashable, make: Callable[[], Callable[..., Any]], *inputs: Any) -> tuple[Tensor, ...] | None:
        """make()(*inputs), compiled; None: it cannot be. ConfigError without a C++ compiler."""
        if self.failure is not None:
            return None
        step, new = self._found.get(key), False
        if step is None:
            logger.info("compiling %s for %s", self.what, key)
            step, new = self._compile(make(), self._made), True
            self._made += 1
        started = perf_counter()
        try:
            with warnings.catch_warnings():
                if new:  # the cache of a function of two constants is passed over: nothing to worry about
                    warnings.filterwarnings("ignore", message=".*lru_cache.*")
                outputs = step(*inputs)
        except (TorchDynamoException, CppCompileError, InvalidCxxCompiler) as error:
            if not new:
                raise
            self._refuse(error)
            return None
        if new:
            self.seconds += perf_counter() - started
            logger.info("compiled %s for %s in %.1f s", self.what, key, perf_counter() - started)
        self._found[key] = step
        return tuple(None if x is None else x.clone() for x in outputs) if self._replays else outputs

    @property
    def _replays(self) -> bool:
        """True if outputs lie in memory that the next replay of a CUDA graph overwrites."""
        return self._compilation.cudagraphs and torch.cuda.is_available()

    def _compile(self, step: Callable[..., Any], number: int) -> Callable[..., Any]:
        # functions made by one definition share its code, and with it torch's limit of recompilations
        step.__code__ = step.__code__.replace(co_name=f"{step.__code__.co_name}_{number}")
        options: dict[str, Any] = {}
        if self._compilation.backend == "inductor":
            options = {"triton.cudagraphs": self._compilation.cudagraphs, **self._compilation.inductor}
        # modules do not change while an engine runs, and checking that they did not would cost more than a small step
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        return torch.compile(step, fullgraph=True, dynamic=False, backend=self._compilation.backend, options=options)

    def _refuse(self, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InvalidCxxCompiler):
                raise ConfigError(
                    f"LLM: enforce_eager=False: {self.what} is compiled with torch's inductor, which needs a C++ "
                    f"compiler: {cause} Install one (g++ or clang), name it in CXX, or leave enforce_eager=True"
                ) from error
            cause = getattr(cause, "inner_exception", None) or cause.__cause__
        lines = [line.strip() for line in str(error).strip().split("\n")]
        parts = [lines[0], *(line for line in lines[1:] if line.startswith("Explanation:"))]
        self.failure = " ".join(parts)
        warnings.warn(
            f"LLM: {self.what} cannot be compiled and runs eager; outputs are the same. "
            f"{type(error).__name__}: {self.failure}",
            stacklevel=2,
        )


class CachedStep:
    """A step over new tokens of the first rows of `cache`, compiled once per shape.

    make    of a shape, the function (placed [2, R], keys, values, *inputs) -> outputs. `placed`: each row's length
            before it, and how many of its new tokens are no padding where `counts` say so
    ahead   slots that it fills after those of its inputs
    """

    def __init__(
        self, what: str, make: Callable[[Shape], Callable[..., Any]], cache: RaggedCache, buckets: Buckets,
        compilation: Compilation, ahead: int = 0,
    ) -> None:  # fmt: skip
        self.compiled = Compiled(what, compilation)
        self._make, self._cache, self.buckets, self._ahead = make, cache, buckets, ahead
        self._like: tuple[Tensor, ...] | None = None  # one token of one row of each input, once it was called

    def __call__(self, rows: int, *inputs: Tensor, counts: Sequence[int] = ()) -> tuple[Tensor, ...] | None:
        """inputs [b, T, …] each -> outputs of all rows of the shape. None: not compiled, and nothing was done, for the
        keys and values have no memory yet, or for the reason that was warned of."""
        cache, (keys, values) = self._cache, self._cache.memory()
        if not keys or self.compiled.failure is not None:
            return None
        if not len(self.compiled):
            for each in (*keys, *values):
                torch._dynamo.mark_static_address(each)
        shape = self.buckets.shape(rows, inputs[0].shape[1], max(cache.lengths[:rows]) + self._ahead)
        cache.reserve(0, shape.rows, shape.width + self._ahead)
        self._like = self._like or tuple(each[:1, :1].clone() for each in inputs)
        return self._run(shape, cache.lengths[: shape.rows], inputs, counts)

    def warm_up(self, go_on: GoOn = lambda: True) -> None:
        """Compiles every shape while `go_on()`, on inputs like those of the first call. No row holds anything: keys
        and values are written over. Nothing if it was never called, or cannot be compiled."""
        for shape in self.buckets.shapes if self._like else ():
            lengths = [max(shape.keys - shape.width - self._ahead, 0)] * shape.rows
            if not go_on() or self._run(shape, lengths, self._like or ()) is None:
                return

    def _run(
        self, shape: Shape, lengths: Sequence[int], inputs: Sequence[Tensor], counts: Sequence[int] = ()
    ) -> tuple[Tensor, ...] | None:
        placed = on_device([lengths, [*counts, *[1] * (shape.rows - len(counts))]], self._cache.device)
        full = [padded(each, shape.rows, shape.width) for each in inputs]
        return self.compiled.run(shape, partial(self._make, shape), placed, *self._cache.memory(), *full)
