"""Lengths are chosen without anticipating, so that text keeps its distribution; they follow
acceptance and costs."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inference import LLM, SamplingParams
from inference.entrypoints.loading import make_draft_length
from inference.entrypoints.speculative_config import parse_speculative_config
from inference.sampling.sampler import batch_probabilities, inverse_cdf
from inference.spec_decode.draft_length.acceptance_estimator import (
    AcceptanceEstimator,
    RequestHistory,
)
from inference.spec_decode.draft_length.costs import MeasuredCosts, RoundCosts
from inference.spec_decode.draft_length.policy import AdaptiveDraftLength, DraftLength
from inference.spec_decode.draft_length.round_plan import RoundPlan
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers import drafter as head
from speculators.drafter import DraftLogits
from speculators.errors import ConfigError
from tests.inference.engine.test_engine import (  # noqa: F401 (fixtures among them)
    PROMPTS,
    SMALL_PROMPT,
    SMALL_VOCAB,
    WRITTEN,
    K,
    check_greedy,
    check_joint_pairs,
    exact_joint,
    greedy_cases,
    ids_of,
    make_llm,
    model,
    small,
    texts,
    token_prompts,
)
from tests.inference.modules import make_llm as llm_of
from tests.lossless.enumeration import (
    LOSSLESS,
    World,
    assert_lossless,
    chain,
    enumerate_rule,
    random_table,
)

CHEAP = {"verify": [10, 10.5, 11, 11.5], "draft": [0.3, 0.6, 0.9]}
DEAR = {"verify": [10, 13, 16, 19], "draft": [1, 2, 3]}
HOPELESS = {"verify": [10, 25, 40, 55], "draft": [2, 4, 6]}


def adaptive(costs=CHEAP, schedule=None) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(K, RoundCosts.given(costs, K), schedule)


# ---------------------------------------------------------------------- never anticipating


@functools.cache
def trained_estimator() -> AcceptanceEstimator:
    """One that has learnt that sure drafts are accepted and others are not."""
    estimator, source = AcceptanceEstimator(K), np.random.default_rng(0)
    for _ in range(300):
        histories = [RequestHistory()]
        state = estimator.start_round(histories, K)
        sure = source.uniform(0.3, 0.9, K)
        for confidence in sure:
            estimator.estimate_next(state, [confidence])
        accepted = next(
            (
                k
                for k, confidence in enumerate(sure)
                if source.random() > (0.95 if confidence > 0.5 else 0.1)
            ),
            K,
        )
        estimator.learn(state, histories, [K], [accepted], confidence_available=True)
    return estimator


def after_texts(
    estimator: AcceptanceEstimator, requests: int, acceptance: float, seed: int
) -> AcceptanceEstimator:
    """What `estimator` becomes by requests of five rounds whose confidences do not tell that
    acceptance."""
    source = np.random.default_rng(seed)
    for _ in range(requests):
        histories = [RequestHistory()]
        for _ in range(5):
            state = estimator.start_round(histories, K)
            for confidence in source.uniform(0.6, 0.9, K):
                estimator.estimate_next(state, [confidence])
            accepted = next((k for k in range(K) if source.random() > acceptance), K)
            estimator.learn(state, histories, [K], [accepted], confidence_available=True)
    return estimator


def first_draft(estimator: AcceptanceEstimator, history: RequestHistory) -> float:
    return estimator.estimate_next(estimator.start_round([history], K), [0.75])[0][0]


def test_texts_of_another_kind_are_noticed():
    """Though their confidences are the same, and every request of them is new."""
    used = after_texts(AcceptanceEstimator(K), 120, 0.9, seed=1)
    assert first_draft(used, RequestHistory()) > 0.8
    worse = after_texts(used, 6, 0.4, seed=2)  # 30 rounds
    assert first_draft(worse, RequestHistory()) < 0.6
    again = after_texts(worse, 6, 0.9, seed=3)
    assert first_draft(again, RequestHistory()) > 0.75


def test_a_request_of_another_kind_is_noticed_among_others():
    mixed = AcceptanceEstimator(K)
    for seed in range(0, 160, 2):
        after_texts(after_texts(mixed, 1, 0.95, seed), 1, 0.4, seed + 1)
    histories = {name: RequestHistory() for name in ("better", "worse", "new")}
    for _ in range(4):
        histories["better"].add(0.3, 0.2)
        histories["worse"].add(-0.7, 0.2)
    seen = {name: first_draft(copy.deepcopy(mixed), history) for name, history in histories.items()}
    assert seen["worse"] + 0.1 < seen["new"] < seen["better"] - 0.03
    for _ in range(400):
        histories["worse"].idle()
    assert first_draft(copy.deepcopy(mixed), histories["worse"]) == pytest.approx(
        seen["new"], abs=0.02
    )


def planned_counts(q, confidence, drafted):
    """World.given_counts by a plan that is shown `confidence(q(prefix), x)` of every draft."""
    estimator = trained_estimator()
    costs = RoundCosts.given({"verify": [10, 11.5, 13, 14.5], "draft": [0.3, 0.6, 0.9]}, K).of([])

    def counts(draft: tuple) -> int:
        plan = RoundPlan(copy.deepcopy(estimator), [RequestHistory()], [K], *costs)
        while plan.committed_length < K and plan.decide_next(
            [confidence(q(draft[: plan.committed_length]), draft[plan.committed_length])],
            drafted=drafted,
        ):
            pass
        return plan.committed_length

    return counts


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_a_plan_are_lossless_by_enumeration(seed, drafted):
    p, q = random_table(seed), random_table(seed + 50)
    counts = planned_counts(q, lambda q, x: float(q.max()), drafted)
    models = World(chain(K), p, q, given_counts=counts)
    assert len({counts(draft) for draft in models.drafts()[0]}) > 1
    assert_lossless(models, "token")


@pytest.mark.parametrize("drafted", [False, True])
def test_the_enumeration_notices_a_plan_that_sees_the_draft(drafted):
    q = random_table(51)
    models = World(
        chain(K),
        random_table(1),
        q,
        given_counts=planned_counts(q, lambda q, x: float(q[x]), drafted),
    )
    assert enumerate_rule(models, "token")[0] > 1e-3
    assert enumerate_rule(replace(models, given_counts=None), "token")[0] <= LOSSLESS


def test_answers_do_not_depend_on_what_is_shown_later():
    costs = RoundCosts.given(DEAR, K).of([])
    source = np.random.default_rng(3)
    for _ in range(50):
        sure = source.uniform(0.05, 0.95, (K, 2))
        answers = []
        for later in (0.01, 0.99):
            plan = RoundPlan(
                copy.deepcopy(trained_estimator()),
                [RequestHistory(), RequestHistory()],
                [K, K],
                *costs,
            )
            first = plan.decide_next(list(sure[0]), drafted=True)
            answers.append((first, plan.committed_length))
            if first:
                plan.decide_next([later] * 2, drafted=True)
                assert plan.committed_length >= 1
        assert answers[0] == answers[1]


class Threshold(DraftLength):
    """Goes on while the first row's confidence is 0.4 or more: a rule whose every decision
    matters."""

    def attach(self, proposer, forward):
        proposer.go_on = lambda confidence: 0 if confidence[0] < 0.4 else K


class Bigrams:
    """A head that drafts by the last token alone, much as the target goes on after the prompt and
    that token."""

    reads_taps = reads_last_hidden = whole_blocks = False
    first_token, max_length, draft_to_target = 1, None, None
    config = SimpleNamespace(tap_layers=())

    def __init__(self, model) -> None:
        with torch.no_grad():
            self.logits = (
                0.85
                * model(
                    torch.tensor([[*SMALL_PROMPT, token] for token in range(SMALL_VOCAB)])
                ).logits[:, -1]
            )

    def attach(self, target):
        return self

    def decode_with(self, forward_of):
        """It is no language model."""

    def require_depth(self, tokens, where):
        """Any number of tokens."""

    require_length = require_depth

    def cache_length(self, slots):
        return slots

    def append(self, inputs):
        inputs.cache.reserve(inputs.start, inputs.stop, inputs.token_ids.shape[1])
        for row, count in enumerate(inputs.counts, inputs.start):
            inputs.cache.advance(row, count)

    def draft_steps(self, inputs, k):
        self.append(inputs)
        tokens = inputs.token_ids[torch.arange(len(inputs.counts)), torch.tensor(inputs.counts) - 1]
        for _ in range(k):
            tokens = yield DraftLogits(self.logits[tokens])


LENGTHS = {"adaptive": lambda: adaptive(DEAR), "threshold": lambda: Threshold(K)}


def joint_fits(draft_length, small, samples=500) -> LLM:
    """χ² of four tokens at T = 1, one request after the other: what one row does is decided by that
    row."""
    params = SamplingParams(temperature=1.0, max_tokens=WRITTEN, n=samples)
    drafting = {
        "drafter": Bigrams(small),
        "num_speculative_tokens": K,
        "draft_length": draft_length,
    }
    llm = llm_of(small, seed=5, max_num_seqs=1, **drafting)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint_pairs(output, exact_joint(small, params))
    return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "asks"), [("adaptive", True), ("adaptive", False), ("threshold", True)]
)
def test_joint_of_the_first_tokens(length, asks, small, monkeypatch):
    monkeypatch.setattr(
        head.HeadProposer,
        "stops_early",
        property(lambda self: asks, lambda self, value: None),
        raising=False,
    )
    llm = joint_fits(LENGTHS[length](), small)
    counters = llm.get_metrics()
    assert counters.num_accepted_tokens > 40
    assert 0 < counters.num_draft_tokens < K * counters.num_drafts


@pytest.mark.slow
def test_a_length_that_looks_at_the_draft_is_noticed(small, monkeypatch):
    """The power of the test above: what is shown is the probability of the token that was drawn."""

    samplers = []

    class Sampler(head._SampledChain):
        def __init__(self, *args):
            super().__init__(*args)
            samplers.append(self)

    def probability_of_the_draft(logits):
        sample = samplers[-1]
        drawn = inverse_cdf(
            batch_probabilities(logits[:, None], sample._params)[:, 0],
            sample._noise[len(sample._q)],
        )
        return logits.softmax(-1).gather(1, drawn[:, None])[:, 0]

    monkeypatch.setattr(head, "_SampledChain", Sampler)
    monkeypatch.setattr(head, "_confidence", probability_of_the_draft)
    with pytest.raises(AssertionError):
        joint_fits(Threshold(K), small)


# -------------------------------------------------- text at temperature 0, and what heads are fed


@pytest.mark.slow
@pytest.mark.parametrize("length", ["cheap", "hopeless", "scheduled", "measured"])
@pytest.mark.parametrize(
    ("kind", "asks"),
    [("ngram", False), ("right", False), ("fake", True), ("fake", False), ("eagle3", True)],
)
def test_greedy_equals_the_target_alone(
    length, kind, asks, make_llm, texts, byte_tokenizer, monkeypatch
):
    monkeypatch.setattr(
        head.HeadProposer,
        "stops_early",
        property(lambda self: asks, lambda self, value: None),
        raising=False,
    )
    lengths = {
        "cheap": adaptive,
        "hopeless": lambda: adaptive(HOPELESS),
        "scheduled": lambda: DraftLength(K, [(1, 1, 2), (2, 2, 0), (3, 8, 1)]),
        "measured": lambda: AdaptiveDraftLength(K, MeasuredCosts(K)),
    }
    cases = greedy_cases(texts, byte_tokenizer)
    llm = make_llm(
        kind, max_num_seqs=3, **({} if kind == "ngram" else {"draft_length": lengths[length]()})
    )
    if kind == "ngram":
        llm.engine.draft_length = lengths[length]()
        llm.engine.draft_length.attach(llm.engine.proposer, llm.engine._rehearse)
    outputs = llm.generate(
        token_prompts(*(case[0] for case in cases)), [case[1] for case in cases], use_tqdm=False
    )
    check_greedy(outputs, cases)


class Irregular(DraftLength):
    """Long stretches without a draft, then a few rounds with, other lengths in every row."""

    rounds = 0

    def limits(self, rows):
        self.rounds += 1
        if self.rounds % 29 < 24:
            return [0] * len(rows)
        return [
            min((self.rounds + row) % (K + 1), request.draft_limit)
            for row, request in enumerate(rows)
        ]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_that_paused_has_seen_the_committed_text(rows, make_llm, monkeypatch):
    llm = make_llm("fake", max_num_seqs=rows, draft_length=Irregular(K))
    proposer, drafter = llm.engine.proposer, llm.engine.proposer._drafter
    propose, paused, checked = proposer.propose, 0, 0

    def checking(requests, limits):
        nonlocal paused, checked
        paused = paused + 1 if not max(limits) else 0
        before = list(proposer._seen)
        proposal = propose(requests, limits)
        if max(limits) or proposer._seen != before:
            for row, request in enumerate(requests):
                ids = request.token_ids
                assert proposer.cache.lengths[row] == len(ids) - 1
                taps, hidden = llm.engine.target(torch.tensor([ids[:-1]]))
                slots = (
                    drafter.embedding[ids[1:]]
                    + (torch.cat([taps, hidden], -1) @ drafter.project)[0]
                )
                seen = proposer.cache._values[0][row, 0, : len(ids) - 1]
                torch.testing.assert_close(seen, slots, atol=1e-4, rtol=1e-4)
                checked += 1
        return proposal

    monkeypatch.setattr(proposer, "propose", checking)
    params = [
        SamplingParams(temperature=t, max_tokens=n, seed=n)
        for t, n in ((0, 50), (1, 40), (1, 9), (0, 45))
    ]
    llm.generate(token_prompts("plain", "one token", "long", "plain"), params, False)
    assert checked > 12


@pytest.mark.parametrize("kind", ["fake", "eagle3"])
def test_rehearsing_leaves_no_trace(kind, make_llm, monkeypatch):
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0, 1)]
    expected = ids_of(make_llm(kind).generate(token_prompts("plain", "long"), params, False))
    llm = make_llm(kind)
    propose = llm.engine.proposer.propose

    def rehearsing(requests, limits):
        for depth in (0, 1, K):
            llm.engine.proposer.rehearse(requests, depth)
            llm.engine._rehearse(len(requests), depth + 1)
        return propose(requests, limits)

    monkeypatch.setattr(llm.engine.proposer, "propose", rehearsing)
    assert ids_of(llm.generate(token_prompts("plain", "long"), params, False)) == expected


def test_given_costs_make_runs_equal(make_llm):
    params = [SamplingParams(temperature=t, max_tokens=30, seed=3) for t in (1, 0, 1)]
    runs = []
    for _ in range(2):
        llm = make_llm("eagle3", max_num_seqs=2, draft_length=adaptive(DEAR))
        runs.append(
            (
                ids_of(llm.generate(token_prompts("plain", "long", "plain"), params, False)),
                llm.get_metrics(),
            )
        )
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------- what is chosen


class Rows:
    """A drafter and a target made of acceptance probabilities, run through a draft length without
    any model."""

    def __init__(self, draft_length: AdaptiveDraftLength, rows: int = 1, seed: int = 0) -> None:
        self.length, self.source = draft_length, np.random.default_rng(seed)
        self.length.attach(
            SimpleNamespace(stops_early=False, whole_blocks=False), lambda rows, tokens: None
        )
        self.requests = [SimpleRequest() for _ in range(rows)]
        self.widths: list[int] = []

    def round(self, acceptance: list[float]) -> int:
        """One round with a chance of acceptance per row, the same at every depth; returns its
        width."""
        limits = self.length.limits(self.requests)
        tokens = torch.zeros(len(limits), max(limits), dtype=torch.long)
        proposal = self.length.settle(Proposal(tokens, limits))
        accepted = []
        for count, chance in zip(proposal.counts, acceptance, strict=True):
            accepted.append(next((k for k in range(count) if self.source.random() > chance), count))
        self.length.learn(proposal.counts, accepted, 0.0, 0.0)
        self.widths.append(proposal.width)
        return proposal.width


class SimpleRequest:
    draft_limit = most_drafts = 1000


def test_drafts_that_are_accepted_are_asked_for_and_others_are_not():
    rows = Rows(adaptive(DEAR))
    for _ in range(100):
        rows.round([0.95])
    assert np.mean(rows.widths[-50:]) > K - 0.2
    rows = Rows(adaptive(DEAR))
    for _ in range(300):
        rows.round([0.1])
    assert np.mean(rows.widths[-200:]) < 0.05


def test_probing_costs_less_than_a_hundredth_and_finds_what_pays_again():
    costs = DEAR
    rows = Rows(adaptive(costs))
    spent, rounds = 0.0, 2000
    for _ in range(rounds):
        width = rows.round([0.0])
        spent += (
            costs["verify"][width]
            + (costs["draft"][width - 1] if width else 0)
            - costs["verify"][0]
        )
    assert 0 < sum(width > 0 for width in rows.widths[-500:])
    assert (
        spent / (rounds * costs["verify"][0]) < 0.01 + 10 / rounds
    )  # the allowance at the start, once
    rows.widths.clear()
    for _ in range(800):
        rows.round([0.97])
    assert np.mean(rows.widths[-200:]) > K - 0.5


def test_a_request_whose_drafts_fail_does_not_spoil_the_next():
    length = adaptive(DEAR)
    for turn in range(12):
        rows = Rows(length, seed=turn)
        for _ in range(40):
            rows.round([0.95 if turn % 2 else 0.1])
        mean = np.mean(rows.widths[15:])
        if turn >= 4:
            assert mean > K - 0.7 if turn % 2 else mean < 1.0, (turn, rows.widths)


def test_rows_of_a_batch_share_a_width_that_pays_for_all_of_them():
    """Three rows that fail and one that succeeds: the width that is right for the one alone loses
    for the batch."""
    alone, together = Rows(adaptive(DEAR)), Rows(adaptive(DEAR), rows=4)
    for _ in range(200):
        alone.round([0.9])
        together.round([0.9, 0.05, 0.05, 0.05])
    assert np.mean(alone.widths[-100:]) > 2
    batch = RoundCosts.given({"verify": [10, 10, 10, 10], "draft": [0.1, 0.2, 0.3]}, K)
    cheap = Rows(AdaptiveDraftLength(K, batch), rows=4)
    for _ in range(100):
        cheap.round([0.9, 0.05, 0.05, 0.05])
    assert np.mean(together.widths[-100:]) < np.mean(cheap.widths[-50:])


def test_confidence_decides_where_it_means_something():
    """Half of all drafts are sure and accepted, the others unsure and rejected; on average drafting
    does not pay."""
    length, source = (
        adaptive({"verify": [10, 17, 24, 31], "draft": [0.2, 0.4, 0.6]}),
        np.random.default_rng(0),
    )
    length.attach(SimpleNamespace(stops_early=True, whole_blocks=False), lambda rows, tokens: None)
    request, wrong = SimpleRequest(), 0
    for turn in range(400):
        limit = length.limits([request])[0]
        sure = source.random(K) < 0.5
        width = 0
        while width < limit:
            wanted = length._go_on([0.95 if sure[width] else 0.2])
            width += wanted > 0
            if wanted <= 1:
                break
        accepted = next((k for k in range(width) if not sure[k]), width)
        length.learn([width], [accepted], 0.0, 0.0)
        if turn >= 200:
            wrong += (width > accepted) + (width == 0 and sure[0])
    assert wrong < 20


def test_the_lengths_chosen_for_recorded_confidences():
    """Golden: the decisions of the first version, so that a rewrite of the estimator or the plan
    changes none."""
    length = adaptive({"verify": [10, 11, 12, 13], "draft": [0.5, 1, 1.5]})
    length.attach(SimpleNamespace(stops_early=False, whole_blocks=False), lambda rows, tokens: None)
    source, request, widths = np.random.default_rng(7), SimpleRequest(), []
    for turn in range(60):
        (limit,), sure = length.limits([request]), source.uniform(0.02, 0.99, (1, K))
        tokens, confidence = torch.zeros(1, limit, dtype=torch.long), torch.tensor(sure[:, :limit])
        width = length.settle(Proposal(tokens, [limit], confidence=confidence)).width
        (hits,) = source.random((1, K)) < sure ** (0.2 if turn < 40 else 1)
        length.learn([width], [next((k for k in range(width) if not hits[k]), width)], 0.0, 0.0)
        widths.append(width)
    assert (
        "".join(map(str, widths)) == "333333333333333333333333333333323333333333333333333233222221"
    )


# ---------------------------------------------------------------------- costs


def test_measured_costs_follow_the_rounds():
    costs = MeasuredCosts(K)
    costs.attach(SimpleNamespace(rehearse=lambda rows, depth: True), lambda rows, tokens: None)
    rows = [SimpleRequest()] * 2
    costs.of(rows)
    for turn in range(2000):
        width = turn % (K + 1)
        costs.learn(2, width, width, 0.001 * width, 0.010 + 0.002 * width)
    verify, draft = costs.of(rows)
    np.testing.assert_allclose(verify, 0.010 + 0.002 * np.arange(K + 1), rtol=0.05)
    np.testing.assert_allclose(draft, 0.001 * np.arange(K + 1), rtol=0.1, atol=1e-5)
    costs.learn(2, 0, 0, 0.0, 5.0)  # a pause of the machine
    assert costs.of(rows)[0][0] < 0.012


def test_measuring_a_batch_size_stays_within_its_budget(make_llm):
    from time import perf_counter

    llm = make_llm("eagle3", draft_length=AdaptiveDraftLength(K, MeasuredCosts(K)))
    started = perf_counter()
    llm.generate(token_prompts("plain"), SamplingParams(temperature=0, max_tokens=3), False)
    assert perf_counter() - started < 2
    verify, draft = llm.engine.draft_length._costs.of([SimpleRequest()])
    assert min(verify) > 0
    assert min(draft[1:]) > 0
    assert draft[0] == 0


# ---------------------------------------------------------------------- options


def config(**options):
    return parse_speculative_config({"method": "ngram", "num_speculative_tokens": K, **options})


def test_schedule_by_batch_size():
    length = make_draft_length(
        config(num_speculative_tokens_per_batch_size=[[2, 4, 2], [8, 64, 0]])
    )
    found = [max(length.limits([SimpleRequest()] * size)) for size in (1, 2, 4, 6, 8, 100)]
    assert found == [K, 2, 2, 2, 0, 0]
    capped = make_draft_length(
        config(
            enable_adaptive_verification=True,
            adaptive_verification_costs=CHEAP,
            num_speculative_tokens_per_batch_size=[[1, 1, 1]],
        )
    )
    capped.attach(SimpleNamespace(stops_early=False, whole_blocks=False), lambda rows, tokens: None)
    assert capped.limits([SimpleRequest()]) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens_per_batch_size": [[1, 4, K + 1]]}, "expected K from 0"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 8, 1]]}, "without overlaps"),
        ({"num_speculative_tokens_per_batch_size": [[0, 4, 2]]}, "from 1 on"),
        ({"adaptive_verification_costs": CHEAP}, "enable_adaptive_verification is not true"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


@pytest.mark.parametrize(
    "costs", [{"verify": [1, 2]}, {**CHEAP, "verify": [0, 1, 1, 1]}, {**CHEAP, "draft": [1]}]
)
def test_refused_costs(costs):
    with pytest.raises(ConfigError, match="adaptive_verification_costs"):
        make_draft_length(
            config(enable_adaptive_verification=True, adaptive_verification_costs=costs)
        )


def test_an_llm_with_the_options(model, texts):
    options = {
        "method": "ngram",
        "num_speculative_tokens": K,
        "prompt_lookup_min": 1,
        "enable_adaptive_verification": True,
    }
    llm = LLM(model, speculative_config=options)
    (output,) = llm.generate(
        token_prompts("plain"), SamplingParams(temperature=0, max_tokens=40), False
    )
    assert output.outputs[0].token_ids == texts[tuple(PROMPTS["plain"])][:40]
    assert llm.get_metrics().num_draft_tokens > 0


def test_warm_up_measures_the_costs_of_every_batch_size(tiny_model, monkeypatch):
    """Otherwise the first user's request of each size waits for it."""
    sizes = []
    real = MeasuredCosts._measure

    def measure(self, rows):
        sizes.append(len(rows))
        return real(self, rows)

    monkeypatch.setattr(MeasuredCosts, "_measure", measure)
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "enable_adaptive_verification": True,
    }
    llm = LLM(tiny_model("llama"), max_num_seqs=7, speculative_config=config)
    llm.warm_up()
    measured = list(sizes)
    assert measured and llm.get_metrics().num_drafts == 0
    prompts = [{"prompt_token_ids": [5, 6, 5, 6, 5]}] * 7
    for rows in (1, 3, 4, 7):
        llm.generate(prompts[:rows], SamplingParams(temperature=0, max_tokens=12), False)
    assert sizes == measured


def test_adaptive_verification_of_trees_is_refused():
    config = {
        "method": "eagle3",
        "model": "x",
        "num_speculative_tokens": 8,
        "speculative_eagle_topk": 2,
        "enable_adaptive_verification": True,
    }
    with pytest.raises(ConfigError, match="enable_adaptive_verification"):
        parse_speculative_config(config)
