"""Rules that walk through a tree are lossless: all trees, all throws enumerated, total variation <=
1e-12."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import inference.spec_decode.verification.tree_rules
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.verification.rejection_sampler import rule_for
from inference.spec_decode.verification.tree_rules import TREE_RULES, Walk, trees_of, walk_together
from speculators.errors import ConfigError

VOCAB = 3
LOSSLESS = 1e-12
Table = Callable[[tuple], Tensor]
PAIRS = (-1, -1, 0, 0, 1, 1)  # two drafts, and two after each
SHAPES = {
    "chain": (-1, 0, 1),
    "wide": (-1, -1, -1),
    "pairs": PAIRS,
    "uneven": (-1, -1, 1, 1, 3),
    "one": (-1,),
}
SAMPLED = ("recursive", "traversal", "sample_match")


class EveryThrow:
    """Dice that come out every way there is: one walk after the other, `probability` that of the
    last one."""

    def __init__(self) -> None:
        self._script: list[int] = []

    def walks(
        self, walk: Callable[[], tuple[list[int], int]]
    ) -> Iterator[tuple[list[int], int, float]]:
        while True:
            self._trail: list[tuple[int, int]] = []  # which of how many outcomes
            self.probability = 1.0
            path, token = walk()
            yield path, token, self.probability
            while self._trail and self._trail[-1][0] + 1 == self._trail[-1][1]:
                self._trail.pop()
            if not self._trail:
                return
            self._script = [choice for choice, _ in self._trail]
            self._script[-1] += 1

    def _choose(self, weights: list[float]) -> int:
        at = len(self._trail)
        choice = self._script[at] if at < len(self._script) else 0
        self._trail.append((choice, len(weights)))
        self.probability *= weights[choice]
        return choice

    def flip(self, probability: float) -> bool:
        if probability >= 1 or probability <= 0:
            return probability > 0
        return self._choose([probability, 1 - probability]) == 0

    def one(self, walk: Walk) -> tuple[list[int], int]:
        (found,) = walk_together([walk], lambda rows, weights: [self.draw(weights[0])])
        return found

    def draw(self, weights: Tensor) -> int:
        tokens = weights.nonzero().flatten().tolist()
        return tokens[self._choose((weights[tokens] / weights.sum()).tolist())]


@dataclass
class Models:
    """Distributions [V] float64 by prefix, and how the rule is told of q if not by the truth."""

    p: Table
    q: Table
    parents: tuple[int, ...]
    told_q: Table | None = None

    def prefixes(self, tokens: tuple) -> list[tuple]:
        """Of every place the tokens up to it."""
        found: list[tuple] = []
        for token, parent in zip(tokens, self.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return found

    def trees(self) -> Iterator[tuple[tuple, float]]:
        """Every tree that can be drafted, and its probability: siblings are drawn in turn, without
        replacement."""
        for tokens in itertools.product(range(VOCAB), repeat=len(self.parents)):
            prefixes, mass = self.prefixes(tokens), 1.0
            for k, parent in enumerate(self.parents):
                earlier = [tokens[j] for j in range(k) if self.parents[j] == parent]
                if tokens[k] in earlier:
                    mass = 0.0
                    break
                q = self.q(prefixes[parent] if parent >= 0 else ())
                left = 1 - sum(float(q[x]) for x in earlier)
                mass *= float(q[tokens[k]]) / left if left > 1e-15 else 0.0
            if mass > 0:
                yield tokens, mass

    def p_of(self, tokens: tuple) -> Tensor:
        return torch.stack([self.p(prefix) for prefix in [(), *self.prefixes(tokens)]])

    def q_of(self, tokens: tuple) -> Tensor:
        prefixes, table = self.prefixes(tokens), self.told_q or self.q
        return torch.stack(
            [table(prefixes[parent] if parent >= 0 else ()) for parent in self.parents]
        )


def random_table(seed: int, sparse: bool = False) -> Table:
    def table(prefix: tuple) -> Tensor:
        place = sum((x + 1) * 4**k for k, x in enumerate(prefix))
        generator = torch.Generator().manual_seed(seed * 1000 + place)
        weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2 + 1e-3
        if sparse:
            weights[torch.randint(VOCAB, (), generator=generator)] = 0
        return weights / weights.sum()

    return table


def enumerate_rule(models: Models, rule: str, tokens: tuple | None = None) -> tuple[float, float]:
    """(total variation of the text from the target's, expected accepted drafts). `tokens`: always
    that tree."""
    length = 1 + max(len(prefix) for prefix in models.prefixes(tuple([0] * len(models.parents))))
    written: dict[tuple, float] = {}
    accepted = 0.0
    for drafted, mass in [(tokens, 1.0)] if tokens is not None else models.trees():
        p = models.p_of(drafted)
        proposal = Proposal(
            torch.tensor([drafted]),
            [len(drafted)],
            None if tokens is not None else models.q_of(drafted)[None],
            [list(models.parents)],
        )
        dice, (tree,) = EveryThrow(), trees_of(proposal, p[None])
        for path, token, chance in dice.walks(
            lambda p=p, tree=tree, dice=dice: dice.one(TREE_RULES[rule](p, tree, dice))
        ):
            text = (*(drafted[place] for place in path), token)
            written[text] = written.get(text, 0.0) + mass * chance
            accepted += mass * chance * len(path)
    distance = 0.0
    for text in itertools.product(range(VOCAB), repeat=length):
        steps = [float(models.p(text[:k])[x]) for k, x in enumerate(text)]
        got = 0.0
        for k in range(1, length + 1):
            rest = 1.0
            for step in steps[k:]:
                rest *= step
            got += written.get(text[:k], 0.0) * rest
        product = 1.0
        for step in steps:
            product *= step
        distance += abs(got - product) / 2
    return distance, accepted


def assert_lossless(models: Models, rule: str, **how) -> None:
    distance, _ = enumerate_rule(models, rule, **how)
    assert distance <= LOSSLESS, f"total variation {distance:.3g}"


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", SAMPLED)
def test_lossless_for_sampled_trees(rule, shape, sparse):
    assert_lossless(
        Models(
            random_table(3, sparse), random_table(60, sparse and shape != "wide"), SHAPES[shape]
        ),
        rule,
    )


@pytest.mark.parametrize("shape", ["chain", "wide", "uneven"])
def test_matching_is_lossless_for_any_tree(shape):
    models = Models(random_table(4, sparse=True), random_table(5), SHAPES[shape])
    trees = [tokens for tokens, _ in models.trees()]
    for tokens in trees[:: max(1, len(trees) // 12)]:
        assert_lossless(models, "sample_match", tokens=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["chain", "pairs", "uneven"])
def test_traversal_keeps_no_less_than_recursive(shape, seed):
    models = Models(random_table(seed), random_table(seed + 50), SHAPES[shape])
    assert enumerate_rule(models, "traversal")[1] >= enumerate_rule(models, "recursive")[1] - 1e-12


def toy(parents: tuple[int, ...]) -> Models:
    p, q = torch.tensor([[1, 2, 0], [2, 1, 0]], dtype=torch.float64) / 3
    return Models(lambda prefix: p, lambda prefix: q, parents)


def test_on_a_chain_they_are_the_token_and_the_block_rule():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 and 11/9 (Sun et al. 2403.10444)."""
    assert enumerate_rule(toy((-1, 0)), "recursive")[1] == pytest.approx(10 / 9, abs=1e-12)
    assert enumerate_rule(toy((-1, 0)), "traversal")[1] == pytest.approx(11 / 9, abs=1e-12)


def test_a_perfect_drafter_is_kept_to_the_leaf():
    table = random_table(8)
    for rule in ("recursive", "traversal"):
        distance, accepted = enumerate_rule(Models(table, table, PAIRS), rule)
        assert distance <= LOSSLESS and accepted == pytest.approx(2)


# each known bug, put in, fails


def put_back(q: Tensor, tokens: Tensor) -> Tensor:
    return q


def not_renormalised(q: Tensor, tokens: Tensor) -> Tensor:
    return q.scatter(1, tokens, 0.0)


def not_clamped(p: Tensor, q: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    rest = (rates * p - q).abs()
    return rest / rest.sum(), rest.sum(-1, keepdim=True)


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("bug", [put_back, not_renormalised])
def test_the_check_fails_for_a_sibling_left_in(rule, bug, monkeypatch):
    monkeypatch.setattr(inference.spec_decode.verification.tree_rules, "_without", bug)
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(Models(random_table(20), random_table(21), PAIRS), rule)


BUGS: dict[str, tuple[str, Callable]] = {
    "the token residual inside the walk": ("_left_over", lambda p, q, rates: (p, rates)),
    "nothing left over is not clamped": ("_left_over", not_clamped),
    "acceptance without q": ("_ratio", lambda p, q: p),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_fails_for(bug, monkeypatch):
    name, wrong = BUGS[bug]
    monkeypatch.setattr(inference.spec_decode.verification.tree_rules, name, wrong)
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(Models(random_table(20), random_table(21), PAIRS), "recursive")


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_the_check_fails_for_q_before_temperature(rule):
    q = random_table(21)
    told = Models(
        random_table(20), q, PAIRS, told_q=lambda prefix: q(prefix) ** 2 / (q(prefix) ** 2).sum()
    )
    with pytest.raises(AssertionError, match=r"total variation \d"):
        assert_lossless(told, rule)


# which rule judges what


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
    with pytest.raises(ConfigError, match="expected one of auto, token, block"):
        rule_for("typical", Proposal(tokens, [2]))


def test_a_tree_is_checked_when_made():
    with pytest.raises(ValueError, match="-1 or an earlier place"):
        Proposal(torch.tensor([[0, 1]]), [2], None, [[1, -1]])
    with pytest.raises(ValueError, match="expected 2 numbers"):
        Proposal(torch.tensor([[0, 1]]), [2], None, [[-1]])
    tree = Proposal(torch.tensor([[5, 6, 7, 8]]), [2], None, [[-1, 0, -1, 2]], scaffold=[2])
    assert tree.depths() == [[1, 2, 1, 2]] and tree.children(0) == {-1: [0], 0: [1]}
