"""Lengths are chosen without anticipating: by enumeration over plans, by χ² through the engine, and
a length that looks is noticed by both."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.sampling.sampler import batch_probabilities, inverse_cdf
from draftsmith.inference.spec_decode.acceptance import Acceptance
from draftsmith.inference.spec_decode.costs import read_costs
from draftsmith.inference.spec_decode.draft_length import DraftLength
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers import head
from draftsmith.inference.spec_decode.round_plan import AdaptivePlan, RoundPlan
from draftsmith.speculators.drafter import DraftLogits
from draftsmith.speculators.traits import Traits
from tests.support.cases import make
from tests.support.chi2 import FAMILY_ALPHA, assert_joint_fits, target_joint
from tests.support.draft_lengths import BLOCKS, MARKOV, K, adaptive, stop_early
from tests.support.drafters import FakeHead
from tests.support.engines import make_llm
from tests.support.enumeration import (
    LOSSLESS,
    World,
    assert_lossless,
    chain,
    enumerate_rule,
    random_table,
)

VOCAB, WRITTEN = 4, 4
PROMPT = [1, 2, 3, 1, 2, 3, 0, 1]
STEEP = {"verify": [10, 11.5, 13, 14.5], "draft": [0.3, 0.6, 0.9]}


# ---------------------------------------------------------------------- plans, by enumeration


def depth_by_depth(q, confidence_of, drafted: bool):
    """World.given_counts of a plan that is shown `confidence_of(q(prefix), x)` of every draft: each
    before the draw, or all of a proposal."""

    def counts(draft: tuple) -> int:
        acceptance = Acceptance(K)
        acceptance.idle_rounds = 0  # nothing is forced
        plan = AdaptivePlan(acceptance, [K], read_costs(STEEP, K))
        shown = [confidence_of(q(draft[:k]), draft[k]) for k in range(K)]
        if drafted:
            confidence = torch.tensor([shown], dtype=torch.float64)
            proposal = Proposal(torch.tensor([draft]), [K], confidence=confidence)
        else:
            length = next((k for k in range(K) if not plan.go_on([shown[k]])), K)
            proposal = Proposal(torch.tensor([draft])[:, :length], [length])
        (count,) = plan.settle(proposal).counts
        return count

    return counts


def largest(q, x) -> float:
    return float(q.max())


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_a_plan(seed, drafted, rule):
    p, q = random_table(seed), random_table(seed + 50)
    counts = depth_by_depth(q, largest, drafted)
    world = World(chain(K), p, q, given_counts=counts)
    assert len({counts(draft) for draft in world.drafts()[0]}) > 1
    assert_lossless(world, rule)


@pytest.mark.parametrize("bug", ["sees the draft", "sees it, drafted"])
def test_a_plan_that_looks_ahead_is_noticed(bug):
    q = random_table(51)
    counts = {
        "sees the draft": depth_by_depth(q, lambda q, x: float(q[x]), False),
        "sees it, drafted": depth_by_depth(q, lambda q, x: float(q[x]), True),
    }
    world = World(chain(K), random_table(1), q, given_counts=counts[bug])
    assert enumerate_rule(world, "token")[0] > 1e-3
    assert enumerate_rule(replace(world, given_counts=None), "token")[0] <= LOSSLESS


# ---------------------------------------------------------------------- the engine, by χ²


@pytest.fixture(scope="module")
def small(tiny_model):
    return tiny_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        initializer_range=0.25,
        pad_token_id=None,
    )


class Bigrams(FakeHead):
    """Drafts by the last token alone, much as the target goes on after PROMPT and that token."""

    traits = Traits()

    def __init__(self, model) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(tap_layers=())
        self.draft_to_target = None
        self.logits = 0.85 * after_prompt(model)

    def append(self, inputs):
        inputs.cache.reserve(inputs.start, inputs.stop, inputs.token_ids.shape[1])
        for row, count in enumerate(inputs.counts, inputs.start):
            inputs.cache.advance(row, count)

    def draft_steps(self, inputs, k):
        self.append(inputs)
        tokens = inputs.token_ids[torch.arange(len(inputs.counts)), torch.tensor(inputs.counts) - 1]
        for _ in range(k):
            tokens = yield DraftLogits(self.logits[tokens])


@torch.no_grad()
def after_prompt(model) -> torch.Tensor:
    """[V, V]: the target's logits after PROMPT and each token."""
    return model(torch.tensor([[*PROMPT, token] for token in range(VOCAB)])).logits[:, -1]


@torch.no_grad()
def follow_the_prompt(drafter, model) -> None:
    """Drafts much as the target goes on after PROMPT and the token before; with a Markov head only
    after tokens of even ids, and the confidence head knows after which."""
    drafter.norm.weight.fill_(0.1)  # what is left of the block itself
    if (markov := getattr(drafter, "markov_head", None)) is None:
        return
    rank, good = MARKOV["markov_rank"], (torch.arange(VOCAB) % 2 == 0).float()
    markov.markov_w1.weight.copy_(torch.eye(VOCAB, rank))
    markov.markov_w2.weight[:, :VOCAB] = (0.9 * after_prompt(model) * (2 * good[:, None] - 1)).T
    drafter.confidence_head.proj.weight.zero_()
    drafter.confidence_head.proj.weight[0, -rank:][:VOCAB] = 3 * good - 1.5


def write(family: str, length: DraftLength, model, samples=500, rows=1) -> LLM:
    """Writes four tokens at temperature 1 many times, and holds their joint to the target's. One
    row at a time unless `rows` says otherwise: what it does is then decided by it alone."""
    drafter = Bigrams(model)
    if family in BLOCKS:
        _, drafter = make(BLOCKS[family], model)
        follow_the_prompt(drafter, model)
        drafter.freeze()
    llm = make_llm(
        model,
        drafter=drafter,
        draft_length=length,
        num_speculative_tokens=K,
        seed=5,
        max_num_seqs=rows,
        max_num_batched_tokens=8000,
    )
    params = SamplingParams(temperature=1.0, max_tokens=WRITTEN, n=samples)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, False)
    written = [completion.token_ids for completion in output.outputs]
    assert_joint_fits(written, target_joint(model, PROMPT, WRITTEN, params), FAMILY_ALPHA / 10)
    return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "early", "rows", "step"),
    [
        ("bigrams", True, 1, 5),
        ("bigrams", False, 1, 5),
        ("dspark", True, 1, 5),
        ("dspark", False, 1, 3),
        ("dflash", False, 3, 3),
        ("dflash2", True, 3, 1.5),
    ],
)
def test_joint_of_the_first_tokens(family, early, rows, step, small, monkeypatch):
    stop_early(monkeypatch, early)
    costs = {"verify": [10 + step * k for k in range(K + 1)], "draft": [0.3] * K}
    counters = write(family, adaptive(costs), small, rows=rows).get_metrics()
    assert counters.num_accepted_tokens > 40
    assert 0.3 < counters.num_draft_tokens / counters.num_drafts < K - 0.3


class Threshold(RoundPlan):
    """Goes on while the first row's confidence is 0.4 or more: every decision matters."""

    reads_confidence = True

    def go_on(self, confidence):
        return 0 if confidence[0] < 0.4 else K


class Ahead(RoundPlan):
    """Verifies draft k where the head is sure of draft k + 1."""

    reads_confidence = True

    def settle(self, proposal):
        if not proposal.width:
            return proposal
        sure = (proposal.confidence[:, 1:] > 0.5).long().cumprod(1).sum(1).tolist()
        most = [most + (most == K - 1) for most in sure]
        counts = [min(pair) for pair in zip(proposal.counts, most, strict=True)]
        return Proposal(proposal.token_ids, counts, proposal.q)


class Planned(DraftLength):
    """Rounds by plans of a kind."""

    def __init__(self, kind) -> None:
        super().__init__(K)
        self.kind = kind

    def plan(self, rows):
        return self.kind(self._room(rows))


@pytest.mark.slow
def test_a_length_that_looks_at_the_draft_is_noticed(small, monkeypatch):
    """What is shown is the probability of the token that was drawn."""
    write("bigrams", Planned(Threshold), small)
    samplers = []

    class Sampler(head._SampledChain):
        def __init__(self, *args):
            super().__init__(*args)
            samplers.append(self)

    def probability_of_the_draft(logits, predicted):
        sample = samplers[-1]
        q = batch_probabilities(logits[:, None], sample._params)[:, 0]
        drawn = inverse_cdf(q, sample._noise[len(sample._q)])
        return logits.softmax(-1).gather(1, drawn[:, None])[:, 0]

    monkeypatch.setattr(head, "_SampledChain", Sampler)
    monkeypatch.setattr(head, "_confidence", probability_of_the_draft)
    with pytest.raises(AssertionError, match="χ²"):
        write("bigrams", Planned(Threshold), small)


@pytest.mark.slow
def test_a_length_by_the_confidence_behind_a_draft_is_noticed(small, monkeypatch):
    stop_early(monkeypatch, False)
    with pytest.raises(AssertionError, match="χ²"):
        write("dspark", Planned(Ahead), small, samples=3000, rows=500)
