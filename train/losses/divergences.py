"""Divergences between the drafter's distribution q and the target's p: one function each.

Every function has the signature `f(log_q, p, labels, **options) -> [n]`:

    log_q   [n, Vd]  the drafter's log-probabilities over its own (perhaps reduced) vocabulary,
            float32 or float64
    p       [n, Vd]  the target's probabilities *of those same tokens*: the softmax over the full
            vocabulary, gathered. With a reduced vocabulary it is a sub-probability: its mass P =
            sum_v p(v) is below 1, and q is zero on every token that is missing. p is constant: no
            gradient flows to the target
    labels  [n]      the data token, as an index into the draft vocabulary; -1 when the draft
            vocabulary lacks it

and returns one value per row. Sums run over the draft vocabulary unless stated otherwise. q enters
through log_q, so that a probability which underflows to zero still has a finite gradient; no
function divides by q.

Chunks, heads, families and the normalisation of means do not belong here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.speculators.errors import ConfigError


def _log(p: Tensor) -> Tensor:
    """log p, with an underflowed zero read as the smallest normal number."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


def overlap(log_q: Tensor, p: Tensor) -> Tensor:
    """alpha = sum_v min(p, q): the probability that a token drawn from q is accepted by the token
    rule. [n]

    Exact for a reduced vocabulary, because min(p, q) is zero wherever q is.
    """
    return torch.minimum(p, log_q.exp()).sum(-1)


def forward_kl(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q).

    Sub-probability: equal to P * KL(p/P || q) + P log P, so the best q is p renormalised and a row
    counts in proportion to the mass that the drafter can reach at all. The constant may make the
    value negative. The tokens that are missing would add an infinite constant; they are left out.
    """
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def reverse_kl(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p).

    Sub-probability: exact, since q is zero on the missing tokens; equal to KL(q || p/P) - log P.
    """
    return (log_q.exp() * (log_q - _log(p))).sum(-1)


def jsd(log_q: Tensor, p: Tensor, labels: Tensor, *, beta: float = 0.5) -> Tensor:
    """JSD_beta = beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q
    (DistillSpec, 2310.08461).

    Sub-probability: exact. A missing token has m = beta p, which adds beta (1 - P) log(1/beta)."""
    log_p = _log(p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))  # [n, Vd]
    to_p = (p * (log_p - log_m)).sum(-1) - (1.0 - p.sum(-1)) * math.log(beta)
    to_q = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * to_p + (1.0 - beta) * to_q


def tv(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Total variation = 1 - sum_v min(p, q) = 1 - alpha: the probability that a sampled draft is
    rejected.

    Sub-probability: exact (see `overlap`); never below 1 - P.
    """
    return 1.0 - overlap(log_q, p)


def neg_log_acceptance(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """-log alpha = -log sum_v min(p, q), summed in log space: a row that accepts nothing still has
    a gradient.

    Sub-probability: exact; never below -log P.
    """
    # a floor below any log_q: where p underflows to zero, q must not count as accepted
    log_p = p.log().clamp_min(-1e4)
    return -torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)


def lk_hybrid(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV with lambda = exp(-3 alpha), detached.

    An LK loss: KL while little is accepted, then total variation. Sub-probability: as these two."""
    mixing = torch.exp(-3.0 * overlap(log_q, p).detach())
    return mixing * forward_kl(log_q, p, labels) + (1.0 - mixing) * tv(log_q, p, labels)


def cross_entropy(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """-log q(x) of the data token x.

    A token outside the draft vocabulary, or one that q gives no probability to (its logit is minus
    infinity), gives 0 in value and gradient. Its row still counts in the normaliser, which all the
    terms of a mix share; give such rows weight 0 to leave them out of the mean as well."""
    picked = log_q.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    return torch.where((labels >= 0) & picked.isfinite(), -picked, 0.0)


def cross_entropy_argmax(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """-log q(argmax p): for drafts that are verified greedily.

    Sub-probability: the argmax is the target's favourite within the draft vocabulary."""
    return -log_q.gather(-1, p.argmax(-1, keepdim=True))[:, 0]


def top_k_cross_entropy(log_q: Tensor, p: Tensor, labels: Tensor, *, k: int = 10) -> Tensor:
    """-sum of p log q over the k tokens that the target likes best, not renormalised (HASS,
    2408.15766; k = 10).

    Sub-probability: the k best within the draft vocabulary.
    """
    best, index = p.topk(min(k, p.shape[-1]), dim=-1)  # [n, k]
    return -(best * log_q.gather(-1, index)).sum(-1)


def smooth_l1(hidden: Tensor, target_hidden: Tensor, *, beta: float = 1.0) -> Tensor:
    """Mean over the width of the smooth L1 distance between states, both [n, H] -> [n] (EAGLE-1,
    2401.15077).

    The one term on states: it takes no probabilities and needs no logits.
    """
    distance = torch.nn.functional.smooth_l1_loss(
        hidden, target_hidden.to(hidden.dtype), reduction="none", beta=beta
    )
    return distance.float().mean(-1) if distance.dtype != torch.float64 else distance.mean(-1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "neg_log_acceptance": neg_log_acceptance,
    "lk_hybrid": lk_hybrid,
    "cross_entropy": cross_entropy,
    "cross_entropy_argmax": cross_entropy_argmax,
    "top_k_cross_entropy": top_k_cross_entropy,
    "smooth_l1": smooth_l1,
}
ON_STATES = frozenset({"smooth_l1"})


@dataclass(frozen=True)
class Term:
    """One weighted divergence of a mix."""

    name: str
    weight: float
    options: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, *args: Tensor) -> Tensor:
        """weight * D(...), one value per row [n]."""
        return self.weight * DIVERGENCES[self.name](*args, **self.options)


@dataclass(frozen=True)
class Mix:
    """A weighted sum of divergences, as a recipe writes it under `loss:`.

    `{"forward_kl": 1.0}`, or with options `{"jsd": {"weight": 1.0, "beta": 0.3}, "tv": 0.5}`.
    """

    terms: tuple[Term, ...]  # on distributions
    state_terms: tuple[Term, ...] = ()  # on states

    @classmethod
    def parse(cls, loss: Mapping[str, float | Mapping[str, float]]) -> Mix:
        """Reads the recipe's mapping. ConfigError names the key that is wrong."""
        if not loss:
            raise ConfigError(f"name at least one of {', '.join(DIVERGENCES)}", where="loss")
        terms = [_parse_term(name, value, f"loss.{name}") for name, value in loss.items()]
        return cls(
            terms=tuple(term for term in terms if term.name not in ON_STATES),
            state_terms=tuple(term for term in terms if term.name in ON_STATES),
        )

    @property
    def names(self) -> set[str]:
        """Of the terms on distributions."""
        return {term.name for term in self.terms}

    def __call__(self, log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        """Sums the terms on distributions: [n]. The caller adds the terms on states."""
        total = torch.zeros(log_q.shape[0], dtype=log_q.dtype, device=log_q.device)
        for term in self.terms:
            total = total + term(log_q, p, labels)
        return total


def _parse_term(name: str, value: float | Mapping[str, float], where: str) -> Term:
    if name not in DIVERGENCES:
        raise ConfigError(f"unknown divergence; use one of {', '.join(DIVERGENCES)}", where=where)
    options = dict(value) if isinstance(value, Mapping) else {"weight": value}
    parameters = inspect.signature(DIVERGENCES[name]).parameters.values()
    allowed = {"weight", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    if "weight" not in options or options.keys() - allowed:
        raise ConfigError(f"expected weight among {sorted(allowed)}", where=where)
    for option, number in options.items():
        kind = int if option == "k" else int | float
        most = 1 if (name, option) == ("jsd", "beta") else math.inf
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 < number < most:
            raise ConfigError(
                f"expected a number above 0 and below {most}, got {number!r}",
                where=f"{where}.{option}",
            )
    return Term(name, float(options.pop("weight")), options)


# ------------------------------------------------------------------ value and gradient, no autograd
#
# With q = softmax(z), P = sum_v p and alpha = sum_v min(p, q), the gradient of every divergence in
# CLOSED_FORM lies in the span of three vectors:
#
#     d KL(p || q) / dz  =  P q - p
#     d (-log q(x)) / dz =  q - onehot(x)
#     d alpha / dz       =  q * (1[q < p] - m),   m = sum_v q 1[q < p]
#
# so any mix of them costs one softmax and a handful of passes over [n, Vd]; autograd through
# log_softmax costs about twice as much. The tests hold value and gradient to the functions above.

CLOSED_FORM = frozenset({"forward_kl", "tv", "lk_hybrid", "cross_entropy"})


def has_closed_form(mix: Mix) -> bool:
    """True if the gradient of every term of the mix is known in closed form."""
    return all(term.name in CLOSED_FORM for term in mix.terms)


@dataclass(frozen=True)
class LogitRows:
    """Draft logits of m rows for each of g targets, and what terms share. Float32 or float64."""

    z: Tensor  # [g, m, Vd] draft logits
    p: Tensor  # [g, 1, Vd] the target's probabilities
    p_log_p: Tensor  # [g, 1] sum p log p
    mass: Tensor  # [g, 1] sum p
    log_z: Tensor  # [g, m] logsumexp(z)
    alpha: Tensor  # [g, m] sum min(p, q)
    labels: Tensor  # [g, m], -1 outside the draft vocabulary

    def kl(self) -> Tensor:
        """[g, m] KL(p || q), computed anew."""
        return self.p_log_p - dot(self.p, self.z) + self.mass * self.log_z


class Coefficients(NamedTuple):
    """How much of each vector the gradient of a mix has, per row [g, m]."""

    kl: Tensor  # of P q - p
    alpha: Tensor  # of -d alpha / dz
    label: Tensor  # of q - onehot(label)


def value_and_coefficients(mix: Mix, rows: LogitRows) -> tuple[Tensor, Coefficients]:
    """The mix's value [g, m], and what its gradient consists of."""
    value = torch.zeros_like(rows.alpha)
    of_kl = value
    of_alpha = value
    of_label = value
    kl = rows.kl() if mix.names & {"forward_kl", "lk_hybrid"} else value
    for term in mix.terms:
        w = term.weight
        if term.name == "forward_kl":
            value = value + w * kl
            of_kl = of_kl + w
        elif term.name == "tv":
            value = value + w * (1.0 - rows.alpha)
            of_alpha = of_alpha + w
        elif term.name == "lk_hybrid":
            mixing = torch.exp(-3.0 * rows.alpha)
            value = value + w * (mixing * kl + (1.0 - mixing) * (1.0 - rows.alpha))
            of_kl = of_kl + w * mixing
            of_alpha = of_alpha + w * (1.0 - mixing)
        else:  # cross_entropy
            picked = rows.z.gather(-1, rows.labels.clamp_min(0)[..., None])[..., 0]
            supported = (rows.labels >= 0) & picked.isfinite()
            value = value + w * torch.where(supported, rows.log_z - picked, 0.0)
            of_label = of_label + w * supported.to(value.dtype)
    return value, Coefficients(of_kl, of_alpha, of_label)


def value_and_gradient(
    mix: Mix, rows: LogitRows, q: Tensor, weight: Tensor, scratch: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The mix's value [g, m] and weight * d value / dz [g, m, Vd], without autograd.

    q [g, m, Vd] = softmax(z), *overwritten by the gradient*; weight [g, m]; scratch [g, m, Vd]:
    overwritten, or None, and there is no gradient."""
    value, of = value_and_coefficients(mix, rows)
    if scratch is None:
        return value, None
    # With b = 1[q < p] the gradient is (kl P + label + alpha Σ q b) q - alpha q b - kl p - label
    # onehot(x): a multiple of q, from which the terms that the mix has are taken away.
    of_q = of.kl * rows.mass + of.label  # [g, m]
    if mix.names & {"tv", "lk_hybrid"}:
        below = torch.lt(q, rows.p, out=scratch).mul_(q)  # [g, m, Vd], q 1[q < p]
        of_q = of_q + of.alpha * below.sum(-1)
        gradient = q.mul_((of_q * weight)[..., None])
        gradient.addcmul_(below, -(of.alpha * weight)[..., None])
    else:
        gradient = q.mul_((of_q * weight)[..., None])
    if mix.names & {"forward_kl", "lk_hybrid"}:
        gradient.addcmul_(rows.p, -(of.kl * weight)[..., None])
    if "cross_entropy" in mix.names:
        gradient = subtract_at(gradient, rows.labels.clamp_min(0), of.label * weight)
    return value, gradient


def dot(x: Tensor, y: Tensor) -> Tensor:
    """sum_v x y of x [g, 1, V] and y [g, m, V]: [g, m]; on a CPU as one product, compiled as a part
    of the pass that reads x and y."""
    if torch.compiler.is_compiling():
        return (x * y).sum(-1)
    if x.device.type != "cpu":
        return torch.linalg.vecdot(x, y)
    return torch.bmm(y, x.transpose(1, 2))[..., 0]


def subtract_at(x: Tensor, index: Tensor, amount: Tensor) -> Tensor:
    """x [g, m, V], overwritten, less `amount` [g, m] at `index` [g, m]; compiled as a part of the
    pass that computes x, which a scatter would be another of."""
    if torch.compiler.is_compiling():
        places = torch.arange(x.shape[-1], device=x.device)
        return x - torch.where(places == index[..., None], amount[..., None], 0.0)
    return x.scatter_add_(-1, index[..., None], -amount[..., None])
