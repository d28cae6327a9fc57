"""Value and gradient of the common divergences with respect to the draft logits, without autograd.

With q = softmax(z), P = sum_v p and alpha = sum_v min(p, q), every divergence here has a gradient in the span
of three vectors:

    d KL(p || q) / dz  =  P q - p
    d (-log q(x)) / dz =  q - onehot(x)
    d alpha / dz       =  q * (1[q < p] - m),   m = sum_v q 1[q < p]

so any mix of them costs one softmax and a handful of passes over [n, Vd]; autograd through log_softmax costs
about twice as much. Value and gradient must agree with `train.losses.divergences`; the tests hold them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses.divergences import Mix

CLOSED_FORM = frozenset(
    {"forward_kl", "tv", "neg_log_acceptance", "lk_hybrid", "cross_entropy", "cross_entropy_argmax"}
)
SMALLEST_OVERLAP = 1e-30  # below it 1/alpha is worthless in float32, and -log alpha is left to log space


def has_closed_form(mix: Mix) -> bool:
    """Whether every term of the mix is in the table above."""
    return all(term.name in CLOSED_FORM for term in mix.terms)


@dataclass
class _Rows:
    """Per row [n]: the value so far, and the coefficients of the three vectors in its gradient."""

    value: Tensor
    kl: Tensor  # of P q - p
    accept: Tensor  # of -d alpha / dz
    label: Tensor  # of q - onehot(label)
    best: Tensor  # of q - onehot(argmax p)


def value_and_gradient(
    mix: Mix, z: Tensor, q: Tensor, p: Tensor, p_log_p: Tensor, alpha: Tensor, labels: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The mix's value [n] and weight * d value / dz [n, Vd]; None when alpha is too small for -log alpha.

    z [n, Vd] draft logits; q [n, Vd] = softmax(z), *overwritten by the gradient*; p [n, Vd] constant;
    p_log_p [n] = sum p log p; alpha [n] = sum min(p, q); labels [n], -1 outside the draft vocabulary;
    weight [n]. Float32 or float64, no autograd.
    """
    names = {term.name for term in mix.terms}
    if "neg_log_acceptance" in names and bool((alpha < SMALLEST_OVERLAP).any()):
        return None
    mass = p.sum(-1)  # [n], P
    log_z = (
        z.amax(-1) - q.amax(-1).log()
    )  # [n], logsumexp(z): at the largest logit log q = z - log_z, never underflowed
    rows = _combine(mix, z, p, p_log_p, mass, log_z, alpha, labels)
    on_q = rows.kl * mass + rows.label + rows.best  # [n]
    gradient = q
    if names & {"tv", "neg_log_acceptance", "lk_hybrid"}:
        below = torch.lt(q, p, out=torch.empty_like(q)).mul_(q)  # [n, Vd], q 1[q < p]
        on_q = on_q + rows.accept * below.sum(-1)
        gradient = q.mul_((on_q * weight)[:, None]).addcmul_(below, -(rows.accept * weight)[:, None])
    else:
        gradient = q.mul_((on_q * weight)[:, None])
    if names & {"forward_kl", "lk_hybrid"}:
        gradient.addcmul_(p, -(rows.kl * weight)[:, None])
    if "cross_entropy" in names:
        gradient.scatter_add_(-1, labels.clamp_min(0)[:, None], -(rows.label * weight)[:, None])
    if "cross_entropy_argmax" in names:
        gradient.scatter_add_(-1, p.argmax(-1, keepdim=True), -(rows.best * weight)[:, None])
    return rows.value, gradient


def _combine(
    mix: Mix,
    z: Tensor,
    p: Tensor,
    p_log_p: Tensor,
    mass: Tensor,
    log_z: Tensor,
    alpha: Tensor,
    labels: Tensor,
) -> _Rows:
    """Values and gradient coefficients of every term, summed over the mix. All [n] but z and p [n, Vd]."""
    zero = torch.zeros_like(alpha)
    rows = _Rows(zero, zero, zero, zero, zero)
    needs_kl = any(term.name in ("forward_kl", "lk_hybrid") for term in mix.terms)
    kl = p_log_p - torch.linalg.vecdot(p, z) + mass * log_z if needs_kl else zero
    for term in mix.terms:
        w = term.weight
        if term.name == "forward_kl":
            rows.value, rows.kl = rows.value + w * kl, rows.kl + w
        elif term.name == "tv":
            rows.value, rows.accept = rows.value + w * (1.0 - alpha), rows.accept + w
        elif term.name == "neg_log_acceptance":
            rows.value, rows.accept = rows.value - w * alpha.log(), rows.accept + w / alpha
        elif term.name == "lk_hybrid":
            mixing = torch.exp(-3.0 * alpha)
            rows.value = rows.value + w * (mixing * kl + (1.0 - mixing) * (1.0 - alpha))
            rows.kl, rows.accept = rows.kl + w * mixing, rows.accept + w * (1.0 - mixing)
        elif term.name == "cross_entropy":
            inside = (labels >= 0).to(z.dtype)
            picked = z.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
            rows.value, rows.label = rows.value + w * inside * (log_z - picked), rows.label + w * inside
        elif term.name == "cross_entropy_argmax":
            picked = z.gather(-1, p.argmax(-1, keepdim=True))[:, 0]
            rows.value, rows.best = rows.value + w * (log_z - picked), rows.best + w
        else:
            raise AssertionError(f"{term.name} has no closed form")
    return rows
