"""Two drafters on the same texts, by exact replay; and whether the target wrote those texts at all.

Replay is the runtime's acceptance on text that the target wrote, and on no other: a head that is
trained on a stranger's text learns to draft after it, and replay on more of it rises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.evaluation.expected_acceptance import (
    WrittenText,
    accept_tables,
    batches_of,
    chunks_of,
    teacher_forced,
)
from draftsmith.inference.sampling.sampler import probabilities
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.replay import ReplayResult, replay
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead

# Greedy text has no surprise of its own. At this temperature the target hardly ever draws another
# token than its best, but for ties within what rounding decides.
LOWEST = 0.25
LEAST_PROBABILITY = 1e-6  # of a token that rounding has put outside a filter


@dataclass(frozen=True)
class PairedResult:
    """One text under two drafters.

    before, after   rounds and acceptance of the two
    tokens          of the response
    excess          how much more the response surprises the target than its own would, in nats
    """

    before: ReplayResult
    after: ReplayResult
    tokens: int
    excess: float


@torch.no_grad()
def paired_replay(
    target: TargetHead,
    drafters: tuple[Drafter, Drafter],
    texts: Sequence[WrittenText],
    params: SamplingParams,
    k: int,
) -> list[PairedResult]:
    """A result per text, in their order: `drafters` before and after, at `k` drafts per round, on
    texts (prompt and response of at least one token each) that were written under the temperature,
    top_p and top_k of `params`. The target runs once for both. `target` and `drafters` as of
    `expected_acceptance`."""
    results: dict[int, PairedResult] = {}
    for members in batches_of([len(prompt) + len(output) for prompt, output in texts]):
        chosen = [texts[i] for i in members]
        features = teacher_forced(target, chosen)
        tables = [accept_tables(target, d, features, chosen, params, k) for d in drafters]
        excesses = excess_surprise(target, features, chosen, params)
        for i, before, after, excess in zip(members, *tables, excesses, strict=True):
            length = len(texts[i][1])
            pair = replay(before, length), replay(after, length)
            results[i] = PairedResult(*pair, length, excess)
    return [results[i] for i in range(len(texts))]


def excess_surprise(
    target: TargetHead,
    features: TargetFeatures,
    texts: Sequence[WrittenText],
    params: SamplingParams,
) -> list[float]:
    """Per text sum over its response of -log p(x) - H(p), in nats: 0 in expectation where x was
    drawn from p, as then E[-log p(x)] = H(p) at every token, whatever came before. `features`: of
    the texts, as `teacher_forced` gives them. Temperatures below LOWEST are taken as it."""
    drawn = SamplingParams(
        temperature=max(params.temperature, LOWEST), top_p=params.top_p, top_k=params.top_k
    )
    B, T = features.input_ids.shape
    ids = features.input_ids
    excess = torch.zeros(B, T, dtype=torch.float64)
    rows, places = features.loss_mask.nonzero(as_tuple=True)
    states = features.last_hidden[rows, places - 1]  # those that the tokens were drawn from
    labels = ids[rows, places]
    parts = [
        _excess(target, states[chunk], labels[chunk], drawn)
        for chunk in chunks_of(states, target.logits)
    ]
    excess[rows.cpu(), places.cpu()] = torch.cat(parts).double().cpu()
    return excess.sum(1).tolist()


def _excess(target: TargetHead, states: Tensor, labels: Tensor, params: SamplingParams) -> Tensor:
    """states [n, H], labels [n] -> -log p(label) - H(p), [n]."""
    p = probabilities(target.logits(states), params)
    entropy = torch.special.entr(p).sum(-1)
    drawn = p.gather(-1, labels[:, None])[:, 0]
    return -drawn.clamp_min(LEAST_PROBABILITY).log() - entropy
