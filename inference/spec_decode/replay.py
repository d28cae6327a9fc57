"""Expected acceptance without drafting: walk text that the target wrote, with teacher-forced
acceptance.

Under the token rule an output token x was an accepted draft with probability min(1, q(x)/p(x)),
given that it is x (TRAINING.md). So on text sampled from the target, at the temperature that is
evaluated, these expectations are those of the runtime, exactly. This module knows no model: it is
given probabilities."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from torch import Tensor

from draftsmith.inference.metrics import acceptance_length, influences, sum_of_squares


@dataclass
class ReplayResult:
    """Expected counts over one text, or over the sum of several.

    rounds                  verifications, counting only those that have a token left to write
    accepted_per_position   [K] rounds whose first k+1 drafts were all accepted (joint counts)
    rounds_by_accepted      [K+1] rounds that accepted exactly j drafts
    """

    rounds: float = 0.0
    accepted_per_position: list[float] = field(default_factory=list)
    rounds_by_accepted: list[float] = field(default_factory=list)

    @property
    def accepted(self) -> float:
        """Drafts that were accepted, in all rounds."""
        return sum(self.accepted_per_position)

    @property
    def expected_acceptance_length(self) -> float:
        """Tokens that a round writes, its own one included."""
        return acceptance_length(self.accepted, self.rounds)

    def __add__(self, other: ReplayResult) -> ReplayResult:
        counts = (
            (self.accepted_per_position, other.accepted_per_position),
            (self.rounds_by_accepted, other.rounds_by_accepted),
        )
        added = ([a + b for a, b in zip_longest(*pair, fillvalue=0.0)] for pair in counts)
        return ReplayResult(self.rounds + other.rounds, *added)


Sample = Mapping[Hashable, ReplayResult]  # the results of texts, by their units (prompts)


def standard_error(samples: Sequence[Sample]) -> float:
    """Standard error of the mean expected acceptance length over `samples`, with the prompt as the
    unit.

    A sample holds the results of its texts by prompt; what texts of one prompt in several samples
    (temperatures) have in common is counted as such. It says how far other prompts would lie, not
    how well two drafters are distinguished: `error_of_difference` does."""
    return math.sqrt(sum_of_squares(list(_influences(samples).values())))


def error_of_difference(before: Sequence[Sample], after: Sequence[Sample]) -> float:
    """Standard error of how much the mean expected acceptance length of `after` exceeds that of
    `before`: two drafters on the same texts, whose units they share. What is hard for both
    cancels, text by text: each unit's influence on the one ratio of sums is subtracted from that
    on the other."""
    earlier = _influences(before)
    differences = [share - earlier[unit] for unit, share in _influences(after).items()]
    return math.sqrt(sum_of_squares(differences))


def _influences(samples: Sequence[Sample]) -> dict[Hashable, float]:
    """How far each unit moves the mean of the samples' acceptance lengths."""
    units: dict[Hashable, float] = {}
    for sample in samples:
        shares = influences([(result.rounds, result.accepted) for result in sample.values()])
        for unit, share in zip(sample, shares, strict=True):
            units[unit] = units.get(unit, 0.0) + share / len(samples)
    return units


def replay(accept: Tensor | np.ndarray, length: int) -> ReplayResult:
    """Expected rounds and acceptance over a response x_0 .. x_{length-1}; x_0 comes from prefill,
    never drafted.

    accept [K, T], T >= length - 1: accept[k, s] is the probability that, in a round anchored at x_s
    (the last token already written), draft k+1 is accepted as x_{s+k+1} given that the k before it
    were. Entries whose token lies past the text (s + k + 1 >= length) are not read: a draft there
    does not exist, as the text has ended. A round that accepts j drafts writes x_{s+j+1} as its
    bonus, and the next round is anchored there. NaN in `accept` makes every count NaN."""
    table = (
        accept.detach().double().cpu().numpy()
        if isinstance(accept, Tensor)
        else np.asarray(accept, dtype=float)
    )
    if table.ndim != 2 or length < 1 or table.shape[1] < length - 1:
        raise ValueError(
            f"replay: accept has shape {list(table.shape)}; expected [K, T], T >= {length - 1}"
            " anchors"
        )
    depth = table.shape[0]
    anchors = length - 1
    exists = np.arange(depth)[:, None] + np.arange(anchors)[None, :] + 1 < length  # [K, anchors]
    table = np.where(exists, table[:, :anchors], 0.0)
    if np.isnan(table).any():  # the drafter's logits are not numbers, and neither is what follows
        return ReplayResult(math.nan, [math.nan] * depth, [math.nan] * (depth + 1))
    outside = (table < 0) | (table > 1)
    if outside.any():
        k, s = np.argwhere(outside)[0]
        raise ValueError(f"replay: accept[{k}, {s}] = {table[k, s]}; expected a probability")
    joint = np.cumprod(table, axis=0)  # [K, anchors]: the first k+1 drafts are all accepted
    at_least = np.concatenate([np.ones((1, anchors)), joint, np.zeros((1, anchors))])
    exactly = at_least[:-1] - at_least[1:]  # [K+1, anchors]
    starts = _round_starts(exactly.T)
    per_position = joint @ starts
    by_accepted = exactly @ starts
    return ReplayResult(float(starts.sum()), per_position.tolist(), by_accepted.tolist())


def _round_starts(exactly: np.ndarray) -> np.ndarray:
    """P(a round is anchored at s): exactly [anchors, K+1], P(j accepted from s) -> [anchors]."""
    anchors, span = exactly.shape
    exactly = np.ascontiguousarray(exactly)
    starts = np.zeros(anchors + span)  # rounds that would begin past the text fall into the tail
    starts[0] = 1.0
    for s in range(anchors):
        starts[s + 1 : s + 1 + span] += starts[s] * exactly[s]
    return starts[:anchors]
