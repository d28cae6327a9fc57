"""Rules for chains are lossless: all drafts and decisions enumerated, total variation from the
target at most 1e-12."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.verification.chain_rules import RULES, verify
from tests.support.enumeration import (
    LOSSLESS,
    VOCAB,
    World,
    assert_lossless,
    chain,
    enumerate_rule,
    one_hot,
    over,
    paper_toy,
    random_table,
    residuals,
)

NO_WHOLE_VOCABULARY = [
    known for size in range(1, VOCAB) for known in itertools.combinations(range(VOCAB), size)
]
EVERY_RULE = pytest.mark.parametrize("rule", RULES)
ALL_DRAFTS = {gamma: list(itertools.product(range(VOCAB), repeat=gamma)) for gamma in (1, 2, 3)}


@pytest.mark.parametrize("sparse_p,sparse_q", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_lossless_and_block_keeps_no_less_than_token(gamma, seed, sparse_p, sparse_q):
    world = World(chain(gamma), random_table(seed, sparse_p), random_table(seed + 50, sparse_q))
    (by_token, kept_by_token), (by_block, kept_by_block) = (
        enumerate_rule(world, rule) for rule in ("token", "block")
    )
    assert by_token <= LOSSLESS and by_block <= LOSSLESS
    assert kept_by_block >= kept_by_token - 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_lossless_and_equal_for_any_deterministic_draft(gamma):
    world = World(chain(gamma), random_table(4, sparse=True), random_table(5))
    for draft in ALL_DRAFTS[gamma]:
        (by_token, kept_by_token), (by_block, kept_by_block) = (
            enumerate_rule(world, rule, only=draft) for rule in ("token", "block")
        )
        assert by_token <= LOSSLESS and by_block <= LOSSLESS
        assert kept_by_block == pytest.approx(kept_by_token, abs=1e-12)


def test_no_q_is_the_one_hot_q():
    dense = World(chain(3), random_table(6), one_hot(random_table(7)))
    ((draft,), _) = dense.drafts()
    dense_verdict = dense.verdict([draft], "token")
    implied = replace(dense, deterministic=True).verdict([draft], "token")
    assert torch.equal(dense_verdict.accept_probs, implied.accept_probs)
    torch.testing.assert_close(residuals(dense_verdict), residuals(implied), rtol=0, atol=1e-15)
    assert_lossless(dense, "token")


@EVERY_RULE
@pytest.mark.parametrize("counts", list(itertools.product([0, 1, 3], repeat=2)))
def test_a_row_shorter_than_its_padding_is_judged_as_if_alone(counts, rule):
    """Whatever lies in the padding."""
    p = torch.rand(2, 4, VOCAB, dtype=torch.float64)
    q = torch.rand(2, 3, VOCAB, dtype=torch.float64)
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
            assert torch.equal(residuals(verdict)[row, : count + 1], residuals(alone)[0])
            assert torch.equal(residuals(verdict)[row, count], p[row, count])


@EVERY_RULE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_precision_is_the_inputs(dtype, rule):
    p = torch.softmax(torch.randn(1, 3, VOCAB, dtype=dtype), -1)
    for q in (p[:, :2].flip(-1), None):
        verdict = verify(p, Proposal(torch.tensor([[0, 1]]), [2], q), rule)
        assert verdict.accept_probs.dtype == residuals(verdict).dtype == dtype


@EVERY_RULE
@pytest.mark.parametrize("known", NO_WHOLE_VOCABULARY)
def test_lossless_for_every_reduced_vocabulary(known, rule):
    """q is 0 outside of it, also where p is large."""
    world = World(chain(2), random_table(9), over(known, random_table(10)))
    assert_lossless(world, rule)


@EVERY_RULE
def test_a_perfect_drafter_is_always_accepted(rule):
    table = random_table(8)
    distance, accepted = enumerate_rule(World(chain(3), table, table), rule)
    assert distance <= LOSSLESS and accepted == pytest.approx(3)


@pytest.mark.parametrize(("rule", "accepted"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_toy_of_the_paper(rule, accepted):
    """Sun et al. 2403.10444, two drafts."""
    distance, kept = enumerate_rule(paper_toy(2), rule)
    assert distance <= LOSSLESS and kept == pytest.approx(accepted, abs=1e-12)


def test_refusals():
    p = torch.full((1, 3, 4), 0.25)
    proposal = Proposal(torch.tensor([[0, 1]]), [2])
    with pytest.raises(ValueError, match="reduced vocabulary"):
        verify(p, replace(proposal, q=torch.full((1, 2, 3), 1 / 3)), "token")
    with pytest.raises(ValueError, match="counts"):
        Proposal(torch.tensor([[0, 1]]), [3])
    with pytest.raises(ValueError, match="q has shape"):
        Proposal(torch.tensor([[0, 1]]), [1], torch.zeros(1, 3, 4))
