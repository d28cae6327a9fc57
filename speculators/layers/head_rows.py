"""Some rows of an output head: the logits of a draft vocabulary cost as much as it has tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.frozen_linear import FrozenLinear
from draftsmith.speculators.layers.int8_linear import FrozenInt8Linear, Int8Linear, rows_to_int8


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


def row_product(head: nn.Module, ids: Tensor, x: Tensor) -> Tensor:
    """x [..., H] -> [..., n] by the rows `ids` [n] of an output head, with their gradients, which
    int8 weights have none of. ConfigError as `head_rows`."""
    if isinstance(head, Int8Linear):
        return frozen_rows(head, ids)(x)
    return nn.functional.linear(x, *head_rows(head, ids))


def frozen_rows(head: nn.Module, ids: Tensor) -> FrozenLinear | FrozenInt8Linear:
    """A copy of these rows, [..., H] -> [..., n], which does not follow what is written to the
    head."""
    if isinstance(head, Int8Linear):
        return FrozenInt8Linear(head.rows(ids))
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


@torch.no_grad()
def mean_elsewhere(head: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The tensors of an output head in which every row but `ids` [n] is the mean of these: for each
    state, the logit there is the mean of theirs, and no larger than the largest."""
    rows = ids.to(head.weight.device)
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    others = torch.ones(len(head.weight), dtype=torch.bool, device=rows.device)
    others[rows] = False
    if isinstance(head, Int8Linear):
        kept = head.weight[rows] * head.weight_scale[rows]
        mean = rows_to_int8(kept.mean(0, keepdim=True))
        tensors["weight"][others], tensors["weight_scale"][others] = mean
    else:
        tensors["weight"][others] = head.weight[rows].float().mean(0).to(head.weight.dtype)
    if getattr(head, "bias", None) is not None:  # tables of embeddings have none
        tensors["bias"][others] = head.bias[rows].float().mean().to(head.bias.dtype)
    return tensors
