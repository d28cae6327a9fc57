"""Lengths follow acceptance, confidence and costs; that they do not anticipate is held by
tests/lossless/test_draft_lengths.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.loading import make_draft_length
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.spec_decode import costs as costs_module
from draftsmith.inference.spec_decode import draft_length as draft_length_module
from draftsmith.inference.spec_decode.costs import SHARED_RATIO, RoundCosts
from draftsmith.inference.spec_decode.draft_length import (
    Acceptance,
    AdaptiveDraftLength,
    DraftLength,
    RoundPlan,
)
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.speculators.errors import ConfigError
from tests.support.cases import make
from tests.support.draft_lengths import BLOCKS, CHEAP, DEAR, K, adaptive, stop_early
from tests.support.drafters import FakeHead, random_eagle3
from tests.support.engines import drafting_llm, ids_of, make_llm, proposer_of

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
    any model. `early`: lengths are chosen before each draw."""

    def __init__(self, length: AdaptiveDraftLength, rows: int = 1, early: bool = False) -> None:
        self.length, self.early, self.source = length, early, np.random.default_rng(0)
        self.proposer = SimpleNamespace(stops_early=early, go_on=None)
        self.length.attach(self.proposer, lambda rows, tokens: None)
        self.requests = [SimpleRequest() for _ in range(rows)]
        self.widths: list[int] = []

    def round(self, chance: list[float], sure: list[float] | None = None) -> int:
        """One round. chance: of acceptance, per row at every depth; or, with `sure`, of one row at
        each depth, whose confidences are these. Returns its width."""
        limits = self.length.limits(self.requests)
        tokens = torch.zeros(len(limits), max(limits), dtype=torch.long)
        confidence = None if sure is None else torch.tensor([sure[: max(limits)]])
        if self.early:
            width = 0
            while width < max(limits) and (further := self.proposer.go_on([sure[width]])):
                width += 1
                if further == 1:
                    break
            counts = [width]
        else:
            proposal = Proposal(tokens, limits, confidence=confidence)
            counts = self.length.settle(proposal).counts
        accepted = []
        for row, count in enumerate(counts):
            chances = [chance[row]] * count if sure is None else chance[:count]
            hits = [self.source.random() < p for p in chances]
            accepted.append(hits.index(False) if False in hits else count)
        self.length.learn(counts, accepted)
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


def test_rows_of_a_batch_share_a_width_that_pays_for_all_of_them():
    """Three rows that fail and one that succeeds: the width that is right for the one alone loses
    for the batch."""
    flat = {"verify": [10, 10, 10, 10], "draft": [0.1, 0.2, 0.3]}
    alone, batch, free = Rows(adaptive(DEAR)), Rows(adaptive(DEAR), 4), Rows(adaptive(flat), 4)
    for _ in range(200):
        alone.round([0.9])
        for rows in (batch, free):
            rows.round([0.9, 0.05, 0.05, 0.05])
    assert np.mean(alone.widths[-100:]) > 2 > np.mean(batch.widths[-100:]) + 1
    assert np.mean(free.widths[-100:]) > 2


@pytest.mark.parametrize("early", [True, False])
def test_confidence_decides_where_it_means_something(early):
    """Half of all rounds are sure and accepted, the others unsure and rejected."""
    rows, wrong = Rows(adaptive({"verify": [10, 12, 14, 16], "draft": [2, 2, 2]}), early=early), 0
    source = np.random.default_rng(0)
    for turn in range(400):
        sure = source.random() < 0.5
        width = rows.round([float(sure)] * K, [0.95 if sure else 0.1] * K)
        wrong += turn >= 200 and width != (K if sure else 0)
    assert wrong < 10


def test_a_drafter_that_is_too_sure_is_found_out():
    """κ: of drafts that are said to be accepted nearly always, a third are."""
    rows = Rows(adaptive(DEAR))
    for _ in range(300):
        rows.round([0.3] * K, [0.95] * K)
    assert np.mean(rows.widths[-200:]) < 0.3
    assert rows.length._acceptance.by_confidence([0.9]) == pytest.approx([0.3], abs=0.1)


def test_what_was_given_up_is_tried_again():
    """Depths that are not reached fade towards the one before them."""
    acceptance = Acceptance(K)
    for _ in range(100):
        acceptance.learn([K], [1], [])  # the second draft fails
    assert acceptance.rates(K)[1] < 0.1
    for _ in range(300):
        acceptance.learn([1], [1], [])
    assert acceptance.rates(K)[1] > 0.8


def test_adaptive_length_without_a_plan_leaves_drafts_as_they_are():
    length = adaptive(CHEAP)
    proposal = Proposal(torch.zeros(1, 2, dtype=torch.long), [2])
    assert length.settle(proposal) is proposal
    length.learn([2], [1])


# ---------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("family", ["dspark", "dflash"])
def test_the_confidence_head_is_asked(family, model, monkeypatch):
    """What a length is told of a draft is the mean log-odds of the head's own probability and the
    largest of q; of others the largest of q."""
    stop_early(monkeypatch, False)
    llm = llm_of(family, model, draft_length=adaptive(CHEAP))
    drafter, length = llm.engine.proposer._drafter, llm.engine.draft_length
    read, settle, states, proposals = drafter.read, length.settle, [], []
    monkeypatch.setattr(drafter, "read", lambda *of: states.append(read(*of)) or states[-1])
    monkeypatch.setattr(length, "settle", lambda given: proposals.append(given) or settle(given))
    llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), False)
    hidden = iter(states)
    for proposal in proposals:
        for depth in range(proposal.width):
            state = next(hidden)
            expected = drafter.head(state).float().softmax(-1).amax(-1)
            if (own := drafter.confidence(state)) is not None:
                expected = ((own.clamp(-6, 6) + expected.logit().clamp(-6, 6)) / 2).sigmoid()
            torch.testing.assert_close(proposal.confidence[:, depth], expected)
    assert len(proposals) > 2


class Irregular(DraftLength):
    """Long stretches without a draft, then a few rounds with, other lengths in every row."""

    rounds = 0

    def limits(self, rows):
        self.rounds += 1
        if self.rounds % 29 < 24:
            return [0] * len(rows)
        lengths = [(self.rounds + row) % (K + 1) for row in range(len(rows))]
        return [min(pair) for pair in zip(lengths, super().limits(rows), strict=True)]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_that_paused_has_seen_the_committed_text(rows, model, monkeypatch):
    llm = llm_of("fake", model, max_num_seqs=rows, draft_length=Irregular(K))
    proposer, drafter = llm.engine.proposer, llm.engine.proposer._drafter
    propose, checked = proposer.propose, 0

    def checking(requests, limits):
        nonlocal checked
        before = list(proposer._seen)
        proposal = propose(requests, limits)
        if max(limits) or proposer._seen != before:
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

    def rehearsing(requests, limits):
        for depth in (0, 1, K):
            llm.engine.proposer.rehearse(requests, depth)
            llm.engine.rehearse(len(requests), depth + 1)
        return propose(requests, limits)

    monkeypatch.setattr(llm.engine.proposer, "propose", rehearsing)
    assert ids_of(llm.generate(PROMPTS[1:3], params, False)) == expected


# ---------------------------------------------------------------------- measured costs


@pytest.mark.parametrize("sizes", [range(1, 65), range(64, 0, -1), [64, 1, 8, 7, 9]], ids=str)
def test_costs_of_a_batch_size_are_measured_at_one_that_is_near(sizes):
    """A batch that fills or drains row by row never has the costs of its first size."""
    costs, timed = RoundCosts(K), []
    costs.attach(Proposer(K), lambda rows, tokens: timed.append(rows))
    for size in sizes:
        costs.of([SimpleRequest()] * size)
        assert any(max(size / other, other / size) <= SHARED_RATIO for other in timed), size
    assert len(set(timed)) < len(sizes) or len(sizes) < 10


@pytest.mark.parametrize("kind", ["fake", "eagle3", "ngram"])
def test_costs_measured_in_an_engine_are_those_of_its_rounds(kind, model, monkeypatch):
    """Of 1 to K + 1 tokens and of 0 to K drafts, none below the one before; the text that goes on
    is as without."""
    monkeypatch.setattr(costs_module, "MEASURING_SECONDS", 0.0)
    length = AdaptiveDraftLength(K)
    if kind == "ngram":
        proposer = proposer_of("ngram", K)
        llm = make_llm(model, proposer=proposer, draft_length=length, max_num_seqs=3)
    else:
        llm = llm_of(kind, model, draft_length=length, max_num_seqs=3)
    used = []

    def planned(acceptance, room, verify, draft):
        used.append((verify, draft))
        return RoundPlan(acceptance, room, verify, draft)

    monkeypatch.setattr(draft_length_module, "RoundPlan", planned)
    params = SamplingParams(temperature=0, max_tokens=20)
    texts = ids_of(llm.generate(PROMPTS, params, False))
    assert texts == ids_of(llm.generate(PROMPTS, params, False, speculate=False))
    for verify, draft in used:
        assert len(verify) == len(draft) == K + 1
        assert 0 < verify[0] and verify == sorted(verify)
        assert draft[0] == 0 and draft == sorted(draft)
        assert (draft[1] > 0) == (kind != "ngram")
    # of three rows, which two share, and of one
    assert len({id(verify) for verify, _ in used}) == 2


@pytest.mark.parametrize("rows", [1, 5])
def test_warm_up_measures_costs_for_every_batch_size(rows, model, monkeypatch):
    """No request waits for a measurement, and none is told what became of the drafts of others."""
    monkeypatch.setattr(costs_module, "MEASURING_SECONDS", 0.0)
    measure, timed = RoundCosts._measure, []
    monkeypatch.setattr(
        RoundCosts, "_measure", lambda *given: timed.append(len(given[1])) or measure(*given)
    )
    length = AdaptiveDraftLength(K)
    llm = llm_of("eagle3", model, draft_length=length, max_num_seqs=rows)
    llm.warm_up()
    assert timed and llm.get_metrics().num_drafts == 0
    assert length._acceptance.rates(K) == Acceptance(K).rates(K)
    timed.clear()
    params = [SamplingParams(temperature=0, max_tokens=2 + 3 * i) for i in range(rows)]
    llm.generate([PROMPTS[0]] * rows, params, False)  # of `rows` rows, and of one fewer each time
    assert llm.get_metrics().num_drafts > 0 and not timed


def test_warm_up_measures_nothing_where_costs_are_options():
    assert adaptive(CHEAP).sizes_to_measure(8) == []


# ---------------------------------------------------------------------- options


def length_of(**options) -> DraftLength:
    config = {"method": "ngram", "num_speculative_tokens": K, **options}
    return make_draft_length(parse_speculative_config(config))


def test_schedule_by_batch_size():
    length = length_of(num_speculative_tokens_per_batch_size=[[2, 4, 2], [8, 64, 0]])
    lengths = [max(length.limits([SimpleRequest()] * size)) for size in (1, 2, 4, 6, 8, 100)]
    assert lengths == [K, 2, 2, 2, 0, 0]
    capped = length_of(
        enable_adaptive_verification=True,
        adaptive_verification_costs=CHEAP,
        num_speculative_tokens_per_batch_size=[[1, 1, 1]],
    )
    capped.attach(SimpleNamespace(stops_early=False), lambda rows, tokens: None)
    assert capped.limits([SimpleRequest()]) == [1]


@pytest.mark.parametrize("family", ["dspark", "dflash"])
def test_a_schedule_cuts_blocks_and_changes_no_draft(family, model, monkeypatch):
    drafted = []
    for most in (K, 2):
        length, seen = DraftLength(K, [(1, 8, most)]), []
        llm = llm_of(family, model, draft_length=length)
        monkeypatch.setattr(
            length, "settle", lambda proposal, seen=seen: seen.append(proposal) or proposal
        )
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
        ({**ADAPTIVE, "adaptive_verification_costs": {"verify": [1, 2]}}, "costs"),
        ({**ADAPTIVE, "method": "eagle3", "model": "x", "speculative_eagle_topk": 2}, "adaptive"),
    ],
)
def test_refused_options(options, named):
    with pytest.raises(ConfigError, match=named):
        length_of(**options)
