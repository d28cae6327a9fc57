"""Starting weights of a block head, fitted in closed form to features of some training rows.

A head that starts at random takes hundreds of steps to find out that the end of the context
matters. Here every attention head first gets a fixed pattern: it looks back a given number of
positions, by rotary frequencies alone. With fixed patterns a layer is linear in its values, so that
the best values and output projection are a least-squares problem over all slots of many blocks,
and behind them the best down projection of an MLP whose other weights stay random. Each layer is
fitted to what the layers before it leave. `head` is a block head (families/dflash.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.least_squares import (
    MLP_RIDGE,
    Regression,
    reduced_rank,
    ridge,
    unit,
)
from draftsmith.speculators.layers.attention import attention as attend
from draftsmith.speculators.layers.decoder import Attention, DecoderLayer
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead

BACK = (1, 0, 2, 4, 3, 6, 5, 8)  # positions that the groups of attention heads look back
# weight of the norms of queries and keys; the logit of a match is its square times sqrt(head_dim)
SHARPNESS = 1.2
NOISE = 0.2  # share of the random projections that stays, as heads must differ


@torch.no_grad()
def start_from_least_squares(
    head: Any, target: TargetHead, features: Sequence[TargetFeatures]
) -> tuple[Tensor, Tensor]:
    """Writes patterns and fitted values into every layer, and scales the final norm to the size of
    the fitted states.

    The desired output of a slot is the target's last state for its token, at unit size and before
    the final norm's weight. Returns, of all N slots with a term, the token before the one that each
    predicts [N] and what is left of the desired output [N, H]. ConfigError if no row has a whole
    block, or the head's width is not the target's."""
    if head.config.hidden_size != target.hidden_size:
        raise ConfigError(
            "least_squares needs the target's hidden_size; set taps", where="drafter.init"
        )
    batches = [_Slots(head, target, batch) for batch in features]
    if not sum(len(batch.desired) for batch in batches):
        raise ConfigError("least_squares needs longer responses; set taps", where="drafter.init")
    for layer in head.layers:
        _look_back(head, layer.self_attn, torch.cat([batch.inputs(layer) for batch in batches]))
        attended = torch.cat([batch.attended(layer) for batch in batches])
        _fit_values(layer.self_attn, attended, torch.cat([batch.left() for batch in batches]))
        layer.mlp.down_proj.weight.zero_()
        for batch in batches:
            batch.advance(layer)
        _fit_mlp(layer, batches)
    states = torch.cat([batch.states() for batch in batches])
    head.norm.weight.mul_(states.square().mean(-1).sqrt().mean())
    before = [batch.before for batch in batches]
    left = [batch.left() for batch in batches]
    return torch.cat(before), torch.cat(left)


class _Slots:
    """The blocks of one batch on their way through the layers."""

    def __init__(self, head: Any, target: TargetHead, features: TargetFeatures) -> None:
        self.head = head
        depths = head.config.max_drafts
        self.batch = head.blocks_of(features, depths)
        self.state = self.batch.embeds.to(head.fc.weight.dtype)
        terms = self.batch.terms.permute(1, 2, 0)  # [B, A, K]
        path = torch.stack(self.batch.path, dim=-1)
        chosen = terms.new_zeros(*terms.shape[:2], self.batch.slots_per_block)
        chosen[..., head.config.first_slot :] = terms
        self.chosen = chosen.flatten(1)  # [B, A·Q]
        rows = torch.arange(len(path), device=path.device)[:, None, None]
        desired = features.last_hidden[rows, path][terms].float()
        if target.final_norm_weight is not None:
            desired = desired / target.final_norm_weight
        self.desired = unit(desired)  # [N, H]
        self.before = features.input_ids[rows, path][terms]  # [N]

    def states(self) -> Tensor:
        """[N, H] of the slots with a term."""
        return self.state[self.chosen].float()

    def left(self) -> Tensor:
        """[N, H]: what these states lack of the desired output."""
        return self.desired - self.states()

    def inputs(self, layer: DecoderLayer) -> Tensor:
        """[·, H]: all that the layer's keys are made of, context and slots."""
        assert layer.input_layernorm is not None
        slots = layer.input_layernorm(self.state).flatten(0, 1)
        return torch.cat([self.batch.context.flatten(0, 1), slots]).float()

    def attended(self, layer: DecoderLayer) -> Tensor:
        """[N, h, H]: the mean input that each attention head sees."""
        assert layer.input_layernorm is not None
        attention = layer.self_attn
        x = layer.input_layernorm(self.state)
        key = attention.project(self.batch.context, self.batch.context_rotary)[1]
        query, block_key, _ = attention.project(x, self.batch.rotary)
        every = (-1, attention.kv_heads, -1, -1)
        values = [value[:, None].expand(every) for value in (x, self.batch.context)]
        seen = attend(
            query, (key, values[1]), [(block_key, values[0])], self.batch.blocks, attention.scale
        )
        return seen.transpose(1, 2)[self.chosen].float()

    def inner(self, layer: DecoderLayer) -> Tensor:
        """[N, I]: what the layer's down projection reads."""
        x = layer.post_attention_layernorm(self.state[self.chosen])
        return layer.mlp.inner(x).float()

    def add_mlp(self, layer: DecoderLayer) -> None:
        """The layer's MLP, over states that its attention has passed."""
        self.state = self.state + layer.mlp(layer.post_attention_layernorm(self.state))

    def advance(self, layer: DecoderLayer) -> None:
        """The whole layer, over all slots."""
        context = layer.self_attn.project(self.batch.context, self.batch.context_rotary)[1:]
        attend = self.head.attend_blocks(context, self.batch.blocks)
        slots = self.batch.slots_per_block
        self.state = self.head.run_layer(layer, self.state, self.batch.rotary, attend, slots)


def _fit_mlp(layer: DecoderLayer, batches: Sequence[_Slots]) -> None:
    """The layer's down projection, fitted to what its attention leaves; the states go on behind
    it."""
    regression = Regression(MLP_RIDGE)
    for batch in batches:
        regression.add(batch.inner(layer), batch.left())
    layer.mlp.down_proj.weight.copy_(regression.solve().T)
    for batch in batches:
        batch.add_mlp(layer)


def _look_back(head: Any, attention: Attention, inputs: Tensor) -> None:
    """Keys nearly the same for all inputs [N, H], queries that match some back."""
    D = attention.head_dim
    h = attention.heads
    g = attention.kv_heads
    constant = ridge(inputs, inputs.new_ones(len(inputs), 1))[:, 0]  # inputs @ constant is about 1
    frequencies = head.positions.rotary_emb.inv_freq.to(inputs)
    ones = torch.ones(D // 2, device=inputs.device)
    key = torch.cat([ones, torch.zeros_like(ones)])
    for group in range(g):
        rows = attention.k_proj.weight[group * D : (group + 1) * D]
        rows.mul_(NOISE).add_(key[:, None] * constant)
    for one in range(h):
        group, within = divmod(one, h // g)
        turned = (BACK[group % len(BACK)] + within) * frequencies
        query = torch.cat([turned.cos(), -turned.sin()])
        rows = attention.q_proj.weight[one * D : (one + 1) * D]
        rows.mul_(NOISE).add_(query[:, None] * constant)
    if attention.qk_norm:
        attention.q_norm.weight.fill_(SHARPNESS)
        attention.k_norm.weight.fill_(SHARPNESS)


def _fit_values(attention: Attention, attended: Tensor, desired: Tensor) -> None:
    """Values and output projection that write the best linear map of `attended` [N, h, H] to
    `desired` [N, H], at the rank that the values of each group have."""
    D = attention.head_dim
    h = attention.heads
    g = attention.kv_heads
    H = desired.shape[1]
    shared = h // g
    fitted = ridge(attended.flatten(1), desired).view(g, shared, -1, H)  # of each attention head
    values = []
    for group in range(g):
        seen = attended[:, group * shared : (group + 1) * shared]  # [N, r, H]
        inputs = seen.flatten(0, 1)
        matrix = fitted[group].transpose(0, 1).flatten(1)
        basis, _ = reduced_rank(inputs, matrix, D)  # [H, ≤ D]
        rows = attention.v_proj.weight[group * D : (group + 1) * D].zero_()
        rows[: basis.shape[1]] = basis.T
        values.append(pad(seen @ basis, (0, D - basis.shape[1])))
    attention.o_proj.weight.copy_(ridge(torch.cat(values, dim=1).flatten(1), desired).T)
