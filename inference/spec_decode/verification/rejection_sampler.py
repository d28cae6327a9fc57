"""The decision of a round with its random numbers: target logits and a proposal in, the tokens to
commit out.

The only place where verification meets randomness. It must not know the engine: ends of sequence,
stop strings and length limits are cut off later, by whoever commits the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.inference.sampling.sampler import (
    argmax,
    batch_probabilities,
    check_drawn,
    inverse_cdf,
    uniforms,
)
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposal import Kept, Proposal, padded
from draftsmith.inference.spec_decode.verification.chain_rules import RULES, decide, verify
from draftsmith.inference.spec_decode.verification.tree_rules import follow, traverse
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.precision import on_device

AUTO = "auto"
SAMPLE_MATCH = "sample_match"
TRAVERSAL = "traversal"
# At temperature 0 all of them are greedy.
REJECTION_SAMPLE_METHODS = (AUTO, *RULES, SAMPLE_MATCH, TRAVERSAL)


def rule_for(method: str, proposal: Proposal) -> str:
    """The rule that judges the rows above temperature 0. `auto`: block for sampled chains,
    traversal for sampled trees, sample_match for what was not sampled. ConfigError if the rule
    asked for cannot judge such a proposal."""
    chain = proposal.parents is None
    sampled = proposal.q is not None
    if method == AUTO:
        if not sampled:
            return SAMPLE_MATCH
        return "block" if chain else TRAVERSAL
    if method not in REJECTION_SAMPLE_METHODS:
        raise ConfigError(
            f"rejection_sample_method={method!r}; expected one of"
            f" {', '.join(REJECTION_SAMPLE_METHODS)}"
        )
    if reason := cannot_judge(method, chain=chain, sampled=sampled or not any(proposal.counts)):
        raise ConfigError(reason)
    return method


def cannot_judge(method: str, *, chain: bool, sampled: bool) -> str | None:
    """Why the rule cannot judge such drafts, and what can; None: it can."""
    if not chain and method in RULES:
        return (
            f"rejection_sample_method={method!r} judges chains, and the drafts are trees; use"
            f" {AUTO}, {TRAVERSAL} or {SAMPLE_MATCH}"
        )
    if not sampled and method == TRAVERSAL:
        return (
            f"rejection_sample_method={method!r} needs drafts that were sampled, and these are"
            f" deterministic; use {AUTO} or {SAMPLE_MATCH}"
        )
    return None


def verify_and_sample(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    rule: str = AUTO,
) -> list[Kept]:
    """Logits [B, 1+K, V] of the target, entry 0 after the committed text and entry 1+k after place
    k -> per row the accepted drafts and the bonus.

    Logits of row b are read at its judged places only. Rows at temperature 0 use no randomness and
    take the greedy path whatever the rule; how many numbers every other row takes from its
    generator depends on that row alone. proposal.q may be overwritten."""
    greedy_rows = [row for row, row_params in enumerate(params) if row_params.greedy]
    sampled_rows = [row for row, row_params in enumerate(params) if not row_params.greedy]
    walks = {
        **_greedy(logits, proposal, greedy_rows),
        **_sampled(logits, proposal, sampled_rows, params, generators, rule),
    }
    return [
        Kept(path, [*(proposal.drafted[row][node] for node in path), token])
        for row, (path, token) in sorted(walks.items())
    ]


_Walk = tuple[list[int], int]  # accepted places, and the target's own token after them


def _part(logits: Tensor, proposal: Proposal, rows: Sequence[int]) -> tuple[Tensor, Proposal]:
    """Of these rows alone; nothing is copied where they are all."""
    if len(rows) == proposal.num_rows:
        return logits, proposal
    return logits[rows], proposal.select(rows)


def _greedy(logits: Tensor, proposal: Proposal, rows: Sequence[int]) -> dict[int, _Walk]:
    """Row -> its walk along the target's likeliest tokens."""
    if not rows:
        return {}
    part_logits, part = _part(logits, proposal, rows)
    return dict(zip(rows, follow(part, argmax(part_logits)), strict=True))


def _sampled(
    logits: Tensor,
    proposal: Proposal,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    method: str,
) -> dict[int, _Walk]:
    """Row -> its walk by the rule; params and generators are those of all rows."""
    if not rows:
        return {}
    part_logits, part = _part(logits, proposal, rows)
    part_generators = [generators[row] for row in rows]
    rule = rule_for(method, part)
    p = batch_probabilities(part_logits, [params[row] for row in rows])  # [b, 1+K, V]
    if rule == SAMPLE_MATCH:
        walks = _by_match(p, part, part_generators)
    elif rule == TRAVERSAL:
        walks = _by_traversal(p, part, part_generators)
    else:
        walks = _by_verdict(p, part, part_generators, rule)
    check_drawn([token for _, token in walks], p.shape[-1])
    return dict(zip(rows, walks, strict=True))


def _by_verdict(
    p: Tensor, proposal: Proposal, generators: Sequence[torch.Generator | None], rule: str
) -> list[_Walk]:
    """A rule for chains: a row takes counts[b] numbers to accept with, and one for the bonus."""
    verdict = verify(p, proposal, rule)
    noise = [
        uniforms(generator, count + 1)
        for generator, count in zip(generators, proposal.counts, strict=True)
    ]
    throws = on_device(padded(noise, proposal.width + 1), p.device, torch.float64)
    # a number behind a row's last draft meets an accept probability of 0
    accepted = decide(verdict, throws[:, :-1])
    bonus = _draw(verdict.residual_at(accepted), [row[-1] for row in noise])
    return [(list(range(kept)), token) for kept, token in zip(accepted, bonus, strict=True)]


def _by_match(
    p: Tensor, proposal: Proposal, generators: Sequence[torch.Generator | None]
) -> list[_Walk]:
    """The target draws its own token at every place; a row takes a number per token it commits."""
    judged = zip(proposal.depths(), proposal.counts, strict=True)
    # [B, 1+K], how many tokens stand between the committed text and an entry
    depths = padded([[0, *row[:count]] for row, count in judged], 1 + proposal.width)
    dice = [
        _Numbers(generator, 1 + max(row)) for generator, row in zip(generators, depths, strict=True)
    ]
    noise = [[die.taken[depth] for depth in row] for die, row in zip(dice, depths, strict=True)]
    numbers = on_device(noise, p.device, torch.float64)
    # row by row: cumulative sums over all places of all rows would take a batch's memory twice
    walks = follow(proposal, torch.stack([inverse_cdf(*row) for row in zip(p, numbers)]))
    for die, (path, _) in zip(dice, walks, strict=True):
        die.give_back(1 + len(path))
    return walks


def _by_traversal(
    p: Tensor, proposal: Proposal, generators: Sequence[torch.Generator | None]
) -> list[_Walk]:
    """p and proposal.q are used up; a row takes a number per draft it tries, and one for the
    token."""
    dice = [
        _Numbers(generator, 1 + count)
        for generator, count in zip(generators, proposal.counts, strict=True)
    ]
    paths = traverse(p, proposal, [die.flip for die in dice])
    ends = on_device([1 + path[-1] if path else 0 for path in paths], p.device)
    weights = p[torch.arange(len(p), device=p.device), ends]  # [B, V]
    tokens = _draw(weights, [die.number() for die in dice])
    for die in dice:
        die.give_back(die.used)
    return list(zip(paths, tokens, strict=True))


class _Numbers:
    """As many numbers of a row's generator as it may need, taken at once; `give_back` leaves the
    generator as if only the first `used` had been taken."""

    def __init__(self, generator: torch.Generator | None, most: int) -> None:
        self._generator = torch.default_generator if generator is None else generator
        self._before = self._generator.get_state() if most > 1 else None
        self.taken = uniforms(generator, most)
        self.used = 0

    def number(self) -> float:
        self.used += 1
        return self.taken[self.used - 1]

    def flip(self, probability: float) -> bool:
        return self.number() < probability

    def give_back(self, used: int) -> None:
        if self._before is not None and used < len(self.taken):
            self._generator.set_state(self._before)
            uniforms(self._generator, used)


def _draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """A token per row: weights [B, V], not necessarily normalised."""
    return inverse_cdf(weights, on_device(numbers, weights.device, torch.float64)).tolist()
