"""Lookahead's window and pool are those of the published algorithm, and its guesses are accepted.
That the text is the target's own is one of the greedy configurations of the engine."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.lookahead import (
    JacobiWindow,
    LookaheadProposer,
    NgramPool,
    merged,
)

LIMIT = 120
SIZES = [(4, 3), (1, 5), (2, 6)]  # (W, N)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", vocab_size=24, max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def sensitive(tiny_model):
    """Its next token depends on all it sees, not only on the last one."""
    return tiny_model("qwen3", vocab_size=24, max_position_embeddings=LIMIT, initializer_range=0.5)


def proposer_of(columns, ngram_size, guesses=4, from_prompt=False, most=None) -> LookaheadProposer:
    return LookaheadProposer(
        most or guesses * (ngram_size - 1),
        window_size=columns,
        ngram_size=ngram_size,
        num_guesses=guesses,
        pool_from_prompt=from_prompt,
    )


def request_of(prompt, length=LIMIT) -> Request:
    params = SamplingParams(temperature=0, max_tokens=None)
    return Request("0", 0, prompt, params, generator=None, max_model_len=length)


@torch.no_grad()
def greedy_next(model, text) -> int:
    return int(model(torch.tensor([text])).logits[0, -1].argmax())


# -------------------------------------------------------- a forward over a tree, and a walk in it


def ancestors(parents: list[int]) -> list[list[int]]:
    """Per node the nodes above it, itself last."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        assert parent < node
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@torch.no_grad()
def tree_logits(model, text: list[int], tokens: list[int], parents: list[int]) -> torch.Tensor:
    """[1 + nodes, V]: of the text's last token, then of every node, which sees the text and the
    nodes above it."""
    length, nodes = len(text), len(tokens)
    mask = torch.zeros(length + nodes, length + nodes, dtype=torch.bool)
    mask[:length, :length] = torch.ones(length, length).tril().bool()
    mask[length:, :length] = True
    positions = [*range(length)]
    for node, path in enumerate(ancestors(parents)):
        mask[length + node, [length + above for above in path]] = True
        positions.append(length - 1 + len(path))
    assert max(positions) < LIMIT
    allowed = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    logits = model(
        torch.tensor([text + tokens]),
        attention_mask=allowed,
        position_ids=torch.tensor([positions]),
    ).logits
    return logits[0, length - 1 :]


def walked(best: list[int], tokens: list[int], parents: list[int], judged: int) -> list[int]:
    """Greedy verification: from the last token down to whichever child says what the target says;
    `best` per entry."""
    at, written = -1, []
    while True:
        written.append(best[1 + at])
        children = [k for k in range(judged) if parents[k] == at and tokens[k] == written[-1]]
        if not children:
            return written
        at = children[0]


def one_round(model, proposer, requests: list[Request]) -> list[int]:
    """What an engine does in a round, without a cache: how many tokens each request got."""
    proposal = proposer.propose(requests, [request.draft_limit for request in requests])
    if not proposal.width:
        return [request.commit([greedy_next(model, request.token_ids)]) for request in requests]
    trees, logits = [], []
    for row, request in enumerate(requests):
        judged, nodes = proposal.counts[row], proposal.counts[row] + proposal.unverified[row]
        assert (
            judged <= proposer.num_speculative_tokens
            and nodes - judged <= proposer.num_unverified_tokens
        )
        tokens, parents = proposal.token_ids[row, :nodes].tolist(), proposal.parents[row]
        deepest = max((len(path) for path in ancestors(parents)), default=0)
        assert len(request.token_ids) - 1 + deepest < request.max_model_len
        own = tree_logits(model, request.token_ids, tokens, parents)
        trees.append((tokens, parents, judged))
        logits.append(
            torch.cat([own, torch.full((proposal.width - nodes, own.shape[1]), torch.nan)])
        )
    proposer.see_logits(requests, proposal, torch.stack(logits))
    new = [walked(own.argmax(-1).tolist(), *tree) for own, tree in zip(logits, trees, strict=True)]
    return [request.commit(tokens) for request, tokens in zip(requests, new, strict=True)]


def begin(model, proposer, *prompts, length=LIMIT) -> list[Request]:
    """Requests with their first tokens, which come of the prompts' forward."""
    requests = [request_of(prompt, length) for prompt in prompts]
    for row, request in enumerate(requests):
        proposer.reset(row)
        request.commit([greedy_next(model, request.token_ids)])
    return requests


def test_repetitive_text_is_accepted(model):
    proposer = proposer_of(5, 5, guesses=5)
    requests = begin(model, proposer, [5, 6, 7, 8] * 6)
    counts = [one_round(model, proposer, requests)[0] for _ in range(25)]
    assert sum(counts[10:]) > 2 * len(counts[10:])


# ---------------------------------------------------------------- against the published algorithm


class Published:
    """Lookahead as its paper tells it, one column at a time: each token of the window is read after
    the text, the part of level 0 up to its column, and its own column so far. No tree, no mask."""

    def __init__(
        self, model, level: list[int], columns: int, ngram_size: int, guesses: int
    ) -> None:
        self.model, self.columns, self.n, self.most = model, columns, ngram_size, guesses
        self.levels, self.pool = [level], {}

    def step(self, text: list[int]) -> None:
        base = [text[-1], *self.levels[0]]  # level 0 with the last token as its first column
        written = []
        for i in range(len(base)):
            if len(self.levels) == 1:
                seen = base[1 : i + 1]
            else:
                seen = base[1 : i + 1] + [level[i] for level in self.levels[1:]]
            written.append(greedy_next(self.model, text + seen))
        if len(self.levels) < self.n - 1:
            self.levels = [level[1:] for level in (*self.levels, written)]
            return
        for i, first in enumerate(base):
            rest = (*(level[i] for level in self.levels[1:]), written[i])
            known = self.pool.setdefault(first, [])
            if rest in known:
                known.remove(rest)
            known.append(rest)
            self.pool[first] = known[-self.most :]
        self.levels = [self.levels[1][1:], *self.levels[2:], written]


@pytest.mark.parametrize(("columns", "ngram_size"), SIZES)
def test_window_and_pool_are_those_of_the_published_algorithm(columns, ngram_size, sensitive):
    proposer = proposer_of(columns, ngram_size, guesses=2)
    (request,) = begin(sensitive, proposer, [1, 2, 3, 4, 5, 2, 3])
    level = JacobiWindow(request.token_ids, columns, ngram_size).levels[0]
    published = Published(sensitive, level, columns, ngram_size, 2)
    for _ in range(14):
        text = list(request.token_ids)
        one_round(sensitive, proposer, [request])
        row = proposer._rows[0]
        published.step(text)
        assert row.window.levels == published.levels
        assert {first: list(rest) for first, rest in row.pool._known.items()} == published.pool
    assert [len(level) for level in row.window.levels] == [columns - 1] + [columns] * (
        ngram_size - 2
    )


# ---------------------------------------------------------------------- its parts


def test_the_pool_keeps_the_latest_of_each_token():
    pool = NgramPool(2)
    for first, rest in [(1, (2, 3)), (1, (4, 5)), (7, (8, 9)), (1, (2, 3)), (1, (6, 6))]:
        pool.add(first, rest)
    assert (
        pool.guesses(1) == [(6, 6), (2, 3)]
        and pool.guesses(7) == [(8, 9)]
        and pool.guesses(2) == []
    )


def test_guesses_share_their_beginnings():
    guesses = [(1, 2, 3), (1, 4, 5), (1, 2, 6), (9, 2, 3)]
    assert merged(guesses, 99, 3) == ([1, 2, 3, 4, 5, 6, 9, 2, 3], [-1, 0, 1, 0, 3, 1, -1, 6, 7])
    assert merged(guesses, 99, 1) == ([1, 9], [-1, -1])
    assert merged(guesses, 5, 2) == ([1, 2, 4, 9, 2], [-1, 0, 0, -1, 3])
    assert merged(guesses, 4, 3) == ([1, 2, 3, 4], [-1, 0, 1, 0])


def test_the_prompt_s_ngrams_are_guesses_from_the_first_round():
    request = request_of([1, 2, 3, 4, 1, 2, 5, 6, 1])
    proposer = proposer_of(2, 3, guesses=4, from_prompt=True)
    proposer.reset(0)
    proposal = proposer.propose([request], [request.draft_limit])
    drafts = proposal.token_ids[0, : proposal.counts[0]].tolist()
    assert drafts == [2, 5, 3] and proposal.parents[0][:3] == [-1, 0, 0]
    request.commit([2])
    assert proposer.propose([request], [1]).counts == [2]  # 5 and 3, no deeper than the limit
    plain = proposer_of(2, 3, guesses=4)
    plain.reset(0)
    assert plain.propose([request], [9]).counts == [0]


def test_rows_do_not_depend_on_each_other_and_survive_moves(model):
    prompts = [[1, 2, 3, 1, 2], [4, 5], [9, 8, 9, 8, 9]]

    def rounds(*chosen):
        proposer = proposer_of(3, 4, from_prompt=True)
        requests = begin(model, proposer, *chosen)
        for _ in range(8):
            one_round(model, proposer, requests)
        return proposer, requests

    proposer, requests = rounds(*prompts)
    proposer.move(2, 0)  # the first has left
    one_round(model, proposer, [requests[2], requests[1]])
    alone_proposer, (alone,) = rounds(prompts[2])
    one_round(model, alone_proposer, [alone])
    assert requests[2].token_ids == alone.token_ids
    moved, own = proposer._rows[0], alone_proposer._rows[0]
    assert moved.window.levels == own.window.levels and moved.pool._known == own.pool._known
