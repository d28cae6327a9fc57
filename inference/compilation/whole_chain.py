"""All drafts of a greedy chain as one compiled step: the new slots, then per depth head, best token
and next slot.

Depth by depth a chain is two compiled calls each, and on a small drafter calling takes longer than
computing. Sampled chains, and those that end early, need their logits outside and are drafted depth
by depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference.compilation.cached_step import CachedStep
from inference.compilation.static_shapes import Shape, StaticRows
from inference.kv_cache.ragged_cache import RaggedCache
from speculators.drafter import DraftInput
from speculators.families.autoregressive import ChainDrafter
from speculators.families.draft_model.model import DraftModel
from speculators.vocab.draft_vocab import to_target_ids

if TYPE_CHECKING:
    from speculators.drafter import Drafter


def has_chain(drafter: Drafter) -> bool:
    """True if this drafter's greedy chains can be one step."""
    if isinstance(drafter, DraftModel):
        return drafter.token_map is None
    return isinstance(drafter, ChainDrafter)


class WholeChain:
    """The `depth` best drafts of every row, for a drafter whose keys and values are in `cache`.
    `step` is what `at` gives, compiled."""

    step: CachedStep

    def __init__(self, drafter: Any, cache: RaggedCache, depth: int) -> None:
        self._drafter = drafter
        self._cache = cache
        self._depth = depth

    def __call__(self, inputs: DraftInput) -> Tensor | None:
        """Token ids [b, depth], the new slots written to the cache; None: it is not compiled, and
        nothing was done."""
        if inputs.start or inputs.token_ids.shape[1] > self.step.buckets.widths[-1]:
            return None
        state = () if isinstance(self._drafter, DraftModel) else (inputs.taps, inputs.last_hidden)
        given = [inputs.token_ids, *(each for each in state if each is not None)]
        found = self.step(inputs.stop, *given, counts=inputs.counts)
        if found is None:
            return None
        for row, count in enumerate(inputs.counts):
            self._cache.advance(row, count)
        return found[0][: inputs.stop]

    def at(self, shape: Shape) -> Callable[..., tuple[Tensor]]:
        drafter, reads_tokens = self._drafter, isinstance(self._drafter, DraftModel)
        one, newest = (
            Shape(shape.rows, 1, shape.keys),
            torch.arange(shape.rows, device=self._cache.device),
        )
        draft_to_target, depth = drafter.draft_to_target, self._depth
        reads_taps, reads_last = drafter.reads_taps, drafter.reads_last_hidden

        def extend(rows: StaticRows, token_ids: Tensor, *state: Tensor) -> Tensor:
            known = drafter._known(token_ids) if reads_tokens else token_ids
            return drafter._extend(rows, 0, shape.rows, known, *state)

        def step(
            placed: Tensor,
            keys: list[Tensor],
            values: list[Tensor],
            token_ids: Tensor,
            *features: Tensor,
        ):
            lengths, counts = placed.unbind(0)
            state: tuple[Tensor, ...] = ()
            if not reads_tokens:
                taps, last = (
                    (features[0] if reads_taps else None),
                    (features[-1] if reads_last else None),
                )
                state = (drafter.first_state(taps, last),)
            states = extend(StaticRows(lengths, keys, values, shape), token_ids, *state)
            read, drafted = states[newest, counts - 1][:, None], []  # [R, 1, H]
            for k in range(depth):
                drafted.append(to_target_ids(drafter.head(read[:, 0]).argmax(-1), draft_to_target))
                if k < depth - 1:
                    rows = StaticRows(lengths + counts + k, keys, values, one)
                    read = extend(rows, drafted[-1][:, None], *(() if reads_tokens else (read,)))
            return (torch.stack(drafted, dim=1),)

        return step
