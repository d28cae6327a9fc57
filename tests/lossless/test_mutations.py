"""Each known bug, put in, is noticed: a check that cannot fail proves nothing.

Bugs of a rule by the enumeration of test_chain_rules.py and test_tree_rules.py, bugs of the dice
and of what the sampler is given by the χ² of test_sampled_text.py, bugs of the engine by the two
checks of test_matrix.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.sampling.logits_processors import RequestProcessors
from draftsmith.inference.sampling.sampler import uniforms
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.tree_attention import ancestors
from draftsmith.inference.spec_decode.tree_shape import DynamicTree
from draftsmith.inference.spec_decode.verification import chain_rules, rejection_sampler, tree_rules
from draftsmith.inference.spec_decode.verification.chain_rules import RULES, Verdict
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target
from tests.support.configurations import Configuration
from tests.support.enumeration import (
    LOSSLESS,
    VOCAB,
    Table,
    World,
    assert_lossless,
    chain,
    one_hot,
    random_table,
)
from tests.support.grown_trees import Tree, enumerate_grown, grown
from tests.support.markov import (
    CLASSES,
    WIDTH,
    Chains,
    Trees,
    assert_written_by_target,
    make_world,
)
from tests.support.matrix import check_greedy, check_sampled

DRAFTER = "draftsmith.inference.spec_decode.proposers.head"
CACHE = "draftsmith.inference.kv_cache.ragged_cache.RaggedCache"
EVERY_RULE = pytest.mark.parametrize("rule", RULES)


def not_lossless() -> pytest.RaisesExc:
    return pytest.raises(AssertionError, match=r"total variation \d")


def not_the_targets() -> pytest.RaisesExc:
    return pytest.raises(AssertionError, match=r"χ² p-value \d")


# ---------------------------------------------------------------------- what a rule is given

TRUTH = World(chain(2), random_table(20), random_table(21))
LONGER = World(chain(3), random_table(1), random_table(51))
PAIRS = World((-1, -1, 0, 0, 1, 1), random_table(20), random_table(21))


def sharpened(table: Table) -> Table:
    return lambda prefix: table(prefix) ** 2 / (table(prefix) ** 2).sum()


def without_least(table: Table) -> Table:
    def cut(prefix: tuple) -> Tensor:
        p = table(prefix)
        p = torch.where(p > p.min(), p, 0.0)
        return p / p.sum()

    return cut


def reduced(prefix: tuple) -> Tensor:
    """A drafter over two tokens of three: draft token 0 is token 2, draft token 1 is token 0."""
    return torch.tensor([0.6, 0.0, 0.4], dtype=torch.float64)


INPUT_BUGS = {
    "argmax p above temperature 0": replace(TRUTH, given_p=one_hot(TRUTH.p)),
    "p before temperature": replace(TRUTH, p=sharpened(TRUTH.p), given_p=TRUTH.p),
    "p before top-p": replace(TRUTH, p=without_least(TRUTH.p), given_p=TRUTH.p),
    "q before temperature": replace(TRUTH, q=sharpened(TRUTH.q), given_q=TRUTH.q),
    "q before top-p": replace(TRUTH, q=without_least(TRUTH.q), given_q=TRUTH.q),
    "q rounded": replace(TRUTH, given_q=lambda prefix: TRUTH.q(prefix).bfloat16().double()),
    "q not scattered to the full vocabulary": replace(
        TRUTH, q=reduced, given_q=lambda prefix: torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64)
    ),
    "length chosen after looking": replace(
        TRUTH, given_counts=lambda draft: 2 if draft[0] == 0 else 0
    ),
    "length chosen after looking at the last token": replace(
        TRUTH, given_counts=lambda draft: 1 + (draft[1] == 1)
    ),
}


@EVERY_RULE
@pytest.mark.parametrize("bug", INPUT_BUGS)
def test_input_of_a_chain_rule(bug, rule):
    assert_lossless(INPUT_BUGS[bug].honest(), rule)
    with not_lossless():
        assert_lossless(INPUT_BUGS[bug], rule)


@pytest.mark.parametrize(
    "world",
    [replace(PAIRS, given_q=sharpened(PAIRS.q)), replace(PAIRS, given_p=sharpened(PAIRS.p))],
    ids=["q before temperature", "p before temperature"],
)
def test_input_of_traversal(world):
    with not_lossless():
        assert_lossless(world, "traversal")


# ---------------------------------------------------------------------- rules


class BadVerdict(Verdict):
    """A wrong distribution after a rejection; `residual_at` is asked for the same node of all
    rows."""

    wrong: Callable[[Tensor, Tensor], Tensor]

    def residual_at(self, accepted):
        (j,) = set(accepted)
        p, proposal = self.p[:, j], self.proposal
        if j == proposal.width:
            return p
        q = (
            torch.nn.functional.one_hot(proposal.token_ids[:, j], VOCAB)
            if proposal.q is None
            else proposal.q[:, j]
        )
        weights = type(self).wrong(p, q)
        total = weights.sum(-1, keepdim=True)
        return torch.where(total > 0, weights / total, 1 / VOCAB)


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
def test_residual_of_the_token_rule(bug, deterministic, monkeypatch):
    monkeypatch.setattr(BadVerdict, "wrong", staticmethod(WRONG_RESIDUALS[bug]), raising=False)
    monkeypatch.setattr(chain_rules, "Verdict", BadVerdict)
    with not_lossless():
        assert_lossless(replace(TRUTH, deterministic=deterministic), "token")


def accepted_as_one_hot(p: Tensor, proposal: Proposal) -> Verdict:
    """p(x) / 1 goes with the residual of one-hot q only."""
    verdict = chain_rules.token_rule(p, replace(proposal, q=None))
    return replace(verdict, proposal=proposal)


def accepted_if_likely_enough(p: Tensor, proposal: Proposal) -> Verdict:
    """ "Typical acceptance" (2401.10774): keeps what the target finds likely, whatever q."""
    verdict = chain_rules.token_rule(p, proposal)
    likely = p[:, : proposal.width].gather(-1, proposal.token_ids.unsqueeze(-1)).squeeze(-1) > 0.09
    return replace(verdict, accept_probs=likely.to(p.dtype), scale=None)


def block_with_the_token_residual(p: Tensor, proposal: Proposal) -> Verdict:
    return replace(chain_rules.block_rule(p, proposal), scale=None)


@pytest.mark.parametrize(
    "wrong", [accepted_as_one_hot, accepted_if_likely_enough, block_with_the_token_residual]
)
def test_rule_for_chains(wrong, monkeypatch):
    monkeypatch.setitem(RULES, "token", wrong)
    with not_lossless():
        assert_lossless(LONGER, "token")


def put_back(q: Tensor, tokens: Tensor) -> Tensor:
    return q


def not_renormalised(q: Tensor, tokens: Tensor) -> Tensor:
    return q.scatter(1, tokens, 0.0)


def not_clamped(p: Tensor, q: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    left = (rates * p - q).abs()
    mass = left.sum(-1, keepdim=True)
    return left / mass, mass


TRAVERSAL_BUGS: dict[str, tuple[str, Callable]] = {
    "a sibling put back": ("_without", put_back),
    "siblings not renormalised": ("_without", not_renormalised),
    "p itself after a rejection": ("_residual", lambda p, q, rates: (p, rates)),
    "nothing left over is not clamped": ("_residual", not_clamped),
    "the rate of the parent left out": (
        "_residual",
        lambda p, q, rates, right=tree_rules._residual: right(p, q, torch.ones_like(rates)),
    ),
    "acceptance without q": ("_ratio", lambda p, q: p),
}


@pytest.mark.parametrize("bug", TRAVERSAL_BUGS)
def test_traversal(bug, monkeypatch):
    assert_lossless(PAIRS, "traversal")
    monkeypatch.setattr(tree_rules, *TRAVERSAL_BUGS[bug])
    with not_lossless():
        assert_lossless(PAIRS, "traversal")


# Of a tree that has grown, which nodes are judged: nodes that have children always.


def by_the_draft_beside(tree: Tree) -> list[int]:
    """A draft is judged if the sibling drawn after it is token 0."""
    tokens, parents = tree
    siblings = {parent: node for node, parent in enumerate(parents)}  # the last of each
    return [
        node
        for node, parent in enumerate(parents)
        if node in parents or siblings[parent] == node or tokens[siblings[parent]] == 0
    ]


def by_the_draft_itself(tree: Tree) -> list[int]:
    tokens, parents = tree
    return [node for node, token in enumerate(tokens) if node in parents or token == 0]


@pytest.mark.parametrize("judged", [by_the_draft_beside, by_the_draft_itself])
def test_a_grown_tree_that_is_chosen_after_looking(judged):
    p, q = random_table(20), random_table(21)
    trees = grown(DynamicTree(2, 2, 5), q)
    assert enumerate_grown(trees, p, q) <= LOSSLESS
    assert enumerate_grown(trees, p, q, judged) > 1e-3


# ------------------------------------------------------- the sampler: dice, and what it is given


class SharedNoise(Chains):
    """The verifier throws the dice that the drafter has already used."""

    def round(self, last, generators):
        before = [generator.get_state() for generator in generators]
        proposal = self.draft(last, generators)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        return self.verify(last, proposal, generators)


class RawTarget(Chains):
    """p before temperature and top-p."""

    def params(self):
        return SamplingParams()


class RawDrafter(Chains):
    """q before its processors."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        context = torch.cat([last.unsqueeze(1), proposal.token_ids[:, :-1]], 1)
        proposal.q = torch.softmax(self.world.drafter_logits, -1)[context % CLASSES]
        return proposal


class NotScattered(Chains):
    """q left in the order of a draft vocabulary of its own."""

    def given_q(self, q):
        return q.flip(-1)


class LengthAfterLooking(Chains):
    """Only drafts that look good are verified."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        q = self.world.q[last % CLASSES].gather(-1, proposal.token_ids[:, :1]).squeeze(-1)
        proposal.counts = [WIDTH if likely else 0 for likely in (q > 0.2).tolist()]
        return proposal


@pytest.mark.slow
@EVERY_RULE
@pytest.mark.parametrize(
    "bug", [SharedNoise, RawTarget, RawDrafter, NotScattered, LengthAfterLooking]
)
def test_sampler_of_chains(bug, rule):
    with not_the_targets():
        assert_written_by_target(bug(make_world(16), rule=rule), rows=4_000)


class SecondIsTheBest(Trees):
    """The rule is told that both siblings were drawn, but the second one is the likeliest that was
    left."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        left = proposal.q[:, 1].scatter(-1, proposal.token_ids[:, :1], 0.0)
        proposal.token_ids[:, 1] = left.argmax(-1)
        return proposal


class PrunedAfterLooking(Trees):
    """Trees that begin with an unlikely draft are not verified."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        likely = proposal.q[:, 0].gather(-1, proposal.token_ids[:, :1]).squeeze(-1) > 0.2
        proposal.counts = [6 if ok else 0 for ok in likely.tolist()]
        proposal.parents = [list(self.parents[:count]) for count in proposal.counts]
        return proposal


@pytest.mark.slow
@pytest.mark.parametrize("bug", [SecondIsTheBest, PrunedAfterLooking])
def test_sampler_of_trees(bug):
    with not_the_targets():
        assert_written_by_target(bug(make_world(16), rule="traversal"), rows=4_000)


@pytest.mark.slow
def test_noise_shared_between_acceptance_and_residual(monkeypatch):
    def repeated(generator, n):
        numbers = uniforms(generator, n)
        return [*numbers[:-1], numbers[0]]

    monkeypatch.setattr(rejection_sampler, "uniforms", repeated)
    with not_the_targets():
        assert_written_by_target(Chains(make_world(16)), rows=5_000)


# ---------------------------------------------------------------------- the engine

HEAD = Configuration("eagle3", "token", "chain", "fixed", "none", "400", "qwen3")
STUB = replace(HEAD, drafter="sampled")


def flattened(q: Tensor, *vocabulary: object) -> Tensor:
    return scatter_to_target(q**0.25 / (q**0.25).sum(-1, keepdim=True), *vocabulary)


def blind_to_drafts(self, logits, token_ids, paths, whole=RequestProcessors._penalise) -> None:
    whole(self, logits, token_ids, [[] for _ in paths])


def settled_by_looking(self: object, proposal: Proposal) -> Proposal:
    first = [row[0] if row else 0 for row in proposal.drafted]
    counts = [
        count if token % 2 else 0 for count, token in zip(proposal.counts, first, strict=True)
    ]
    return replace(proposal, counts=counts)


SAMPLED_BUGS: dict[str, tuple[Configuration, str, Callable]] = {
    "q before the drafter's temperature": (HEAD, f"{DRAFTER}.scatter_to_target", flattened),
    "penalties that do not count drafts": (
        replace(STUB, processors="penalties"),
        "draftsmith.inference.sampling.logits_processors.RequestProcessors._penalise",
        blind_to_drafts,
    ),
    "p before processors": (
        replace(STUB, processors="penalties"),
        "draftsmith.inference.engine.engine.process_logits",
        lambda logits, proposal, requests: logits,
    ),
    "a length chosen after looking": (
        HEAD,
        "draftsmith.inference.spec_decode.round_plan.RoundPlan.settle",
        settled_by_looking,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SAMPLED_BUGS)
def test_sampled_text_of_the_engine(bug, monkeypatch):
    configuration, *patch = SAMPLED_BUGS[bug]
    check_sampled(configuration)
    with not_the_targets():
        check_sampled(configuration, lambda: monkeypatch.setattr(*patch))


def seen_by_all(proposal, width, device):
    depths, visible = ancestors(proposal, width, device)
    return depths, torch.ones_like(visible).tril()


def at_positions_of_a_chain(proposal, width, device):
    depths, visible = ancestors(proposal, width, device)
    return torch.arange(width + 1, device=device).expand_as(depths), visible


def kept_where_they_were(self: RaggedCache, nodes) -> None:
    self.advance_rows(0, [len(kept) for kept in nodes])


def kept_with_a_rejected_one(self: RaggedCache, nodes) -> None:
    self.advance_rows(0, [len(kept) + (len(kept) == 2) for kept in nodes])


TREE = Configuration("branches", "auto", "static", "fixed", "none", "3", "qwen3")
CHAIN = replace(TREE, drafter="ragged", tree="chain")
ANCESTORS = "draftsmith.inference.spec_decode.tree_attention.ancestors"
GREEDY_BUGS: dict[str, tuple[Configuration, str, Callable]] = {
    "drafts that see their siblings": (TREE, ANCESTORS, seen_by_all),
    "drafts of a tree at positions of a chain": (TREE, ANCESTORS, at_positions_of_a_chain),
    "accepted drafts not moved together": (TREE, f"{CACHE}.keep", kept_where_they_were),
    "a rejected draft left in the cache": (CHAIN, f"{CACHE}.keep", kept_with_a_rejected_one),
    "states that went on with rejected drafts": (
        replace(CHAIN, architecture="lfm2"),
        "draftsmith.speculators.target.recurrent.RecurrentStates._again",
        lambda self, states, rows, count: self._load(rows, True),
    ),
    "penalties that do not count drafts": (
        replace(CHAIN, drafter="right", processors="penalties"),
        "draftsmith.inference.sampling.logits_processors.RequestProcessors._penalise",
        blind_to_drafts,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", GREEDY_BUGS)
def test_greedy_text_of_the_engine(bug, monkeypatch):
    configuration, *patch = GREEDY_BUGS[bug]
    check_greedy(configuration)
    with pytest.raises(AssertionError):
        check_greedy(configuration, lambda: monkeypatch.setattr(*patch))
