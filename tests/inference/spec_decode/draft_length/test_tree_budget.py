"""Trees that grow while a place is worth its verification: as far as prices say, and without
looking."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from inference import SamplingParams
from inference.entrypoints.loading import make_draft_length
from inference.entrypoints.speculative_config import parse_speculative_config
from inference.requests.request import Request
from inference.sampling.sampler import make_generator
from inference.spec_decode import tree_drafting
from inference.spec_decode.draft_length.costs import MeasuredCosts, RoundCosts
from inference.spec_decode.draft_length.policy import AdaptiveDraftLength
from inference.spec_decode.draft_length.tree_budget import AdaptiveTreeBudget
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.tree_drafting import TreeGrowth
from inference.spec_decode.tree_shape import DynamicTree
from inference.spec_decode.verification.tree_rules import TREE_RULES, trees_of
from speculators.errors import ConfigError
from tests.inference.engine.test_engine import (  # noqa: F401 (fixtures among them)
    SMALL_PROMPT,
    SMALL_VOCAB,
    WRITTEN,
    check_greedy,
    check_joint_pairs,
    exact_joint,
    greedy_cases,
    ids_of,
    model,
    small,
    texts,
    token_prompts,
)
from tests.inference.modules import make_llm
from tests.inference.spec_decode.draft_length.test_block_lengths import FAMILIES, follow_the_prompt
from tests.inference.spec_decode.verification.test_tree_verification import (
    LOSSLESS,
    VOCAB,
    EveryThrow,
    random_table,
)
from tests.speculators.families.conftest import Case, make

SHAPE = DynamicTree(topk=3, depth=3, budget=7)
CASES = {
    **FAMILIES,
    "peagle": Case(
        "peagle", {"num_depths": 3, "mask_token_id": 2}, {"own_embeddings": False}, taps=(1, 2)
    ),
    "eagle3": Case("eagle3", taps=(1, 2)),
}


def budget(verify) -> AdaptiveTreeBudget:
    costs = {"verify": list(verify), "draft": [1.0] * SHAPE.budget}
    return AdaptiveTreeBudget(SHAPE.budget, RoundCosts.given(costs, SHAPE.budget))


def linear(slope: float) -> list[float]:
    return [10 + slope * w for w in range(SHAPE.budget + 1)]


# ---------------------------------------------------------------------- how far a tree grows


def grown(
    shape: DynamicTree,
    temperature: float,
    prices,
    rows: int = 1,
    seeds=None,
    sharpness: float = 2.0,
):
    requests = [
        Request(
            str(b),
            b,
            [1],
            SamplingParams(temperature=temperature),
            generator=make_generator(seed),
            max_model_len=64,
        )
        for b, seed in enumerate(seeds or range(rows))
    ]
    grow = TreeGrowth(shape, requests, [shape.depth] * rows, None, 60, prices=prices)
    generator, width = torch.Generator().manual_seed(0), 1
    one_row = torch.randn(shape.depth, 1, shape.topk, 60, generator=generator)
    for logits in one_row:
        level = grow(sharpness * logits[:, :width].expand(rows, -1, -1))
        width = width if level is None else level.token_ids.shape[1]
    return grow, grow.proposal()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_places_are_all_taken_and_dear_ones_are_not(temperature):
    shape = DynamicTree(4, 4, 14)
    _, whole = grown(shape, temperature, None)
    _, free = grown(shape, temperature, [3.0] * 15)
    assert free.counts == whole.counts == [14]
    assert free.parents == whole.parents and torch.equal(free.token_ids, whole.token_ids)
    _, dear = grown(shape, temperature, [2.0 * w for w in range(15)])
    assert dear.counts == [1]
    counts = [
        grown(shape, temperature, [slope * w for w in range(15)])[1].counts[0]
        for slope in (0.3, 0.1, 0.03, 0.01)
    ]
    assert counts == sorted(counts) and 1 < counts[1] < 14


def test_a_price_of_a_place_is_a_threshold_of_path_probabilities():
    """Of the likeliest children, with one row: all places above it, and no others."""
    shape = DynamicTree(4, 4, 60)
    grow, _ = grown(shape, 0.0, None, sharpness=3.0)
    (every,) = tree_drafting._Grown.all_of(grow._levels)
    scores = sorted((every.score[d][i] for d, i in every.nodes()), reverse=True)
    for slope in (0.2, 0.05, 0.01):
        _, pruned = grown(shape, 0.0, [slope * w for w in range(61)], sharpness=3.0)
        assert pruned.counts == [sum(score > slope for score in scores)]
        assert pruned.expected == pytest.approx(sum(score for score in scores if score > slope))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_share_the_columns_of_a_forward(temperature):
    """A column that is dear for one row pays for five that are alike; no row is wider than the
    batch's places."""
    shape, prices = DynamicTree(4, 4, 14), [0.2 * w for w in range(15)]
    _, alone = grown(shape, temperature, prices)
    _, together = grown(shape, temperature, prices, rows=5, seeds=[0] * 5)
    assert together.counts == together.counts[:1] * 5
    assert together.counts[0] > alone.counts[0]


def test_a_step_of_the_costs_is_climbed_where_what_lies_behind_it_pays():
    """The first place is the expensive one, as where a product of a vector becomes one of a
    matrix."""
    shape = DynamicTree(4, 4, 14)
    for step, expected in (
        (0.2, 14),
        (50.0, 14),
    ):  # one place at least is verified, and the others cost nothing
        assert grown(shape, 0.0, [0.0, *[step] * 14])[1].counts == [expected]
    assert grown(shape, 0.0, [0.0, 0.0, *[50.0] * 13])[1].counts == [1]
    assert grown(shape, 0.0, [0.0, 0.0, *[0.3] * 13], sharpness=3.0)[1].counts == [14]


def test_what_is_drawn_does_not_decide_how_much_is():
    """Of the first level, whose logits are the same whatever the numbers are."""
    prices = [0.05 * w for w in range(15)]
    alive = [
        grown(DynamicTree(4, 4, 14), 1.0, prices, seeds=[seed])[0]._levels[0].alive
        for seed in range(8)
    ]
    assert all(torch.equal(alive[0], each) for each in alive)
    assert 1 <= int(alive[0].sum()) < 4


# ---------------------------------------------------------------------- lossless


class PrunedAfterwards(TreeGrowth):
    """The known bug: what was drawn is left out by its own probability."""

    def _chosen(self, rows):
        return [sorted(row.best(2, 2)) for row in rows]


def distance(growth, prices, rule: str, monkeypatch) -> tuple[float, set[int]]:
    """Total variation of three tokens from the target's, over every tree that can be drawn and
    every throw of the rule; and the numbers of places that there were."""
    p, q, shape = random_table(3), random_table(60), DynamicTree(2, 2, 4)
    drafting, written, sizes = EveryThrow(), {}, set()

    def draw(weights, noise):
        return torch.tensor([drafting.draw(row) if row.sum() > 0 else VOCAB for row in weights])

    monkeypatch.setattr(tree_drafting, "inverse_cdf", draw)
    monkeypatch.setattr(
        tree_drafting, "batch_probabilities", lambda logits, params: logits.exp()
    )  # in float64

    def tree():
        request = Request(
            "0", 0, [1], SamplingParams(), generator=make_generator(0), max_model_len=64
        )
        grow, paths = growth(shape, [request], [2], None, VOCAB, prices=prices), [()]
        while (level := grow(torch.stack([q(path) for path in paths]).log()[None])) is not None:
            (tokens,), (parents,) = level.token_ids.tolist(), level.parents.tolist()
            paths = [(*paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return grow.proposal(), None

    for proposal, _, mass in drafting.walks(tree):
        prefixes = [tuple(path) for path in proposal.paths(0)]
        sizes.add(proposal.counts[0])
        probabilities, dice = torch.stack([p(prefix) for prefix in prefixes]), EveryThrow()
        (found,) = trees_of(proposal, probabilities[None])
        for path, token, chance in dice.walks(
            lambda p=probabilities, tree=found, dice=dice: dice.one(TREE_RULES[rule](p, tree, dice))
        ):
            text = (*(proposal.drafted[0][place] for place in path), token)
            written[text] = written.get(text, 0.0) + mass * chance
    total = 0.0
    for text in itertools.product(range(VOCAB), repeat=3):
        steps = [float(p(text[:k])[x]) for k, x in enumerate(text)]
        got = sum(written.get(text[:k], 0.0) * np.prod(steps[k:]) for k in (1, 2, 3))
        total += abs(got - np.prod(steps)) / 2
    return total, sizes


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_grown_trees_are_lossless_by_enumeration(rule, monkeypatch):
    for prices in (None, [0.25 * w for w in range(5)], [0.0, 0.0, 0.3, 0.3, 0.5]):
        found, sizes = distance(TreeGrowth, prices, rule, monkeypatch)
        assert found <= LOSSLESS, (prices, found)
        assert prices is None or len(sizes) > 1


@pytest.mark.slow
def test_the_enumeration_notices_a_tree_that_is_pruned_after_drawing(monkeypatch):
    assert distance(PrunedAfterwards, None, "traversal", monkeypatch)[0] > 1e-3


def tree_llm(family: str, model, length, **options):
    target, drafter = make(CASES[family], model)
    if model.config.vocab_size == SMALL_VOCAB and family in FAMILIES:
        follow_the_prompt(drafter, model)
    return make_llm(target, drafter=drafter.freeze(), tree=SHAPE, draft_length=length, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dspark", "dflash", "peagle"])
def test_joint_of_the_first_tokens(family, small):
    """χ² of four tokens at T = 1, five rows at a time."""
    params = SamplingParams(temperature=1.0, max_tokens=WRITTEN, n=1500)
    llm = tree_llm(family, small, budget(linear(1.0)), seed=5, max_num_seqs=5)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint_pairs(output, exact_joint(small, params))
    counters = llm.get_metrics()
    assert counters.num_accepted_tokens > 100
    assert 1 < counters.num_draft_tokens / counters.num_drafts < SHAPE.budget


@pytest.mark.slow
@pytest.mark.parametrize("costs", ["cheap", "dear", "measured"])
@pytest.mark.parametrize("family", CASES)
def test_greedy_equals_the_target_alone(costs, family, model, texts, byte_tokenizer):
    made = {
        "cheap": lambda: budget(linear(0.0)),
        "dear": lambda: budget(linear(1.5)),
        "measured": lambda: AdaptiveTreeBudget(SHAPE.budget, MeasuredCosts(SHAPE.budget)),
    }[costs]()
    cases = greedy_cases(texts, byte_tokenizer)
    options = {"tokenizer": byte_tokenizer, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    llm = tree_llm(family, model, made, **options)
    outputs = llm.generate(
        token_prompts(*(case[0] for case in cases)), [case[1] for case in cases], use_tqdm=False
    )
    check_greedy(outputs, cases)
    counters = llm.get_metrics()
    mean = counters.num_draft_tokens / counters.num_drafts
    if costs != "measured":
        assert mean > 0.8 * SHAPE.budget if costs == "cheap" else 1 <= mean < 3


def test_a_rehearsed_tree_leaves_no_trace(model, monkeypatch):
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0, 1)]
    runs = []
    for rehearsing in (False, True):
        llm = tree_llm("eagle3", model, budget(linear(0.5)))
        proposer = llm.engine.proposer
        propose = proposer.propose

        def watched(requests, limits, llm=llm, propose=propose, rehearsing=rehearsing):
            if rehearsing:
                llm.engine.proposer.rehearse(requests, SHAPE.budget)
            return propose(requests, limits)

        monkeypatch.setattr(proposer, "propose", watched)
        runs.append(ids_of(llm.generate(token_prompts("plain", "long"), params, False)))
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------- the price


class FakeProposer:
    place_prices = None


class SimpleRequest:
    draft_limit = most_drafts = 1000


def test_time_that_is_put_to_good_use_becomes_dearer():
    """ρ is what rounds of late gained; it follows the rounds, and is never below that of plain
    decoding."""
    length, proposer = budget(linear(1.0)), FakeProposer()
    length.attach(proposer, lambda rows, tokens: None)
    rows = [SimpleRequest()] * 2

    def price_of_a_place() -> float:
        assert length.limits(rows) == [SHAPE.budget] * 2
        return (proposer.place_prices[5] - proposer.place_prices[4]) * length.calibration

    assert price_of_a_place() == pytest.approx(2 * 1.0 / 10)  # two rows commit two tokens in ten
    for _ in range(300):
        price_of_a_place()
        length.learn([4, 2], [3, 2], 0.0, 0.0)
    assert length.gain == pytest.approx(3.5 / 1.5, rel=1e-2)  # 1 + 2.5 tokens in 10 + 4 + 1
    assert price_of_a_place() == pytest.approx(2 * 0.1 * length.gain)
    for _ in range(300):
        price_of_a_place()
        length.learn([4, 2], [0, 0], 0.0, 0.0)
    assert length.gain < 1
    assert price_of_a_place() == pytest.approx(0.2)


def test_a_drafter_that_is_too_sure_is_corrected():
    """κ becomes what is accepted over what was expected, and prices rise with its inverse."""
    length, proposer = budget(linear(1.0)), FakeProposer()
    length.attach(proposer, lambda rows, tokens: None)
    prices = []
    for accepted in [1] * 300 + [3] * 300:
        length.limits([SimpleRequest()])
        prices.append(proposer.place_prices[5] / max(length.gain, 1.0))
        tokens = torch.zeros(1, 4, dtype=torch.long)
        length.settle(Proposal(tokens, [4], None, [[-1, 0, 1, 2]], expected=2.0))
        length.learn([4], [accepted], 0.0, 0.0)
    assert prices[299] / prices[0] == pytest.approx(2, rel=0.05)
    assert prices[-1] / prices[0] == pytest.approx(2 / 3, rel=0.05)


def test_options():
    base = {
        "method": "dspark",
        "model": "somewhere",
        "num_speculative_tokens": 7,
        "enable_adaptive_verification": True,
    }
    grown = parse_speculative_config(
        {**base, "speculative_eagle_topk": 3, "speculative_num_steps": 3}
    )
    assert isinstance(make_draft_length(grown), AdaptiveTreeBudget)
    assert isinstance(make_draft_length(parse_speculative_config(base)), AdaptiveDraftLength)
    with pytest.raises(ConfigError, match="the shape of these drafts is fixed"):
        parse_speculative_config(
            {**base, "num_speculative_tokens": 1, "speculative_token_tree": "[(0,)]"}
        )
