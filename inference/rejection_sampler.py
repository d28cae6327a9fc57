"""One round's decision, dice included: target logits and a proposal in, the tokens to commit out.

The only place where verification meets randomness. It must not know the engine: ends of sequence, stop
strings and length limits are cut off later, by whoever commits the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.proposal import Proposal
from inference.sampler import argmax, batch_probabilities, check_drawn, inverse_cdf, uniforms
from inference.sampling_params import SamplingParams
from inference.verification import decide, verify, verify_greedy
from speculators.errors import ConfigError


def verify_and_sample(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    rule: str = "token",
) -> list[list[int]]:
    """Logits [B, K+1, V] of the target after 0..K drafts -> new tokens per row: accepted drafts, then the
    bonus.

    Logits of row b are read at 0..counts[b] only. Rows at temperature 0 use no randomness and take the greedy
    path whatever the rule; every other row takes counts[b] + 1 numbers from its generator, whatever its
    neighbours are.
    """
    rows = logits.shape[0]
    if not rows == proposal.num_rows == len(params) == len(generators):
        raise ValueError(
            f"verify_and_sample: {rows} rows of logits, {proposal.num_rows} proposals, "
            f"{len(params)} sampling params, {len(generators)} generators; expected as many of each"
        )
    greedy = [row for row in range(rows) if params[row].greedy]
    if len(greedy) == rows:
        return _greedy_tokens(logits, proposal)
    if not greedy:
        return _sampled_tokens(logits, proposal, params, generators, rule)
    sampled = [row for row in range(rows) if not params[row].greedy]
    tokens: list[list[int]] = [[] for _ in range(rows)]
    for row, new in zip(greedy, _greedy_tokens(logits[greedy], proposal.select(greedy)), strict=True):
        tokens[row] = new
    new_tokens = _sampled_tokens(
        logits[sampled],
        proposal.select(sampled),
        [params[row] for row in sampled],
        [generators[row] for row in sampled],
        rule,
    )
    for row, new in zip(sampled, new_tokens, strict=True):
        tokens[row] = new
    return tokens


def _greedy_tokens(logits: Tensor, proposal: Proposal) -> list[list[int]]:
    accepted, bonus = verify_greedy(argmax(logits), proposal)
    return _joined(proposal, accepted, bonus)


def _sampled_tokens(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    rule: str,
) -> list[list[int]]:
    if rule == "greedy":
        hot = [row_params.temperature for row_params in params]
        raise ConfigError(f"rule 'greedy' keeps p at temperature 0 only, and rows ask for {hot}; use rule 'token'")
    p = batch_probabilities(logits, params)  # [B, K+1, V]
    verdict = verify(p, proposal, rule)
    # one call per row: counts[b] numbers to accept with, and one to draw the bonus
    noise = [uniforms(generator, count + 1) for generator, count in zip(generators, proposal.counts, strict=True)]
    throws = [row[:-1] + [0.0] * (proposal.width + 1 - len(row)) for row in noise]
    accepted = decide(verdict, torch.tensor(throws, dtype=torch.float64, device=p.device))
    last = torch.tensor([row[-1] for row in noise], dtype=torch.float64, device=p.device)
    bonus = inverse_cdf(verdict.residual_at(accepted), last).tolist()
    check_drawn(bonus, p.shape[-1])
    return _joined(proposal, accepted, bonus)


def _joined(proposal: Proposal, accepted: list[int], bonus: list[int]) -> list[list[int]]:
    drafted = proposal.token_ids.tolist()
    return [row[:kept] + [token] for row, kept, token in zip(drafted, accepted, bonus, strict=True)]
