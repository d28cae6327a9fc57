"""One round's decision, dice included: target logits and a proposal in, the tokens to commit out.

The only place where verification meets randomness. It must not know the engine: ends of sequence,
stop strings and length limits are cut off later, by whoever commits the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inference.sampling.sampler import (
    argmax,
    batch_probabilities,
    check_drawn,
    inverse_cdf,
    uniforms,
)
from inference.sampling_params import SamplingParams
from inference.spec_decode.proposal import Kept, Proposal
from inference.spec_decode.verification.chain_rules import (
    LOSSY,
    RULES,
    decide,
    verify,
    verify_greedy,
)
from inference.spec_decode.verification.tree_rules import (
    TREE_RULES,
    follow,
    match_together,
    traverse_together,
    trees_of,
    walk_together,
)
from speculators.errors import ConfigError
from speculators.precision import on_device

AUTO = "auto"
METHODS = (
    AUTO,
    *(name for name in {**RULES, **TREE_RULES} if name != "greedy"),
)  # temperature 0 is greedy under any


def rule_for(method: str, proposal: Proposal) -> str:
    """The rule that judges the rows above temperature 0. `auto`: block for sampled chains,
    traversal for sampled trees, sample_match for what was not sampled. ConfigError if the rule
    asked for cannot judge such a proposal."""
    chain, sampled = proposal.parents is None, proposal.q is not None
    if method == AUTO:
        return ("block" if chain else "traversal") if sampled else "sample_match"
    if method not in RULES and method not in TREE_RULES:
        raise ConfigError(
            f"rejection_sample_method={method!r}; expected one of {', '.join(METHODS)}"
        )
    if not chain and method not in TREE_RULES:
        raise ConfigError(
            f"rejection_sample_method={method!r} judges chains, and the drafts are trees; use"
            f" {AUTO}, or one of {', '.join(name for name in TREE_RULES if name != 'greedy')}"
        )
    if not sampled and method in ("recursive", "traversal") and any(proposal.counts):
        raise ConfigError(
            f"rejection_sample_method={method!r} needs drafts that were sampled, and these are"
            f" deterministic; use {AUTO} or sample_match"
        )
    return method


def is_lossless(method: str) -> bool:
    """True if a rule preserves the target's distribution."""
    return not method.startswith(LOSSY)


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
    generator depends on that row alone."""
    rows = logits.shape[0]
    if not rows == proposal.num_rows == len(params) == len(generators):
        counts = rows, proposal.num_rows, len(params), len(generators)
        raise ValueError(
            f"verify_and_sample: {counts} logits, proposals, params, generators; expected as many"
            " of each"
        )
    greedy = [row for row in range(rows) if params[row].greedy]
    if len(greedy) == rows:
        return _greedy(logits, proposal)
    if not greedy:
        return _sampled(logits, proposal, params, generators, rule)
    sampled = [row for row in range(rows) if not params[row].greedy]
    kept = dict(zip(greedy, _greedy(logits[greedy], proposal.select(greedy)), strict=True))
    hot, dice = [params[row] for row in sampled], [generators[row] for row in sampled]
    kept |= zip(
        sampled, _sampled(logits[sampled], proposal.select(sampled), hot, dice, rule), strict=True
    )
    return [kept[row] for row in range(rows)]


def _greedy(logits: Tensor, proposal: Proposal) -> list[Kept]:
    best = argmax(logits)
    if proposal.parents is None:
        return _chains(proposal, *verify_greedy(best, proposal))
    walks = [
        follow(wanted, tree) for wanted, tree in zip(best.tolist(), trees_of(proposal), strict=True)
    ]
    return _walked(proposal, walks)


def _sampled(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    method: str,
) -> list[Kept]:
    rule = rule_for(method, proposal)
    if rule == "greedy":
        hot = [row_params.temperature for row_params in params]
        raise ConfigError(
            f"rule 'greedy' keeps p at temperature 0 only, and rows ask for {hot}; use rule"
            f" {AUTO!r}"
        )
    p = batch_probabilities(logits, params)  # [B, 1+K, V]
    if rule in TREE_RULES:
        return _walked(proposal, _walks(p, proposal, generators, rule))
    verdict = verify(p, proposal, rule)
    # one call per row: counts[b] numbers to accept with, and one to draw the bonus
    noise = [
        uniforms(generator, count + 1)
        for generator, count in zip(generators, proposal.counts, strict=True)
    ]
    throws = [row[:-1] + [0.0] * (proposal.width + 1 - len(row)) for row in noise]
    accepted = decide(
        verdict, on_device(throws, p.device, torch.float64).view(len(throws), proposal.width)
    )
    last = on_device([row[-1] for row in noise], p.device, torch.float64)
    bonus = inverse_cdf(verdict.residual_at(accepted), last).tolist()
    check_drawn(bonus, p.shape[-1])
    return _chains(proposal, accepted, bonus)


class _Numbers:
    """Dice of one row: as many numbers of its generator as it may need, taken at once; `give_back`
    leaves the generator as if those it has not used had never been taken."""

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

    def give_back(self) -> None:
        if self._before is not None and self.used < len(self.taken):
            self._generator.set_state(self._before)
            uniforms(self._generator, self.used)


def _walks(
    p: Tensor, proposal: Proposal, generators: Sequence[torch.Generator | None], rule: str
) -> list[tuple[list[int], int]]:
    """p [B, 1+K, V], which is used up, and the proposal of every row -> places kept, and the
    target's own token."""
    most = [1 + count for count in proposal.counts]  # every draft is tried once
    if rule == "sample_match":  # a number per token
        depths = zip(proposal.depths(), proposal.counts, strict=True)
        most = [1 + max(row[:count], default=0) for row, count in depths]
    dice = [_Numbers(generator, count) for generator, count in zip(generators, most, strict=True)]
    if rule in ("sample_match", "traversal"):
        noise = [each.taken + [0.0] * (max(most) - len(each.taken)) for each in dice]
        if (
            rule == "sample_match" or not proposal.width
        ):  # without drafts both rules draw one token from p
            walks = match_together(p, proposal, on_device(noise, p.device, torch.float64))
            used = [1 + len(path) for path, _ in walks]
        else:
            walks, used = traverse_together(p, proposal, np.array(noise))
        check_drawn([token for _, token in walks], p.shape[-1])
        for each, count in zip(dice, used, strict=True):
            each.used = count
    else:
        rows = zip(p, trees_of(proposal, p), dice, strict=True)
        walks = walk_together([TREE_RULES[rule](*row) for row in rows], partial(_draw, dice))
    for each in dice:
        each.give_back()
    return walks


def _draw(dice: Sequence[_Numbers], rows: Sequence[int], weights: Tensor) -> list[int]:
    """A token of each of some rows, weights [n, V]: a number of the row's generator each."""
    numbers = on_device([dice[row].number() for row in rows], weights.device, torch.float64)
    tokens = inverse_cdf(weights, numbers).tolist()
    check_drawn(tokens, weights.shape[-1])
    return tokens


def _chains(proposal: Proposal, accepted: list[int], bonus: list[int]) -> list[Kept]:
    return [
        Kept(list(range(kept)), [*row[:kept], token])
        for row, kept, token in zip(proposal.drafted, accepted, bonus, strict=True)
    ]


def _walked(proposal: Proposal, walks: list[tuple[list[int], int]]) -> list[Kept]:
    return [
        Kept(path, [*(row[place] for place in path), token])
        for row, (path, token) in zip(proposal.drafted, walks, strict=True)
    ]
