"""A Markov target and drafter, and text written in rounds of draft and verify through the
production sampler, random numbers included, until every row has three tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.sampling.sampler import make_generator, probabilities
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.verification.rejection_sampler import verify_and_sample
from tests.support.chi2 import FAMILY_ALPHA, assert_fits
from tests.support.drafters import draw

CLASSES = 4  # the next token depends on the last one modulo this
WIDTH = 2  # drafts per round
WRITTEN = 3  # tokens examined
CASES = [
    *((16, True, rule) for rule in ("token", "block", "traversal", "sample_match")),
    *((16, False, rule) for rule in ("token", "block", "sample_match")),
    *((4096, True, rule) for rule in ("token", "block", "traversal")),
    *((4096, False, rule) for rule in ("token", "sample_match")),
]
TREES = [
    (16, True, "traversal"),
    (16, True, "sample_match"),
    (16, False, "sample_match"),
    (4096, True, "traversal"),
]
# each position and the joint of the first two
ALPHA = FAMILY_ALPHA / ((len(CASES) + len(TREES)) * (WRITTEN + 1))
TARGET_PARAMS = SamplingParams(temperature=0.8, top_p=0.9)
DRAFT_PARAMS = SamplingParams(temperature=1.3, top_k=12)


@dataclass
class MarkovWorld:
    target_logits: Tensor  # [CLASSES, V]
    drafter_logits: Tensor  # [CLASSES, V]
    p: Tensor  # [CLASSES, V] float64, by a reference of its own
    q: Tensor  # [CLASSES, V] float32, what is drafted from

    @property
    def vocab(self) -> int:
        return self.p.shape[1]


def make_world(vocab: int) -> MarkovWorld:
    generator = torch.Generator().manual_seed(vocab)
    spread = 1 if vocab == 16 else 3
    target = spread * torch.randn(CLASSES, vocab, generator=generator)
    drafter = target + torch.randn(CLASSES, vocab, generator=generator)
    rows = []
    for row in target.double():
        p = torch.softmax(row / TARGET_PARAMS.temperature, -1)
        mass = 0.0
        for token in p.argsort(descending=True).tolist():
            before = mass
            mass += float(p[token])
            if before >= TARGET_PARAMS.top_p:
                p[token] = 0
        rows.append(p / p.sum())
    return MarkovWorld(target, drafter, torch.stack(rows), probabilities(drafter, DRAFT_PARAMS))


class Chains:
    """How a round is drafted and verified; the bugs override one step each."""

    def __init__(self, world: MarkovWorld, dense: bool = True, rule: str = "token"):
        self.world = world
        self.dense = dense
        self.rule = rule

    def draft(self, last: Tensor, generators: list) -> Proposal:
        """Drafts after the last tokens [B], one by one."""
        tokens = []
        qs = []
        for _ in range(WIDTH):
            q = self.world.q[last % CLASSES]
            last = draw(q, generators) if self.dense else q.argmax(-1)
            tokens.append(last)
            qs.append(q)
        return Proposal(
            torch.stack(tokens, 1), [WIDTH] * len(last), self.given_q(torch.stack(qs, 1))
        )

    def given_q(self, q: Tensor) -> Tensor | None:
        return q if self.dense else None

    def params(self) -> SamplingParams:
        return TARGET_PARAMS

    def verify(self, last: Tensor, proposal: Proposal, generators: list) -> list[list[int]]:
        context = torch.cat([last.unsqueeze(1), proposal.token_ids], 1)  # [B, K+1]
        logits = self.world.target_logits[context % CLASSES]
        params = [self.params()] * len(last)
        kept = verify_and_sample(logits, proposal, params, generators, self.rule)
        return [row.tokens for row in kept]

    def round(self, last: Tensor, generators: list) -> list[list[int]]:
        return self.verify(last, self.draft(last, generators), generators)

    def write(self, rows: int, batch: int = 50) -> Tensor:
        """The first WRITTEN tokens of each row, after token 0: [rows, WRITTEN]."""
        texts: list[list[int]] = []
        for start in range(0, rows, batch):
            generators = [make_generator(start + b) for b in range(batch)]
            written: list[list[int]] = [[] for _ in range(batch)]
            while short := [b for b in range(batch) if len(written[b]) < WRITTEN]:
                last = torch.tensor([written[b][-1] if written[b] else 0 for b in short])
                rounds = self.round(last, [generators[b] for b in short])
                for b, tokens in zip(short, rounds, strict=True):
                    written[b] += tokens
            texts += [text[:WRITTEN] for text in written]
        return torch.tensor(texts)


class Trees(Chains):
    """Two drafts after the last token, and two after each of them, siblings drawn without
    replacement."""

    parents = (-1, -1, 0, 0, 1, 1)

    def draft(self, last: Tensor, generators: list) -> Proposal:
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        for pair in range(3):
            place = last if pair == 0 else tokens[pair - 1]
            q = self.world.q[place % CLASSES]
            left = q.clone()
            for _ in range(2):
                drawn = draw(left, generators) if self.dense else left.argmax(-1)
                left[torch.arange(len(left)), drawn] = 0
                tokens.append(drawn)
                qs.append(q)
        parents = [list(self.parents) for _ in last]
        q_all = self.given_q(torch.stack(qs, 1))
        return Proposal(torch.stack(tokens, 1), [6] * len(last), q_all, parents)


def assert_written_by_target(rounds: Chains, rows: int) -> None:
    p = rounds.world.p
    vocab = rounds.world.vocab
    texts = rounds.write(rows)
    step = torch.stack([_by_class(row) for row in p])  # [CLASSES, CLASSES], of the next class
    for position, marginal in enumerate([p[0], step[0] @ p, step[0] @ step @ p]):
        observed = torch.bincount(texts[:, position], minlength=vocab)
        assert_fits(observed, rows * marginal, ALPHA, f"position {position + 1}")
    groups = _groups_of(p[0])  # first tokens one by one, but the rare ones together
    most = 24
    joint = torch.stack([_by_class(p[0] * (groups == g)) @ p for g in range(most)])  # [most, V]
    observed = torch.bincount(groups[texts[:, 0]] * vocab + texts[:, 1], minlength=most * vocab)
    assert_fits(observed, rows * joint.flatten(), ALPHA, "joint of the first two")


def _by_class(weights: Tensor) -> Tensor:
    """Mass [V] of tokens -> mass [CLASSES] of what the next token depends on."""
    return weights.view(-1, CLASSES).sum(0)


def _groups_of(p: Tensor) -> Tensor:
    """Rank of each token [V], the rare ones sharing four groups after the first twenty."""
    tokens = torch.arange(len(p))
    rank = torch.empty_like(tokens).scatter_(0, p.argsort(descending=True), tokens)
    return torch.where(rank < 20, rank, 20 + tokens % 4)
