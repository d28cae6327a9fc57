"""The production path, dice included, writes what the target would: χ² with fixed seeds.

The same check must fail for known bugs.

A Markov target and drafter; text is written in rounds of draft and verify until every row has three
tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import inference.spec_decode.verification.rejection_sampler
from inference.sampling.sampler import make_generator, probabilities, uniforms
from inference.sampling_params import SamplingParams
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.verification.rejection_sampler import verify_and_sample as judge
from inference.spec_decode.verification.tree_rules import TREE_RULES, trees_of, walk_together
from speculators.errors import ConfigError, DraftsmithError
from tests.inference.conftest import draw

CLASSES = 4  # the next token depends on the last one modulo this
WIDTH = 2  # drafts per round
WRITTEN = 3  # tokens examined
FAMILY_ALPHA = 1e-6
CASES = [
    *((16, True, rule) for rule in ("token", "block", "recursive", "traversal", "sample_match")),
    *((16, False, rule) for rule in ("token", "block", "sample_match")),
    *((4096, True, rule) for rule in ("token", "block", "traversal")),
    *((4096, False, rule) for rule in ("token", "sample_match")),
]
TREES = [
    (16, True, "recursive"),
    (16, True, "traversal"),
    (16, True, "sample_match"),
    (16, False, "sample_match"),
    (4096, True, "recursive"),
    (4096, True, "traversal"),
]
ALPHA = FAMILY_ALPHA / (
    (len(CASES) + len(TREES)) * (WRITTEN + 1)
)  # each position and the joint of the first two
TARGET_PARAMS = SamplingParams(temperature=0.8, top_p=0.9)
DRAFT_PARAMS = SamplingParams(temperature=1.3, top_k=12)


def verify_and_sample(*arguments) -> list[list[int]]:
    """The tokens alone."""
    return [kept.tokens for kept in judge(*arguments)]


@dataclass
class World:
    target_logits: Tensor  # [CLASSES, V]
    drafter_logits: Tensor  # [CLASSES, V]
    p: Tensor  # [CLASSES, V] float64, by a reference of its own
    q: Tensor  # [CLASSES, V] float32, what is drafted from

    @property
    def vocab(self) -> int:
        return self.p.shape[1]


def make_world(vocab: int) -> World:
    generator = torch.Generator().manual_seed(vocab)
    spread = 1 if vocab == 16 else 3
    target = spread * torch.randn(CLASSES, vocab, generator=generator)
    drafter = target + torch.randn(CLASSES, vocab, generator=generator)
    rows = []
    for row in target.double():
        p, mass = torch.softmax(row / TARGET_PARAMS.temperature, -1), 0.0
        for token in p.argsort(descending=True).tolist():
            before, mass = mass, mass + float(p[token])
            if before >= TARGET_PARAMS.top_p:
                p[token] = 0
        rows.append(p / p.sum())
    return World(target, drafter, torch.stack(rows), probabilities(drafter, DRAFT_PARAMS))


class Path:
    """How a round is drafted and verified; the bugs override one step each."""

    def __init__(self, world: World, dense: bool, rule: str = "token"):
        self.world, self.dense, self.rule = world, dense, rule

    def draft(self, last: Tensor, generators: list) -> Proposal:
        """Drafts after the last tokens [B], one by one."""
        tokens, qs = [], []
        for _ in range(WIDTH):
            q = self.world.q[last % CLASSES]
            last = draw(q, generators) if self.dense else q.argmax(-1)
            tokens.append(last)
            qs.append(q)
        return Proposal(
            torch.stack(tokens, 1), [WIDTH] * len(last), self.told_q(torch.stack(qs, 1))
        )

    def told_q(self, q: Tensor) -> Tensor | None:
        return q if self.dense else None

    def round(self, last: Tensor, generators: list) -> list[list[int]]:
        proposal = self.draft(last, generators)
        context = torch.cat([last.unsqueeze(1), proposal.token_ids], 1)  # [B, K+1]
        logits = self.world.target_logits[context % CLASSES]
        return verify_and_sample(
            logits, proposal, [TARGET_PARAMS] * len(last), generators, self.rule
        )

    def write(self, rows: int, batch: int) -> Tensor:
        """The first WRITTEN tokens of each row, after token 0: [rows, WRITTEN]."""
        texts: list[list[int]] = []
        for start in range(0, rows, batch):
            generators = [make_generator(start + b) for b in range(batch)]
            new: list[list[int]] = [[] for _ in range(batch)]
            while todo := [b for b in range(batch) if len(new[b]) < WRITTEN]:
                last = torch.tensor([new[b][-1] if new[b] else 0 for b in todo])
                for b, tokens in zip(
                    todo, self.round(last, [generators[b] for b in todo]), strict=True
                ):
                    new[b] += tokens
            texts += [text[:WRITTEN] for text in new]
        return torch.tensor(texts)


class TreePath(Path):
    """Two drafts after the last token, and two after each of them, siblings drawn without
    replacement."""

    parents = (-1, -1, 0, 0, 1, 1)

    def draft(self, last, generators):
        tokens, qs, above = [], [], [last] * 2
        for pair in range(3):
            place = above[pair] if pair == 0 else tokens[pair - 1]
            q = self.world.q[place % CLASSES]
            left = q.clone()
            for _ in range(2):
                drawn = draw(left, generators) if self.dense else left.argmax(-1)
                left[torch.arange(len(left)), drawn] = 0
                tokens.append(drawn)
                qs.append(q)
        parents = [list(self.parents) for _ in last]
        return Proposal(
            torch.stack(tokens, 1), [6] * len(last), self.told_q(torch.stack(qs, 1)), parents
        )


def p_value(observed: Tensor, expected: Tensor) -> float:
    """χ² of counts against expected counts; rare cells are pooled until each pool expects ten."""
    if (observed[expected == 0] > 0).any():
        return 0.0
    order = expected.argsort()
    pools = (expected[order].cumsum(0) / 10).floor().clamp(max=10**9)
    _, pools = pools.unique_consecutive(return_inverse=True)
    wanted = torch.zeros(int(pools.max()) + 1, dtype=torch.float64).index_add_(
        0, pools, expected[order]
    )
    got = torch.zeros_like(wanted).index_add_(0, pools, observed[order].double())
    kept = wanted > 1
    statistic = ((got - wanted)[kept] ** 2 / wanted[kept]).sum()
    freedom = torch.tensor(float(kept.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def assert_written_by_target(path: Path, rows: int, batch: int = 50) -> None:
    p, vocab = path.world.p, path.world.vocab
    texts = path.write(rows, batch)
    step = torch.stack([by_class(row) for row in p])  # [CLASSES, CLASSES], of the next class
    marginals = [p[0], step[0] @ p, step[0] @ step @ p]
    for position, marginal in enumerate(marginals):
        observed = torch.bincount(texts[:, position], minlength=vocab)
        value = p_value(observed, rows * marginal)
        assert value > ALPHA, f"position {position + 1}: χ² p-value {value:.3g}"
    groups, most = groups_of(p[0]), 24  # first tokens one by one, but the rare ones together
    joint = torch.stack([by_class(p[0] * (groups == g)) @ p for g in range(most)])  # [most, V]
    observed = torch.bincount(groups[texts[:, 0]] * vocab + texts[:, 1], minlength=most * vocab)
    value = p_value(observed, rows * joint.flatten())
    assert value > ALPHA, f"joint of the first two: χ² p-value {value:.3g}"


def by_class(weights: Tensor) -> Tensor:
    """Mass [V] of tokens -> mass [CLASSES] of what the next token depends on."""
    return weights.view(-1, CLASSES).sum(0)


def groups_of(p: Tensor) -> Tensor:
    """Rank of each token [V], the rare ones sharing four groups after the first twenty."""
    tokens = torch.arange(len(p))
    rank = torch.empty_like(tokens).scatter_(0, p.argsort(descending=True), tokens)
    return torch.where(rank < 20, rank, 20 + tokens % 4)


# (b) χ²


@pytest.mark.slow
@pytest.mark.parametrize("vocab,dense,rule", CASES)
def test_text_is_distributed_as_the_targets(vocab, dense, rule):
    assert_written_by_target(
        Path(make_world(vocab), dense, rule), rows=8_000 if vocab == 16 else 2_000
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab,dense,rule", TREES)
def test_text_of_tree_drafts_is_distributed_as_the_targets(vocab, dense, rule):
    assert_written_by_target(
        TreePath(make_world(vocab), dense, rule), rows=3_000 if vocab == 16 else 1_000
    )


# (c) each known bug, put in, fails the check of (b)


class SharedNoise(Path):
    """The verifier throws the dice that the drafter has already used."""

    def round(self, last, generators):
        before = [generator.get_state() for generator in generators]
        proposal = self.draft(last, generators)
        context = torch.cat([last.unsqueeze(1), proposal.token_ids], 1)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        logits = self.world.target_logits[context % CLASSES]
        return verify_and_sample(
            logits, proposal, [TARGET_PARAMS] * len(last), generators, self.rule
        )


class RawTarget(Path):
    """p before temperature and top-p."""

    def round(self, last, generators):
        proposal = self.draft(last, generators)
        context = torch.cat([last.unsqueeze(1), proposal.token_ids], 1)
        logits = self.world.target_logits[context % CLASSES]
        return verify_and_sample(
            logits, proposal, [SamplingParams()] * len(last), generators, self.rule
        )


class RawDrafter(Path):
    """q before its processors."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        context = torch.cat([last.unsqueeze(1), proposal.token_ids[:, :-1]], 1)
        proposal.q = torch.softmax(self.world.drafter_logits, -1)[context % CLASSES]
        return proposal


class NotScattered(Path):
    """q left in the order of a draft vocabulary of its own."""

    def told_q(self, q):
        return q.flip(-1)


class LengthAfterLooking(Path):
    """Only drafts that look good are verified."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        likely = (
            self.world.q[last % CLASSES].gather(-1, proposal.token_ids[:, :1]).squeeze(-1) > 0.2
        )
        proposal.counts = [WIDTH if ok else 0 for ok in likely.tolist()]
        return proposal


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "bug", [SharedNoise, RawTarget, RawDrafter, NotScattered, LengthAfterLooking]
)
def test_the_check_fails_for(bug, rule):
    with pytest.raises(AssertionError, match=r"χ² p-value \d"):
        assert_written_by_target(bug(make_world(16), dense=True, rule=rule), rows=4_000)


class SecondIsTheBest(TreePath):
    """The rule is told that both siblings were drawn, but the second one is the likeliest that was
    left."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        left = proposal.q[:, 1].scatter(-1, proposal.token_ids[:, :1], 0.0)
        proposal.token_ids[:, 1] = left.argmax(-1)
        return proposal


class PrunedAfterLooking(TreePath):
    """Drafts that look unlikely are not verified."""

    def draft(self, last, generators):
        proposal = super().draft(last, generators)
        likely = proposal.q[:, 0].gather(-1, proposal.token_ids[:, :1]).squeeze(-1) > 0.2
        proposal.counts = [6 if ok else 0 for ok in likely.tolist()]
        proposal.parents = [
            parents[:count]
            for parents, count in zip(proposal.parents, proposal.counts, strict=True)
        ]
        return proposal


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("bug", [SecondIsTheBest, PrunedAfterLooking])
def test_the_check_fails_for_trees(bug, rule):
    with pytest.raises(AssertionError, match=r"χ² p-value \d"):
        assert_written_by_target(bug(make_world(16), dense=True, rule=rule), rows=4_000)


@pytest.mark.parametrize("path", [Path, TreePath])
def test_matched_drafts_leave_every_seeds_text_as_it_is(path):
    """The target draws every token itself, from the numbers it would draw it from without
    drafts."""
    world = make_world(16)
    drafted = path(world, dense=False, rule="sample_match").write(50, 50)
    alone = path(world, dense=False)
    alone.draft = lambda last, generators: Proposal.empty(len(last))
    assert torch.equal(drafted, alone.write(50, 50))


@pytest.mark.slow
def test_the_check_fails_for_noise_shared_between_acceptance_and_residual(monkeypatch):
    def repeated(generator, n):
        numbers = uniforms(generator, n)
        return [*numbers[:-1], numbers[0]]

    monkeypatch.setattr(inference.spec_decode.verification.rejection_sampler, "uniforms", repeated)
    with pytest.raises(AssertionError, match=r"χ² p-value \d"):
        assert_written_by_target(Path(make_world(16), dense=True), rows=5_000)


# rows are independent


def mixed_batch(rows=12, width=3, vocab=50):
    """Greedy and sampled rows, all draft lengths: logits, proposal, params."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(rows, width + 1, vocab, generator=generator)
    q = torch.softmax(
        logits[:, :width] + 0.5 * torch.randn(rows, width, vocab, generator=generator), -1
    )
    tokens = torch.stack([draw(q[:, k], [generator] * rows) for k in range(width)], 1)
    params = [
        SamplingParams(temperature=(0, 0.7, 1.0)[b % 3], top_p=1 - 0.1 * (b % 2))
        for b in range(rows)
    ]
    return logits, Proposal(tokens, [b % (width + 1) for b in range(rows)], q), params


@pytest.mark.parametrize("rule", ["token", "block", "sample_match"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_row_writes_the_same_in_a_mixed_batch_and_alone(dense, rule):
    logits, proposal, params = mixed_batch()
    if not dense:
        proposal.q = None
    generators = [make_generator(b) for b in range(12)]
    together = verify_and_sample(logits, proposal, params, generators, rule)
    for b, count in enumerate(proposal.counts):
        generator = make_generator(b)
        alone = Proposal(
            proposal.token_ids[b : b + 1, :count],
            [count],
            proposal.q[b : b + 1, :count] if dense else None,
        )
        (tokens,) = verify_and_sample(
            logits[b : b + 1, : count + 1], alone, [params[b]], [generator], rule
        )
        assert together[b] == tokens
        assert 1 <= len(tokens) <= count + 1
        assert torch.equal(generator.get_state(), generators[b].get_state())
        taken = make_generator(b)
        if not params[b].greedy:
            uniforms(taken, len(tokens) if rule == "sample_match" else count + 1)
        assert torch.equal(taken.get_state(), generator.get_state())


def drafted_batch(seed: int, rows=6, width=7, vocab=12, *, chains: bool, sampled: bool):
    """Chains or trees of all sizes, scaffold behind those that were not sampled, rows of many
    parameters."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, width + 1, vocab, generator=generator)
    counts = [source.randint(0, width) for _ in range(rows)]
    scaffold = [0 if chains or sampled else source.randint(0, width - count) for count in counts]
    parents = [[source.randint(-1, k // 2 - 1) for k in range(width)] for _ in range(rows)]
    tokens, q = (
        torch.randint(vocab, (rows, width), generator=generator),
        torch.zeros(rows, width, vocab),
    )
    for b, count in enumerate(counts):
        left: dict[int, Tensor] = {}  # by parent, what the next sibling is drawn from
        for k in range(count):
            above = k - 1 if chains else parents[b][k]
            fresh = torch.softmax(
                logits[b, above + 1] + 0.7 * torch.randn(vocab, generator=generator), -1
            )
            first = above not in left
            weights = left.setdefault(above, fresh)
            q[b, k] = fresh if first else q[b, next(j for j in range(k) if parents[b][j] == above)]
            tokens[b, k] = token = int(draw(weights[None], [generator]))
            weights = left[above] = weights.clone()
            weights[token] = 0
    of_rows = [
        row[: count + more] for row, count, more in zip(parents, counts, scaffold, strict=True)
    ]
    proposal = Proposal(
        tokens, counts, q if sampled else None, *(() if chains else (of_rows, scaffold))
    )
    params = [
        SamplingParams(
            temperature=source.choice((0, 0.7, 1.0)),
            top_p=source.choice((0.9, 1)),
            top_k=source.choice((-1, 5)),
        )
        for _ in range(rows)
    ]
    return logits, proposal, params


class Alone:
    """Dice of one row, one number at a time."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def flip(self, probability: float) -> bool:
        return uniforms(self._generator, 1)[0] < probability

    def draw(self, rows: list[int], weights: Tensor) -> list[int]:
        return [int(draw(each[None], [self._generator])) for each in weights]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "rule", ["recursive", "traversal", "sample_match", "sample_match of a list"]
)
def test_all_rows_at_once_is_one_row_after_the_other(rule, chains, seed):
    """The rule as it is proved, walked by each row alone: the same drafts, the same token, the same
    numbers taken."""
    rule, _, listed = rule.partition(" ")
    logits, proposal, params = drafted_batch(seed, chains=chains, sampled=not listed)
    generators = [make_generator(b) for b in range(len(params))]
    together = judge(logits, proposal, params, generators, rule)
    for b, each in enumerate(params):
        generator = make_generator(b)
        p = probabilities(logits[b : b + 1], each)
        tree = trees_of(proposal.select([b]), p)[0]
        walk = TREE_RULES["greedy" if each.greedy else rule]
        ((path, token),) = walk_together(
            [walk(p[0], tree, Alone(generator))], Alone(generator).draw
        )
        assert together[b] == (path, [*(proposal.drafted[b][place] for place in path), token])
        assert torch.equal(generator.get_state(), generators[b].get_state())


def test_greedy_rows_need_no_generator_and_no_q_and_write_the_argmax():
    logits, proposal, params = mixed_batch()
    proposal.q[::3] = float("nan")
    generators = [None if row_params.greedy else make_generator(0) for row_params in params]
    written = verify_and_sample(logits, proposal, params, generators)
    for b in range(0, 12, 3):
        best = logits[b].argmax(-1).tolist()
        assert written[b] == best[: len(written[b])]


def test_nothing_drafted_is_plain_sampling():
    logits, _, _ = mixed_batch(rows=6)
    params = [SamplingParams(temperature=0.9)] * 6
    written = verify_and_sample(
        logits[:, :1], Proposal.empty(6), params, [make_generator(b) for b in range(6)]
    )
    p = probabilities(logits[:, 0], params[0])
    assert written == [[int(t)] for t in draw(p, [make_generator(b) for b in range(6)])]


def test_refusals():
    logits, proposal, params = mixed_batch()
    generators = [make_generator(b) for b in range(12)]
    with pytest.raises(ConfigError, match="temperature 0 only"):
        verify_and_sample(logits, proposal, params, generators, "greedy")
    with pytest.raises(ValueError, match="as many of each"):
        verify_and_sample(logits, proposal, params[:-1], generators)
    with pytest.raises(DraftsmithError, match="no token of positive probability"):
        verify_and_sample(torch.full_like(logits, float("nan")), proposal, params, generators)
