"""Replay over target-written text equals the runtime, exactly: every text of a toy, and the walk
over a longer one at temperature 0."""

import itertools
import math

import numpy as np
import pytest
import torch

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.replay import (
    ReplayResult,
    error_of_difference,
    replay,
    standard_error,
)
from draftsmith.inference.spec_decode.verification.chain_rules import verify
from tests.support.enumeration import residuals


class Toy:
    """A Markov target, and a drafter whose distribution depends on its depth and on the previous
    token.

    Text starts with token 0 and ends with token `eos` (if any) or at `longest` tokens.
    """

    def __init__(self, vocab, depth, longest, eos, seed):
        rng = np.random.default_rng(seed)
        self.vocab, self.depth, self.longest, self.eos = vocab, depth, longest, eos
        self.p = rng.dirichlet(np.ones(vocab), size=vocab)  # [previous, next]
        self.q = rng.dirichlet(np.ones(vocab), size=(depth, vocab))  # [depth, previous, next]

    def ended(self, text):
        return len(text) == self.longest or (len(text) > 1 and text[-1] == self.eos)

    def texts(self, text=(0,), weight=1.0):
        """Every text the target can write, with its probability."""
        if self.ended(text):
            yield text, weight
            return
        for token in range(self.vocab):
            yield from self.texts((*text, token), weight * self.p[text[-1], token])

    def replayed(self):
        """Expected counts of replay over text sampled from the target: rounds, per position, by
        accepted."""
        total = np.zeros(1 + self.depth + self.depth + 1)
        for text, weight in self.texts():
            # what lies past the text must not be read
            accept = np.full((self.depth, len(text)), np.nan)
            for k, s in itertools.product(range(self.depth), range(len(text))):
                if s + k + 1 < len(text):
                    before, token = text[s + k], text[s + k + 1]
                    accept[k, s] = min(1, self.q[k, before, token] / self.p[before, token])
            total += weight * flat(replay(accept, len(text)))
        return total

    def speculated(self, text=(0,)):
        """Expected counts of speculative decoding by the token rule, all drafts and decisions
        enumerated."""
        if self.ended(text):
            return np.zeros(1 + self.depth + self.depth + 1)
        drafts = list(itertools.product(range(self.vocab), repeat=self.depth))
        before = [(text[-1], *draft) for draft in drafts]
        p = torch.tensor(np.stack([self.p[list(row)] for row in before]))  # [B, K+1, V]
        q = torch.tensor(
            np.stack([[self.q[k, row[k]] for k in range(self.depth)] for row in before])
        )
        verdict = verify(p, Proposal(torch.tensor(drafts), [self.depth] * len(drafts), q), "token")
        accept, residual = verdict.accept_probs.numpy(), residuals(verdict).numpy()
        total = np.zeros(1 + self.depth + self.depth + 1)
        for b, draft in enumerate(drafts):
            drawn = math.prod(float(q[b, k, token]) for k, token in enumerate(draft))
            for j, bonus in itertools.product(range(self.depth + 1), range(self.vocab)):
                rejected = 1 - accept[b, j] if j < self.depth else 1.0
                weight = drawn * accept[b, :j].prod() * rejected * residual[b, j, bonus]
                if weight > 0:
                    total += weight * self.committed(text, draft[:j], bonus)
        return total

    def committed(self, text, accepted, bonus):
        """This round's counts plus those expected of the rounds that follow."""
        kept = 0
        while kept < len(accepted) and not self.ended(text):
            text, kept = (*text, accepted[kept]), kept + 1
        counts = np.zeros(1 + self.depth + self.depth + 1)
        counts[0] = 1
        counts[1 : 1 + kept] = 1
        counts[1 + self.depth + kept] = 1
        if not self.ended(text):
            text = (*text, bonus)
        return counts + self.after(text)

    def after(self, text):
        key = (len(text), text[-1], self.ended(text))
        cache = self.__dict__.setdefault("known", {})
        if key not in cache:
            cache[key] = self.speculated(text)
        return cache[key]


def flat(result: ReplayResult) -> np.ndarray:
    return np.array([result.rounds, *result.accepted_per_position, *result.rounds_by_accepted])


@pytest.mark.parametrize("eos", [None, 2], ids=["fixed length", "ends by itself"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_replay_is_exactly_what_speculative_decoding_does(depth, eos):
    toy = Toy(vocab=3, depth=depth, longest=6, eos=eos, seed=depth)
    np.testing.assert_allclose(toy.replayed(), toy.speculated(), rtol=0, atol=1e-12)


def simulate(accept, length, rng):
    """One text decoded with real throws."""
    depth = accept.shape[0]
    counts, anchor = np.zeros(1 + depth + depth + 1), 0
    while anchor < length - 1:
        j = 0
        while j < depth and anchor + j + 1 < length and rng.random() < accept[j, anchor]:
            j += 1
        counts[0] += 1
        counts[1 : 1 + j] += 1
        counts[1 + depth + j] += 1
        anchor += j + 1
    return counts


def test_at_temperature_zero_replay_is_the_walk_itself():
    rng = np.random.default_rng(1)
    accept = (rng.random((3, 50)) < 0.6).astype(np.float32)
    assert flat(replay(torch.from_numpy(accept), 50)).tolist() == simulate(accept, 50, rng).tolist()


def test_texts_add_up_and_short_ones_have_no_rounds():
    one, two = replay(torch.full((2, 9), 0.5), 9), replay(torch.full((3, 20), 0.7), 20)
    both = sum([one, two], ReplayResult())
    assert both.rounds == one.rounds + two.rounds
    assert both.accepted == pytest.approx(one.accepted + two.accepted)
    assert len(both.accepted_per_position) == 3 and len(both.rounds_by_accepted) == 4
    assert both.expected_acceptance_length == pytest.approx(1 + both.accepted / both.rounds)
    assert replay(torch.ones(2, 1), 1).rounds == 0
    assert replay(torch.ones(2, 1), 2).accepted == 1


def test_what_is_no_probability_is_named():
    accept = torch.full((2, 5), 0.5)
    accept[1, 2] = 1.5
    with pytest.raises(ValueError, match=r"accept\[1, 2\]"):
        replay(accept, 5)
    for accept, length in ((torch.ones(2, 3), 5), (torch.ones(2, 3), 0), (torch.ones(3), 2)):
        with pytest.raises(ValueError, match="expected"):
            replay(accept, length)


def test_logits_that_are_not_numbers_have_no_acceptance_length():
    accept = torch.full((2, 5), 0.5)
    accept[1, 2] = float("nan")
    assert math.isnan(replay(accept, 5).expected_acceptance_length)


def test_error_of_difference_is_that_of_the_paired_influences_by_hand():
    before = {"a": ReplayResult(4, [2.0]), "b": ReplayResult(6, [6.0])}  # 8 of 10: a moves -0.12
    after = {"b": ReplayResult(5, [7.0]), "a": ReplayResult(3, [3.0])}  # 10 of 8: a moves -0.09375
    by_hand = math.sqrt(2 * 2 * (0.12 - 0.09375) ** 2)  # n / (n - 1) times the sum of squares
    assert error_of_difference([before], [after]) == pytest.approx(by_hand)
    assert by_hand < standard_error([after]) < standard_error([before])
    assert error_of_difference([before, before], [after, after]) == pytest.approx(by_hand)
    assert error_of_difference([before], [before]) == 0
