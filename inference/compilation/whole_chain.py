"""All drafts of a greedy chain as one compiled step: the new slots, then per depth head, best token
and next slot.

Depth by depth a chain is two compiled calls each, and on a small drafter calling takes longer than
computing. Sampled chains, and those that end early, need their logits outside and are drafted depth
by depth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inference.compilation.compiled_step import CachedStep
from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, StaticRows
from inference.kv_cache.ragged_cache import RaggedCache
from speculators.drafter import DraftInput
from speculators.families.autoregressive import ChainDrafter
from speculators.families.draft_model.model import DraftModel
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
        self._drafter, self._cache, self._depth = drafter, cache, depth
        self.step = CachedStep(
            f"the chain of {what}", self._at, cache, buckets, compilation, ahead=depth - 1
        )

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

    def _at(self, shape: Shape) -> Callable[..., tuple[Tensor]]:
        drafter, reads_tokens = self._drafter, isinstance(self._drafter, DraftModel)
        one, newest = (
            Shape(shape.rows, 1, shape.keys),
            torch.arange(shape.rows, device=self._cache.device),
        )
        draft_to_target, depth = drafter.draft_to_target, self._depth
        reads_taps, reads_last = drafter.reads_taps, drafter.reads_last_hidden

        def extend(rows: StaticRows, token_ids: Tensor, *state: Tensor) -> Tensor:
            known = drafter._known(token_ids) if reads_tokens else token_ids
            return drafter._extend(rows, 0, shape.rows, known, *state)  # type: ignore[arg-type]

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
