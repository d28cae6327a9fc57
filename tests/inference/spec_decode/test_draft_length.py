"""Lengths follow acceptance, confidence and costs; that they do not anticipate is held by
tests/lossless/test_draft_lengths.py."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine import round_costs
from draftsmith.inference.entrypoints.loading import make_draft_length
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import (
    CostsBySize,
    RoundCosts,
    read_costs,
    sizes_to_measure,
)
from draftsmith.inference.spec_decode.draft_length import AdaptiveDraftLength, DraftLength
from draftsmith.inference.spec_decode.proposal import Kept, Proposal
from draftsmith.inference.spec_decode.round_plan import AdaptivePlan, RoundPlan
from draftsmith.speculators.errors import ConfigError
from tests.support.cases import make
from tests.support.draft_lengths import BLOCKS, CHEAP, DEAR, K, adaptive, stop_early
from tests.support.drafters import FakeHead, random_eagle3
from tests.support.engines import drafting_llm, ids_of, make_llm, proposer_of, same_text
from tests.support.errors import raises_at

PROMPTS = [{"prompt_token_ids": [3 + (7 * i) % 50 for i in range(n)]} for n in (9, 1, 40, 9)]


def llm_of(kind: str, model, **options) -> LLM:
    if kind in BLOCKS:
        drafter = make(BLOCKS[kind], model)[1].freeze()
    else:
        drafter = random_eagle3(model, (1, 2)) if kind == "eagle3" else FakeHead(94, (1, 2), 32)
    return make_llm(model, drafter=drafter, num_speculative_tokens=K, **options)


# ---------------------------------------------------------------------- what is chosen


class Rows:
    """A drafter and a target made of acceptance probabilities, run through a draft length without
    any model."""

    def __init__(self, length: AdaptiveDraftLength, rows: int = 1) -> None:
        self.length, self.source = length, np.random.default_rng(0)
        self.requests = [SimpleRequest() for _ in range(rows)]
        self.widths: list[int] = []

    def round(self, chance: list[float]) -> int:
        """One round; chance: of acceptance, per row at every depth. Returns its width."""
        plan = self.length.plan(self.requests)
        tokens = torch.zeros(len(plan.limits), max(plan.limits), dtype=torch.long)
        counts = plan.settle(Proposal(tokens, plan.limits)).counts
        kept = []
        for row, count in enumerate(counts):
            hits = [self.source.random() < chance[row] for _ in range(count)]
            accepted = hits.index(False) if False in hits else count
            kept.append(Kept(list(range(accepted)), [0] * (accepted + 1)))
        plan.learn(kept)
        self.widths.append(max(counts))
        return max(counts)


class SimpleRequest:
    draft_limit = most_drafts = 1000


def test_drafts_that_are_accepted_are_asked_for_and_others_are_not():
    rows = Rows(adaptive(DEAR))
    for _ in range(100):
        rows.round([0.95])
    assert np.mean(rows.widths[-50:]) > K - 0.2
    for _ in range(300):
        rows.round([0.1])
    assert np.mean(rows.widths[-200:]) < 0.05


def test_probing_costs_a_hundredth_and_finds_what_pays_again():
    rows, spent, rounds = Rows(adaptive(DEAR)), 0.0, 2000
    for _ in range(rounds):
        width = rows.round([0.0])
        spent += DEAR["verify"][width] + (DEAR["draft"][width - 1] if width else 0) - 10
    assert any(rows.widths[-500:])
    assert spent / (rounds * 10) < 0.01 + 10 / rounds  # the first probes, once
    for _ in range(400):
        rows.round([0.97])
    assert np.mean(rows.widths[-100:]) > K - 0.5


def test_confidence_counts_as_far_as_it_holds_and_never_as_certainty():
    holds, boasts, understates = (Acceptance(1) for _ in range(3))
    for turn in range(300):
        holds.learn([1], [turn % 2], [[0.5]])
        boasts.learn([1], [turn % 3 == 0], [[0.95]])
        understates.learn([1], [1], [[0.5]])
    assert holds.by_confidence([0.5]) == pytest.approx([0.5], abs=0.02)
    assert boasts.by_confidence([0.9]) == pytest.approx([0.3], abs=0.05)
    (sure,) = understates.by_confidence([0.9])
    assert 0.95 < sure < 1


def test_what_was_given_up_is_tried_again():
    """Depths that are not reached fade towards the one before them."""
    acceptance = Acceptance(K)
    assert len(acceptance.rates(2)) == 2 and 0 < min(acceptance.rates(2))
    assert max(acceptance.rates(2)) < 1
    for _ in range(100):
        acceptance.learn([K], [1], [])  # the second draft fails
    assert acceptance.rates(K)[1] < 0.1
    for _ in range(300):
        acceptance.learn([1], [1], [])
    assert acceptance.rates(K)[1] > 0.8


def most_paying(room, rho, costs, rates, known, length: int, drafted: bool) -> int:
    """How many drafts more than `length` gain the most over ρ times their time, by the definition
    in round_plan.py, with every sum taken anew; 0: none does."""

    def surplus(width: int) -> float:
        time = costs.verify[width] - costs.verify[length]
        if not drafted and width > length:
            time += costs.draft[width] - costs.draft[length + 1]
        return expected_tokens(room, rates, known, width) - rho * time

    best = max(range(length, max(room) + 1), key=surplus)
    return best - length


def expected_tokens(room, rates, known, width: int) -> float:
    """Drafts of all rows that are expected to be accepted, of `width` in each that has as many;
    known [d][B]: acceptance of the first depths."""
    total = 0.0
    for row, limit in enumerate(room):
        chances = [known[k][row] if k < len(known) else rates[k] for k in range(min(width, limit))]
        total += float(np.cumprod(chances).sum())
    return total


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_adaptive_plan_drafts_and_verifies_what_gains_most_for_its_time(seed, drafted):
    """And learns what became of it."""
    source = np.random.default_rng(seed)
    most = 5
    acceptance = Acceptance(most)
    for accepted in source.integers(most + 1, size=30):
        acceptance.learn([most], [int(accepted)], [[0.5]] * most)
    acceptance.idle_rounds = 0  # nothing is forced
    taught = copy.deepcopy(acceptance)
    rates = acceptance.rates(most)
    room = [*source.integers(most + 1, size=3).tolist(), most]
    rise = source.uniform(0, 5, size=(2, most + 1)).cumsum(1)
    costs = RoundCosts((10 + rise[0]).tolist(), (rise[1] - rise[1][0]).tolist())
    times = np.add(costs.verify, costs.draft)
    tokens = [len(room) + expected_tokens(room, rates, [], w) for w in range(most + 1)]
    rho = max(np.divide(tokens, times))
    plan = AdaptivePlan(acceptance, room, costs)
    limits = plan.limits if drafted else plan.limits_asking
    confidences = source.uniform(0.1, 1, size=(max(limits), len(room))).tolist()
    expected: list[int] = []
    known = []
    while len(known) < max(limits) and (not expected or expected[-1]):
        known.append(acceptance.by_confidence(confidences[len(known)]))
        seen = (limits if drafted else room, rho, costs, rates, known)
        expected.append(most_paying(*seen, len(known) - 1, drafted))
    length = len([further for further in expected if further])
    proposal = Proposal(torch.zeros(len(room), max(limits), dtype=torch.long), limits)
    if drafted:
        proposal.confidence = torch.tensor(confidences, dtype=torch.float64).T
    else:
        assert [plan.go_on(shown) for shown in confidences[: len(expected)]] == expected
        proposal = proposal.shortened(length)
    settled = plan.settle(proposal)
    assert settled.counts == [min(limit, length) for limit in limits]
    assert settled.width == max(settled.counts)
    accepted = [int(source.integers(count + 1)) for count in settled.counts]
    plan.learn([Kept(list(range(count)), [0] * (count + 1)) for count in accepted])
    if length:
        taught.learn(settled.counts, accepted, confidences)
    assert acceptance.rates(most) == taught.rates(most)
    assert acceptance.by_confidence([0.5]) == taught.by_confidence([0.5])


def test_adaptive_length_without_room_plans_no_draft():
    full = SimpleRequest()
    full.most_drafts = 0
    assert adaptive(CHEAP).plan([full]).limits == [0]
    assert isinstance(adaptive(DEAR).plan([full, SimpleRequest()]), AdaptivePlan)


def test_adaptive_length_without_costs_is_an_error():
    with raises_at(ConfigError, "AdaptiveDraftLength"):
        AdaptiveDraftLength(K).plan([SimpleRequest()])


# ---------------------------------------------------------------------- in the engine


def settled_proposals(monkeypatch, kind: type[RoundPlan]) -> list[Proposal]:
    """Gets every proposal that plans of this kind settle from now on."""
    settle, proposals = kind.settle, []

    def watched(self, proposal):
        proposals.append(proposal)
        return settle(self, proposal)

    monkeypatch.setattr(kind, "settle", watched)
    return proposals


@pytest.mark.parametrize("family", ["dspark", "dflash"])
def test_the_confidence_head_is_asked(family, model, monkeypatch):
    """What a length is told of a draft is the mean log-odds of the head's own probability and the
    largest of q; of others the largest of q."""
    stop_early(monkeypatch, False)
    llm = llm_of(family, model, draft_length=adaptive(CHEAP))
    drafter = llm.engine.proposer._drafter
    read, states = drafter.read, []
    monkeypatch.setattr(drafter, "read", lambda *of: states.append(read(*of)) or states[-1])
    proposals = settled_proposals(monkeypatch, AdaptivePlan)
    llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), False)
    hidden = iter(states)
    for proposal in proposals:
        for depth in range(proposal.width):
            state = next(hidden)
            expected = drafter.head(state).float().softmax(-1).amax(-1)
            if (confidence := drafter.confidence(state)) is not None:
                expected = ((confidence.clamp(-6, 6) + expected.logit().clamp(-6, 6)) / 2).sigmoid()
            torch.testing.assert_close(proposal.confidence[:, depth], expected)
    assert len(proposals) > 2


class Irregular(DraftLength):
    """Long stretches without a draft, then a few rounds with, other lengths in every row."""

    rounds = 0

    def plan(self, rows):
        self.rounds += 1
        if self.rounds % 29 < 24:
            return RoundPlan([0] * len(rows))
        lengths = [(self.rounds + row) % (K + 1) for row in range(len(rows))]
        return RoundPlan([min(pair) for pair in zip(lengths, self._room(rows), strict=True)])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_that_paused_has_seen_the_committed_text(rows, model, monkeypatch):
    llm = llm_of("fake", model, max_num_seqs=rows, draft_length=Irregular(K))
    proposer, drafter = llm.engine.proposer, llm.engine.proposer._drafter
    propose, checked = proposer.propose, 0

    def checking(requests, plan):
        nonlocal checked
        before = list(proposer._seen)
        proposal = propose(requests, plan)
        if max(plan.limits) or proposer._seen != before:
            for row, request in enumerate(requests):
                ids = request.token_ids
                assert proposer.cache.lengths[row] == len(ids) - 1
                features = torch.cat(llm.engine.target(torch.tensor([ids[:-1]])), -1)
                slots = drafter.embedding[ids[1:]] + (features @ drafter.project)[0]
                seen = proposer.cache.memory()[1][0][row, 0, : len(ids) - 1]
                torch.testing.assert_close(seen, slots, atol=1e-4, rtol=1e-4)
                checked += 1
        return proposal

    monkeypatch.setattr(proposer, "propose", checking)
    params = [
        SamplingParams(temperature=t, max_tokens=n, seed=n)
        for t, n in ((0, 50), (1, 40), (1, 9), (0, 45))
    ]
    llm.generate(PROMPTS, params, False)
    assert checked > 12


@pytest.mark.parametrize("kind", ["fake", "eagle3"])
def test_rehearsing_leaves_no_trace(kind, model, monkeypatch):
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0, 1)]
    expected = ids_of(llm_of(kind, model).generate(PROMPTS[1:3], params, False))
    llm = llm_of(kind, model)
    propose = llm.engine.proposer.propose

    def rehearsing(requests, plan):
        for depth in (0, 1, K):
            llm.engine.proposer.rehearse(requests, depth)
            llm.engine.runner.rehearse(len(requests), depth + 1)
        return propose(requests, plan)

    monkeypatch.setattr(llm.engine.proposer, "propose", rehearsing)
    assert ids_of(llm.generate(PROMPTS[1:3], params, False)) == expected


# ---------------------------------------------------------------------- measured costs


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100])
def test_sizes_to_measure_reach_all_rows_and_double_at_most(most):
    sizes = sizes_to_measure(most)
    assert sizes[0] == 1 and sizes[-1] == most
    assert all(small < large <= 2 * small for small, large in itertools.pairwise(sizes))


def test_costs_between_two_sizes_are_on_a_straight_line():
    """Beyond the last they are those of the last; of one size alone, those of all."""
    few, many = RoundCosts([10.0, 12.0], [0.0, 1.0]), RoundCosts([20.0, 40.0], [0.0, 3.0])
    costs = CostsBySize({4: few, 8: many})
    assert costs.of(4) == few and costs.of(8) == many
    assert costs.of(7) == RoundCosts([17.5, 33.0], [0.0, 2.5])
    assert costs.of(1) == few and costs.of(9) == many
    assert CostsBySize({1: many}).of(64) == many


def test_costs_of_options_cost_nothing_without_a_draft():
    assert read_costs(DEAR, K) == RoundCosts(DEAR["verify"], [0, *DEAR["draft"]])


@pytest.mark.parametrize("kind", ["fake", "eagle3", "ngram"])
def test_costs_measured_in_an_engine_are_those_of_its_rounds(kind, model, monkeypatch):
    """Of 1 to K + 1 tokens and of 0 to K drafts, none below the one before; the text that goes on
    is as without."""
    monkeypatch.setattr(round_costs, "MEASURING_SECONDS", 0.0)
    length = AdaptiveDraftLength(K)
    if kind == "ngram":
        proposer = proposer_of("ngram", K)
        llm = make_llm(model, proposer=proposer, draft_length=length, max_num_seqs=3)
    else:
        llm = llm_of(kind, model, draft_length=length, max_num_seqs=3)
    assert length._costs is not None
    for rows in (1, 2, 3):
        verify, draft = length._costs.of(rows)
        assert len(verify) == len(draft) == K + 1
        assert 0 < verify[0] and verify == sorted(verify)
        assert draft[0] == 0 and draft == sorted(draft)
        assert (draft[1] > 0) == (kind != "ngram")
    same_text(llm, PROMPTS, 20)


@pytest.mark.parametrize("length", [4, 40, None])
def test_costs_are_measured_before_requests_and_never_in_one(length, model, monkeypatch):
    """In rows of any length. A warm-up is told what became of its drafts, and requests are not."""
    monkeypatch.setattr(round_costs, "MEASURING_SECONDS", 0.0)
    timed, costs_of = [], round_costs._costs_of

    def watched(runner, proposer, rows):
        timed.append(len(rows))
        return costs_of(runner, proposer, rows)

    monkeypatch.setattr(round_costs, "_costs_of", watched)
    policy = AdaptiveDraftLength(K)
    llm = llm_of("eagle3", model, draft_length=policy, max_num_seqs=5, max_model_len=length)
    assert timed == [1, 2, 4, 5]
    assert not llm.engine.has_unfinished and not any(llm.engine.runner.cache.lengths)
    llm.warm_up()
    assert llm.get_metrics().num_drafts == 0
    assert policy._acceptance.rates(K) == Acceptance(K).rates(K)
    params = [SamplingParams(temperature=0, max_tokens=2 + 3 * i) for i in range(5)]
    llm.generate([PROMPTS[1]] * 5, params, False)  # of five rows, and of one fewer each time
    assert llm.get_metrics().num_drafts > 0 and len(timed) == 4


def test_costs_of_compiled_rounds_are_measured_by_the_thread_that_runs_them(model, monkeypatch):
    """That of the first request, since CUDA graphs belong to the thread that captured them."""
    timed = []
    costs = round_costs.RoundCosts([1.0] * (K + 1), [0.0] + [0.1] * K)
    monkeypatch.setattr(round_costs, "_costs_of", lambda *_: timed.append(1) or costs)
    compiled = {"mode": 3, "backend": "eager"}
    policy = AdaptiveDraftLength(K)
    llm = llm_of("eagle3", model, draft_length=policy, compilation_config=compiled)
    assert not timed
    for prompt in PROMPTS:
        llm.submit(Prompt(None, prompt["prompt_token_ids"]), SamplingParams())
    assert timed == [1] * len(sizes_to_measure(llm.engine.options.max_num_seqs))


def test_costs_are_those_of_drafting_after_rounds_without(model, monkeypatch):
    """As in a warm-up, whose last rounds draft nothing."""
    monkeypatch.setattr(round_costs, "MEASURING_SECONDS", 0.0)
    policy = AdaptiveDraftLength(K)
    llm = llm_of("eagle3", model, draft_length=policy, max_num_seqs=2)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4), False, speculate=False)
    round_costs.measure_costs(llm.engine)
    assert policy._costs.of(1).draft[1] > 0
    same_text(llm, PROMPTS, 20)


@pytest.mark.parametrize("length", [adaptive(CHEAP), DraftLength(K)])
def test_costs_that_are_options_or_not_asked_for_are_not_measured(length, model, monkeypatch):
    monkeypatch.setattr(round_costs, "_costs_of", lambda *of: pytest.fail("they were measured"))
    llm_of("eagle3", model, draft_length=length)


# ---------------------------------------------------------------------- options


def length_of(**options) -> DraftLength:
    config = {"method": "ngram", "num_speculative_tokens": K, **options}
    return make_draft_length(parse_speculative_config(config))


def test_schedule_by_batch_size():
    length = length_of(num_speculative_tokens_per_batch_size=[[2, 4, 2], [8, 64, 0]])
    sizes = (1, 2, 4, 6, 8, 100)
    lengths = [max(length.plan([SimpleRequest()] * size).limits) for size in sizes]
    assert lengths == [K, 2, 2, 2, 0, 0]
    capped = length_of(
        enable_adaptive_verification=True,
        adaptive_verification_costs=CHEAP,
        num_speculative_tokens_per_batch_size=[[1, 1, 1]],
    )
    assert capped.plan([SimpleRequest()]).limits == [1]


@pytest.mark.parametrize("family", ["dspark", "dflash"])
def test_a_schedule_cuts_blocks_and_changes_no_draft(family, model, monkeypatch):
    drafted = []
    for most in (K, 2):
        llm = llm_of(family, model, draft_length=DraftLength(K, [(1, 8, most)]))
        seen = settled_proposals(monkeypatch, RoundPlan)
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=14), False)
        assert {proposal.width for proposal in seen[:-2]} == {most}
        drafted.append(seen[0].token_ids[:, :2].tolist())
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("kind", ["static", "dynamic", "lookahead"])
def test_a_schedule_of_trees_is_of_drafts(kind, model):
    """K of the batch size is what a row drafts at most, of a tree and of guesses too."""
    most = {}
    for k in (6, 2):
        length = DraftLength(6, [(1, 2, 6), (3, 8, k)])
        llm = drafting_llm(
            kind, model, draft_length=length, num_speculative_tokens=6, max_num_seqs=4
        )
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, False)
        # four rows run until the first of them ends
        rounds = min(len(output.metrics.drafted_per_round) for output in outputs) // 2
        most[k] = max(max(output.metrics.drafted_per_round[:rounds]) for output in outputs)
        assert ids_of(outputs) == ids_of(llm.generate(PROMPTS, params, False, speculate=False))
    assert most[2] == 2 < most[6] <= 6


ADAPTIVE = {"enable_adaptive_verification": True}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_speculative_tokens_per_batch_size": [[1, 4, K + 1]]}, "batch_size"),
        ({"adaptive_verification_costs": CHEAP}, "enable_adaptive_verification"),
        *(
            ({**ADAPTIVE, "adaptive_verification_costs": costs}, "costs")
            for costs in (
                {"verify": [1, 2]},
                {"verify": [1] * K, "draft": [1] * K},
                {"verify": [], "draft": []},
                {**DEAR, "verify": [0, 1, 1, 1]},
                {**DEAR, "draft": [1, -1, 1]},
                {**DEAR, "sample": [1]},
            )
        ),
        ({**ADAPTIVE, "method": "eagle3", "model": "x", "speculative_eagle_topk": 2}, "adaptive"),
    ],
)
def test_refused_options(options, named):
    with pytest.raises(ConfigError, match=named):
        length_of(**options)
