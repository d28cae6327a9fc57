"""Shapes of trees: what is refused, what a level holds, and that best-first takes the best."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import make_generator
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.tree_drafting import GROWTHS, DynamicGrowth
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree, TreeShape
from draftsmith.speculators.errors import ConfigError
from tests.support.errors import raises_at

MEDUSA = "[(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0)]"


def test_a_static_tree_by_levels():
    tree = StaticTree.parse(MEDUSA)
    assert tree.choices == ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert (tree.depth, tree.budget, tree.speculative_slots) == (3, 7, 3)
    assert tree.levels == [[(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 1), (1, 0)], [(0, 0)]]
    assert tree.frontiers == [[0, 1], [0]]


@pytest.mark.parametrize("given_", ["[(0,), (1, 0)]", "[(-1,)]", "[()]", "[]", "(0,"])
def test_what_is_no_tree_is_refused(given_):
    with raises_at(ConfigError, "speculative_token_tree"):
        StaticTree.parse(given_)


@pytest.mark.parametrize("topk,depth,budget", list(itertools.product([1, 4], [1, 6], [6, 20])))
def test_draws_of_a_sampled_tree_keep_to_the_budget(topk, depth, budget):
    tree = DynamicTree(topk, depth, budget)
    dealt = [tree.draws(d) for d in range(depth)]
    assert all(1 <= drawn <= topk**2 for drawn in dealt) and dealt[0] <= topk
    assert sum(dealt) <= budget
    if budget >= topk + (depth - 1) * topk**2:
        assert dealt == [topk] + [topk**2] * (depth - 1)


@pytest.mark.parametrize("shape", [(4, 5, 10), (8, 4, 16), (3, 6, 14)], ids=str)
def test_a_sampled_tree_spends_its_whole_budget_on_what_is_verified(shape):
    """No number is drawn below a node that was not drafted: such a child would not be verified, and
    the budget that is dealt out before anything is drawn would be lost with it."""
    shape = DynamicTree(*shape)
    requests = [
        Request(
            str(b), b, [1], SamplingParams(seed=b), generator=make_generator(b), max_model_len=64
        )
        for b in range(20)
    ]
    growth = DynamicGrowth(shape, requests, [shape.budget] * len(requests), None, 60)
    generator, width = torch.Generator().manual_seed(0), 1
    while (
        level := growth(2 * torch.randn(len(requests), width, 60, generator=generator))
    ) is not None:
        width = level.token_ids.shape[1]
    assert growth.proposal().counts == [sum(map(shape.draws, range(shape.depth)))] * len(requests)


@pytest.mark.parametrize(
    "chances, budget", [([0.5, 0.3, 0.15, 0.05], 9), ([0.7, 0.3, 0.0, 0.0], 20)]
)
def test_a_greedy_tree_is_the_likeliest_nodes_of_those_that_can_be_drafted(chances, budget):
    """Every node has the same children; compared with sorting all of a tree of three levels."""
    chances = torch.tensor(chances)
    request = Request("0", 0, [1], SamplingParams(temperature=0), generator=None, max_model_len=64)
    growth, width = DynamicGrowth(DynamicTree(4, 3, budget), [request], [99], None, 4), 1
    while (level := growth(chances.log().expand(1, width, -1))) is not None:
        width = level.token_ids.shape[1]
    proposal, every = growth.proposal(), []
    for depth in (1, 2, 3):
        for path in itertools.product(range(4), repeat=depth):
            every.append(float(chances[list(path)].prod()))
    paths = proposal.paths(0)[1:]
    possible = sorted(filter(None, every), reverse=True)[:budget]
    assert proposal.counts == [len(possible)] == [len(set(map(tuple, paths)))]
    kept = sorted((float(chances[path].prod()) for path in paths), reverse=True)
    assert kept == pytest.approx(possible)


def grown(shape: TreeShape, requests: list[Request], limits: list[int]) -> list[list]:
    """Tokens and parents of each row's tree, drafted from logits that its request alone decides."""
    growth = GROWTHS[type(shape)](shape, requests, limits, None, 60)
    width, depth, level = 1, 0, None
    while depth == 0 or level is not None:
        logits = []
        for request in requests:
            source = torch.Generator().manual_seed(100 * request.index + depth)
            logits.append(2 * torch.randn(width, 60, generator=source))
        level = growth(torch.stack(logits))
        width = width if level is None else level.token_ids.shape[1]
        depth += 1
    proposal = growth.proposal()
    return [
        [proposal.drafted[row][:count], proposal.parents_of(row)]
        for row, count in enumerate(proposal.counts)
    ]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", [DynamicTree(4, 5, 16), StaticTree.parse(MEDUSA)], ids=str)
def test_a_tree_has_no_more_nodes_than_its_row_may_draft(shape, temperature):
    """Whatever the other rows may draft; at temperature 0 it has as many."""
    limits = [*range(shape.budget + 1), 99]

    def request_of(b: int) -> Request:
        params = SamplingParams(temperature=temperature, seed=b)
        return Request(str(b), b, [1], params, generator=make_generator(b), max_model_len=64)

    rows = grown(shape, [request_of(b) for b in range(len(limits))], limits)
    for b, (limit, row) in enumerate(zip(limits, rows, strict=True)):
        tokens, _ = row
        most = min(limit, shape.budget)
        # a sampled tree deals its budget out to levels, which may not have as many places
        assert len(tokens) <= most and (temperature or len(tokens) == most)
        if limit:
            assert len(tokens) > 0
            assert grown(shape, [request_of(b)], [limit]) == [row]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_token_tree": MEDUSA},  # which has 7 choices
        {"speculative_token_tree": "[(0,)]", "speculative_eagle_topk": 2},
        {"speculative_num_steps": 3},
        {"speculative_eagle_topk": 2, "speculative_num_steps": 9},
        {"method": "ngram", "speculative_eagle_topk": 2},
    ],
)
def test_options_that_contradict_each_other_are_refused(options):
    base = {"method": "eagle3", "model": "somewhere", "num_speculative_tokens": 4}
    with raises_at(ConfigError, "speculative_config"):
        parse_speculative_config({**base, **options})


def test_options_make_shapes():
    base = {"method": "eagle3", "model": "somewhere"}
    shape = parse_speculative_config(
        {**base, "num_speculative_tokens": 7, "speculative_token_tree": MEDUSA}
    ).tree
    assert shape == StaticTree.parse(MEDUSA)
    grown = {"num_speculative_tokens": 12, "speculative_eagle_topk": 4, "speculative_num_steps": 5}
    assert parse_speculative_config({**base, **grown}).tree == DynamicTree(4, 5, 12)
    assert parse_speculative_config({**base, "num_speculative_tokens": 4}).tree is None
