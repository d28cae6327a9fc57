"""Heads that feed their own state back: EAGLE, EAGLE-3, multi-token prediction.

Slot t of such a head pairs the token x_{t+1} with what the target computed at t and predicts
x_{t+2}; depth k of the slot reads x_{t+1+k} and the depth k-1 output, at rotary position t + k, and
predicts x_{t+2+k}. `unroll` does that for all slots at once (training-time test, arXiv 2503.01840),
`draft_steps` for the newest slot of each row with a cache; both run the family's `run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

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
from draftsmith.speculators.layers.attention import Pair, attention
from draftsmith.speculators.layers.checkpointing import kept_or_recomputed
from draftsmith.speculators.layers.decoder import Asked, Attends, Rotary, RotaryTable
from draftsmith.speculators.layers.grouped_attention import cached_attends
from draftsmith.speculators.layers.queries import PackedQueries, in_window
from draftsmith.speculators.precision import on_device, on_host, to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures

WORTH_NARROWING = 0.8  # share of the slots still in use below which an unroll drops the others


class ChainDrafter(Drafter):
    """A family gives its first state, embedding and layers, and their `positions`."""

    positions: RotaryTable

    # -------------------------------------------------------------- the family's part

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values of their own."""
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """Positions that a slot reads, its own included; None: all."""
        return None

    def first_state(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """taps [B, T, n·H], last_hidden [B, T, H] -> the state that depth 0 reads [B, T, H]."""
        raise NotImplementedError

    def embed(self, token_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """token_ids, positions of slots [B, T] -> [B, T, H], of its table or the target's."""
        table = self.embed_tokens if self.config.own_embeddings else self.target.embed_tokens
        return table(token_ids)

    def run(
        self, embeds: Tensor, state: Tensor, rotary: Rotary, attends: Attends, queries: Asked = None
    ) -> Tensor:
        """All layers: embeds, state [B, T, H] -> what `head` reads and the next depth gets [B, T,
        H], or [B, M, H]."""
        raise NotImplementedError

    def feed_back(self, state: Tensor) -> Tensor:
        """The state as the next depth of an unroll reads it."""
        return state

    def tokens_read(self, token_ids: Tensor, depth: int) -> Tensor:
        """The tokens x_{t+1+depth} [B, M] as a depth of an unroll reads them."""
        return token_ids

    # -------------------------------------------------------------- training

    def terms(self, batch: Any, steps: int) -> list[Tensor]:
        """Per depth, the terms of an unroll, bool [B, T]."""
        return [valid_terms(batch, depth + 2) for depth in range(steps)]

    @override
    def count_terms(self, batch: Any, steps: int) -> Tensor:
        return torch.stack([valid.sum() for valid in self.terms(batch, steps)])

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """`steps` depths; depth k of slot t reads the token at t + 1 + k and matches its target.

        Every slot gives keys and values at depth 0, since later slots attend to it. All the rest,
        from the last layer's queries on, runs over slots that have a term at some depth, which in
        chat data is the smaller part of a row."""
        ids, segments, positions = features.input_ids, features.segment_ids, features.position_ids
        (B, T), device = ids.shape, ids.device
        valid = self.terms(host_batch(features), steps)  # K x [B, T], in the host's memory
        present = PackedQueries(segments)  # the slots that a depth runs over
        rows = T * torch.arange(B)[:, None]
        asking = present  # those whose states are needed
        if self.traits.selects_queries:
            used = slots_in_use(torch.stack(valid).any(0))
            asking = PackedQueries(segments, to_device(used, device))
        state = self.first_state(features.taps, features.last_hidden)
        layers = self.attention_layers
        causal: list[Pair] = []  # per layer: keys and values of depth 0
        own: list[list[Pair]] = [[] for _ in range(layers)]  # those of each later depth
        for depth in range(steps):
            if depth and self.traits.selects_queries and self.traits.samples_terms:
                fewer = to_device(slots_in_use(torch.stack(valid[depth:]).any(0)), device)
                if fewer.shape[1] <= WORTH_NARROWING * asking.slots.shape[1]:
                    state, own = _narrowed(asking.slots, fewer, T, state, own)
                    present = asking = PackedQueries(segments, fewer)
            read = (present.slots + 1 + depth) % T  # slots that wrap have no term
            tokens = self.tokens_read(ids.gather(1, read), depth)  # x_{t+1+depth}
            queries = asking.slots if depth == 0 and self.traits.selects_queries else None
            attends = [
                self._unrolled(i, depth, causal, own[i], present if i < layers - 1 else asking)
                for i in range(layers)
            ]
            places = positions.gather(1, present.slots) + depth
            state = self.feed_back(state) if depth else state
            given = (tokens, places, state, attends, queries)
            state = kept_or_recomputed(self.traits.recomputes, self._depth, *given)
            present, slots = asking, on_host(asking.slots)  # [B, M]
            terms = valid[depth].gather(1, slots).flatten().nonzero().flatten()  # of the flat B·M
            anchors = (slots + rows).flatten()[terms]
            yield DraftStep(
                depth=depth,
                hidden=state.flatten(0, 1)[to_device(terms, device)],
                target_index=to_device(anchors + 1 + depth, device),
                anchor_index=to_device(anchors, device),
                weight=torch.ones(len(anchors), device=state.device),
            )

    def _unrolled(
        self, layer: int, depth: int, causal: list, own: list, queries: PackedQueries
    ) -> Callable:
        before = tuple(own)  # of the depths 1..depth - 1, which a window always holds
        if self.window is not None:  # depth k stands k positions behind its slot
            queries = queries.within(self.window - depth)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            """Keeps its keys and values for later depths; a recomputed forward calls it again."""
            if depth == 0:
                if len(causal) == layer:
                    causal.append((k, v))
                return attention(q, (k, v), (), queries, scale)
            if len(own) < depth:
                own.append((k, v))
            return attention(q, causal[layer], [*before, (k, v)], queries, scale)

        return attend

    def _depth(
        self, tokens: Tensor, places: Tensor, state: Tensor, attends: Attends, queries: Asked
    ) -> Tensor:
        embeds = self.embed(tokens, places)
        return self.run(embeds, state, self.positions(state, places), attends, queries)

    # -------------------------------------------------------------- inference

    def append(self, inputs: DraftInput) -> None:
        """See `Drafter.append`: keys and values are all that is needed."""
        self._append(inputs, inputs.token_ids[:, :0] if self.traits.selects_queries else None)

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`: one forward per depth."""
        cache, start, stop = inputs.cache, inputs.start, inputs.stop
        state = self._append(inputs)
        with inputs.drafting() as lengths:
            token_ids = yield DraftLogits(self.head(state[:, 0]))
            for _ in range(k - 1):
                state = self._extend(cache, start, stop, token_ids[:, None], state)
                inputs.advance([1] * len(lengths))
                token_ids = yield DraftLogits(self.head(state[:, 0]))

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`."""
        cache, start, stop = inputs.cache, inputs.start, inputs.stop
        states, depth = self._append(inputs), 0
        with inputs.drafting() as base:
            while (level := grow(self.head(states))) is not None:
                mask = cache.tree_mask(start, stop, base, level.visible)[0]
                position_ids = on_device(base, states.device)[:, None] + depth
                placed = (position_ids.expand_as(level.token_ids), mask)
                parents = level.of_parents(states)
                states = self._extend(cache, start, stop, level.token_ids, parents, placed=placed)
                depth += 1
                inputs.advance([level.token_ids.shape[1]] * len(base))

    def _append(self, inputs: DraftInput, queries: Asked = None) -> Tensor:
        """Appends each row's slots; the newest's state [b, 1, H], unless `queries` is empty."""
        state = self.first_state(inputs.taps, inputs.last_hidden)
        rows = (inputs.cache, inputs.start, inputs.stop)
        states = self._extend(*rows, inputs.token_ids, state, queries)
        inputs.advance(inputs.counts)
        return states if states.shape[1] <= 1 else inputs.newest(states)[:, None]

    def _extend(
        self,
        cache,
        start: int,
        stop: int,
        token_ids: Tensor,
        state: Tensor,
        queries: Asked = None,
        placed=None,
    ) -> Tensor:
        """One pass over M new slots per row, written at each row's own length: states [b, M, H], or
        of the queries. `placed`: their positions [b, M] and what they see, bool [b, 1, M, S], where
        they are no text."""
        M = token_ids.shape[1]
        rows = (start, stop, M)
        position_ids, mask = placed or (cache.position_ids(*rows), cache.mask(*rows))
        first, reads = 0, queries is None or queries.shape[1] or self.attention_layers > 1
        if self.window is not None and reads:
            lengths = None if placed or cache.static else cache.lengths[start:stop]
            mask, first = self._in_window(lengths, position_ids, mask)
        attends = cached_attends(cache.view(*rows), mask, M, self.attention_layers, first)
        rotary = self.positions.lookup(position_ids, cache.capacity, state)
        return self.run(self.embed(token_ids, position_ids), state, rotary, attends, queries)

    def _in_window(
        self, lengths: Sequence[int] | None, position_ids: Tensor, mask: Tensor | None
    ) -> tuple[Tensor | None, int]:
        """What `_extend` masks within the window, and the first key that any row reads. `lengths`:
        of the rows before it; None: not known here, or the slots are those of a tree."""
        window, M = self.window, position_ids.shape[1]
        assert window is not None
        first = 0 if lengths is None else max(0, min(lengths) - window + 1)
        if mask is None:
            assert lengths is not None
            if M == 1 or lengths[0] + M <= window:
                return None, first
        last = mask.shape[-1] if mask is not None else lengths[0] + M
        keys = torch.arange(first, last, device=position_ids.device)
        seen = in_window(position_ids, keys, window)[:, None]
        causal = (keys <= position_ids[..., None])[:, None] if mask is None else mask[..., first:]
        return seen & causal, first


class DecoderChain(ChainDrafter):
    """A chain whose `layers` are those of speculators/layers/decoder.py."""

    layers: nn.ModuleList

    @override
    @property
    def attention_layers(self) -> int:
        return len(self.layers)

    @override
    @property
    def window(self) -> int | None:
        return self.config.sliding_window

    @override
    @property
    def max_depth(self) -> int | None:
        return self.window

    @torch.no_grad()
    def start_small(self) -> None:
        """Half the usual random weights, layers that hardly add to their input."""
        apart = {id(parameter) for parameter in self.head_parameters()}
        for module in self.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in apart:
                nn.init.normal_(module.weight, std=module.in_features**-0.5 * 0.5)
        for layer in self.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)


def slots_in_use(needed: Tensor) -> Tensor:
    """needed bool [B, T] -> [B, M] slots of each row, needed ones first and ascending; M is the
    most a row wants.

    A row that needs fewer is filled up with slots that are not needed: they have no term, and
    nobody reads them."""
    M = max(int(needed.sum(1).max()), 1)
    slots = torch.arange(needed.shape[1], device=needed.device)
    return torch.where(needed, slots, 2 * needed.shape[1] - slots).argsort(dim=1)[:, :M]


def _narrowed(
    slots: Tensor, fewer: Tensor, T: int, state: Tensor, own: list
) -> tuple[Tensor, list]:
    """State [B, M, H] and keys and values [B, g, M, d] of `slots` [B, M] -> those of `fewer` [B,
    M'], some of them. A slot that is not among `slots` has no term and gets any."""
    B, M = slots.shape
    place = torch.zeros(B, T, dtype=torch.long, device=slots.device)
    place.scatter_(1, slots, torch.arange(M, device=slots.device).expand(B, M))
    index = place.gather(1, fewer)
    heads = index[:, None, :, None]
    narrow = lambda x: x.gather(2, heads.expand(-1, x.shape[1], -1, x.shape[3]))
    kept = [[tuple(map(narrow, pair)) for pair in layer] for layer in own]
    return state.gather(1, index[..., None].expand(-1, -1, state.shape[-1])), kept
