"""Heads without attention: Medusa, the MLP speculator.

Slot t of such a head reads what the target computed at t and no other slot, so that depth k, which
predicts x_{t+2+k}, is a function of that one state and, if the family wants them, of the tokens
x_{t+1} .. x_{t+1+k}. `unroll` does that for all slots that have a term, `draft_steps` for the
newest slot of each row; both run the family's `start`, `advance` and `read`. The cache of such a
head holds the lengths of its rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from draftsmith.speculators.drafter import (
    Drafter,
    DraftInput,
    DraftLogits,
    DraftStep,
    DraftSteps,
    Grow,
    host_batch,
    valid_terms,
)
from draftsmith.speculators.layers.checkpointing import kept_or_recomputed
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.precision import to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.traits import Traits


class SlotwiseDrafter(Drafter):
    """A family gives its first state, how a token moves the state on, and what its head reads of
    it.

    As written here the heads are independent: the state is the target's at every depth, and `read`
    is all they do."""

    traits = Traits(reads_last_hidden=True, one_head=False)

    # -------------------------------------------------------------- the family's part

    def start(self, last_hidden: Tensor) -> Tensor:
        """last_hidden of the target [N, H] -> the state before depth 0 [N, S]."""
        return last_hidden.to(dtype_of(self))

    def advance(self, state: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """State before `depth` [N, S], tokens x_{t+1+depth} [N] -> its state [N, S]."""
        return state

    def read(self, state: Tensor, depth: int) -> Tensor:
        """State of a depth [N, S] -> what `head` reads there [N, D]."""
        return state

    # -------------------------------------------------------------- training

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """`steps` depths; depth k of slot t reads the token at t + 1 + k and matches its target. A
        slot goes on while a term is to come."""
        ids = features.input_ids.flatten()
        device = features.input_ids.device
        batch = host_batch(features)
        terms_of = [valid_terms(batch, depth + 2) for depth in range(steps)]
        valid = torch.stack(terms_of).flatten(1)  # [K, B·T], in the host's memory, as all indices
        slots = valid.any(0).nonzero().flatten()  # [N]
        state = self.start(features.last_hidden.flatten(0, 1)[to_device(slots, device)])
        for depth in range(steps):
            going = valid[depth:, slots].any(0).nonzero().flatten()
            slots = slots[going]
            state = state[to_device(going, device)]
            tokens = ids[to_device(slots + 1 + depth, device)]
            state = kept_or_recomputed(self.traits.recomputes, self.advance, state, tokens, depth)
            terms = valid[depth, slots].nonzero().flatten()
            anchors = slots[terms]
            yield DraftStep(
                depth=depth,
                hidden=kept_or_recomputed(
                    self.traits.recomputes, self.read, state[to_device(terms, device)], depth
                ),
                target_index=to_device(anchors + 1 + depth, device),
                anchor_index=to_device(anchors, device),
                weight=torch.ones(len(anchors), device=state.device),
            )

    # -------------------------------------------------------------- inference

    def append(self, inputs: DraftInput) -> None:
        """See `Drafter.append`: such a cache holds lengths alone."""
        inputs.cache.reserve(inputs.start, inputs.stop, inputs.token_ids.shape[1])
        inputs.advance(inputs.counts)

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`."""
        self.append(inputs)
        state = self.start(inputs.newest(inputs.last_hidden))
        token_ids = inputs.newest(inputs.token_ids)
        for depth in range(k):
            state = self.advance(state, token_ids, depth)
            token_ids = yield DraftLogits(self.head(self.read(state, depth), depth))

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`. Heads that read no draft are computed once per depth."""
        self.append(inputs)
        state = self.start(inputs.newest(inputs.last_hidden))
        tokens = inputs.newest(inputs.token_ids)
        states = state[:, None]  # [b, w, S]
        tokens = tokens[:, None]  # [b, w]
        depth = 0
        while True:
            rows = states if self.traits.reads_drafts else states[:, :1]
            b, w = rows.shape[:2]
            state = self.advance(rows.flatten(0, 1), tokens[:, :w].flatten(), depth)
            logits = self.head(self.read(state, depth), depth).unflatten(0, (b, w))
            if (level := grow(logits.expand(-1, tokens.shape[1], -1))) is None:
                return
            state = state.unflatten(0, (b, w)).expand(-1, tokens.shape[1], -1)
            states = level.of_parents(state)
            tokens = level.token_ids
            depth += 1
