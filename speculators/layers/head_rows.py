"""Some rows of an output head: the logits of a draft vocabulary cost as much as it has tokens."""

from __future__ import annotations

from torch import Tensor, nn

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.frozen_linear import FrozenLinear


def head_rows(head: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight [n, H] and bias [n], if it has one, of the tokens `ids` [n] of an output head, with
    their gradients. ConfigError for a head that is not a linear layer."""
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"the output head is a {type(head).__name__}, of which no rows can be taken; leave the"
            " draft vocabulary whole",
            where="draft_vocab_size",
        )
    rows = ids.to(head.weight.device)
    bias = None if head.bias is None else head.bias.index_select(0, rows)
    return head.weight.index_select(0, rows), bias


def frozen_rows(head: nn.Module, ids: Tensor) -> FrozenLinear:
    """A copy of these rows, [..., H] -> [..., n], which does not follow what is written to the
    head."""
    weight, bias = head_rows(head, ids)
    rows = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return FrozenLinear(rows)


def keep_rows(linear: nn.Linear, ids: Tensor) -> None:
    """Takes all other rows out of a layer."""
    weight, bias = head_rows(linear, ids)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=linear.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=linear.bias.requires_grad)
    linear.out_features = len(ids)
