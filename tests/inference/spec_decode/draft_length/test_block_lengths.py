"""Lengths of blocks that are drafted whole: chosen afterwards, by the drafter's own confidence
where it has one, and without looking at a draft that is judged."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from inference import LLM, SamplingParams
from inference.spec_decode.draft_length.acceptance_estimator import (
    AcceptanceEstimator,
    RequestHistory,
)
from inference.spec_decode.draft_length.costs import MeasuredCosts, RoundCosts
from inference.spec_decode.draft_length.policy import AdaptiveDraftLength, DraftLength
from inference.spec_decode.draft_length.round_plan import RoundPlan
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers import drafter as head
from tests.inference.engine.test_engine import (  # noqa: F401 (fixtures among them)
    SMALL_PROMPT,
    SMALL_VOCAB,
    WRITTEN,
    K,
    check_greedy,
    check_joint_pairs,
    exact_joint,
    greedy_cases,
    model,
    small,
    texts,
    token_prompts,
)
from tests.inference.modules import make_llm
from tests.inference.spec_decode.draft_length.test_draft_length import (
    CHEAP,
    DEAR,
    HOPELESS,
    SimpleRequest,
    adaptive,
    planned_counts,
    trained_estimator,
)
from tests.lossless.enumeration import (
    World,
    assert_lossless,
    chain,
    enumerate_rule,
    random_table,
)
from tests.speculators.families.conftest import Case, make

BLOCK = {
    "num_layers": 1,
    "block_size": 4,
    "mask_token_id": 2,
}  # three drafts of a block that fills in
MARKOV = {**BLOCK, "markov_rank": 8, "sample_from_anchor": False}
FAMILIES = {
    "dspark": Case("dspark", MARKOV, taps=(1, 2)),
    "dspark, no confidence": Case(
        "dspark", {**MARKOV, "enable_confidence_head": False}, taps=(1, 2)
    ),
    "dflash": Case("dflash", BLOCK, taps=(1, 2)),
    "dflash2": Case(
        "dflash2",
        {**BLOCK, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
        taps=(1, 2),
    ),
}


def block_llm(family: str, model, **options) -> LLM:
    target, drafter = make(FAMILIES[family], model)
    if model.config.vocab_size == SMALL_VOCAB:
        follow_the_prompt(drafter, model)
    return make_llm(target, drafter=drafter.freeze(), num_speculative_tokens=K, **options)


@torch.no_grad()
def follow_the_prompt(drafter, model) -> None:
    """Drafts much as the target goes on after SMALL_PROMPT and the token before; with a Markov head
    only after tokens of even ids, and the confidence head knows after which."""
    drafter.norm.weight.fill_(0.1)  # what is left of the block itself
    after = model(torch.tensor([[*SMALL_PROMPT, token] for token in range(SMALL_VOCAB)])).logits[
        :, -1
    ]  # [V, V]
    if (markov := getattr(drafter, "markov_head", None)) is None:
        return
    rank = MARKOV["markov_rank"]
    markov.markov_w1.weight.copy_(torch.eye(SMALL_VOCAB, rank))
    good = (torch.arange(SMALL_VOCAB) % 2 == 0).float()
    markov.markov_w2.weight[:, :SMALL_VOCAB] = (0.9 * after * (2 * good[:, None] - 1)).T
    if drafter.config.enable_confidence_head:
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.weight[0, -rank:][:SMALL_VOCAB] = 3 * good - 1.5


def after_drafting(monkeypatch) -> None:
    """Lengths are chosen after drafting, as on a GPU."""
    monkeypatch.setattr(
        head.HeadProposer,
        "stops_early",
        property(lambda self: False, lambda self, _: None),
        raising=False,
    )


def watch(llm: LLM, monkeypatch) -> list[tuple[Proposal, Proposal]]:
    """What was drafted in every round from now on, and what of it was verified."""
    seen, settle = [], llm.engine.draft_length.settle

    def watched(proposal: Proposal) -> Proposal:
        seen.append((proposal, settle(proposal)))
        return seen[-1][1]

    monkeypatch.setattr(llm.engine.draft_length, "settle", watched)
    return seen


# ---------------------------------------------------------------------- what is told


def recorded(drafter, monkeypatch) -> list:
    """What `read` returns from now on."""
    read, seen = drafter.read, []
    monkeypatch.setattr(drafter, "read", lambda *of: seen.append(read(*of)) or seen[-1])
    return seen


def test_the_confidence_head_is_asked(model, monkeypatch):
    """What the policy is told of a draft is the mean log-odds of the head's own probability and the
    largest of q; of others the largest of q."""
    after_drafting(monkeypatch)
    for family in ("dspark", "dspark, no confidence", "dflash"):
        llm = block_llm(family, model, draft_length=adaptive(CHEAP))
        drafter, told = llm.engine.proposer._drafter, watch(llm, monkeypatch)
        hidden = recorded(drafter, monkeypatch)
        llm.generate(token_prompts("plain"), SamplingParams(temperature=0, max_tokens=12), False)
        assert len(told) > 2
        steps = iter([state for state, _ in hidden])
        for proposal, _ in told:
            for depth in range(proposal.width):
                state = next(steps)
                own, expected = (
                    drafter.confidence(state),
                    drafter.head(state).float().softmax(-1).amax(-1),
                )
                if own is not None:
                    expected = ((own.clamp(-6, 6) + expected.logit().clamp(-6, 6)) / 2).sigmoid()
                torch.testing.assert_close(proposal.confidence[:, depth], expected)
            assert proposal.foreseen == (family == "dflash" and proposal.width > 0)


def test_a_draft_changes_the_confidence_of_those_behind_it(model):
    """Why a DSpark block is judged depth by depth: the confidence of draft k + 1 has seen draft
    k."""
    _, drafter = make(FAMILIES["dspark"], model)
    state = torch.randn(1, drafter.config.hidden_size)
    told = [drafter.confidence(drafter.read(state, torch.tensor([token]))[0]) for token in (5, 6)]
    assert not torch.allclose(*told, atol=1e-3)


@pytest.mark.parametrize("family", ["dspark", "dflash"])
def test_no_more_is_verified_than_any_row_may_have(family, model, monkeypatch):
    """A schedule of two of three drafts: blocks are the same, and verification is two wide."""
    params = SamplingParams(temperature=0, max_tokens=14)
    drafted = []
    for most in (K, 2):
        llm = block_llm(family, model, draft_length=DraftLength(K, [(1, 8, most)]))
        told = watch(llm, monkeypatch)
        llm.generate(token_prompts("plain"), params, False)
        assert {proposal.width for proposal, _ in told[:-2]} == {most}
        drafted.append(told[0][0].token_ids[:, :2].tolist())
    assert drafted[0] == drafted[1]


# ---------------------------------------------------------------------- lossless


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_drafted_blocks_are_lossless_by_enumeration(seed, rule):
    """Confidences that depend on the drafts before theirs, shown depth by depth, under both rules
    for chains."""
    p, q = random_table(seed), random_table(seed + 50)
    counts = planned_counts(q, lambda q, x: float(q.max()), True)
    models = World(chain(K), p, q, given_counts=counts)
    assert len({counts(draft) for draft in models.drafts()[0]}) > 1
    assert_lossless(models, rule)


def plan_of(estimator: AcceptanceEstimator, verify, rows: int = 1) -> RoundPlan:
    costs = RoundCosts.given({"verify": verify, "draft": [0.3] * K}, K).of([])
    return RoundPlan(
        copy.deepcopy(estimator), [RequestHistory() for _ in range(rows)], [K] * rows, *costs
    )


def test_the_enumeration_notices_confidences_of_drafts_shown_all_at_once():
    """They are known before the first draft is drawn only where no draft changes them."""
    q, estimator = random_table(51), trained_estimator()

    def counts(draft: tuple) -> int:
        shown = [[float(q(draft[:k]).max())] for k in range(K)]
        return plan_of(estimator, [10, 13, 13.1, 13.2]).decide_all(shown)

    models = World(chain(K), random_table(1), q, given_counts=counts)
    assert len({counts(draft) for draft in models.drafts()[0]}) > 1
    assert enumerate_rule(models, "token")[0] > 1e-3


def joint_fits(family, draft_length, small, samples=500, rows=1) -> LLM:
    """χ² of four tokens at T = 1."""
    params = SamplingParams(temperature=1.0, max_tokens=WRITTEN, n=samples)
    llm = block_llm(
        family,
        small,
        seed=5,
        max_num_seqs=rows,
        max_num_batched_tokens=8000,
        draft_length=draft_length,
    )
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint_pairs(output, exact_joint(small, params))
    return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rows", "asks"),
    [
        ("dspark", 1, True),
        ("dspark", 1, False),
        ("dspark", 3, False),
        ("dflash", 1, False),
        ("dflash2", 3, True),
    ],
)
def test_joint_of_the_first_tokens(family, rows, asks, small, monkeypatch):
    if not asks:
        after_drafting(monkeypatch)
    step = {"dspark": 1.5, "dflash": 2.2, "dflash2": 0.85}[family]
    length = adaptive({"verify": [10 + step * k for k in range(K + 1)], "draft": [0.3] * K})
    learn, cut = length.learn, []

    def watched(verified, *outcome):
        if max(length._limits):
            cut.append(max(verified) < max(length._limits))
        learn(verified, *outcome)

    monkeypatch.setattr(length, "learn", watched)
    llm = joint_fits(family, length, small, rows=rows)
    assert llm.get_metrics().num_accepted_tokens > 40
    assert 0.05 < np.mean(cut) < 0.95


class Ahead(DraftLength):
    """Verifies draft k where the head is sure of draft k + 1."""

    def attach(self, proposer, forward):
        proposer.go_on = lambda confidence: K

    def settle(self, proposal):
        if not proposal.width:
            return proposal
        sure = (proposal.confidence[:, 1:] > 0.5).long().cumprod(1).sum(1).tolist()
        counts = [
            min(count, most + (most == K - 1))
            for count, most in zip(proposal.counts, sure, strict=True)
        ]
        return Proposal(proposal.token_ids, counts, proposal.q)


@pytest.mark.slow
def test_a_length_by_the_confidence_behind_a_draft_is_noticed(small, monkeypatch):
    """The power of the test above."""
    after_drafting(monkeypatch)
    with pytest.raises(AssertionError):
        joint_fits("dspark", Ahead(K), small, samples=3000, rows=500)


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("length", ["cheap", "dear", "hopeless", "measured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_target_alone(
    length, family, asks, model, texts, byte_tokenizer, monkeypatch
):
    """Three rows of other lengths, each with its own room for drafts."""
    if not asks:
        after_drafting(monkeypatch)
    lengths = {"cheap": CHEAP, "dear": DEAR, "hopeless": HOPELESS}
    draft_length = (
        adaptive(lengths[length]) if length in lengths else AdaptiveDraftLength(K, MeasuredCosts(K))
    )
    cases = greedy_cases(texts, byte_tokenizer)
    llm = block_llm(
        family,
        model,
        draft_length=draft_length,
        tokenizer=byte_tokenizer,
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )
    outputs = llm.generate(
        token_prompts(*(case[0] for case in cases)), [case[1] for case in cases], use_tqdm=False
    )
    check_greedy(outputs, cases)


# ---------------------------------------------------------------------- what is chosen


def test_all_confidences_give_the_length_of_most_tokens_per_price():
    """Over all lengths, where one draft that fails would have hidden what lies behind a step of the
    costs."""
    source = np.random.default_rng(0)
    lengths = set()
    for _ in range(60):
        verify = [10.0, *(10 + np.cumsum(source.uniform(0, 3, K))).tolist()]
        shown = source.uniform(0.2, 0.95, (K, 2))
        plan = plan_of(trained_estimator(), verify, rows=2)
        state = copy.deepcopy(plan.state)
        a = [trained_estimator().estimate_next(state, list(each))[0] for each in shown]
        gains = np.cumprod(np.array(a), 0).sum(1).cumsum()
        net = [0.0, *(gains - plan._rate * (np.array(verify[1:]) - verify[0]))]
        assert plan.decide_all(shown.tolist()) == int(np.argmax(net))
        lengths.add(plan.committed_length)
    assert len(lengths) > 2


def test_a_block_is_drafted_whole_and_verified_as_far_as_it_pays():
    """Half of all blocks are sure and accepted, the others unsure and rejected; all of each is
    drafted."""
    length, source = (
        adaptive({"verify": [10, 12, 14, 16], "draft": [2, 2, 2]}),
        np.random.default_rng(0),
    )
    proposer = SimpleProposer()
    length.attach(proposer, lambda rows, tokens: None)
    request, wrong, drafted = SimpleRequest(), 0, set()
    for turn in range(400):
        (limit,), sure = length.limits([request]), source.random() < 0.5
        drafted.add(limit)
        width = 0
        if limit:
            told = torch.full((1, limit), 0.95 if sure else 0.2)
            tokens = torch.zeros(1, limit, dtype=torch.long)
            width = length.settle(Proposal(tokens, [limit], confidence=told, foreseen=True)).width
        length.learn([width], [width if sure else 0], 0.0, 0.0)
        if turn >= 200:
            wrong += width != (K if sure else 0)
    assert drafted == {K}
    assert wrong < 10


def test_the_first_draft_is_charged_with_the_whole_block(model, monkeypatch):
    """What is rehearsed to be timed is the block of a round, however little is drafted of it."""
    llm = block_llm("dspark", model)
    drafter, asked = llm.engine.proposer._drafter, []
    block = drafter._block
    monkeypatch.setattr(drafter, "_block", lambda *given: asked.append(given[-1]) or block(*given))
    propose = llm.engine.proposer.propose

    def rehearsing(requests, limits):
        for depth in (1, K):
            assert llm.engine.proposer.rehearse(requests, depth)
        return propose(requests, limits)

    monkeypatch.setattr(llm.engine.proposer, "propose", rehearsing)
    llm.generate(token_prompts("plain"), SamplingParams(temperature=0, max_tokens=6), False)
    assert len(asked) > 3
    assert set(asked) == {K}


class SimpleProposer:
    stops_early, whole_blocks, go_on = False, True, None


def test_where_blocks_do_not_pay_few_are_drafted():
    length, source = adaptive(HOPELESS), np.random.default_rng(0)
    length.attach(SimpleProposer(), lambda rows, tokens: None)
    request, verified = SimpleRequest(), []
    for _ in range(600):
        (limit,) = length.limits([request])
        width = 0
        if limit:
            told = torch.tensor(source.uniform(0.2, 0.9, (1, limit)))
            proposal = Proposal(
                torch.zeros(1, limit, dtype=torch.long), [limit], confidence=told, foreseen=True
            )
            width = length.settle(proposal).width
        length.learn([width], [int(width > 0 and source.random() < 0.3)], 0.0, 0.0)
        verified.append(width)
    assert 0 < np.mean(np.array(verified) > 0) < 0.05
