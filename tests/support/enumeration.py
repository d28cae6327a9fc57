"""Rules on trial: every draft, every decision and every token of a tiny world, with their
probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.verification.chain_rules import RULES, Verdict, decide, verify
from draftsmith.inference.spec_decode.verification.tree_rules import follow, traverse

VOCAB = 3
LOSSLESS = 1e-12
Table = Callable[[tuple], Tensor]  # prefix (tuple of tokens) -> distribution [V] float64
# draft, accepted nodes, distribution [V] of the token that follows, probability of this decision
Outcome = tuple[int, list[int], Tensor, float]


def chain(gamma: int) -> tuple[int, ...]:
    """The parents of a chain of gamma drafts."""
    return tuple(range(-1, gamma - 1))


def prefixes(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple]:
    """The tokens up to each node."""
    paths: list[tuple] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def chance(tokens: Sequence[int], parents: Sequence[int], q: Table) -> float:
    """The probability of these drafts: siblings are drawn in turn, without replacement."""
    before = prefixes(tokens, parents)
    product = 1.0
    for k, parent in enumerate(parents):
        earlier = [tokens[j] for j in range(k) if parents[j] == parent]
        weights = q(before[parent] if parent >= 0 else ())
        left = 1 - sum(float(weights[x]) for x in earlier)
        if tokens[k] in earlier or left <= 1e-15:
            return 0.0
        product *= float(weights[tokens[k]]) / left
    return product


@dataclass(frozen=True)
class World:
    """A target and a drafter that remember everything, and the shape of the drafts.

    The `given_` fields are what the verifier gets; unless a bug is put in, the truth."""

    parents: tuple[int, ...]
    p: Table
    q: Table
    given_p: Table | None = None
    given_q: Table | None = None
    given_counts: Callable[[tuple], int] | None = None
    deterministic: bool = False  # the verifier is given one-hot q

    def honest(self) -> World:
        return replace(self, given_p=None, given_q=None, given_counts=None)

    def prefixes(self, tokens: tuple) -> list[tuple]:
        return prefixes(tokens, self.parents)

    def drafts(self) -> tuple[list[tuple], list[float]]:
        """Every tree that can be drafted, and its probability."""
        trees = list(itertools.product(range(VOCAB), repeat=len(self.parents)))
        chances = [chance(tokens, self.parents, self.q) for tokens in trees]
        possible = [b for b, of_tree in enumerate(chances) if of_tree > 0]
        return [trees[b] for b in possible], [chances[b] for b in possible]

    def input_of(self, drafts: list[tuple], *, as_chain: bool) -> tuple[Tensor, Proposal]:
        """What the verifier gets: p [N, 1+K, V] and the proposal."""
        p = self.given_p or self.p
        q = self.given_q or self.q
        before = [[(), *self.prefixes(tokens)] for tokens in drafts]
        p_all = torch.stack([torch.stack([p(prefix) for prefix in row]) for row in before])
        q_all = torch.stack(
            [torch.stack([q(row[1 + parent]) for parent in self.parents]) for row in before]
        )
        counts = [
            self.given_counts(tokens) if self.given_counts else len(tokens) for tokens in drafts
        ]
        parents = None if as_chain else [list(self.parents[:count]) for count in counts]
        return p_all, Proposal(
            torch.tensor(drafts), counts, None if self.deterministic else q_all, parents
        )

    def verdict(self, drafts: list[tuple], rule: str) -> Verdict:
        return verify(*self.input_of(drafts, as_chain=True), rule)

    def outcomes(self, drafts: list[tuple], rule: str) -> Iterator[Outcome]:
        if rule in RULES:
            return _of_verdict(self.verdict(drafts, rule))
        p, proposal = self.input_of(drafts, as_chain=False)
        return {"traversal": of_traversal, "sample_match": _of_match, "recursive": _of_recursive}[
            rule
        ](p, proposal)


def residuals(verdict: Verdict) -> Tensor:
    """[B, K+1, V]: entry j is what the bonus token is drawn from if j drafts are accepted."""
    rows, nodes = verdict.p.shape[:2]
    return torch.stack([verdict.residual_at([j] * rows) for j in range(nodes)], dim=1)


def _of_verdict(verdict: Verdict) -> Iterator[Outcome]:
    """Every pattern of passed and failed throws, through `decide`."""
    accept = verdict.accept_probs
    left = residuals(verdict)
    for pattern in itertools.product([True, False], repeat=accept.shape[1]):
        passed = torch.tensor(pattern, dtype=torch.bool)
        throws = torch.where(passed, accept / 2, (1 + accept) / 2)
        chances = torch.where(passed, accept, 1 - accept).prod(-1).tolist()
        for b, accepted in enumerate(decide(verdict, throws)):
            yield b, list(range(accepted)), left[b, accepted], chances[b]


class EveryThrow:
    """Flips that come out every way there is, one walk after the other; `probability` is that of
    the walk since `advance`."""

    def __init__(self) -> None:
        self._script: list[bool] = []
        self._trail: list[bool] = []
        self.probability = 1.0

    def flip(self, probability: float) -> bool:
        if probability >= 1 or probability <= 0:
            return probability > 0
        at = len(self._trail)
        passed = self._script[at] if at < len(self._script) else True
        self._trail.append(passed)
        self.probability *= probability if passed else 1 - probability
        return passed

    def advance(self) -> bool:
        """On to the next walk; False if there is none."""
        while self._trail and not self._trail[-1]:
            self._trail.pop()
        self._script = [*self._trail[:-1], False]
        more = bool(self._trail)
        self._trail = []
        self.probability = 1.0
        return more


def of_traversal(p: Tensor, proposal: Proposal) -> Iterator[Outcome]:
    """Through the production's batch of all drafts that have an outcome left."""
    throws = [EveryThrow() for _ in p]
    rows = list(range(len(p)))
    while rows:
        left = p[rows].clone()
        paths = traverse(left, proposal.select(rows), [throws[b].flip for b in rows])
        for i, (b, path) in enumerate(zip(rows, paths, strict=True)):
            yield b, path, left[i, 1 + path[-1] if path else 0], throws[b].probability
        rows = [b for b in rows if throws[b].advance()]


def _of_recursive(p: Tensor, proposal: Proposal) -> Iterator[Outcome]:
    """An oracle's outcomes, draft by draft."""
    for b in range(len(p)):
        throws = EveryThrow()
        more = True
        while more:
            path, left = siblings_in_turn(p[b], proposal, b, throws.flip)
            yield b, path, left, throws.probability
            more = throws.advance()


def siblings_in_turn(
    p: Tensor, proposal: Proposal, row: int, flip: Callable[[float], bool]
) -> tuple[list[int], Tensor]:
    """Siblings in turn, each against what the ones before it left of p and q. -> the path, and the
    distribution [V] of the token after it.

    SpecInfer (Miao et al. 2305.09781), with sampling without replacement (Yang et al. 2402.13720).
    On a chain it is the token rule."""
    path = []
    node = -1
    below = proposal.children(row)
    while True:
        left = p[node + 1]
        children = below.get(node, [])
        q = proposal.q[row, children[0]] if children else None
        for child in children:
            token = proposal.drafted[row][child]
            if flip(min(1.0, float(left[token] / q[token])) if q[token] > 0 else 0.0):
                break
            rest = (left - q).clamp(min=0)
            left = rest / rest.sum() if rest.sum() > 0 else left
            q = q.clone()
            q[token] = 0
            q = q / q.sum() if q.sum() > 0 else q
        else:
            return path, left
        path.append(child)
        node = child


def _of_match(p: Tensor, proposal: Proposal) -> Iterator[Outcome]:
    """Every text that the target may draw, along the tree as far as it is there."""
    depths = proposal.depths()
    seen = set()
    for text in itertools.product(range(VOCAB), repeat=1 + max(map(max, depths))):
        target_ids = torch.tensor([[text[depth] for depth in (0, *row)] for row in depths])
        for b, (path, token) in enumerate(follow(proposal, target_ids)):
            if (b, *path, token) not in seen:
                seen.add((b, *path, token))
                entries = [0, *(1 + node for node in path)]
                chance = math.prod(float(p[b, i, x]) for i, x in zip(entries, text, strict=False))
                one_hot = torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()
                yield b, path, one_hot, chance


def enumerate_rule(world: World, rule: str, only: tuple | None = None) -> tuple[float, float]:
    """Total variation of the text from the target's own, and expected accepted drafts.

    What a round leaves unwritten is completed with the target's own distributions. `only`: always
    these drafts, given as deterministic."""
    drafts, drawn = world.drafts()
    if only is not None:
        drafts = [only]
        drawn = [1.0]
        world = replace(world, deterministic=True)
    return compare(world.outcomes(drafts, rule), drafts, drawn, world.p)


def compare(
    outcomes: Iterable[Outcome], drafts: Sequence[tuple], drawn: Sequence[float], p: Table
) -> tuple[float, float]:
    """As `enumerate_rule`, of the outcomes of these drafts, which are drawn with these
    probabilities."""
    written: dict[tuple, float] = {}
    expected_accepted = 0.0
    for b, path, weights, chance in outcomes:
        mass = drawn[b] * chance
        expected_accepted += mass * len(path)
        for token, weight in enumerate(weights.tolist()):
            text = (*(drafts[b][node] for node in path), token)
            written[text] = written.get(text, 0.0) + mass * weight
    distance = 0.0
    length = max(map(len, written))
    for text in itertools.product(range(VOCAB), repeat=length):
        steps = [float(p(text[:k])[x]) for k, x in enumerate(text)]
        mass = sum(written.get(text[:k], 0.0) * math.prod(steps[k:]) for k in range(1, length + 1))
        distance += abs(mass - math.prod(steps)) / 2
    return distance, expected_accepted


def assert_lossless(world: World, rule: str, only: tuple | None = None) -> None:
    distance, _ = enumerate_rule(world, rule, only)
    assert distance <= LOSSLESS, f"total variation {distance:.3g}"


# ---------------------------------------------------------------------- worlds


def random_table(seed: int, sparse: bool = False) -> Table:
    """A random distribution for every prefix; sparse ones have tokens of probability zero."""
    known: dict[tuple, Tensor] = {}

    def table(prefix: tuple) -> Tensor:
        if prefix not in known:
            code = sum((x + 1) * 4**k for k, x in enumerate(prefix))
            generator = torch.Generator().manual_seed(seed * 1000 + code)
            weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2 + 1e-3
            if sparse:
                weights[torch.randint(VOCAB, (), generator=generator)] = 0
            known[prefix] = weights / weights.sum()
        return known[prefix]

    return table


def one_hot(table: Table) -> Table:
    return lambda prefix: torch.nn.functional.one_hot(table(prefix).argmax(), VOCAB).double()


def over(known: Sequence[int], table: Table) -> Table:
    """The same over these tokens alone: a reduced vocabulary."""
    listed = torch.zeros(VOCAB, dtype=torch.float64)
    listed[list(known)] = 1.0

    def reduced(prefix: tuple) -> Tensor:
        kept = table(prefix) * listed
        return kept / kept.sum()

    return reduced


def paper_toy(gamma: int) -> World:
    """p = (1/3, 2/3), q = (2/3, 1/3) (Sun et al. 2403.10444)."""
    p, q = torch.tensor([[1, 2, 0], [2, 1, 0]], dtype=torch.float64) / 3
    return World(chain(gamma), lambda prefix: p, lambda prefix: q)
