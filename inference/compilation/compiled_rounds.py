"""Rounds at static shapes: the target's forward and the drafter's steps by torch.compile, on a GPU
as CUDA graphs.

What is compiled is what runs anyway, at the shapes of static_shapes.py, one recording per shape,
made when a shape is first met. Prefill, trees of drafts and what decides over tokens stay as they
are. What torch cannot compile as one graph is named in a warning and runs eager from then on, with
the same outputs."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from inference.compilation.compiled_step import CachedStep, Compiled, GoOn, Report
from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, StaticRows, at_least, padded
from inference.compilation.whole_chain import WholeChain
from inference.kv_cache.memory_limit import KVMemory
from inference.kv_cache.ragged_cache import RaggedCache
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer
from inference.spec_decode.proposers.drafter import HeadProposer
from speculators.errors import ConfigError
from speculators.families.attention_free import SlotwiseDrafter
from speculators.families.autoregressive import ChainDrafter
from speculators.families.draft_model.model import DraftModel
from speculators.target.frozen_target import FrozenTarget
from speculators.target.plain_decoder import TargetForward

if TYPE_CHECKING:
    from speculators.drafter import Drafter

logger = logging.getLogger(__name__)


class CompiledRounds:
    """The compiled steps of an engine. Keys and values get all their memory at once, so that their
    addresses are fixed.

    ConfigError if a limit of memory does not hold that.
    """

    def __init__(
        self,
        compilation: Compilation,
        target: FrozenTarget,
        target_forward: TargetForward,
        cache: RaggedCache,
        proposer: Proposer | None,
        max_model_len: int,
        memory: KVMemory | None,
    ) -> None:
        if memory is not None and not memory.fits(cache.max_rows, cache.max_len):
            raise ConfigError(
                f"kv_cache_memory_bytes={memory.limit}, but compiled rounds keep keys and values"
                f" where they are: all {cache.max_rows} rows of {cache.max_len} positions from the"
                f" start, {memory.bytes(cache.max_rows, cache.max_len)} bytes. Lower max_num_seqs"
                " or max_model_len, raise the limit, or set enforce_eager=True"
            )
        cache.resize(cache.max_rows, cache.max_len)
        width = 1 if proposer is None else 1 + proposer.num_speculative_tokens
        buckets = Buckets(cache.max_rows, width, cache.max_len, compilation.row_sizes)

        def make(shape: Shape) -> Callable[..., Any]:
            def step(
                placed: Tensor, keys: list[Tensor], values: list[Tensor], token_ids: Tensor
            ) -> Any:
                rows = StaticRows(placed[0], keys, values, shape)
                positions = rows.position_ids().clamp(max=max_model_len - 1)  # padding only
                return target_forward(token_ids, positions, rows.mask(), rows.view())

            return step

        self.target = CachedStep(
            f"the target {target.name_or_path}", make, cache, buckets, compilation
        )
        self.drafter = CompiledDrafter(compilation)
        if isinstance(proposer, HeadProposer) and compilation.drafter:
            proposer.run_drafter(self.drafter)
        self._warned = False

    def warm_up(self, report: Report | None = None, limit_s: float = math.inf) -> None:
        """Compiles every shape that a round can have. Before any request, and after one round with
        drafting and one without, which show what each step is given.

        report: called with the graphs there are and the most there can be. limit_s: seconds after
        which no further shape is begun; those left are compiled when they are first met."""
        began = perf_counter()

        def go_on() -> bool:
            if report is not None:
                report(self.num_graphs, self.most_graphs)
            return perf_counter() - began < limit_s

        for step in (self.target, *self.drafter.steps):
            step.warm_up(go_on)
        if not go_on():
            logger.warning(
                "%d of at most %d graphs were compiled in %.0f s; the others are when they are"
                " first met",
                self.num_graphs,
                self.most_graphs,
                perf_counter() - began,
            )

    def forget_target(self) -> None:
        """The target is made of other modules or memory: its steps are compiled anew."""
        self.target.compiled.forget()

    @property
    def num_graphs(self) -> int:
        """Steps compiled so far."""
        return sum(len(step.compiled) for step in (self.target, *self.drafter.steps))

    @property
    def most_graphs(self) -> int:
        """More are never compiled: one per shape."""
        return self.target.buckets.most + self.drafter.most_graphs

    def forward(
        self, start: int, rows: int, token_ids: Tensor, proposal: Proposal | None
    ) -> tuple | None:
        """token_ids [b, T] -> taps and last_hidden as the target gives them; None where it is to be
        asked itself: for prefill, whose shapes are its own, and for trees."""
        if start or token_ids.shape[1] > self.target.buckets.widths[-1]:
            return None
        if proposal is not None and proposal.parents is not None:
            if not self._warned:
                logger.warning("trees of drafts are not compiled: rounds that verify one run eager")
            self._warned = True
            return None
        found = self.target(rows, token_ids)
        return found and tuple(None if x is None else x[:rows, : token_ids.shape[1]] for x in found)


class CompiledDrafter:
    """Makes a twin of a drafter, with the same weights, whose steps along a chain are compiled."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self.steps: list[CachedStep | RowStep] = []
        self.most_graphs = 0

    def __call__(
        self, drafter: Drafter, cache: RaggedCache, depth: int
    ) -> tuple[Drafter, WholeChain | None]:
        """The twin, and its greedy chains as one step, where it has them. `cache`: its keys and
        values; `depth`: tokens of the longest chain."""
        chain = None
        name, twin = f"the drafter ({type(drafter).__name__})", copy.copy(drafter)
        cache.resize(cache.max_rows, cache.max_len)
        buckets = Buckets(cache.max_rows, depth + 1, cache.max_len, self._compilation.row_sizes)
        if isinstance(drafter, SlotwiseDrafter):
            twin.step = self._by_rows(name, drafter.step, buckets)  # type: ignore[attr-defined]
            self.most_graphs = len(buckets.rows) * depth
        elif isinstance(drafter, ChainDrafter) or (
            isinstance(drafter, DraftModel) and drafter.token_map is None
        ):
            twin._extend = self._extending(name, drafter, cache, buckets)  # type: ignore[union-attr]
            twin.head = self._by_rows(f"the output head of {name}", drafter.head, buckets)  # type: ignore[method-assign]
            chain = WholeChain(name, drafter, cache, buckets, self._compilation, depth)
            self.steps.append(chain.step)
            self.most_graphs = 2 * buckets.most + len(buckets.rows)
        else:
            why = (
                "its steps have no fixed shape"
                if isinstance(drafter, DraftModel)
                else "its steps are not known"
            )
            warnings.warn(
                f"LLM: {name} is not compiled and runs eager; outputs are the same: {why}",
                stacklevel=2,
            )
        return twin, chain

    def _extending(
        self, name: str, drafter: ChainDrafter | DraftModel, cache: RaggedCache, buckets: Buckets
    ) -> Callable[..., Tensor]:
        original = drafter._extend

        def make(shape: Shape) -> Callable[..., tuple[Tensor]]:
            def step(
                placed: Tensor, keys: list[Tensor], values: list[Tensor], *inputs: Any
            ) -> tuple[Tensor]:
                return (
                    original(StaticRows(placed[0], keys, values, shape), 0, shape.rows, *inputs),
                )

            return step

        step = CachedStep(name, make, cache, buckets, self._compilation)
        self.steps.append(step)

        def extend(
            cache: RaggedCache, start: int, stop: int, token_ids: Tensor, *given: Any, **placed: Any
        ) -> Tensor:
            """As the drafter's own; some of `given` may be None."""
            inputs = (token_ids, *(each for each in given if each is not None))
            plain = (
                len(inputs) <= 2
                and not start
                and not placed
                and token_ids.shape[1] <= buckets.widths[-1]
            )
            found = step(stop, *inputs) if plain else None
            if found is None:
                return original(cache, start, stop, token_ids, *given, **placed)
            return found[0][:stop, : token_ids.shape[1]]

        return extend

    def _by_rows(self, name: str, function: Callable[..., Any], buckets: Buckets) -> RowStep:
        step = RowStep(name, function, buckets, self._compilation)
        self.steps.append(step)
        return step


class RowStep:
    """A function of tensors [b, …] and then numbers, compiled once per number of rows and for these
    numbers."""

    def __init__(
        self, what: str, function: Callable[..., Any], buckets: Buckets, compilation: Compilation
    ) -> None:
        self.compiled = Compiled(what, compilation)
        self._function, self._buckets = function, buckets
        self._like: dict[
            tuple, list[Tensor]
        ] = {}  # one row of each input, by the numbers it was called with

    def __call__(self, *given: Any) -> Any:
        tensors = [each for each in given if isinstance(each, Tensor)]
        numbers, (b, *_) = given[len(tensors) :], tensors[0].shape
        self._like.setdefault(numbers, [each[:1].clone() for each in tensors])
        found = self._run(at_least(self._buckets.rows, b), numbers, tensors)
        if found is None:
            return self._function(*given)
        cut = tuple(each[:b] for each in found)
        return cut if len(cut) > 1 else cut[0]

    def warm_up(self, go_on: GoOn = lambda: True) -> None:
        """For every number of rows, with the numbers that it was called with so far, while
        `go_on()`."""
        for numbers, like in self._like.items():
            for rows in self._buckets.rows:
                if not go_on():
                    return
                self._run(rows, numbers, like)

    def _run(
        self, rows: int, numbers: tuple, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        def make() -> Callable[..., Any]:
            function = self._function

            def step(*inputs: Tensor) -> tuple[Tensor, ...]:
                outputs = function(*inputs, *numbers)
                return outputs if isinstance(outputs, tuple) else (outputs,)

            return step

        return self.compiled.run((rows, *numbers), make, *(padded(each, rows) for each in tensors))
