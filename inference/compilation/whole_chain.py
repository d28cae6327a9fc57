"""All drafts of a greedy chain as one compiled step: the new slots, then per depth head, best token and next slot.

Depth by depth a chain is two compiled calls each, and on a small drafter calling takes longer than computing. Sampled
chains, and those that end early, need their logits outside and are drafted depth by depth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from inference.compilation.compiled_step import Compiled, GoOn
from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, StaticRows, padded
from inference.kv_cache.ragged_cache import RaggedCache
from speculators.drafter import DraftInput
from speculators.families.autoregressive import ChainDrafter
from speculators.families.draft_model.model import DraftModel
from speculators.precision import on_device
from speculators.vocab.draft_vocab import to_target_ids


class WholeChain:
    """The `depth` best drafts of every row, for a drafter whose keys and values are in `cache`."""

    def __init__(
        self,
        what: str,
        drafter: ChainDrafter | DraftModel,
        cache: RaggedCache,
        buckets: Buckets,
        compilation: Compilation,
        depth: int,
    ) -> None:
        self.compiled = Compiled(f"the chain of {what}", compilation)
        self._drafter, self._cache, self._buckets, self._depth = drafter, cache, buckets, depth
        self._like: tuple[Tensor, ...] | None = None  # one token of one row of each input, once it was called

    def __call__(self, inputs: DraftInput) -> Tensor | None:
        """Token ids [b, depth], the new slots written to the cache; None: it is not compiled, and nothing was done."""
        cache, stop, width = self._cache, inputs.stop, inputs.token_ids.shape[1]
        keys, values = cache.memory()
        if inputs.start or not keys or self.compiled.failure is not None or width > self._buckets.widths[-1]:
            return None
        if not len(self.compiled):
            for each in (*keys, *values):
                torch._dynamo.mark_static_address(each)
        shape = self._buckets.shape(stop, width, max(cache.lengths[:stop]) + self._depth - 1)
        cache.reserve(0, shape.rows, shape.width + self._depth - 1)
        given = (inputs.token_ids, *self._features(inputs))
        self._like = self._like or tuple(each[:1, :1].clone() for each in given)
        counts = [*inputs.counts, *[1] * (shape.rows - stop)]
        placed = on_device([cache.lengths[: shape.rows], counts], cache.device)
        full = [padded(each, shape.rows, shape.width) for each in given]
        found = self.compiled.run(shape, partial(self._at, shape), placed, keys, values, *full)
        if found is None:
            return None
        for row, count in enumerate(inputs.counts):
            cache.advance(row, count)
        return found[0][:stop]

    def warm_up(self, go_on: GoOn = lambda: True) -> None:
        """As `CachedStep.warm_up`."""
        for shape in self._buckets.shapes if self._like else ():
            keys, values = self._cache.memory()
            length = max(shape.keys - shape.width - self._depth, 0)
            placed = on_device([[length] * shape.rows, [1] * shape.rows], self._cache.device)
            full = [padded(each, shape.rows, shape.width) for each in self._like or ()]
            if not go_on():
                return
            if self.compiled.run(shape, partial(self._at, shape), placed, keys, values, *full) is None:
                return

    def _features(self, inputs: DraftInput) -> list[Tensor]:
        if isinstance(self._drafter, DraftModel):
            return []
        return [each for each in (inputs.taps, inputs.last_hidden) if each is not None]

    def _at(self, shape: Shape) -> Callable[..., tuple[Tensor]]:
        drafter, reads_tokens = self._drafter, isinstance(self._drafter, DraftModel)
        one, newest = Shape(shape.rows, 1, shape.keys), torch.arange(shape.rows, device=self._cache.device)
        draft_to_target, depth = drafter.draft_to_target, self._depth
        reads_taps, reads_last = drafter.reads_taps, drafter.reads_last_hidden

        def extend(rows: StaticRows, token_ids: Tensor, *state: Tensor) -> Tensor:
            known = drafter._known(token_ids) if reads_tokens else token_ids
            return drafter._extend(rows, 0, shape.rows, known, *state)  # type: ignore[arg-type]

        def step(placed: Tensor, keys: list[Tensor], values: list[Tensor], token_ids: Tensor, *features: Tensor):
            lengths, counts = placed.unbind(0)
            state: tuple[Tensor, ...] = ()
            if not reads_tokens:
                taps, last = (features[0] if reads_taps else None), (features[-1] if reads_last else None)
                state = (drafter.first_state(taps, last),)  # type: ignore[union-attr]
            states = extend(StaticRows(lengths, keys, values, shape), token_ids, *state)
            read, drafted = states[newest, counts - 1][:, None], []  # [R, 1, H]
            for k in range(depth):
                drafted.append(to_target_ids(drafter.head(read[:, 0]).argmax(-1), draft_to_target))
                if k < depth - 1:
                    rows = StaticRows(lengths + counts + k, keys, values, one)
                    read = extend(rows, drafted[-1][:, None], *(() if reads_tokens else (read,)))
            return (torch.stack(drafted, dim=1),)

        return step
