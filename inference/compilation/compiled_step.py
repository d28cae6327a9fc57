"""One function compiled by torch.compile, once per key; what torch cannot compile is named and runs
eager.

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
from torch._dynamo.backends.registry import lookup_backend
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

    def run(
        self, key: Hashable, make: Callable[[], Callable[..., Any]], *inputs: Any
    ) -> tuple[Any, ...] | None:
        """make()(*inputs), compiled; None: it cannot be. ConfigError without a C++ compiler."""
        if self.failure is not None:
            return None
        step, new = self._found.get(key), False
        if step is None:
            logger.info("compiling %s for %s", self.what, key)
            step, new = (
                CompiledFunction(make(), self._made, self._compilation, direct=not self._replays),
                True,
            )
            self._made += 1
        started = perf_counter()
        try:
            with warnings.catch_warnings():
                # the cache of a function of two constants is passed over: nothing to worry about
                if new:
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
        return (
            tuple(None if x is None else x.clone() for x in outputs) if self._replays else outputs
        )

    @property
    def _replays(self) -> bool:
        """True if outputs lie in memory that the next replay of a CUDA graph overwrites."""
        return self._compilation.cudagraphs and torch.cuda.is_available()

    def _refuse(self, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InvalidCxxCompiler):
                raise ConfigError(
                    f"LLM: enforce_eager=False: {self.what} is compiled with torch's inductor,"
                    f" which needs a C++ compiler: {cause} Install one (g++ or clang), name it in"
                    " CXX, or leave enforce_eager=True"
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


class CompiledFunction:
    """A function by torch.compile, as one graph, returning a tuple of tensors. `direct`: from the
    second call on the graph is called itself.

    Before a graph torch checks its guards and collects every weight, which takes as long as a third
    of a small step. All that changes from call to call is the tensors, and lists of tensors, that
    the function is given: the graph's other inputs are kept. Not for CUDA graphs, whose replays
    torch tells apart by its own calls."""

    def __init__(
        self, step: Callable[..., Any], number: int, compilation: Compilation, *, direct: bool
    ) -> None:
        # functions made by one definition share its code, and with it torch's limit of
        # recompilations
        step.__code__ = step.__code__.replace(co_name=f"{step.__code__.co_name}_{number}")
        self._compilation = compilation
        # modules do not change while an engine runs, and checking that they did not would cost more
        # than a small step
        options: Any = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        self._step = torch.compile(
            step, fullgraph=True, dynamic=False, backend=self._made, options=options
        )
        self._graph: Callable[..., Any] | None = None
        self._inputs: list[Any] = []  # of the graph, when it was last called by torch
        self._outputs: tuple[Any, ...] = ()
        self._given: list[
            tuple[int, int]
        ] = []  # which input of the graph is which tensor that is given
        self._returned: list[int | None] = []  # which outputs of the graph are returned; None: None
        self._like: list[tuple] = []
        self._direct = direct

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if (
            self._returned
            and [(x.shape, x.dtype) for x in inputs if isinstance(x, Tensor)] == self._like
        ):
            flat, given = _flat(inputs), self._inputs.copy()
            for place, which in self._given:
                given[place] = flat[which]
            outputs = self._graph(*given)  # type: ignore[misc]
            return tuple(None if i is None else outputs[i] for i in self._returned)
        returned = self._step(*inputs)
        if self._direct and not self._returned:
            self._follow(inputs, returned)
        return returned

    def _made(self, graph: Any, examples: Any, **_: Any) -> Callable[..., Any]:
        """The backend of torch.compile."""
        name, options = self._compilation.backend, {}
        if name == "inductor":
            patches = {
                "triton.cudagraphs": self._compilation.cudagraphs,
                **self._compilation.inductor,
            }
            options = {"config_patches": patches}
        run = self._graph = lookup_backend(name)(graph, examples, **options)

        def by_torch(*inputs: Any) -> Any:
            outputs = run(*inputs)
            if self._direct and not self._returned:
                self._inputs, self._outputs = list(inputs), tuple(outputs)
            return outputs

        return by_torch

    def _follow(self, inputs: Any, returned: tuple[Tensor | None, ...]) -> None:
        """Finds out which of the graph's inputs and outputs are those of the function. They have to
        be the same objects, each given once; otherwise torch makes every call."""
        flat = _flat(inputs)
        which, out = (
            {id(x): i for i, x in enumerate(flat)},
            {id(x): i for i, x in enumerate(self._outputs)},
        )
        self._direct = len(which) == len(flat) and all(x is None or id(x) in out for x in returned)
        if self._direct:
            self._given = [
                (place, which[id(x)]) for place, x in enumerate(self._inputs) if id(x) in which
            ]
            self._like = [(x.shape, x.dtype) for x in inputs if isinstance(x, Tensor)]
            self._returned = [None if x is None else out[id(x)] for x in returned]
            for place, _ in self._given:
                self._inputs[place] = None
        self._outputs = ()


def _flat(inputs: Sequence[Any]) -> list[Tensor]:
    return [x for each in inputs for x in (each if isinstance(each, list) else (each,))]


class CachedStep:
    """A step over new tokens of the first rows of `cache`, compiled once per shape.

    make    of a shape, the function (placed [2, R], keys, values, *inputs) -> outputs. `placed`:
    each row's length
            before it, and how many of its new tokens are no padding where `counts` say so
    ahead   slots that it fills after those of its inputs
    """

    def __init__(
        self,
        what: str,
        make: Callable[[Shape], Callable[..., Any]],
        cache: RaggedCache,
        buckets: Buckets,
        compilation: Compilation,
        ahead: int = 0,
    ) -> None:
        self.compiled = Compiled(what, compilation)
        self._make, self._cache, self.buckets, self._ahead = make, cache, buckets, ahead
        self._like: tuple[Tensor, ...] | None = (
            None  # one token of one row of each input, once it was called
        )

    def __call__(
        self, rows: int, *inputs: Tensor, counts: Sequence[int] = ()
    ) -> tuple[Tensor, ...] | None:
        """inputs [b, T, …] each -> outputs of all rows of the shape. None: not compiled, and
        nothing was done, for the keys and values have no memory yet, or for the reason that was
        warned of."""
        cache, (keys, values) = self._cache, self._cache.memory()
        if not keys or self.compiled.failure is not None:
            return None
        if not len(self.compiled):
            for each in (*keys, *values):
                torch._dynamo.mark_static_address(each)
        shape = self.buckets.shape(
            rows, inputs[0].shape[1], max(cache.lengths[:rows]) + self._ahead
        )
        cache.reserve(0, shape.rows, shape.width + self._ahead)
        self._like = self._like or tuple(each[:1, :1].clone() for each in inputs)
        return self._run(shape, cache.lengths[: shape.rows], inputs, counts)

    def warm_up(self, go_on: GoOn = lambda: True) -> None:
        """Compiles every shape while `go_on()`, on inputs like those of the first call. No row
        holds anything: keys and values are written over. Nothing if it was never called, or cannot
        be compiled."""
        for shape in self.buckets.shapes if self._like else ():
            lengths = [max(shape.keys - shape.width - self._ahead, 0)] * shape.rows
            if not go_on() or self._run(shape, lengths, self._like or ()) is None:
                return

    def _run(
        self,
        shape: Shape,
        lengths: Sequence[int],
        inputs: Sequence[Tensor],
        counts: Sequence[int] = (),
    ) -> tuple[Tensor, ...] | None:
        placed = on_device(
            [lengths, [*counts, *[1] * (shape.rows - len(counts))]], self._cache.device
        )
        full = [padded(each, shape.rows, shape.width) for each in inputs]
        return self.compiled.run(
            shape, partial(self._make, shape), placed, *self._cache.memory(), *full
        )
