"""Rules that walk through a tree are lossless: all trees and decisions enumerated, total variation
from the target at most 1e-12."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import make_generator
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.tree_drafting import DynamicGrowth
from draftsmith.inference.spec_decode.tree_shape import DynamicTree
from draftsmith.inference.spec_decode.verification.rejection_sampler import rule_for
from draftsmith.inference.spec_decode.verification.tree_rules import traverse
from draftsmith.speculators.errors import ConfigError
from tests.support.enumeration import (
    LOSSLESS,
    VOCAB,
    World,
    assert_lossless,
    chain,
    enumerate_rule,
    over,
    paper_toy,
    random_table,
)
from tests.support.grown_trees import enumerate_grown, grown

PAIRS = (-1, -1, 0, 0, 1, 1)  # two drafts, and two after each
SHAPES = {
    "chain": chain(3),
    "wide": (-1, -1, -1),
    "pairs": PAIRS,
    "uneven": (-1, -1, 1, 1, 3),
    "one": (-1,),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["traversal", "sample_match"])
def test_lossless_for_sampled_trees(rule, shape, sparse):
    q = random_table(60, sparse and shape != "wide")
    assert_lossless(World(SHAPES[shape], random_table(3, sparse), q), rule)


@pytest.mark.parametrize("rule", ["traversal", "sample_match"])
@pytest.mark.parametrize("known", [(0, 1), (1, 2), (0, 2)])
def test_lossless_for_every_reduced_vocabulary_of_two_siblings(known, rule):
    world = World(PAIRS, random_table(9), over(known, random_table(10)))
    assert_lossless(world, rule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [3, 5])
def test_traversal_is_lossless_for_every_tree_that_grows(budget, seed):
    """Which nodes have children, and how many, depends on the drafts above."""
    p, q = random_table(seed), random_table(seed + 50)
    trees = grown(DynamicTree(2, 2, budget), q)
    assert len({parents for _, parents in trees}) > 1
    assert enumerate_grown(trees, p, q) <= LOSSLESS


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_drafter_that_is_sure_of_a_token_draws_the_others_in_order(temperature):
    """In float32 its q is 1, and the chances of all children but the first are 0."""
    logits = torch.tensor([30.0, 10, 5, 4, 3, 2, 1, 0]) * temperature
    params = SamplingParams(temperature=temperature)
    generators = [make_generator(seed) for seed in range(64)]
    requests = [
        Request(str(row), 0, [1], params, generator=generator, max_model_len=64)
        for row, generator in enumerate(generators)
    ]
    growth = DynamicGrowth(DynamicTree(8, 1, 2), requests, [2] * len(requests), None, len(logits))
    growth(logits.expand(len(requests), 1, -1))
    proposal = growth.proposal()
    assert proposal.q[:, 0].amax(-1).unique().tolist() == [1.0]
    assert proposal.token_ids[:, 0].unique().tolist() == [0]
    second = proposal.token_ids[:, 1]  # by what is left of q: of the 2nd token nearly all
    assert (second == 1).double().mean() > 0.9


@pytest.mark.parametrize("shape", ["chain", "wide", "uneven"])
def test_matching_is_lossless_for_any_tree(shape):
    world = World(SHAPES[shape], random_table(4, sparse=True), random_table(5))
    trees, _ = world.drafts()
    for tokens in trees[:: max(1, len(trees) // 12)]:
        assert_lossless(world, "sample_match", only=tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_traversal_is_the_block_rule_on_a_chain(gamma, seed):
    world = World(chain(gamma), random_table(seed), random_table(seed + 50))
    by_block, by_traversal = (enumerate_rule(world, rule)[1] for rule in ("block", "traversal"))
    assert by_traversal == pytest.approx(by_block, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["chain", "pairs", "uneven"])
def test_traversal_keeps_no_less_than_siblings_in_turn(shape, seed):
    world = World(SHAPES[shape], random_table(seed), random_table(seed + 50))
    (oracle, by_siblings), (_, by_traversal) = (
        enumerate_rule(world, rule) for rule in ("recursive", "traversal")
    )
    assert oracle <= LOSSLESS and by_traversal >= by_siblings - 1e-12


def test_the_toy_of_the_paper():
    assert enumerate_rule(paper_toy(2), "traversal")[1] == pytest.approx(11 / 9, abs=1e-12)


def test_a_perfect_drafter_is_kept_to_the_leaf():
    table = random_table(8)
    distance, accepted = enumerate_rule(World(PAIRS, table, table), "traversal")
    assert distance <= LOSSLESS and accepted == pytest.approx(2)


def test_traversal_of_equal_distributions_goes_on_where_rounding_rejects():
    """Nothing is left of p - q then, and the draft before is as sure as it was."""
    p = torch.full((1, 3, VOCAB), 1 / VOCAB)
    proposal = Proposal(torch.tensor([[0, 1]]), [2], p[:, 1:].clone(), [[-1, 0]])
    asked = []
    assert traverse(p, proposal, [lambda rate: asked.append(rate) or len(asked) > 1]) == [[0]]
    assert asked == [1, 1]


def test_rules_by_proposal():
    q, parents = torch.full((1, 2, VOCAB), 1 / VOCAB), [[-1, -1]]
    tokens = torch.tensor([[0, 1]])
    assert rule_for("auto", Proposal(tokens, [2])) == "sample_match"
    assert rule_for("auto", Proposal(tokens, [2], q)) == "block"
    assert rule_for("auto", Proposal(tokens, [2], q, parents)) == "traversal"
    assert rule_for("auto", Proposal(tokens, [2], None, parents)) == "sample_match"
    with pytest.raises(ConfigError, match="judges chains"):
        rule_for("block", Proposal(tokens, [2], q, parents))
    with pytest.raises(ConfigError, match="deterministic"):
        rule_for("traversal", Proposal(tokens, [2], None, parents))
    for gone in ("recursive", "lossy:typical", "greedy"):
        with pytest.raises(ConfigError, match="rejection_sample_method"):
            rule_for(gone, Proposal(tokens, [2]))


def test_a_tree_is_checked_when_made():
    for parents in ([1, -1], [-1, 1], [-1]):
        with pytest.raises(ValueError, match="parents"):
            Proposal(torch.tensor([[0, 1]]), [2], None, [parents])
    tree = Proposal(torch.tensor([[5, 6, 7, 8]]), [2], None, [[-1, 0, -1, 2]], unverified=[2])
    assert tree.depths() == [[1, 2, 1, 2]] and tree.children(0) == {-1: [0], 0: [1]}
