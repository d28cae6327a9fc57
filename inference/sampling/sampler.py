"""From logits to probabilities, and from probabilities to tokens.

`probabilities` is the one definition of p (and of q, when a drafter samples): what is drawn from
and what is verified must be the same tensor. No row depends on another of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.errors import DraftsmithError
from draftsmith.speculators.precision import on_device


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits [..., V] -> p [..., V] float32, after temperature, min-p, top-k and top-p, in this
    order.

    Temperature 0 is a one-hot at the argmax, first index on ties. Filters keep every token whose
    probability equals that of the last token they keep, so that p does not depend on how a sort
    breaks ties."""
    if params.temperature == 0:
        best = argmax(logits)
        p = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        return p.scatter_(-1, best.unsqueeze(-1), 1.0)
    logits = logits.float()
    p = torch.softmax(logits if params.temperature == 1 else logits / params.temperature, dim=-1)
    if not (params.min_p > 0 or 0 < params.top_k < p.shape[-1] or params.top_p < 1):
        return p
    if params.min_p > 0:
        p.masked_fill_(p < params.min_p * p.amax(-1, keepdim=True), 0.0)
    largest = None
    if 0 < params.top_k < p.shape[-1]:
        largest = p.topk(params.top_k, dim=-1).values  # [..., k]
        p.masked_fill_(p < largest[..., -1:], 0.0)
    if params.top_p < 1:
        p.masked_fill_(p < _top_p_floor(p, params.top_p, largest), 0.0)
    return p.div_(p.sum(-1, keepdim=True))


def batch_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [B, T, V], one SamplingParams per row -> p [B, T, V] float32; equal params go
    together."""
    groups: dict[tuple, list[int]] = {}
    for row, row_params in enumerate(params):
        key = (row_params.temperature, row_params.min_p, row_params.top_k, row_params.top_p)
        groups.setdefault(key, []).append(row)
    if len(groups) == 1:
        return probabilities(logits, params[0])
    p = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for rows in groups.values():
        index = on_device(rows, logits.device)
        p.index_copy_(0, index, probabilities(logits.index_select(0, index), params[rows[0]]))
    return p


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest of [..., V] -> [...] long; the first one on ties."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # numpy's is some ten times faster than torch's on a CPU, and every round pays for it
    exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.from_numpy(exact.detach().numpy().argmax(-1, keepdims=True)).squeeze(-1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Weights [B, V], not necessarily normalised, and uniforms [B] float64 in [0, 1) -> token ids
    [B] long.

    Takes the first token whose cumulative weight exceeds u times the total: never one of weight
    zero. The product stays below the total because u <= 1 - 2^-53 and both are float64. V is
    answered where no token has any weight."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # [B, V]
    targets = uniforms.unsqueeze(-1) * cumulative[:, -1:]  # [B, 1]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def uniforms(generator: torch.Generator | None, n: int) -> list[float]:
    """n numbers in [0, 1), float64, taken in one call. None is torch's global generator."""
    return torch.rand(n, generator=generator, dtype=torch.float64).tolist()


def make_generator(seed: int) -> torch.Generator:
    """A row's own source of randomness, on the CPU, so that a seed means the same on every device.

    torch keeps only the lowest 32 bits of a seed, so all bits are mixed into those first."""
    return torch.Generator().manual_seed(_mix(seed))


def check_drawn(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse what `inverse_cdf` answers for a row without probabilities."""
    for row, token in enumerate(token_ids):
        if token >= vocab_size:
            raise DraftsmithError(
                f"row {row} has no token of positive probability; expected finite logits."
                " Look for NaN in the model's output (a dtype that overflows), or a mask that"
                " forbids all.",
                where="sampler",
            )


def _top_p_floor(p: Tensor, top_p: float, largest: Tensor | None) -> Tensor:
    """Smallest probability that top-p keeps: p [..., V] -> [..., 1].

    A token stays if the mass of those before it, in falling order, falls short of top_p of the
    total. `largest` [..., k], falling: the probabilities that top-k kept; any others that it kept
    tie with the last of them."""
    total = p.sum(-1, keepdim=True, dtype=torch.float64)  # [..., 1]
    falling = largest
    if falling is None:
        most = p.shape[-1]
        if p.device.type == "cpu":
            # V tokens below (1 - top_p) / V of the total weigh less than what top-p drops, so none
            # of them need be sorted; half of that bound leaves room for rounding
            bound = 0.5 * (1 - top_p) / most * total
            most = max(1, int((p >= bound).sum(-1).max()))
        falling = p.topk(most, dim=-1).values
    cumulative = falling.cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(cumulative, total * top_p)  # [..., 1], the last token kept
    return falling.gather(-1, last.clamp_(max=falling.shape[-1] - 1))


def _mix(seed: int) -> int:
    """All bits of a seed hashed into 32, by the finaliser of splitmix64."""
    x = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & 0xFFFFFFFF
