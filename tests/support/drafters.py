"""Drafters for testing the engine: stubs, a head with maths of its own, a random EAGLE-3."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from draftsmith.inference.sampling.sampler import check_drawn, inverse_cdf, uniforms
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.tree_shape import DynamicTree, StaticTree
from draftsmith.speculators.drafter import Drafter, DraftLogits
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.traits import Traits

TREES = {
    "static": StaticTree.parse([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": DynamicTree(topk=3, depth=3, budget=7),
}


class StubProposer(Proposer):
    """Drafts from `texts`, a dict prompt -> the response the target will write: `right` as it is,
    `wrong` every token off by one, `random` any tokens; `ragged` varies the count; `sampled` draws
    from a random dense q; `branches` is a tree, the text beside wrong tokens."""

    def __init__(self, kind: str, k: int, vocab_size: int, texts: dict | None = None) -> None:
        super().__init__(k)
        self.kind = kind
        self.vocab_size = vocab_size
        self.texts = texts or {}
        self.drafts_trees = kind == "branches"

    @property
    def max_width(self) -> int:
        return self.num_speculative_tokens * (3 if self.drafts_trees else 1)

    def propose(self, requests, plan) -> Proposal:
        width = self.num_speculative_tokens
        counts = [min(limit, width) for limit in plan.limits]
        if self.kind == "sampled":
            return self._sampled(requests, counts, width)
        if self.kind == "branches":
            return self._branches(requests, counts)
        tokens = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            seed = 1000 * sum(request.token_ids) + len(request.token_ids)
            source = torch.Generator().manual_seed(seed)
            if self.kind == "random":
                tokens[row] = torch.randint(self.vocab_size, (width,), generator=source)
                continue
            right = self._text(request)[:width]
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.long)
            if self.kind == "ragged":
                counts[row] = int(torch.randint(counts[row] + 1, (), generator=source))
        if self.kind == "wrong":
            tokens = (tokens + 1) % self.vocab_size
        return Proposal(tokens, counts)

    def _text(self, request) -> list[int]:
        text = self.texts[tuple(request.token_ids[: request.num_prompt_tokens])]
        return text[len(request.token_ids) - request.num_prompt_tokens :]

    def _branches(self, requests, counts) -> Proposal:
        """At every depth a wrong token, the right one, and the right one's follower."""
        drafts: list[list[int]] = []
        parents: list[list[int]] = []
        for request, count in zip(requests, counts, strict=True):
            right = [*self._text(request), 0, 0, 0, 0][: count + 1]
            tokens: list[int] = []
            above: list[int] = []
            place = -1
            for depth in range(count):
                wrong = len(tokens)
                tokens += [(right[depth] + 1) % self.vocab_size, right[depth]]
                above += [place, place]
                if depth + 1 < count:
                    tokens.append(right[depth + 1])
                    above.append(wrong)
                place = wrong + 1
            drafts.append(tokens)
            parents.append(above)
        return Proposal.deterministic(drafts, parents=parents)

    def _sampled(self, requests, counts, width) -> Proposal:
        q = torch.zeros(len(requests), width, self.vocab_size)
        tokens = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in enumerate(requests):
            last = request.token_ids[-1]
            for k in range(counts[row]):
                source = torch.Generator().manual_seed(97 * last + k)
                q[row, k] = torch.softmax(2 * torch.randn(self.vocab_size, generator=source), -1)
                last = int(draw(q[row, k : k + 1], [request.generator]))
                tokens[row, k] = last
        return Proposal(tokens, counts, q)


def draw(p, generators):
    """One token per row: p [B, V] -> token ids [B]. Takes one number from each row's generator."""
    drawn = [uniforms(generator, 1)[0] for generator in generators]
    numbers = torch.tensor(drawn, dtype=torch.float64)
    token_ids = inverse_cdf(p, numbers)
    check_drawn(token_ids.tolist(), p.shape[-1])
    return token_ids


class FakeHead(Drafter):
    """A head with maths of its own: its state is the mean of all slots it may see, a slot is
    embedding of the token + projected features, and the state is fed back as features. Keys hold
    the tokens."""

    traits = Traits(reads_taps=True, reads_last_hidden=True)
    max_depth = draft_to_target = None
    width = 8

    def __init__(
        self, vocab_size: int, tap_layers: tuple[int, ...], hidden_size: int, draft_ids=None
    ) -> None:
        super().__init__(SimpleNamespace(tap_layers=tap_layers, reduced_vocabulary=False))
        source = torch.Generator().manual_seed(5)

        def weights(*shape):
            return torch.randn(shape, generator=source) / shape[0] ** 0.5

        self.draft_to_target = None if draft_ids is None else torch.tensor(draft_ids)
        self.embedding = weights(vocab_size, self.width) * vocab_size**0.5
        self.project = weights((len(tap_layers) + 1) * hidden_size, self.width)
        self.output = 2 * weights(self.width, vocab_size if draft_ids is None else len(draft_ids))

    def attach(self, target):
        return self

    def append(self, inputs):
        features = torch.cat([inputs.taps, inputs.last_hidden], -1) @ self.project
        state = self._extend(inputs.cache, inputs.start, inputs.stop, inputs.token_ids, features)
        inputs.advance(inputs.counts)
        return torch.stack([state[i, max(count - 1, 0)] for i, count in enumerate(inputs.counts)])

    def draft_steps(self, inputs, k):
        cache = inputs.cache
        start = inputs.start
        stop = inputs.stop
        state = self.append(inputs)
        with inputs.drafting() as lengths:
            token_ids = yield DraftLogits(state @ self.output)
            for _ in range(k - 1):
                state = self._extend(cache, start, stop, token_ids[:, None], state[:, None])[:, 0]
                inputs.advance([1] * len(lengths))
                token_ids = yield DraftLogits(state @ self.output)

    def _extend(self, cache, start, stop, token_ids, features):
        """features [b, M, D] -> states [b, M, D]."""
        M = token_ids.shape[1]
        slots = self.embedding[token_ids] + features
        keys = token_ids[:, None, :, None].float().repeat(1, 1, 1, self.width)  # [b, 1, M, D]
        mask = cache.mask(start, stop, M)
        _, values = cache.view(start, stop, M).update(keys, slots[:, None], 0)
        if mask is None:
            mask = torch.ones(M, values.shape[2], dtype=torch.bool).tril(values.shape[2] - M)
        visible = mask.expand(stop - start, 1, M, -1).to(values.dtype)
        return ((visible @ values) / visible.sum(-1, keepdim=True))[:, 0]


def random_eagle3(model, tap_layers) -> Eagle3:
    """A random head of every other token of the vocabulary, of three at least."""
    target = FrozenTarget(model)
    size = max(target.vocab_size // 2, 3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        shape = {"tap_layers": tap_layers, "draft_vocab_size": size}
        drafter = Eagle3(config_for_target(target, "eagle3", **shape)).eval()
    drafter.target_ids.copy_(torch.arange(size) * target.vocab_size // size)
    return drafter
