"""The objective over draft steps: a mix of divergences, summed without holding a [tokens,
vocabulary] tensor.

`chunked_objective` computes draft logits, target probabilities, divergences, acceptance and
gradients for a few hundred rows at a time (`chunked.py`). It returns the *sum* of
weight * D: the caller divides by a normaliser summed over ranks and accumulation steps.

Families, target architectures, optimizers and the schedule of depth weights do not belong here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import to_device
from draftsmith.speculators.vocab.draft_vocab import to_draft_ids
from draftsmith.train.losses.chunked import (
    Chunked,
    Head,
    Task,
    default_block_size,
    default_chunk_size,
    precise,
    probe,
    walk,
)
from draftsmith.train.losses.divergences import Mix


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one call, per row in the order of `hidden`, without gradients."""

    loss: Tensor  # [N] float, weight * D
    alpha: Tensor  # [N] float, sum_v min(p, q): teacher-forced acceptance probability
    agreement: Tensor  # [N] bool, the drafter's argmax is the target's (over the full vocabulary)

    def split(self, sizes: Sequence[int]) -> list[StepMetrics]:
        """The metrics of each depth, where the rows of several were concatenated."""
        parts = (x.split(sizes) for x in (self.loss, self.alpha, self.agreement))
        return [StepMetrics(*part) for part in zip(*parts, strict=True)]


def in_loop_lengths(alphas: Sequence[Tensor], anchors: Sequence[Tensor], size: int) -> Tensor:
    """[2] float64: 1 + sum_k prod_{j<=k} alpha_j summed over the anchors of depth 0, and their
    number.

    Both add up over batches; their ratio is a number to watch, not the runtime's. alphas[k] [N_k]:
    acceptance at depth k; anchors[k] [N_k] long below `size`: the anchor of each, unique within a
    depth. A chain ends at the first depth where its anchor has no row (its document ended)."""
    if not alphas or alphas[0].numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=alphas[0].device if alphas else None)
    joint = torch.ones(size, dtype=torch.float64, device=alphas[0].device)  # prefix product
    total = torch.zeros_like(joint)
    for alpha, anchor in zip(alphas, anchors, strict=True):
        accepted = torch.zeros_like(joint)
        accepted[anchor] = alpha.to(joint.dtype)
        joint = joint * accepted
        total = total + joint
    return torch.stack([(1.0 + total[anchors[0]]).sum(), total.new_full((), len(anchors[0]))])


Loss = Mapping[str, float | Mapping[str, float]]


def chunked_objective(
    hidden: Tensor,
    draft_head: Head,
    target_hidden: Tensor,
    target_logits: Head,
    weight: Tensor,
    labels: Tensor,
    loss: Loss,
    draft_to_target: Tensor | None = None,
    chunk_size: int | None = None,
    target_index: Tensor | None = None,
) -> tuple[Tensor, StepMetrics]:
    """Sum over rows of weight * D(p, q), and the metrics of the same rows.

    hidden [N, D]        the drafter's states
    draft_head           [n, D] -> logits [n, Vd]; whichever parameters it uses get their gradient
                         through autograd, so hooks (DDP) fire as usual
    target_hidden [N, H] the state of the position that each row must match
    target_logits        [n, H] -> [n, V], called without gradient
    weight [N]           drop rows of weight 0 beforehand
    labels [N]           target ids of the predicted data tokens
    loss                 what a recipe writes under `loss:`
    draft_to_target [Vd] the target id of every draft token; None when the vocabularies are the same
    chunk_size           rows; None chooses from the vocabulary
    target_index [N]     optional: target_hidden is then [M, H], row i matches
                         target_hidden[target_index[i]]. Rows are walked in the order of their
                         target, so that a distribution which several rows match (one per depth,
                         with the depths concatenated into one call) is made once

    Gradients are computed here and only scaled in backward, which therefore runs once. One call
    holds one float32 gradient of the head until then: one call over all depths holds one, a call
    per depth holds K. The softmax is float32 under any autocast; fp16 with a loss scaler is not
    supported."""
    mix = Mix.parse(loss)
    _require_same_width(mix, hidden, target_hidden)
    with_gradient = torch.is_grad_enabled()
    if with_gradient and torch.is_autocast_enabled(hidden.device.type):
        # a copy of a weight cast earlier under no_grad would cut the graph
        torch.clear_autocast_cache()
    target_hidden = target_hidden.detach()
    parameters, draft_vocabulary = probe(draft_head, hidden)
    with torch.no_grad():
        vocabulary = max(draft_vocabulary, target_logits(target_hidden[:1]).shape[-1])
    rows = chunk_size or default_chunk_size(vocabulary, hidden.device)
    if target_index is None:
        target_index = to_device(torch.arange(len(hidden)), hidden.device)
    task = Task(
        head=draft_head,
        target_hidden=target_hidden,
        target_index=target_index,
        target_logits=target_logits,
        weight=weight.detach().to(precise(hidden.dtype)),
        labels=to_draft_ids(labels, draft_to_target),
        mix=mix,
        draft_to_target=draft_to_target,
        chunk_size=rows,
        block_size=min(rows, default_block_size(vocabulary, hidden.device)),
    )
    if with_gradient and (hidden.requires_grad or parameters):
        total, per_row, alpha, agreement = Chunked.apply(hidden, task, *parameters)
    else:
        (per_row, alpha, agreement), _, _ = walk(task, hidden, [], needs_hidden=False)
        total = per_row.sum()
    for term in mix.state_terms:  # in ordinary autograd: they are no larger than `hidden`
        on_states = term(hidden, target_hidden[target_index]) * task.weight
        total = total + on_states.sum()
        per_row = per_row + on_states.detach()
    return total, StepMetrics(per_row, alpha, agreement)


def _require_same_width(mix: Mix, hidden: Tensor, target_hidden: Tensor) -> None:
    """ConfigError if the mix has a term on states, and these are of two widths."""
    if mix.state_terms and hidden.shape[-1] != target_hidden.shape[-1]:
        raise ConfigError(
            "the drafter's states and the target's differ in width", where="loss.smooth_l1"
        )


def confidence_objective(logits: Tensor, alpha: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight * BCE(σ(logit), α), of a confidence head (DSpark, arXiv 2607.05147).

    logits [N] with gradient; alpha [N]: Σ min(p, q) of the same drafts, taken without one; weight
    [N]."""
    label = alpha.detach().clamp(0.0, 1.0).to(logits.dtype)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
    return (loss * weight.detach().to(loss.dtype)).sum()
