"""DFlash (arXiv 2602.06036): a whole block of drafts in one forward, and the backbone of the other
block families.

With a the position of the newest committed token, the anchor, slots 0..Q-1 stand at rotary
positions a..a+Q-1. Slot 0 holds the embedding of the anchor, the others that of a mask token. In
every layer a slot reads the context, keys and values that the layer's own projections make of c_i =
norm(fc(taps at i)) for i < a, and the slots of its block: all of them, or in a causal block those
up to itself (JetSpec). Layouts: `fill_in`, slot j >= 1 predicts the token at a + j and slot 0
nothing; `anchor_first` (`sample_from_anchor`), slot j predicts the token at a + j + 1.

The context's keys and values depend on no block: drafting computes them once per committed token
and keeps them in the ragged cache. Tensor names are those of vLLM's loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from draftsmith.speculators.config import DecoderConfig, TargetShape
from draftsmith.speculators.drafter import (
    Drafter,
    DraftInput,
    DraftLogits,
    DraftStep,
    DraftSteps,
    Grow,
    Samples,
    host_batch,
    row_noise,
    valid_terms,
)
from draftsmith.speculators.families.autoregressive import slots_in_use
from draftsmith.speculators.families.dflash_init import start_from_least_squares
from draftsmith.speculators.families.least_squares import fit_bytes, fit_flops, terms_for
from draftsmith.speculators.layers.attention import attention
from draftsmith.speculators.layers.checkpointing import kept_or_recomputed
from draftsmith.speculators.layers.decoder import Attend, DecoderLayer, RMSNorm, Rotary, RotaryTable
from draftsmith.speculators.layers.grouped_attention import cached_attends
from draftsmith.speculators.layers.int8_linear import dtype_of
from draftsmith.speculators.layers.kept_bytes import EXACT, Batch, block_bytes, layer_bytes
from draftsmith.speculators.layers.queries import Blocks, in_window
from draftsmith.speculators.options import (
    Count,
    DecoderOptions,
    PositiveInt,
    TapOptions,
    VocabularySize,
)
from draftsmith.speculators.precision import on_host, to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.speculators.traits import Traits

ANCHORS = 512  # blocks trained per row, as published


def block_tap_layers(num_layers: int, taps: int) -> list[int]:
    """The published taps of `taps` of them, as `hidden_states` numbers: outputs of layers spread
    over the target, none of the last two, whose states are close to the logits."""
    if taps == 1:
        return [num_layers // 2 + 1]
    layers = np.linspace(1, max(num_layers - 3, 1), taps).round().astype(int) + 1
    return sorted(set(layers.tolist()))


class DFlashConfig(DecoderConfig):
    """The decoder layers and the block."""

    qk_norm: bool = Field(True, description="normalise queries and keys per head (the Qwen3 layer)")
    block_size: int = Field(ge=2, description="slots of a block as trained, the anchor's included")
    mask_token_id: int = Field(
        ge=0, description="token whose embedding fills the slots without a known token"
    )
    sample_from_anchor: bool = Field(
        False, description="slot j predicts the token after its own position"
    )
    is_causal: bool = Field(False, description="a slot sees only the slots before it in its block")

    @model_validator(mode="after")
    def _block(self) -> Self:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id}: there are {self.vocab_size}")
        if self.sample_from_anchor and self.family in ("dflash", "dflash2"):
            raise ValueError(f"sample_from_anchor: no engine serves a {self.family} head so")
        if self.attention_bias:
            raise ValueError("attention_bias: the layers of block families have no biases here")
        return self

    @override
    @classmethod
    def for_target(cls, target: TargetShape, family: str) -> dict[str, Any]:
        return super().for_target(target, family) | {"num_layers": 5}

    @property
    def first_slot(self) -> int:
        """The slot of a block that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @override
    @property
    def max_drafts(self) -> int:
        """The slots of a block that are drafted from."""
        return self.block_size - self.first_slot

    @override
    def describe(self) -> str:
        kind = "causal" if self.is_causal else "bidirectional"
        block = f"{kind} blocks of {self.block_size}, drafting {self.max_drafts}"
        return f"{super().describe()}; {block}"


class DFlashOptions(DecoderOptions, TapOptions):
    """The trained head. Sizes left null are the target's own."""

    num_layers: PositiveInt = Field(
        5, description="decoder layers of the head, all run once per round"
    )
    block_size: Annotated[int, Field(ge=2)] = Field(
        16, description="slots of a block, the anchor's included; drafts are at most one fewer"
    )
    is_causal: bool = Field(
        False, description="true: a slot sees only the slots before it in its block (JetSpec)"
    )
    mask_token_id: Count | None = Field(
        None, description="token for unknown slots; null: a mask token, or an unused row"
    )
    anchors_per_row: PositiveInt = Field(
        ANCHORS, description="blocks trained per row, drawn anew at every step"
    )
    draft_vocab_size: VocabularySize | None = Field(
        None,
        description="reduced vocabulary with a head of its own; auto: as measured to be fastest;"
        " null: the target's head",
    )
    tap_layers: list[Count] | None = Field(
        None,
        min_length=1,
        description="states that are read; null: one per layer, from the second to the third last",
    )
    unroll_steps: PositiveInt = Field(
        15, description="depths trained; left out, all that a block has"
    )
    init: Literal["taps", "least_squares"] = Field(
        "taps", description="start as the mean of the taps, or fitted to some training rows"
    )

    @override
    @classmethod
    def all_depths(cls, section: dict[str, Any]) -> Any:
        fields = {name: field.default for name, field in cls.model_fields.items()} | section
        size = fields["block_size"]
        anchored = fields.get("sample_from_anchor", False)
        return max(size - (not anchored), 1) if isinstance(size, int) else None

    @override
    def shape(self, fields: dict[str, Any], target: Any = None) -> dict[str, Any]:
        shape = super().shape(fields, target)
        if target is not None:
            usual = tuple(block_tap_layers(target.num_layers, self.num_layers))
            shape["tap_layers"] = shape["tap_layers"] or usual
            shape["draft_vocab_size"] = shape["draft_vocab_size"] or target.vocab_size
        return shape


@dataclass(frozen=True)
class BlockBatch:
    """The blocks of a batch of rows [B, T], A of them in a row, with Q slots each.

    slots    [B, A] the row's slot before each anchor; terms bool [K, B, A] the predictions to train
    path     K x [B, A] the row's slot of the newest token before each prediction
    embeds   [B, A·Q, H_t] embeddings of the blocks; rotary: of their positions
    context  [B, T, H] what the layers read of the row's taps; context_rotary: of its positions
    """

    slots: Tensor
    terms: Tensor
    path: list[Tensor]
    embeds: Tensor
    rotary: Rotary
    context: Tensor
    context_rotary: Rotary
    blocks: Blocks

    @property
    def slots_per_block(self) -> int:
        """S, the anchor's slot included."""
        return self.blocks.places.shape[-1]


class DFlash(Drafter):
    """The backbone. In `read` a family says what its head reads of a state and a token."""

    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    options: ClassVar[type[DFlashOptions]] = DFlashOptions
    traits = Traits(
        reads_taps=True,
        reads_drafts=False,
        whole_blocks=True,
        samples_terms=True,
        defaults={
            "loss": {"cross_entropy": 1.0},
            "position_weights": {"gamma": 7.0},
            "training": {"learning_rate": 6e-4},
        },
    )

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(len(config.tap_layers) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(self.make_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps=eps)
        self.lm_head: nn.Linear | None = None
        if config.reduced_vocabulary:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.positions = RotaryTable(config)
        self.max_anchors = ANCHORS

    def make_layer(self, config: DFlashConfig) -> DecoderLayer:
        """A layer of the backbone, for families that change it."""
        return DecoderLayer(config)

    @override
    @property
    def vocabulary_heads(self) -> list[nn.Linear]:
        """The head that it was trained with; none, if it reads the target's."""
        return [] if self.lm_head is None else [self.lm_head]

    @override
    @property
    def borrowed_head(self) -> TargetHead | None:
        """The target's, if it has none."""
        return self.target if self.lm_head is None else None

    # ---------------------------------------------------- starting weights, and how it is trained

    @override
    def prepare_training(self, options: DFlashOptions) -> DFlash:
        self.max_anchors = options.anchors_per_row
        return self

    @override
    def start_terms(self, options: DFlashOptions) -> int:
        return terms_for(self.config.hidden_size) if options.init == "least_squares" else 0

    @override
    def start_bytes(self, options: DFlashOptions, terms: int) -> int:
        """Of each slot of a term's block what every attention head sees, twice, and ten states. All
        attention heads are fitted together."""
        config = self.config
        seen = config.num_attention_heads * config.hidden_size
        numbers = config.max_drafts * (2 * seen + 10 * config.hidden_size)
        return fit_bytes(terms, numbers, max(seen, config.intermediate_size))

    @override
    def start_flops(self, options: DFlashOptions, terms: int) -> int:
        """In each layer and of each slot of a term's block: what all attention heads see to the
        state, the same in groups, values to the state, and the MLP with two runs of it."""
        config = self.config
        slots = terms * config.max_drafts
        width = config.hidden_size
        heads = config.num_attention_heads
        inner = config.intermediate_size
        together = fit_flops(slots, heads * width, width)
        in_groups = heads * fit_flops(slots, width, config.head_dim)
        values = fit_flops(slots, heads * config.head_dim, width)
        mlp = fit_flops(slots, inner, width) + 2 * 2 * slots * 3 * width * inner
        return config.num_layers * (together + in_groups + values + mlp)

    @property
    def read_width(self) -> int:
        """D, of what `read` makes of a slot's state."""
        return self.config.hidden_size

    def layer_kept(self, slots: int, batch: Batch) -> int:
        """Bytes that a layer keeps of the slots of blocks, whose states are float32."""
        return layer_bytes(self.config, slots, batch, stream=EXACT)

    def blocks_in(self, batch: Batch) -> int:
        """Blocks that are trained in all rows."""
        return batch.rows * min(self.max_anchors, batch.length)

    @override
    def state_bytes(self, batch: Batch) -> int:
        return self.blocks_in(batch) * batch.depths * EXACT * self.read_width

    @override
    def kept_bytes(self, batch: Batch) -> int:
        """Of the context the joined taps and their projection, and in every layer keys and values,
        with what these are products of, cast for each. Of the slots of blocks every layer, and what
        the final norm reads.

        Recomputed is one layer at a time: the others keep the states that come in."""
        config = self.config
        width = batch.depths + config.first_slot
        slots = self.blocks_in(batch) * width
        state = EXACT * config.hidden_size
        keys = config.num_key_value_heads * config.head_dim
        before_norm = EXACT * keys if config.qk_norm else 0
        cast = 0 if batch.size == EXACT else 2 * batch.size * config.hidden_size
        context = config.num_layers * (2 * batch.size * keys + before_norm + cast)
        once = batch.tokens * (batch.size * self.fc.in_features + state + context)
        once += slots * state + self.state_bytes(batch)
        layer = self.layer_kept(slots, batch) + block_bytes(config, slots, batch, 1, width)
        if batch.recomputes:
            return once + config.num_layers * slots * state + layer
        return once + config.num_layers * layer

    @torch.no_grad()
    def initialise_from(
        self, target: TargetHead, options: Any = None, features: Samples = None
    ) -> DFlash:
        """`start_weights`; with `init: least_squares` fitted to `features`."""
        self.start_weights(target)
        if options is not None and options.init == "least_squares" and features is not None:
            self.start_reading(target, *start_from_least_squares(self, target, features))
        return self

    def start_weights(self, target: TargetHead) -> None:
        """Layers that hardly add to their input, the taps' mean, the target's norm and head."""
        width = self.config.hidden_size
        taps = len(self.config.tap_layers)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
        for layer in self.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
        if width == self.config.target_hidden_size:
            self.fc.weight.mul_(0.5).add_(
                torch.eye(width, device=self.fc.weight.device).repeat(1, taps) / taps
            )
        if (norm := target.final_norm_weight) is not None and len(norm) == width:
            self.norm.weight.copy_(norm)
        if self.lm_head is not None:
            rows = target.head_weight
            self.lm_head.weight.copy_(rows[self.target_ids.to(rows.device)])

    def start_reading(self, target: TargetHead, token_ids: Tensor, left: Tensor) -> None:
        """Starts what `read` makes of the tokens before [N], by what the block leaves [N, H]."""

    # -------------------------------------------------------------- the family's part

    def read(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """A slot's state [..., H], the token before its own [...] -> what `head` reads [..., D]."""
        return state

    def head(self, hidden: Tensor, depth: int = 0, base: Tensor | None = None) -> Tensor:
        """[N, D] -> [N, V_draft]. `base`: `base_logits` of the states in `hidden`, if known."""
        return self.base_logits(hidden) if base is None else base

    def base_logits(self, state: Tensor) -> Tensor:
        """Normed states [..., H] -> [..., V_draft], by the target's head or the reduced one."""
        return self.borrowed_logits(state) if self.lm_head is None else self.lm_head(state)

    @override
    def head_parameters(self) -> list[nn.Parameter]:
        head = () if self.lm_head is None else self.lm_head.parameters()
        return [p for p in head if p.requires_grad]

    def run_layer(
        self, layer: DecoderLayer, state: Tensor, rotary: Rotary, attend: Attend, slots: int
    ) -> Tensor:
        """One layer over blocks of `slots` slots: state [B, A·slots, H] -> the same."""
        return layer(state, rotary, attend)

    # -------------------------------------------------------------- shared by training and drafting

    def context(self, taps: Tensor, rotary: Rotary) -> list[tuple[Tensor, Tensor]]:
        """taps [B, T, n·H_t] -> per layer rotated keys and values of the context [B, g, T, d]."""
        return self._project_context(self._read_taps(taps), rotary)

    def _read_taps(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps.to(dtype_of(self.fc))))

    def _project_context(self, c: Tensor, rotary: Rotary) -> list[tuple[Tensor, Tensor]]:
        return [layer.self_attn.project_context(c, rotary) for layer in self.layers]

    def run(self, embeds: Tensor, rotary: Rotary, attends: Sequence[Attend], slots: int) -> Tensor:
        """Embeddings of blocks [B, A·slots, H] -> their normed states [B, A, slots, H]."""
        state = embeds.to(dtype_of(self.fc))
        for layer, attend in zip(self.layers, attends, strict=True):
            inputs = (layer, state, rotary, attend, slots)
            state = kept_or_recomputed(self.traits.recomputes, self.run_layer, *inputs)
        return self.norm(state).unflatten(1, (-1, slots))

    def block_ids(self, anchor_ids: Tensor, slots: int) -> Tensor:
        """Anchors [...] -> tokens of their blocks [..., slots]."""
        ids = anchor_ids.new_full((*anchor_ids.shape, slots), self.config.mask_token_id)
        ids[..., 0] = anchor_ids
        return ids

    # -------------------------------------------------------------- training

    def anchors(self, batch: Any, first: Tensor) -> tuple[Tensor, Tensor]:
        """(slots [B, A], bool [B, A] whether there is a block) of the blocks of a batch.

        first bool [B, T]: slots with a term at depth 0. In training at most `anchors_per_row` of
        those whose anchor is supervised itself, as drafting starts from no other; drawn from the
        seed of the row, so that they do not depend on the rows beside it. Otherwise every slot."""
        if not self.training:
            slots = slots_in_use(first)
            return slots, first.gather(1, slots)
        eligible = first & batch.loss_mask.bool().roll(-1, 1)
        noise = row_noise(batch).masked_fill_(~eligible, -1.0)
        drawn = noise.topk(min(self.max_anchors, first.shape[1]), dim=1).indices
        used = torch.zeros_like(first).scatter_(1, drawn, True) & eligible
        slots = slots_in_use(used)
        return slots, used.gather(1, slots)

    def _terms(self, batch: Any, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """(slots [B, A], terms bool [K, B, A], blocks bool [B, A]: whether there is one).

        Supervision is closed under prefixes: a depth has a term only if all depths before it have.
        """
        valid = torch.stack([valid_terms(batch, depth + 2) for depth in range(steps)])
        closed = valid.cumprod(0).bool()  # [K, B, T]
        slots, kept = self.anchors(batch, closed[0])
        terms = closed.gather(2, slots.expand(steps, -1, -1)) & kept
        return slots, terms, kept

    @override
    def count_terms(self, batch: Any, steps: int) -> Tensor:
        return self._terms(batch, steps)[1].sum((1, 2))

    def blocks_of(self, features: TargetFeatures, steps: int) -> BlockBatch:
        """The blocks of `steps` predicting slots that a batch trains."""
        ids = features.input_ids
        positions = features.position_ids
        slots, terms, kept = self._terms(host_batch(features), steps)
        Q = steps + self.config.first_slot
        T = ids.shape[1]
        # of slots that wrap no block is trained
        path = [to_device((slots + 1 + depth) % T, ids.device) for depth in range(steps)]
        last = to_device(torch.where(kept, slots, -1), ids.device)
        slots, terms = (to_device(x, ids.device) for x in (slots, terms))
        first = positions.gather(1, slots)[..., None] + 1
        places = first + torch.arange(Q, device=ids.device)  # [B, A, Q]
        embeds = self.target.embed_tokens(self.block_ids(ids.gather(1, path[0]), Q).flatten(1))
        rows = (positions, features.segment_ids)
        seen = (self.config.is_causal, self.config.sliding_window)
        return BlockBatch(
            slots=slots,
            terms=terms,
            path=path,
            embeds=embeds,
            rotary=self.positions(self._like(embeds), places.flatten(1)),
            context=self._read_taps(features.taps),
            context_rotary=self.positions(self._like(features.taps), positions),
            blocks=Blocks(last, places, *rows, *seen),
        )

    def unroll(self, features: TargetFeatures, steps: int) -> Iterator[DraftStep]:
        """One forward of blocks of `steps` predicting slots, then a step per depth."""
        batch = self.blocks_of(features, steps)
        ids = features.input_ids
        rows = ids.shape[1] * torch.arange(len(ids))[:, None]
        context = self._project_context(batch.context, batch.context_rotary)
        attends = [self.attend_blocks(pair, batch.blocks) for pair in context]
        Q = batch.slots_per_block
        states = self.run(batch.embeds, batch.rotary, attends, Q)  # [B, A, Q, H]
        for depth in range(steps):
            tokens = ids.gather(1, batch.path[depth])
            hidden = self.read(states[:, :, depth + self.config.first_slot], tokens)
            chosen = on_host(batch.terms)[depth].flatten().nonzero().flatten()  # of the flat B·A
            anchors = (on_host(batch.slots) + rows).flatten()[chosen]
            targets = (on_host(batch.path[depth]) + rows).flatten()[chosen]
            yield DraftStep(
                depth=depth,
                hidden=hidden.flatten(0, 1)[to_device(chosen, ids.device)],
                target_index=to_device(targets, ids.device),
                anchor_index=to_device(anchors, ids.device),
                weight=torch.ones(len(anchors), device=hidden.device),
            )

    @staticmethod
    def attend_blocks(context: tuple[Tensor, Tensor], blocks: Blocks) -> Attend:
        """Attention of blocks to a layer's keys and values of the context, and to themselves."""
        return lambda q, k, v, scale: attention(q, context, [(k, v)], blocks, scale)

    def _like(self, x: Tensor) -> Tensor:
        """An empty tensor of the drafter's precision, on the device of `x`."""
        return x.new_empty(0, dtype=dtype_of(self.fc))

    # -------------------------------------------------------------- inference

    def append(self, inputs: DraftInput) -> None:
        """See `Drafter.append`: the context's keys and values of each layer."""
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        M = inputs.taps.shape[1]
        rotary = self._rotary(cache, start, stop, M, inputs.taps)
        view = cache.view(start, stop, M)
        for i, (key, value) in enumerate(self.context(inputs.taps, rotary)):
            view.update(key, value, i)
        inputs.advance(inputs.counts)

    def draft_steps(self, inputs: DraftInput, k: int) -> DraftSteps:
        """See `Drafter.draft_steps`: one forward of k slots, or of k + 1 with `fill_in`."""
        self.append(inputs)
        tokens = inputs.newest(inputs.token_ids)
        states = self._block(inputs.cache, inputs.start, inputs.stop, tokens, k)
        base = self._base_of(states)
        for depth in range(k):
            hidden = self.read(states[:, depth], tokens)
            logits = self.head(hidden, depth, base[:, depth])
            tokens = yield DraftLogits(logits, self.confidence(hidden))

    def draft_tree(self, inputs: DraftInput, k: int, grow: Grow) -> None:
        """See `Drafter.draft_tree`. One block serves all branches: marginals where drafts are not
        read, otherwise the distribution after each parent."""
        self.append(inputs)
        tokens = inputs.newest(inputs.token_ids)[:, None]  # [b, w]
        states = self._block(inputs.cache, inputs.start, inputs.stop, tokens[:, 0], k)
        base = self._base_of(states)
        for depth in range(k):
            w = tokens.shape[1] if self.traits.reads_drafts else 1
            state = states[:, depth, None].expand(-1, w, -1)
            hidden = self.read(state, tokens[:, :w])
            known = base[:, depth, None].expand(-1, w, -1).flatten(0, 1)
            logits = self.head(hidden.flatten(0, 1), depth, known).unflatten(0, hidden.shape[:2])
            if (level := grow(logits.expand(-1, tokens.shape[1], -1))) is None:
                return
            tokens = level.token_ids

    def _base_of(self, states: Tensor) -> Tensor:
        """[b, k, H] -> [b, k, V_draft]: the head's weights are read once for all slots. As rows of
        one matrix, because a product of more dimensions copies the weights."""
        return self.base_logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def _block(self, cache, start: int, stop: int, anchor_ids: Tensor, k: int) -> Tensor:
        """Normed states of the slots that predict the next `k` tokens [b, k, H]. The cache stays as
        it is: the block's keys are written behind each row's end, where the next ones overwrite
        them."""
        Q = k + self.config.first_slot
        ids = self.block_ids(anchor_ids, Q)
        view = cache.view(start, stop, Q)
        mask = self._mask(cache, start, stop, Q)
        attends = cached_attends(view, mask, Q, len(self.layers))
        rotary = self._rotary(cache, start, stop, Q, anchor_ids)
        states = self.run(self.target.embed_tokens(ids), rotary, attends, Q)
        return states[:, 0, self.config.first_slot :]

    def _rotary(self, cache, start: int, stop: int, tokens: int, like: Tensor) -> Rotary:
        return self.positions.lookup(
            cache.position_ids(start, stop, tokens), cache.capacity, self._like(like)
        )

    def _mask(self, cache, start: int, stop: int, Q: int) -> Tensor:
        """bool [b, 1, Q, S], True = attend: the row's context and its block behind it."""
        places = cache.position_ids(start, stop, Q)  # [b, Q]
        keys = torch.arange(max(cache.lengths[start:stop]) + Q, device=places.device)
        last = places if self.config.is_causal else places[:, -1:].expand(-1, Q)
        seen = keys <= last[..., None]
        if self.config.sliding_window is not None:
            seen &= in_window(places, keys, self.config.sliding_window)
        return seen[:, None]

    @override
    def cache_length(self, slots: int) -> int:
        return slots + self.config.block_size
