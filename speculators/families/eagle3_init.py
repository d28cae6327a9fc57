"""Starting weights of an EAGLE-3 head: what it knows before its first training step.

`start_from_taps` measures next to nothing: the deepest tap passes through to the target's own
output rows. `start_from_least_squares` fits the head to features of some training rows in closed
form, in seconds. Such a head starts from the best linear recursion there is, from one attention
head that copies, and from an MLP that is fitted to what these leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from draftsmith.speculators.drafter import host_batch, valid_terms
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families import least_squares
from draftsmith.speculators.families.autoregressive import DecoderChain, slots_in_use
from draftsmith.speculators.families.least_squares import (
    MLP_RIDGE,
    Regression,
    fit_flops,
    unit,
)
from draftsmith.speculators.layers.decoder import Attention, DecoderLayer
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead

DEPTHS = 4  # over which the recursion is fitted, on its own predictions
ROUNDS = 3  # of refitting it to them
# of the regressions, whose terms are few for as many inputs: with a hundredth of it a head knows
# its sample better and accepts less elsewhere
RIDGE = 0.1
MLP_ROUNDS = 2  # of fitting the MLP, which changes the states that deeper depths read
# logit of a query for the key of its own slot: nearly all of the softmax over some hundred keys
OWN_SLOT_SCORE = 12.0
COPY_SCORE = 20.0  # logit of a query for a slot whose token is the query's
COPY_WEIGHT = 0.6  # of what is copied, beside a state of unit size
COPY_REACH = 256  # tokens over which a copying key must not turn away
# of the first distributions, as a factor on the logits: a linear guess deserves less than the
# target's
SHARPNESS = 0.8


ridge = partial(least_squares.ridge, strength=RIDGE)


@torch.no_grad()
def start_from_taps(head: DecoderChain, target: TargetHead) -> None:
    """The deepest tap passes through `fc`, at unit size; residual writes start small."""
    head.start_small()
    width = head.config.target_hidden_size
    if width == head.config.hidden_size:
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -width:] += torch.eye(width, device=head.fc.weight.device)
        head.fc.weight.div_(_tap_scale(head, target).to(head.fc.weight))


def _tap_scale(head: DecoderChain, target: TargetHead) -> Tensor:
    """[n·H] typical size of each tap's values, seen on a few tokens; 1 where a norm comes first.

    A residual stream may be of any size (tens, in deep targets). The final norm does not mind, but
    a layer whose output is added to it would have to grow to that size before it counted for
    anything."""
    config = head.config
    width = head.config.target_hidden_size
    if tuple(target.tap_layers) != tuple(config.tap_layers):
        raise ConfigError(
            f"the target taps layers {list(target.tap_layers)}; load it with the"
            f" head's, {list(config.tap_layers)}",
            where="initialise_from",
        )
    scale = torch.ones(len(config.tap_layers), 1, device=target.device)
    if not (config.norm_before_fc or config.fc_norm):
        taps, _ = target(target.start_text())
        seen = taps.float().view(-1, len(config.tap_layers), width)  # [START_TOKENS, n, H]
        scale = seen.square().mean(-1).sqrt().median(0).values[:, None].clamp(min=1e-6)  # [n, 1]
    return scale.expand(-1, width).reshape(-1)


@torch.no_grad()
def start_from_least_squares(
    head: DecoderChain, target: TargetHead, features: Sequence[TargetFeatures]
) -> None:
    """Fits a linear recursion to `features` and writes it, and a copying head, into the first
    layer.

    With n(x) = x / rms(x), s_t = fc(taps_t) and y_t the target's last state before its norm's
    weight, the fit is one matrix [G; B] with n(s_t) G + n(e_{t+1}) B ≈ y_{t+1} at depth 0, and
    deeper the same on its own results in place of s. The residual stream carries n(s); what is
    left, G - 1 and B, goes through the values of attention heads that look at their own slot. The
    last group of heads instead looks for the slot behind an earlier occurrence of the newest token
    and writes the token that followed there. (Recursion: EAGLE-3's training-time test, arXiv
    2503.01840; copying circuit: Olsson et al., arXiv 2209.11895.) Values have fewer dimensions than
    the map; what they cannot hold, and what is not linear, is left to the MLP (`_fit_mlp`)."""
    config = head.config
    first = head.layers[0]
    if not config.norm_before_residual or config.hidden_size != config.target_hidden_size:
        raise ConfigError(
            "least_squares needs norm_before_residual: true and the target's"
            " hidden_size; set drafter.init: taps",
            where="drafter.init",
        )
    start_from_taps(head, target)
    scale = target.final_norm_weight
    size = _state_size(features) if scale is None else scale
    taps, states, embeds = _terms(head, features, size)
    H = config.hidden_size
    P, step = _recursion(taps, states, embeds, scale if config.norm_output else None)
    B = step[H:]
    G = step[:H] - torch.eye(H, device=step.device)
    head.fc.weight.copy_(P.T)
    groups = config.num_key_value_heads
    copying = groups > 1
    _attend_to_own_slot(head, groups - copying)
    _write_linear(first.self_attn, torch.cat([B, G]), groups - copying)
    if copying:
        _copy(head, target, _own_token(head, features), scale, groups - 1)
    if config.qk_norm:  # sizes of queries and keys are the norms' alone
        for norm in (first.self_attn.q_norm, first.self_attn.k_norm):
            norm.weight.fill_(math.sqrt(OWN_SLOT_SCORE / math.sqrt(config.head_dim)))
    for weight in (first.self_attn.q_proj.weight, first.self_attn.k_proj.weight):
        weight.add_(torch.randn_like(weight), alpha=0.02)  # heads that are alike become different
    _fit_mlp(head, features, size)


def flops_of_least_squares(head: DecoderChain, terms: int) -> int:
    """FLOPs of `start_from_least_squares` with so many terms, about; without attention."""
    F = head.fc.in_features
    H = head.config.hidden_size
    inner = head.config.intermediate_size
    deep = DEPTHS * terms
    projection = fit_flops(terms, F, H) + 2 * terms * F * H
    recursion = fit_flops(deep, 2 * H, H) + 2 * deep * 2 * H * H
    weights = sum(p.numel() for p in head.layers.parameters())
    mlp = fit_flops(deep, inner, H) + 2 * deep * weights
    return (1 + ROUNDS) * projection + ROUNDS * recursion + MLP_ROUNDS * mlp


def _terms(
    head: DecoderChain, features: Sequence[TargetFeatures], size: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """For slots with a term at every depth: the input of `fc` [N, F], and for DEPTHS + 1 positions
    from each slot on the target's states y [N, H] and normed token embeddings [N, H]."""
    taps = []
    states = [[] for _ in range(DEPTHS + 1)]
    embeds = [[] for _ in range(DEPTHS + 1)]
    for f in features:
        T = f.input_ids.shape[1]
        chosen = torch.stack([valid_terms(f, depth + 2) for depth in range(DEPTHS)]).all(0)
        chosen[:, T - DEPTHS - 1 :] = False
        rows, slots = chosen.nonzero(as_tuple=True)
        taps.append(head.read_taps(f.taps[rows, slots].to(head.fc.weight.dtype)))
        for k in range(DEPTHS + 1):
            states[k].append(f.last_hidden[rows, slots + k].float() / size)
            embeds[k].append(unit(head.embed(f.input_ids[rows, slots + k]).float()))
    inputs = torch.cat(taps)
    if len(inputs) == 0:
        raise ConfigError(
            "least_squares needs responses of a few tokens; set taps", where="drafter.init"
        )
    y = [torch.cat(tensors) for tensors in states]
    return inputs.float(), y, [torch.cat(tensors) for tensors in embeds]


def _state_size(features: Sequence[TargetFeatures]) -> Tensor:
    """[] root mean square of the target's states on the whole, whatever its architecture."""
    states = [f.last_hidden[f.segment_ids >= 0].float() for f in features]
    return torch.cat(states).square().mean().sqrt()


def _recursion(
    taps: Tensor, states: list[Tensor], embeds: list[Tensor], fed_through: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(P [F, H] of `fc`, [G; B] [2H, H]). `fed_through`: the weight of a norm that a result passes
    before it is fed back, if one does."""

    def fed(result: Tensor) -> Tensor:
        return unit(result if fed_through is None else result * fed_through)

    outputs = states[0] if fed_through is None else states[0] * fed_through
    direct = ridge(taps, outputs)  # a state that could have been fed back
    P = direct
    step = ridge(torch.cat([unit(taps @ P), embeds[1]], 1), states[1])
    H = outputs.shape[1]
    for _ in range(ROUNDS):
        state = unit(taps @ P)
        inputs = []
        for k in range(DEPTHS):
            inputs.append(torch.cat([state, embeds[k + 1]], 1))
            state = fed(inputs[-1] @ step)
        step = ridge(torch.cat(inputs), torch.cat(states[1:]))
        # of states that are nearly as good to feed, the one that predicts best:
        # min |sG + eB - y|² + |s - s₀|²/10
        G = step[:H]
        B = step[H:]
        best = ridge(taps, states[1] - embeds[1] @ B)  # [F, H]
        near = G @ G.T + 0.1 * torch.eye(H, device=G.device)
        P = torch.linalg.solve(near, (best @ G.T + 0.1 * direct).T).T
    return P / (taps @ P).square().mean().sqrt(), step


def _fit_mlp(head: DecoderChain, features: Sequence[TargetFeatures], size: Tensor) -> None:
    """The last layer's down projection, from gate and up projections that stay random: the ridge
    regression, over all depths of the head's own runs, of what its states lack of the target's.
    (Random features: Rahimi and Recht, NeurIPS 2007.)"""
    layer = head.layers[-1]
    for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
        part.weight.mul_(2.0)  # back to the usual size: `down` need not be large
    down = layer.mlp.down_proj.weight.zero_()
    for _ in range(MLP_ROUNDS):
        regression = Regression(MLP_RIDGE)
        for batch in features:
            for states, desired in _before_mlp(head, layer, batch, size):
                inner = layer.mlp.inner(layer.post_attention_layernorm(states))
                regression.add(inner.float(), desired - states.float())
        down.copy_(regression.solve().T)


def _before_mlp(
    head: DecoderChain, layer: DecoderLayer, batch: TargetFeatures, size: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The terms of each depth of an unroll: states before the MLP of the last layer [N, H], and the
    target's states that it should make of them [N, H]."""
    depths = min(DEPTHS, head.max_depth or DEPTHS)
    valid = head.terms(host_batch(batch), depths)
    slots = slots_in_use(torch.stack(valid).any(0))  # [B, M], those whose states come out
    y = batch.last_hidden.flatten(0, 1).float() / size
    read: list[Tensor] = []
    norm = layer.post_attention_layernorm
    hook = norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        for step in head.unroll(batch, depths):
            states = read.pop()  # [B, M, H]
            if states.shape[1] < slots.shape[1]:  # the unroll goes on with those still in use
                slots = slots_in_use(torch.stack(valid[step.depth :]).any(0))
            terms = valid[step.depth].gather(1, slots).flatten().nonzero()[:, 0]
            yield states.flatten(0, 1)[terms.to(y.device)], y[step.target_index]
    finally:
        hook.remove()


def _own_token(head: DecoderChain, features: Sequence[TargetFeatures]) -> Tensor:
    """[H, H]: reads the normed embedding of x_t from a normed state s_t; fitted to all text."""
    states = []
    embeds = []
    for f in features:
        text = f.segment_ids >= 0
        states.append(unit(head.first_state(f.taps[text], None).float()))
        embeds.append(unit(head.embed(f.input_ids[text]).float()))
    return ridge(torch.cat(states), torch.cat(embeds))


def _attend_to_own_slot(head: DecoderChain, groups: int) -> None:
    """Queries and keys of the first `groups`: one projection of the newest token's embedding."""
    attention, D, H, repeat = _sizes(head)
    size = math.sqrt(OWN_SLOT_SCORE / (H * math.sqrt(D)))
    attention.q_proj.weight.zero_()
    attention.k_proj.weight.zero_()
    for group in range(groups):
        key = torch.randn(D, H, device=attention.k_proj.weight.device) * size
        queries = slice(group * repeat * D, (group + 1) * repeat * D)
        attention.k_proj.weight[group * D : (group + 1) * D, :H] = key
        attention.q_proj.weight[queries, :H] = key.repeat(repeat, 1)


def _sizes(head: DecoderChain) -> tuple[Attention, int, int, int]:
    """The first layer's attention, widths of head and state, heads of a group."""
    attention = head.layers[0].self_attn
    repeat = attention.heads // attention.kv_heads
    return attention, attention.head_dim, head.config.hidden_size, repeat


def _write_linear(attention: Attention, matrix: Tensor, groups: int) -> None:
    """[embedding; state] -> output [2H, H] through values and o_proj of `groups` groups."""
    D = attention.head_dim
    repeat = attention.heads // attention.kv_heads
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = min(groups * D, len(S))
    root = S[:rank].sqrt()
    attention.v_proj.weight.zero_()
    attention.o_proj.weight.zero_()
    attention.v_proj.weight[:rank] = (U[:, :rank] * root).T
    written = torch.zeros(matrix.shape[1], groups * D, device=matrix.device)
    written[:, :rank] = (root[:, None] * Vh[:rank]).T
    for group in range(groups):  # the heads of a group share its values, and the work
        block = written[:, group * D : (group + 1) * D] / repeat
        heads = slice(group * repeat * D, (group + 1) * repeat * D)
        attention.o_proj.weight[:, heads] = block.repeat(1, repeat)


def _copy(
    head: DecoderChain, target: TargetHead, identity: Tensor, scale: Tensor | None, group: int
) -> None:
    """Group `group` asks for slots whose own token is the newest token, and writes the token they
    pair it with.

    identity [H, H] reads a slot's own token from its state. Matching uses rotary pairs that hardly
    turn within COPY_REACH tokens: it is about what a token is, not where."""
    attention, D, H, repeat = _sizes(head)
    device = identity.device
    half = D // 2
    slow = (head.positions.rotary_emb.inv_freq * COPY_REACH <= 1).nonzero()[:, 0].to(device)
    least = min(8, half)
    slow = slow if len(slow) >= least else torch.arange(half - least, half, device=device)
    places = torch.cat([slow, slow + half])[:H]
    match = torch.linalg.qr(torch.randn(H, len(places), device=device)).Q.T  # [m, H]
    match = match * math.sqrt(COPY_SCORE * math.sqrt(D) / len(places))
    keys = slice(group * D, (group + 1) * D)
    attention.k_proj.weight[group * D + places, H:] = match @ identity.T
    values = torch.linalg.qr(torch.randn(H, min(D, H), device=device)).Q.T  # [d, H]
    attention.v_proj.weight[keys] = 0.0
    attention.v_proj.weight[keys][: len(values), :H] = values
    tokens = torch.arange(0, target.vocab_size, max(target.vocab_size // 16_384, 1), device=device)
    seen = unit(head.embed(tokens).float()) @ values.T  # [n, d]
    written = ridge(seen, unit(target.head_weight[tokens])) * COPY_WEIGHT  # [d, H]
    if scale is not None:
        written = written / scale
    for one in range(group * repeat, (group + 1) * repeat):
        attention.q_proj.weight[one * D + places, :H] = match
        attention.o_proj.weight[:, one * D : one * D + len(values)] = written.T / repeat
