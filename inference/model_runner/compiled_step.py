"""Steps at static shapes by torch.compile, on a GPU as CUDA graphs (mode "reduce-overhead"): a
model's forward over the last token and the drafts, and what compiled_chain.py makes of a drafter.

A shape of static_shapes.py is compiled in a warm-up, or when it is first met. Prefill, the drafting
of trees and of sampled chains, and what decides over tokens run eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftsmith.inference.kv_cache.static_rows import StaticRows
from draftsmith.inference.model_runner.compile_options import CompileOptions
from draftsmith.inference.model_runner.static_shapes import Shape, all_shapes, shape_for
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.target.ragged_rows import Forward, TreePlaces, run_rows

if TYPE_CHECKING:
    from draftsmith.inference.kv_cache.ragged_cache import RaggedCache

# Of all steps of all engines of a process, which torch counts together; its own limits, of what is
# alike and of all, are 8 and 256. The shapes are limit enough.
MOST_GRAPHS = 1 << 16
LIMITS = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), MOST_GRAPHS)
RUNS_TO_RECORD = 2  # of a shape: its first run compiles it, the second records its CUDA graph

Outputs = tuple[Tensor | None, ...]
Step = Callable[..., Outputs]  # (rows, counts [R], *inputs [R, T, …])


class CachedStep(nn.Module):
    """A step over new tokens of the first rows of `cache`, compiled once per shape. The memory of
    the cache are its buffers, whose addresses are fixed. `ahead`: slots that it fills after those
    of its inputs. `narrow`: rounds of one token have shapes of their own. `compiled`: the shapes
    that are."""

    def __init__(
        self,
        step: Step,
        cache: RaggedCache,
        width: int,
        ahead: int,
        options: CompileOptions,
        *,
        narrow: bool = True,
    ) -> None:
        super().__init__()
        cache.reserve_all()
        self._most_rows = min(cache.max_rows, options.most_rows or cache.max_rows)
        self._when_met = options.asked
        shapes = all_shapes(self._most_rows, width, cache.max_len)
        self.shapes = [shape for shape in shapes if narrow or shape.width == width]
        self.compiled: set[Shape] = set()
        self._step = step
        self._cache = cache
        self._width = width
        self._ahead = ahead
        self._layers = 0
        self._inputs: list[Tensor] = []  # one token of one row of each
        self._compiled = torch.compile(self, fullgraph=True, dynamic=False, **options.arguments)

    def forward(self, placed: Tensor, keys: int, *inputs: Tensor) -> Outputs:
        """placed [2, R]: each row's length, and how many of its new tokens are no padding."""
        memory = [getattr(self, f"memory_{i}") for i in range(2 * self._layers)]
        cached = memory[: self._layers], memory[self._layers :]
        static = StaticRows(placed[0], *cached, inputs[0].shape[1], keys)
        return self._step(static, placed[1], *inputs)

    def run(self, start: int, counts: Sequence[int], *inputs: Tensor) -> Outputs:
        """inputs [b, T, …] each, of whose tokens counts [b] are no padding -> outputs of these
        rows; () where the step has to run eager: prefill, more rows than are compiled, a shape that
        was left out of the warm-up, or nothing was cached yet."""
        rows, width = inputs[0].shape[:2]
        keys, values = self._cache.memory()
        if start or width > self._width or rows > self._most_rows or not keys:
            return ()
        if not self._layers:
            self._layers = len(keys)
            for i, memory in enumerate((*keys, *values)):
                self.register_buffer(f"memory_{i}", memory, persistent=False)
            self._inputs = [x[:1, :1].clone() for x in inputs]
        lengths = self._cache.lengths[:rows]
        shape = shape_for(self.shapes, rows, width, max(lengths) + self._ahead)
        if not (self._when_met or shape in self.compiled):
            return ()
        return self._run(shape, lengths, counts, inputs)

    def _run(
        self, shape: Shape, lengths: Sequence[int], counts: Sequence[int], inputs: Sequence[Tensor]
    ) -> Outputs:
        """The step at a shape that holds rows of these lengths, which is compiled if it is new."""
        rows, width = inputs[0].shape[:2]
        unused = shape.rows - rows  # they hold nothing
        placed = [[*lengths, *[0] * unused], [*counts, *[1] * unused]]
        padded = [x.new_zeros(shape.rows, shape.width, *x.shape[2:]) for x in inputs]
        for full, x in zip(padded, inputs, strict=True):
            full[:rows, :width] = x
        try:
            torch.compiler.cudagraph_mark_step_begin()  # it writes over the outputs of the last one
            with torch.compiler.config.patch(**LIMITS):  # type: ignore[attr-defined]
                outputs = self._compiled(on_device(placed, padded[0].device), shape.keys, *padded)
        # torch has no public name for it
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"enforce_eager=False: rounds cannot be compiled: {error}. Set enforce_eager=True",
                where="LLM",
            ) from error
        self.compiled.add(shape)
        return tuple(None if x is None else x[:rows].clone() for x in outputs)

    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        """Compiles every shape until then, and records its CUDA graph. No row holds anything: keys
        and values are written over. Nothing if it was never run. `longest`: tokens of the longest
        text that is to come; shapes that only longer ones have are left out."""
        if not self._inputs:
            return
        shapes = self.shapes
        if longest is not None:
            room = longest + self._width + self._ahead
            most = next((s.keys for s in shapes if s.keys >= room), self._cache.max_len)
            shapes = [shape for shape in shapes if shape.keys <= most]
        for shape in [shape for shape in shapes for _ in range(RUNS_TO_RECORD)]:
            if perf_counter() < deadline:
                lengths = [max(shape.keys - shape.width - self._ahead, 0), *[0] * (shape.rows - 1)]
                inputs = [x.expand(*shape[:2], *x.shape[2:]) for x in self._inputs]
                self._run(shape, lengths, [1] * shape.rows, inputs)


class CompiledForward:
    """`forward` over up to `width` new tokens of each of the first rows of `cache`, which gets all
    its memory at once. `max_positions`: as of `run_rows`. `trees`: the new tokens may be trees."""

    def __init__(
        self,
        forward: Forward,
        cache: RaggedCache,
        width: int,
        max_positions: int,
        options: CompileOptions,
        *,
        trees: bool = False,
    ) -> None:
        def step(rows: StaticRows, counts: Tensor, token_ids: Tensor) -> Outputs:
            return run_rows(forward, rows, 0, token_ids, max_positions=max_positions)

        def tree_step(
            rows: StaticRows, counts: Tensor, token_ids: Tensor, depths: Tensor, visible: Tensor
        ) -> Outputs:
            tree = TreePlaces(depths, visible)
            return run_rows(forward, rows, 0, token_ids, max_positions=max_positions, tree=tree)

        self.step = CachedStep(step, cache, width, 0, options)
        self.tree_step: CachedStep | None = None
        if trees:
            self.tree_step = CachedStep(tree_step, cache, width, 0, options, narrow=False)
        self._width = width

    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        """Compiles every shape of its steps until then; see `CachedStep.warm_up`."""
        self.step.warm_up(deadline, longest)
        if self.tree_step is not None:
            self.tree_step.warm_up(deadline, longest)

    def __call__(
        self, start: int, token_ids: Tensor, tree: TreePlaces | None = None
    ) -> tuple[Tensor | None, Tensor] | None:
        """token_ids [b, T] -> taps and last_hidden as `forward` gives them; None where it has to
        run eager. `tree`: which begins with the new tokens."""
        rows, width = token_ids.shape
        counts = [1] * rows
        if tree is None:
            outputs = self.step.run(start, counts, token_ids)
        elif self.tree_step is None or width > self._width:
            return None
        else:
            # what a padded token sees is decided in the step
            visible = pad(tree.visible, (0, self._width - width))  # [b, T, width of the step]
            outputs = self.tree_step.run(start, counts, token_ids, tree.depths, visible)
        if not outputs:
            return None
        taps, last_hidden = outputs
        assert last_hidden is not None
        return None if taps is None else taps[:, :width], last_hidden[:, :width]
