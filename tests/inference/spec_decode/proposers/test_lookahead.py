"""Lookahead's window and pool are those of the published algorithm, and its guesses are accepted.
That the text is the target's own is one of the greedy configurations of the engine."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.lookahead import (
    JacobiWindow,
    LookaheadOptions,
    LookaheadProposer,
    merged,
)
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from tests.support.engines import make_llm

LIMIT = 120
SIZES = [(4, 3), (1, 5), (2, 6)]  # (W, N)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", vocab_size=24, max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def sensitive(tiny_model):
    """Its next token depends on all it sees, not only on the last one."""
    return tiny_model("qwen3", vocab_size=24, max_position_embeddings=LIMIT, initializer_range=0.5)


def proposer_of(columns, ngram_size, guesses=4, from_prompt=False) -> LookaheadProposer:
    return LookaheadOptions(
        method="lookahead",
        lookahead_window_size=columns,
        lookahead_ngram_size=ngram_size,
        lookahead_num_guesses=guesses,
        lookahead_pool_from_prompt=from_prompt,
    ).make_proposer()


def request_of(prompt, length=LIMIT) -> Request:
    params = SamplingParams(temperature=0, max_tokens=None)
    return Request("0", 0, prompt, params, generator=None, max_model_len=length)


@torch.no_grad()
def greedy_next(model, text) -> int:
    return int(model(torch.tensor([text])).logits[0, -1].argmax())


def test_repetitive_text_is_accepted(model):
    llm = make_llm(model, proposer=proposer_of(5, 5, guesses=5), max_model_len=LIMIT)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8] * 6}, params, False)
    later = output.metrics.accepted_per_round[10:]
    assert sum(later) > len(later)


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
def test_window_and_pool_are_those_of_the_published_algorithm(
    columns, ngram_size, sensitive, monkeypatch
):
    proposer, published = proposer_of(columns, ngram_size, guesses=2), []
    see_logits = proposer.see_logits

    def compare(requests, proposal, logits):
        see_logits(requests, proposal, logits)
        text = list(requests[0].token_ids)  # that the round began with
        if not published:
            level = JacobiWindow(text, columns, ngram_size).levels[0]
            published.append(Published(sensitive, level, columns, ngram_size, 2))
        published[0].step(text)
        window, pool = proposer.rows[0].window, proposer.rows[0].pool
        assert window.levels == published[0].levels
        assert {first: list(rest) for first, rest in pool._known.items()} == published[0].pool

    monkeypatch.setattr(proposer, "see_logits", compare)
    llm = make_llm(sensitive, proposer=proposer, max_model_len=LIMIT)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm.generate({"prompt_token_ids": [1, 2, 3, 4, 5, 2, 3]}, params, False)
    levels = proposer.rows[0].window.levels if proposer.rows else published[0].levels
    assert list(map(len, levels)) == [columns - 1] + [columns] * (ngram_size - 2)


# ---------------------------------------------------------------------- its parts


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
    proposal = proposer.propose([request], RoundPlan([request.draft_limit]))
    drafts = proposal.token_ids[0, : proposal.counts[0]].tolist()
    assert drafts == [2, 5, 3] and proposal.parents[0][:3] == [-1, 0, 0]
    request.commit([2])
    assert proposer.propose([request], RoundPlan([1])).counts == [1]  # the latest of 5 and 3
    plain = proposer_of(2, 3, guesses=4)
    plain.reset(0)
    assert plain.propose([request], RoundPlan([9])).counts == [0]
