"""Verification is lossless: all drafts and decisions enumerated, total variation from the target <=
1e-12.

The same check must fail for each known bug put in; a check that cannot fail proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import inference.spec_decode.verification.chain_rules
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.verification.chain_rules import (
    RULES,
    Verdict,
    decide,
    verify,
    verify_greedy,
)
from inference.spec_decode.verification.rejection_sampler import METHODS, is_lossless
from speculators.errors import ConfigError

VOCAB = 3
LOSSLESS = 1e-12


@dataclass
class Models:
    """A target and a drafter that remember everything: prefix (tuple of tokens) -> distribution [V]
    float64.

    The `told_` fields are what the verifier is given; unless a bug is put in, the truth.
    """

    gamma: int
    p: Callable[[tuple], Tensor]
    q: Callable[[tuple], Tensor]
    told_p: Callable[[tuple], Tensor] | None = None
    told_q: Callable[[tuple], Tensor] | None = None
    told_counts: Callable[[tuple], int] | None = None
    deterministic: bool = False  # the verifier is told that q is one-hot

    def drafts(self) -> tuple[list[tuple], Tensor]:
        """Every draft [B, γ] and the probability of drafting it [B]."""
        drafts = list(itertools.product(range(VOCAB), repeat=self.gamma))
        drawn = [torch.stack([self.q(d[:k])[x] for k, x in enumerate(d)]).prod() for d in drafts]
        return drafts, torch.stack(drawn)

    def verdict(self, drafts: list[tuple], rule: str) -> Verdict:
        p, q = self.told_p or self.p, self.told_q or self.q
        p_all = torch.stack(
            [torch.stack([p(d[:k]) for k in range(self.gamma + 1)]) for d in drafts]
        )
        q_all = torch.stack([torch.stack([q(d[:k]) for k in range(self.gamma)]) for d in drafts])
        counts = [self.told_counts(d) if self.told_counts else self.gamma for d in drafts]
        return verify(
            p_all,
            Proposal(torch.tensor(drafts), counts, None if self.deterministic else q_all),
            rule,
        )


def random_tables(seed: int, sparse: bool = False) -> Callable[[tuple], Tensor]:
    """A random distribution for every prefix; sparse ones have tokens of probability zero."""

    def table(prefix: tuple) -> Tensor:
        place = sum((x + 1) * 4**k for k, x in enumerate(prefix))
        generator = torch.Generator().manual_seed(seed * 1000 + place)
        weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2 + 1e-3
        if sparse:
            weights[torch.randint(VOCAB, (), generator=generator)] = 0
        return weights / weights.sum()

    return table


def one_hot(table: Callable[[tuple], Tensor]) -> Callable[[tuple], Tensor]:
    return lambda prefix: torch.nn.functional.one_hot(table(prefix).argmax(), VOCAB).double()


def outcomes(verdict: Verdict) -> tuple[Tensor, list[list[int]]]:
    """Every pattern of passed and failed throws, through `decide`: probabilities [patterns, B],
    accepted."""
    accept = verdict.accept_probs
    weights, accepted = [], []
    for pattern in itertools.product([True, False], repeat=accept.shape[1]):
        passed = torch.tensor(pattern)
        throws = torch.where(passed, accept / 2, (1 + accept) / 2)
        weights.append(torch.where(passed, accept, 1 - accept).prod(-1))
        accepted.append(decide(verdict, throws))
    return torch.stack(weights), accepted


def enumerate_rule(models: Models, rule: str, only: int | None = None) -> tuple[float, float]:
    """Total variation of the first γ+1 tokens from the target's own, and expected accepted drafts.

    What a round leaves unwritten is completed with the target's own distributions. `only`: always
    that draft."""
    drafts, drawn = models.drafts()
    if only is not None:
        drawn = torch.nn.functional.one_hot(torch.tensor(only), len(drafts)).double()
    verdict = models.verdict(drafts, rule)
    residual, length = verdict.residual, models.gamma + 1
    written: dict[tuple, Tensor] = {}
    expected_accepted = 0.0
    for weights, accepted in zip(*outcomes(verdict), strict=True):
        for b, j in enumerate(accepted):
            mass = drawn[b] * weights[b]
            expected_accepted += float(mass) * j
            if mass > 0:
                for token in range(VOCAB):
                    text = (*drafts[b][:j], token)
                    written[text] = written.get(text, 0) + mass * residual[b, j, token]
    distance = 0.0
    for text in itertools.product(range(VOCAB), repeat=length):
        target = torch.stack([models.p(text[:k])[x] for k, x in enumerate(text)])
        got = sum(written.get(text[:k], 0) * target[k:].prod() for k in range(1, length + 1))
        distance += abs(float(got - target.prod())) / 2
    return distance, expected_accepted


def assert_lossless(models: Models, rule: str, **how) -> None:
    distance, _ = enumerate_rule(models, rule, **how)
    assert distance <= LOSSLESS, f"total variation {distance:.3g}"


# (a) exact enumeration


@pytest.mark.parametrize("sparse_p,sparse_q", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_token_rule_is_lossless(gamma, seed, sparse_p, sparse_q):
    assert_lossless(
        Models(gamma, random_tables(seed, sparse_p), random_tables(seed + 50, sparse_q)), "token"
    )


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_token_rule_is_lossless_for_any_deterministic_draft(gamma):
    models = Models(gamma, random_tables(4, sparse=True), random_tables(5), deterministic=True)
    for draft in range(VOCAB**gamma):
        assert_lossless(models, "token", only=draft)


def test_a_one_hot_vector_is_no_vector():
    dense = Models(3, random_tables(6), one_hot(random_tables(7)))
    drafts, drawn = dense.drafts()
    sure = [b for b in range(len(drafts)) if drawn[b] == 1]
    told, untold = (
        dense.verdict(drafts, "token"),
        replace(dense, deterministic=True).verdict(drafts, "token"),
    )
    torch.testing.assert_close(told.accept_probs[sure], untold.accept_probs[sure], rtol=0, atol=0)
    torch.testing.assert_close(told.residual[sure], untold.residual[sure], rtol=0, atol=1e-15)
    assert_lossless(dense, "token")


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("counts", list(itertools.product([0, 1, 3], repeat=2)))
def test_drafts_shorter_than_their_padding(counts, rule):
    """Row by row as if alone, whatever lies in the padding."""
    p, q = (
        torch.rand(2, 4, VOCAB, dtype=torch.float64),
        torch.rand(2, 3, VOCAB, dtype=torch.float64),
    )
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.tensor([[0, 1, 2], [2, 2, 0]])
    for row, count in enumerate(counts):
        p[row, count + 1 :] = float("nan")
        q[row, count:] = float("nan")
    for dense in (q, None):
        verdict = verify(p, Proposal(tokens, list(counts), dense), rule)
        for row, count in enumerate(counts):
            one = slice(row, row + 1)
            short = Proposal(
                tokens[one, :count], [count], None if dense is None else dense[one, :count]
            )
            alone = verify(p[one, : count + 1], short, rule)
            assert torch.equal(verdict.accept_probs[row, :count], alone.accept_probs[0])
            assert (verdict.accept_probs[row, count:] == 0).all()
            assert torch.equal(verdict.residual[row, : count + 1], alone.residual[0])
            assert torch.equal(verdict.residual[row, count], p[row, count])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("p_dtype", [torch.float64, torch.float32])
def test_precision_is_the_inputs(p_dtype, rule):
    p = torch.softmax(torch.randn(1, 3, VOCAB, dtype=p_dtype), -1)
    for q in (p[:, :2].flip(-1), None):
        verdict = verify(p, Proposal(torch.tensor([[0, 1]]), [2], q), rule)
        assert verdict.accept_probs.dtype == verdict.residual.dtype == p_dtype


def test_a_perfect_drafter_is_always_accepted():
    tables = random_tables(8)
    distance, accepted = enumerate_rule(Models(3, tables, tables), "token")
    assert distance <= LOSSLESS and accepted == pytest.approx(3)


def paper_toy(gamma=2):
    p, q = torch.tensor([[1, 2, 0], [2, 1, 0]], dtype=torch.float64) / 3
    return Models(gamma, lambda prefix: p, lambda prefix: q)


def test_the_papers_toy():
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 10/9 accepted drafts (Sun et al. 2403.10444)."""
    distance, accepted = enumerate_rule(paper_toy(), "token")
    assert distance <= LOSSLESS and accepted == pytest.approx(10 / 9, abs=1e-12)


# temperature 0


@pytest.mark.parametrize("dense", [True, False])
def test_the_fast_greedy_path_is_the_general_rule_on_one_hot_p(dense):
    generator = torch.Generator().manual_seed(0)
    best = torch.randint(VOCAB, (400, 4), generator=generator)
    tokens = torch.randint(VOCAB, (400, 3), generator=generator)
    counts = torch.randint(4, (400,), generator=generator).tolist()
    p = torch.nn.functional.one_hot(best, VOCAB).float()
    q = torch.softmax(torch.randn(400, 3, VOCAB, generator=generator), -1) if dense else None
    proposal = Proposal(tokens, counts, q)
    accepted, bonus = verify_greedy(best, proposal)
    assert len(set(accepted)) == 4
    for rule in ("greedy", "token"):
        verdict = verify(p, proposal, rule)
        for throws in (
            torch.rand(400, 3, generator=generator),
            torch.zeros(400, 3),
            torch.full((400, 3), 0.9999),
        ):
            assert decide(verdict, throws) == accepted
        residual = verdict.residual_at(accepted)
        assert residual.argmax(-1).tolist() == bonus
        assert torch.equal(residual.max(-1).values, torch.ones(400))


def test_greedy_rule_is_lossless_at_temperature_zero_only():
    hot, cold = random_tables(9), one_hot(random_tables(9))
    assert_lossless(Models(3, cold, random_tables(10)), "greedy")
    assert_lossless(Models(3, cold, random_tables(10)), "token")
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(Models(3, hot, random_tables(10)), "greedy")


# the block rule


@pytest.mark.parametrize("sparse_p,sparse_q", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block_rule_is_lossless_and_keeps_no_less_than_the_token_rule(
    gamma, seed, sparse_p, sparse_q
):
    models = Models(gamma, random_tables(seed, sparse_p), random_tables(seed + 50, sparse_q))
    (distance, kept), (_, by_token) = (
        enumerate_rule(models, "block"),
        enumerate_rule(models, "token"),
    )
    assert distance <= LOSSLESS
    assert kept >= by_token - 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block_rule_is_the_token_rule_for_deterministic_drafts(gamma):
    models = Models(gamma, random_tables(4, sparse=True), random_tables(5), deterministic=True)
    for draft in range(VOCAB**gamma):
        (distance, kept), (_, by_token) = (
            enumerate_rule(models, rule, only=draft) for rule in ("block", "token")
        )
        assert distance <= LOSSLESS
        assert kept == pytest.approx(by_token, abs=1e-12)


def test_block_rule_on_the_papers_toy():
    distance, accepted = enumerate_rule(paper_toy(), "block")
    assert distance <= LOSSLESS and accepted == pytest.approx(11 / 9, abs=1e-12)


def test_block_rule_with_the_token_residual_is_not_lossless(monkeypatch):
    block = RULES["block"]
    monkeypatch.setitem(RULES, "block", lambda p, proposal: replace(block(p, proposal), scale=None))
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(Models(3, random_tables(1), random_tables(51)), "block")


def test_typical_acceptance_is_lossy_and_says_so():
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(Models(2, random_tables(1), random_tables(51)), "lossy:typical")
    assert [name for name in METHODS if not is_lossless(name)] == ["lossy:typical"]


# (c) each known bug, put in, fails the check of (a)

TRUTH = Models(2, random_tables(20), random_tables(21))


def sharpened(table: Callable[[tuple], Tensor], power: float) -> Callable[[tuple], Tensor]:
    return lambda prefix: table(prefix) ** power / (table(prefix) ** power).sum()


def without_least(table: Callable[[tuple], Tensor]) -> Callable[[tuple], Tensor]:
    def cut(prefix: tuple) -> Tensor:
        p = table(prefix)
        p = torch.where(p > p.min(), p, 0.0)
        return p / p.sum()

    return cut


def reduced(prefix: tuple) -> Tensor:
    """A drafter over two tokens of three: draft token 0 is token 2, draft token 1 is token 0."""
    return torch.tensor([0.6, 0.0, 0.4], dtype=torch.float64)


BUGS = {
    "p before temperature": replace(TRUTH, p=sharpened(TRUTH.p, 2), told_p=TRUTH.p),
    "p before top-p": replace(TRUTH, p=without_least(TRUTH.p), told_p=TRUTH.p),
    "q before temperature": replace(TRUTH, q=sharpened(TRUTH.q, 2), told_q=TRUTH.q),
    "q before top-p": replace(TRUTH, q=without_least(TRUTH.q), told_q=TRUTH.q),
    "q rounded": replace(TRUTH, told_q=lambda prefix: TRUTH.q(prefix).bfloat16().double()),
    "q not scattered to the full vocabulary": replace(
        TRUTH, q=reduced, told_q=lambda prefix: torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64)
    ),
    "length chosen after looking": replace(
        TRUTH, told_counts=lambda draft: 2 if draft[0] == 0 else 0
    ),
    "length chosen after looking at the last token": replace(
        TRUTH, told_counts=lambda draft: 1 + (draft[1] == 1)
    ),
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("bug", BUGS)
def test_the_check_fails_for(bug, rule):
    assert_lossless(replace(BUGS[bug], told_p=None, told_q=None, told_counts=None), rule)
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(BUGS[bug], rule)


def test_choosing_the_length_after_looking_gives_the_known_bias():
    """p = (.7, .3), q = (.5, .5), verified only if the draft is token 0: the output is (.85,
    .15)."""
    p, q = torch.tensor([[0.7, 0.3, 0], [0.5, 0.5, 0]], dtype=torch.float64)
    biased = Models(1, lambda _: p, lambda _: q, told_counts=lambda draft: int(draft[0] == 0))
    distance, _ = enumerate_rule(biased, "token")
    assert distance == pytest.approx(0.15, abs=1e-12)


class BadVerdict(Verdict):
    """A wrong distribution after a rejection. `residual` asks all rows for the same j."""

    wrong: Callable[[Tensor, Tensor], Tensor]

    def residual_at(self, accepted):
        (j,) = set(accepted)
        p, proposal = self.p[:, j], self.proposal
        if j == proposal.width:
            return p
        if proposal.q is not None:
            return normed(type(self).wrong(p, proposal.q[:, j]))
        return normed(
            type(self).wrong(p, torch.nn.functional.one_hot(proposal.token_ids[:, j], VOCAB))
        )


def normed(weights: Tensor) -> Tensor:
    """norm(·), and 1/V where nothing is left."""
    return torch.where(
        weights.sum(-1, keepdim=True) > 0, weights / weights.sum(-1, keepdim=True), 1 / VOCAB
    )


WRONG_RESIDUALS = {
    "p itself": lambda p, q: p,
    "not clamped": lambda p, q: (p - q).abs(),
    "of a scalar q = 1": lambda p, q: (p - 1).clamp(min=0),
    "of a scalar q, that of the draft": (
        lambda p, q: (p - q.max(-1, keepdim=True).values).clamp(min=0)
    ),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bug", WRONG_RESIDUALS)
def test_the_check_fails_for_a_residual(bug, deterministic, monkeypatch):
    monkeypatch.setattr(BadVerdict, "wrong", staticmethod(WRONG_RESIDUALS[bug]), raising=False)
    monkeypatch.setattr(inference.spec_decode.verification.chain_rules, "Verdict", BadVerdict)
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(replace(TRUTH, deterministic=deterministic), "token")


def test_the_check_fails_for_scalar_q_where_the_vector_is_dense(monkeypatch):
    """Accepting with p(x) / 1 goes with the residual of one-hot q only."""

    def scalar(p: Tensor, proposal: Proposal) -> Verdict:
        return replace(token(p, replace(proposal, q=None)), proposal=proposal)

    token = RULES["token"]
    monkeypatch.setitem(RULES, "token", scalar)
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(TRUTH, "token")


def test_hiding_q_is_lossless_but_costs_acceptance():
    """Any fixed draft is verified without loss as one-hot, hence any mixture of drafts: only
    waste."""
    told, hidden = (
        enumerate_rule(TRUTH, "token"),
        enumerate_rule(replace(TRUTH, deterministic=True), "token"),
    )
    assert hidden[0] <= LOSSLESS and hidden[1] < told[1]


# what is refused


def test_refusals_say_what_was_expected():
    p = torch.full((1, 3, 4), 0.25)
    proposal = Proposal(torch.tensor([[0, 1]]), [2])
    with pytest.raises(ConfigError, match="expected one of"):
        verify(p, proposal, "typical")
    with pytest.raises(ConfigError, match="tree"):
        verify(p, replace(proposal, parents=[[-1, 0]]), "token")
    with pytest.raises(ValueError, match="expected \\[1, 3, V\\]"):
        verify(p[:, :2], proposal, "token")
    with pytest.raises(ValueError, match="reduced vocabulary"):
        verify(p, replace(proposal, q=torch.full((1, 2, 3), 1 / 3)), "token")
    with pytest.raises(ValueError, match="between 0 and 2"):
        Proposal(torch.tensor([[0, 1]]), [3])
    with pytest.raises(ValueError, match="q has shape"):
        Proposal(torch.tensor([[0, 1]]), [1], torch.zeros(1, 3, 4))
