"""In place of the kernels of attention on the emulated device: all scores in memory, counted as the
launches that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.speculators.layers import flex_attention
from tests.support.attention_cases import visible


def stand_in_for_attention(emulation: Any, patch: Any) -> None:
    """Heads attend as by flex_attention. `emulation`: of tests/support/device_emulation.py, as the
    fixture `claimed_gpu` gives it; `patch`: pytest's monkeypatch."""

    def block_mask(queries: Any) -> Tensor:
        if queries not in masks:
            with emulation.one_launch("block_mask"):
                masks[queries] = visible(queries)[:, None]
        return masks[queries]

    masks = dict[Any, Tensor]()
    attend = partial(_Dense.apply, emulation)
    merged = partial(flex_attention.merged_attention, attend=attend)
    patch.setattr(flex_attention, "serves", lambda query, value: True)
    patch.setattr(flex_attention, "block_mask", block_mask)
    patch.setattr(flex_attention, "merged_attention", merged)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, emulation: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        *inputs, seen, scale = tensors
        ctx.save_for_backward(*inputs, seen)
        ctx.emulation = emulation
        ctx.scale = scale
        with emulation.one_launch("flex_attention"):
            return _dense(*inputs, seen, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *inputs, seen = ctx.saved_tensors
        # delta, and the gradients of query, key and value
        with ctx.emulation.one_launch("flex_attention_delta"):
            inputs = [x.detach().requires_grad_() for x in inputs]
        with ctx.emulation.one_launch("flex_attention_backward"), torch.enable_grad():
            results = _dense(*inputs, seen, ctx.scale)
            grads: Sequence[Tensor] = torch.autograd.grad(results, inputs, gradients)
        return None, *grads, None, None


def _dense(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen, -1e30)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
