"""Drafting with a language model that reads tokens alone: as a chain, as a tree, and in another
tokenizer's tokens.

Slot p of its cache holds token x_p, so that a draft depends on the text and the drafts before it
and on nothing of the target. What a round committed is read at once, at most as many tokens as were
drafted and one more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.drafter import Drafter, DraftInput, DraftLogits, DraftSteps, Grow
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.ragged_rows import Forward, TreePlaces, run_rows
from draftsmith.speculators.traits import Traits
from draftsmith.speculators.vocab.token_map import TokenMap


class TokenDrafter(Drafter):
    """A family gives `runner`, its model run as a target, and `head`; perhaps a `token_map`."""

    traits = Traits(first_token=0)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.token_map: TokenMap | None = None
        self._fast_forward: Forward | None = None  # the runtime's of the runner, while frozen

    @property
    def runner(self) -> FrozenTarget:
        """The language model that drafts, as the runtime runs one."""
        raise NotImplementedError

    @override
    @torch.no_grad()
    def decode_with(self, forward_of: Callable[[FrozenTarget], Forward | None]) -> None:
        if not self.training:
            self._fast_forward = forward_of(self.runner)

    @override
    def thaw(self) -> None:
        super().thaw()
        self._fast_forward = None

    @property
    def max_positions(self) -> int | None:
        """Positions that its model has; None: any number."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Ids within its own table; ids of the padding of the target's become its last token."""
        return token_ids.clamp(max=self.config.vocab_size - 1)

    def append(self, inputs: DraftInput) -> Tensor:
        """See `Drafter.append`; slot p holds token x_p. Returns each row's newest state [b, D]."""
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        ids, counts = self._spelt(inputs.token_ids, inputs.counts, cache.lengths[start:stop])
        states = self.extend(cache, start, stop, ids)
        inputs.advance(counts)
        return self._newest(cache, start, stop, states, counts)

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`: one forward per depth."""
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        state = self.append(inputs)
        # A drafted token is in both vocabularies: one token of the draft model spells it.
        one_each = [1] * (stop - start)
        with inputs.drafting() as lengths:
            token_ids = yield DraftLogits(self.head(state))
            for _ in range(k - 1):
                ids, _ = self._spelt(token_ids[:, None], one_each, lengths)
                state = self.extend(cache, start, stop, ids)[:, 0]
                inputs.advance(one_each)
                token_ids = yield DraftLogits(self.head(state))

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`. ConfigError with another tokenizer (many tokens a draft)."""
        if self.token_map is not None:
            raise ConfigError("a draft model with another tokenizer drafts chains; ask for no tree")
        cache = inputs.cache
        start = inputs.start
        states = self.append(inputs)[:, None]
        depth = 0
        with inputs.drafting() as base:
            depths = inputs.token_ids.new_zeros(len(base), 0)  # of all drafts so far
            while (level := grow(self.head(states))) is not None:
                width = level.token_ids.shape[1]
                depths = torch.cat([depths, depths.new_full((len(base), width), depth)], dim=1)
                tree = TreePlaces(depths, level.visible, base)
                states = self._run(cache, start, level.token_ids, tree)
                inputs.advance([width] * len(base))
                depth += 1

    def _run(
        self, cache: Any, start: int, token_ids: Tensor, tree: TreePlaces | None = None
    ) -> Tensor:
        """Own token ids [b, M] in rows start, start + 1, … -> states [b, M, D]."""
        forward = self._fast_forward or self.runner
        token_ids = self._known(token_ids)
        return run_rows(
            forward, cache, start, token_ids, max_positions=self.max_positions, tree=tree
        )[1]

    def _spelt(
        self, token_ids: Tensor, counts: Sequence[int], before: Sequence[int]
    ) -> tuple[Tensor, Sequence[int]]:
        """counts [b] target tokens, behind `before` [b] own ones -> own ids [b, M'], counts."""
        if self.token_map is None:
            return token_ids, counts
        numbers = on_device(list(counts), token_ids.device)
        empty = on_device([n == 0 for n in before], token_ids.device, torch.bool)
        ids, lengths = self.token_map.spell_rows(token_ids, numbers, empty)
        return ids, lengths.tolist()

    def extend(self, cache, start: int, stop: int, token_ids: Tensor) -> Tensor:
        """One pass over M new tokens of its own per row, written at each row's own length: states
        [b, M, D]. Without a token map these are the target's tokens."""
        states = self._run(cache, start, token_ids)
        if self.token_map is not None:
            # A target token may be spelt by nothing: the state before it is asked for then.
            view = cache.view(start, stop, token_ids.shape[1])
            view.update(states[:, None], states[:, None, :, :1], self.runner.num_layers)
        return states

    def _newest(
        self, cache, start: int, stop: int, states: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """The state after the last token of each row [b, D]."""
        rows = torch.arange(stop - start, device=states.device)
        if self.token_map is None:
            return states[rows, on_device(counts, states.device) - 1]
        kept = cache.keys_of(self.runner.num_layers, start, stop)[:, 0]  # [b, capacity, D]
        lengths = on_device(cache.lengths[start:stop], states.device)
        return torch.where(lengths[:, None] > 0, kept[rows, (lengths - 1).clamp(min=0)], 0.0)
