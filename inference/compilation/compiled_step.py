"""One function compiled by torch.compile, once per key; what torch cannot compile is named and runs eager.

Knows no model, no cache and no shapes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from inference.compilation.config import Compilation
from speculators.errors import ConfigError

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
