"""The bytes of a training step as on a GPU, counted on a CPU.

Where a GPU keeps other tensors than a CPU does, this does as a GPU: RMS norms are one operation and
float32 under autocast, `addcmul` promotes, attention keeps queries, keys, values, output and
log-sum-exp. Their values are not computed."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from draftsmith.speculators import kernels
from draftsmith.speculators.layers import decoder, flex_attention
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.train.losses import chunked
from draftsmith.train.planner.plan import StagePlan
from draftsmith.train.trainer.step_loss import StepLoss
from tests.support.memory import Peak

ATTENTION = "of_a_gpu"  # transformers' name of `_attend_model`


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor):
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:2])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: object, scale: float):
    return _Attention.apply(query, key, value)


def _attend_model(module, query, key, value, *args, **kwargs):
    out, _ = _Attention.apply(query, key, value)
    return out.transpose(1, 2), None


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        return _Norm.apply(x.float(), weight.float())
    return _Norm.apply(x, weight)


def _addcmul(x: Tensor, first: Tensor, second: Tensor, plain=torch.addcmul) -> Tensor:
    wide = torch.promote_types(torch.promote_types(x.dtype, first.dtype), second.dtype)
    return plain(x.to(wide), first.to(wide), second.to(wide))


def act_as_gpu(monkeypatch: pytest.MonkeyPatch, sizes: chunked.Sizes) -> None:
    """`sizes`: of the objective's chunks. No layer is compiled."""
    monkeypatch.setattr(flex_attention, "serves", lambda query, value: True)
    monkeypatch.setattr(flex_attention, "block_mask", lambda queries: None)
    monkeypatch.setattr(flex_attention.merged_attention, "__defaults__", (_attend,))
    monkeypatch.setattr(decoder, "rms_norm", _norm)
    monkeypatch.setattr(torch, "addcmul", _addcmul)
    monkeypatch.setattr(kernels, "LEAST_NUMBERS", 1 << 60)
    for device in chunked.SIZES:
        monkeypatch.setitem(chunked.SIZES, device, sizes)
    AttentionInterface.register(ATTENTION, _attend_model)


@dataclass(frozen=True)
class Counted:
    """Bytes beside parameters and features."""

    kept: int  # by the unroll, for its backward pass
    peak: int  # of the objective, these included
    gradients: int


class _Target(nn.Module):
    """Embedding and output head, as drafters share them."""

    def __init__(self, sketch) -> None:
        super().__init__()
        sizes = (sketch.vocab_size, sketch.hidden_size)
        self.vocab_size = sketch.vocab_size
        self.dtype = sketch.dtype
        self.device = torch.device("cpu")
        self.embed_tokens = nn.Embedding(*sizes, dtype=sketch.dtype)
        self.lm_head = nn.Linear(*sizes[::-1], bias=False, dtype=sketch.dtype)
        self.requires_grad_(False)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    head_to_logits = nn.Identity()


def count(stage: StagePlan) -> Counted:
    """Forward and backward of the micro-step that the stage plans, every token supervised."""
    rows = stage.step_rows.rows
    length = stage.recipe.data.max_length
    sketch = stage.target
    taps = len(stage.drafter.tap_layers)
    target = _Target(sketch)
    drafter = family_class(stage.recipe.family)(stage.drafter)
    last = torch.zeros(rows, length, sketch.hidden_size, dtype=sketch.dtype)
    tapped = last.new_zeros(rows, length, taps * sketch.hidden_size) if taps else None
    drafter._target = [target]
    drafter.prepare_training(stage.recipe.drafter).train()
    if stage.drafter.reduced_vocabulary:
        drafter.target_ids = torch.arange(stage.drafter.draft_vocab_size)
    if stage.recipe.family == "draft_model":
        drafter._runners = [_runner(drafter.model)]
    ids = torch.randint(stage.target.vocab_size, (rows, length))
    places = torch.arange(length).repeat(rows, 1)
    documents = torch.zeros_like(ids)
    features = TargetFeatures(ids, places, documents, documents == 0, tapped, last)
    accelerator = SimpleNamespace(device=ids.device, autocast=lambda: _autocast(stage))
    loss = StepLoss(
        stage.recipe, target, drafter, accelerator=accelerator, joint=None, within=lambda _: None
    )
    weights = loss.term_weights(drafter.count_terms(features, loss.depths))
    with Peak() as made:
        with _autocast(stage):
            steps = list(drafter.unroll(features, loss.depths))
        kept = _now(made)
        made.bytes = 0
        with _autocast(stage):
            total, _ = loss.objectives(features, steps, weights)
        peak = made.bytes
        total.backward()
    gradients = [p.grad.nbytes for p in drafter.parameters() if p.grad is not None]
    return Counted(kept, peak, sum(gradients))


def _now(made: Peak) -> int:
    gc.collect()
    return sum(made.live.values())


def _autocast(stage: StagePlan) -> torch.autocast:
    enabled = stage.autocast != torch.float32
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def _runner(model: nn.Module) -> SimpleNamespace:
    """A student as its unroll asks it, over rows without masks."""
    model.config._attn_implementation = ATTENTION

    def features(ids: Tensor, places: Tensor, *_, **__) -> SimpleNamespace:
        decoded = model.model(input_ids=ids, position_ids=places, use_cache=False)
        return SimpleNamespace(last_hidden=decoded.last_hidden_state)

    return SimpleNamespace(features=features, logits=model.lm_head, dtype=torch.float32)
