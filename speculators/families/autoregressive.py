"""Heads that feed their own state back: EAGLE, EAGLE-3, multi-token prediction.

Slot t of such a head pairs the token x_{t+1} with what the target computed at t and predicts
x_{t+2}; depth k of the slot reads x_{t+1+k} and the depth k-1 output, at rotary position t + k, and
predicts x_{t+2+k}. `unroll` does that for all slots at once (training-time test, arXiv 2503.01840),
`draft_steps` for the newest slot of each row with a cache; both run the family's `run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from draftsmith.speculators.layers.decoder import (
    Asked,
    Attend,
    Attends,
    Rotary,
    RotaryTable,
    at_slots,
)
from draftsmith.speculators.layers.grouped_attention import cached_attends
from draftsmith.speculators.layers.kept_bytes import Batch, block_bytes
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

        What depth k of slot t stands for is the k-th draft of the runtime after a text that ends
        with x_{t+1}. There the cache holds slots 0..t as the depth 0 of each wrote them, since that
        text is committed and the target's features of it are known; behind them one slot for each
        of the depths 1..k-1, which read drafts, and now that of depth k. `ChainKeys` gives a query
        just these. Keys of depth j >= 1 of another slot are drafts of another chain, and nobody
        but this chain reads them.

        So all T slots of a row need keys and values at depth 0, whatever is asked of them: later
        slots read them. Everything else is needed only of slots that have a term at this depth or a
        later one (`asked`), which in chat data are the smaller part of a row: from the last layer's
        queries of depth 0 on, the unroll runs over M of the T slots, and where families sample
        their terms over fewer and fewer. A state is [B, M, H], M = T before depth 0.

        Kept for the backward pass is the graph of all depths, since the loss of a depth reaches the
        parameters through the states and keys of all depths before it; with `traits.recomputes` it
        is what each depth reads, and the rest is computed again."""
        valid = self.terms(host_batch(features), steps)  # K x [B, T], in the host's memory
        keys = ChainKeys(self.attention_layers, self.window)
        state = self.first_state(features.taps, features.last_hidden)
        slots = PackedQueries(features.segment_ids)  # those whose states a depth reads
        asked = self._slots_in_use(features, valid) or slots  # those whose states come out of it
        for depth in range(steps):
            if depth and self.traits.selects_queries and self.traits.samples_terms:
                fewer = self._slots_in_use(features, valid[depth:])
                if fewer.slots.shape[1] <= WORTH_NARROWING * slots.slots.shape[1]:
                    index = places_among(slots.slots, fewer.slots, features.input_ids.shape[1])
                    state = at_slots(state, index)
                    keys.narrow(index)
                    slots = fewer
                    asked = fewer
            state = self._unroll_depth(features, depth, slots, asked, state, keys)
            slots = asked
            yield _step(depth, state, slots, valid[depth])

    def _slots_in_use(
        self, features: TargetFeatures, valid: Sequence[Tensor]
    ) -> PackedQueries | None:
        """The slots with a term at one of the depths of `valid`, bool [B, T] each; None where the
        layers cannot leave out a slot."""
        if not self.traits.selects_queries:
            return None
        used = slots_in_use(torch.stack(list(valid)).any(0))
        return PackedQueries(features.segment_ids, to_device(used, features.input_ids.device))

    def _unroll_depth(
        self,
        features: TargetFeatures,
        depth: int,
        slots: PackedQueries,
        asked: PackedQueries,
        state: Tensor,
        keys: ChainKeys,
    ) -> Tensor:
        """One depth over `slots`, whose states [B, M, H] come in: those of `asked` [B, M', H]."""
        ids = features.input_ids
        behind = (slots.slots + 1 + depth) % ids.shape[1]  # slots that wrap have no term
        tokens = self.tokens_read(ids.gather(1, behind), depth)  # x_{t+1+depth}
        positions = features.position_ids.gather(1, slots.slots) + depth
        if depth:
            state = self.feed_back(state)
        last = self.attention_layers - 1
        attends = [
            keys.attend(layer, depth, asked if layer == last else slots)
            for layer in range(self.attention_layers)
        ]
        queries = None if asked is slots else asked.slots
        inputs = (tokens, positions, state, attends, queries)
        return kept_or_recomputed(self.traits.recomputes, self._depth, *inputs)

    def _depth(
        self, tokens: Tensor, positions: Tensor, state: Tensor, attends: Attends, queries: Asked
    ) -> Tensor:
        embeds = self.embed(tokens, positions)
        return self.run(embeds, state, self.positions(state, positions), attends, queries)

    # -------------------------------------------------------------- memory of training

    @property
    def state_size(self) -> int | None:
        """Bytes of a number of a state; None: as in products."""
        return None

    def share_of_slots(self, depth: int) -> float:
        """Of a row, those that a depth is computed for if all have a term at depth 0."""
        return 1.0

    def once_kept(self, batch: Batch) -> int:
        """Bytes kept for the first state."""
        return 0

    def depth_kept(self, slots: int, batch: Batch) -> int:
        """Bytes that a depth over so many slots keeps, without keys outside of its row."""
        raise NotImplementedError

    def slots_of(self, batch: Batch) -> list[int]:
        """Slots that each depth is computed for."""
        return [round(batch.tokens * self.share_of_slots(k)) for k in range(batch.depths)]

    @override
    def state_bytes(self, batch: Batch) -> int:
        size = self.state_size or batch.size
        return sum(self.slots_of(batch)) * size * self.config.hidden_size

    @override
    def kept_bytes(self, batch: Batch) -> int:
        """Of depth k its layers, with the keys of k depths beside the context's.

        Recomputed is one depth at a time; keys and values and the state that comes in stay."""
        config = self.config
        slots = self.slots_of(batch)
        depths = [self.depth_kept(count, batch) for count in slots]
        for depth in range(1, batch.depths):
            of_chains = block_bytes(config, slots[depth], batch, depth)
            depths[depth] += self.attention_layers * of_chains
        given = self.state_bytes(batch)
        stays = self.once_kept(batch) + given
        if not batch.recomputes:
            return stays + sum(depths)
        keys = 2 * batch.size * config.num_key_value_heads * config.head_dim
        return stays + given + sum(slots) * self.attention_layers * keys + max(depths)

    # -------------------------------------------------------------- inference

    def append(self, inputs: DraftInput) -> None:
        """See `Drafter.append`: keys and values are all that is needed."""
        self._append(inputs, inputs.token_ids[:, :0] if self.traits.selects_queries else None)

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`: one forward per depth."""
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        state = self._append(inputs)
        with inputs.drafting() as lengths:
            token_ids = yield DraftLogits(self.head(state[:, 0]))
            for _ in range(k - 1):
                state = self.extend(cache, start, stop, token_ids[:, None], state)
                inputs.advance([1] * len(lengths))
                token_ids = yield DraftLogits(self.head(state[:, 0]))

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`."""
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        states = self._append(inputs)
        depth = 0
        with inputs.drafting() as base:
            while (level := grow(self.head(states))) is not None:
                mask = cache.tree_mask(start, stop, base, level.visible)[0]
                position_ids = on_device(base, states.device)[:, None] + depth
                placed = (position_ids.expand_as(level.token_ids), mask)
                parents = level.of_parents(states)
                states = self.extend(cache, start, stop, level.token_ids, parents, placed=placed)
                depth += 1
                inputs.advance([level.token_ids.shape[1]] * len(base))

    def _append(self, inputs: DraftInput, queries: Asked = None) -> Tensor:
        """Appends each row's slots; the newest's state [b, 1, H], unless `queries` is empty."""
        state = self.first_state(inputs.taps, inputs.last_hidden)
        rows = (inputs.cache, inputs.start, inputs.stop)
        states = self.extend(*rows, inputs.token_ids, state, queries)
        inputs.advance(inputs.counts)
        return states if states.shape[1] <= 1 else inputs.newest(states)[:, None]

    def extend(
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
        first = 0
        # with one layer and no queries, keys are written and none is read
        reads = queries is None or queries.shape[1] or self.attention_layers > 1
        if self.window is not None and reads:
            lengths = None if placed or cache.static else cache.lengths[start:stop]
            mask, first = self._in_window(lengths, position_ids, mask)
        attends = cached_attends(cache.view(*rows), mask, M, self.attention_layers, first)
        rotary = self.positions.lookup(position_ids, cache.capacity, state)
        return self.run(self.embed(token_ids, position_ids), state, rotary, attends, queries)

    def _in_window(
        self, lengths: Sequence[int] | None, position_ids: Tensor, mask: Tensor | None
    ) -> tuple[Tensor | None, int]:
        """What `extend` masks within the window, and the first key that any row reads. `lengths`:
        of the rows before it; None: not known here, or the slots are those of a tree."""
        window = self.window
        M = position_ids.shape[1]
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


class ChainKeys:
    """The keys and values that the depths of one unroll have computed, by layer.

    context    of depth 0: [B, g, T, ·] of every slot, read by later slots of the same document
    of_depths  of each depth from 1 on: [B, g, M, ·] of the slots that the unroll runs over, each
               read by the later depths of its own slot alone
    window     positions that a slot reads, its own included; None: all

    An unroll appends and never overwrites: the pairs are part of the graph of the depths that read
    them, until the backward pass is done."""

    def __init__(self, layers: int, window: int | None) -> None:
        self.window = window
        self.context: list[Pair | None] = [None] * layers
        self.of_depths: list[list[Pair]] = [[] for _ in range(layers)]

    def attend(self, layer: int, depth: int, queries: PackedQueries) -> Attend:
        """What the queries of a layer read at a depth.

        With activation checkpointing the backward pass calls it again, when later depths have added
        theirs. The pairs to read are therefore those that are there now, and the first call alone
        keeps what it computed."""
        # of depths 1..depth - 1, which a window always holds
        earlier = tuple(self.of_depths[layer])
        if self.window is not None:  # depth k stands k positions behind its slot
            queries = queries.within(self.window - depth)

        def attend_context(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if self.context[layer] is None:
                self.context[layer] = (k, v)
            return attention(q, (k, v), (), queries, scale)

        def attend_chain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if len(self.of_depths[layer]) < depth:
                self.of_depths[layer].append((k, v))
            return attention(q, self.context[layer], [*earlier, (k, v)], queries, scale)

        return attend_chain if depth else attend_context

    def narrow(self, index: Tensor) -> None:
        """Leaves those of the slots at `index` [B, M'] of the M that the unroll runs over."""
        self.of_depths = [
            [(_at_heads_slots(k, index), _at_heads_slots(v, index)) for k, v in pairs]
            for pairs in self.of_depths
        ]


class DecoderChain(ChainDrafter):
    """A chain whose `layers` are those of speculators/layers/decoder.py."""

    layers: nn.ModuleList

    @override
    @property
    def attention_layers(self) -> int:
        """All of its decoder layers."""
        return len(self.layers)

    @override
    @property
    def window(self) -> int | None:
        """The sliding window of its config."""
        return self.config.sliding_window

    @override
    @property
    def max_depth(self) -> int | None:
        """Its window: no more depths than a slot reads positions."""
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


def places_among(slots: Tensor, fewer: Tensor, T: int) -> Tensor:
    """Where the slots `fewer` [B, M'] stand among `slots` [B, M] of rows of T slots: [B, M'].

    One that is not among them has no term, and gets any place."""
    B, M = slots.shape
    places = torch.zeros(B, T, dtype=torch.long, device=slots.device)
    places.scatter_(1, slots, torch.arange(M, device=slots.device).expand(B, M))
    return places.gather(1, fewer)


def _at_heads_slots(x: Tensor, index: Tensor) -> Tensor:
    """x [B, g, M, d] at index [B, M'] -> [B, g, M', d]."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _step(depth: int, state: Tensor, slots: PackedQueries, valid: Tensor) -> DraftStep:
    """The terms of a depth: of states [B, M, H] of `slots`, those that `valid` [B, T] holds."""
    B, T = valid.shape
    row_starts = T * torch.arange(B)[:, None]
    on_the_host = on_host(slots.slots)  # [B, M]
    terms = valid.gather(1, on_the_host).flatten().nonzero().flatten()  # of the flat B·M
    anchors = (on_the_host + row_starts).flatten()[terms]
    return DraftStep(
        depth=depth,
        hidden=state.flatten(0, 1)[to_device(terms, state.device)],
        target_index=to_device(anchors + 1 + depth, state.device),
        anchor_index=to_device(anchors, state.device),
        weight=torch.ones(len(anchors), device=state.device),
    )
