"""Lookahead decoding: the target generates the n-grams that are drafted in unused positions of each
verification.

Fu et al., arXiv 2402.02057. Each round the target judges guesses, n-grams from a pool that start
with the last token, and in the same forward takes one step of a parallel Jacobi iteration over a
window of tokens further on, from which new n-grams enter the pool. Both are one tree behind the
last token: guesses are drafts, the window is unverified.

The window has N-1 levels of W columns, level 0 being a chain behind the last token. Column i of
level l stands i + l tokens after it and sees level 0 up to column i, then its own column on the
levels before: its ancestors, if its parent is column i of the level before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from draftsmith.inference.engine_options import option
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import argmax
from draftsmith.inference.spec_decode.proposal import Proposal, padded
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.speculators.precision import on_device


class NgramPool:
    """The last `most` different continuations seen after each token."""

    def __init__(self, most: int) -> None:
        self._most = most
        # first token -> the rest, oldest first
        self._known: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """`rest` was seen after the token `first`. It is the newest; the oldest beyond the last
        `most` is forgotten."""

        known = self._known.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def guesses(self, first: int) -> list[tuple[int, ...]]:
        """The latest first."""
        return list(reversed(self._known.get(first, {})))


class JacobiWindow:
    """Levels of tokens the target guessed at, each level read after the one before. It starts as
    one level of tokens drawn from the text and grows by a level a round until there are N-1. Level
    0 lacks its first column, which is the last token of the text."""

    def __init__(self, token_ids: Sequence[int], columns: int, ngram_size: int) -> None:
        self._height = ngram_size - 1
        self.levels = [random.Random(0).choices(token_ids, k=columns + ngram_size - 3)]

    def tree(self, first: int) -> tuple[list[int], list[int]]:
        """Its tokens and their parents, if the first token's node is `first`."""
        tokens: list[int] = []
        parents: list[int] = []
        above: list[int] = []  # nodes of the level before, column by column
        for depth, level in enumerate(self.levels):
            start = first + len(tokens)
            nodes = list(range(start, start + len(level)))
            tokens += level
            if depth == 0:
                # a chain behind the last token, which is its first column
                columns = [-1, *nodes]
                parents += columns[:-1]
                above = columns
            else:
                parents += above
                above = nodes
        return tokens, parents

    def read_at(self, first: int) -> list[int]:
        """Entries of the logits (0 the last token's, 1 + k those of node k) that `advance` wants
        the argmax of."""
        end = 1 + first + sum(map(len, self.levels))
        entries = range(end - len(self.levels[-1]), end)
        return [0, *entries] if len(self.levels) == 1 else [*entries]

    def advance(self, last_token: int, written: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """One token further: `written` is the new last level. Returns the n-grams that columns and
        `written` spell: (first token, the rest)."""
        if len(self.levels) < self._height:
            self.levels = [level[1:] for level in (*self.levels, written)]
            return []
        first, *others = self.levels
        self.levels = [others[0][1:], *others[1:], written]
        return list(zip([last_token, *first], zip(*others, written, strict=True), strict=True))


class _Row:
    def __init__(self, window: JacobiWindow, pool: NgramPool) -> None:
        self.window = window
        self.pool = pool
        self.pooled = 0  # tokens of the request's text whose n-grams the pool has


class LookaheadProposer(Proposer):
    """Deterministic drafts (q is one-hot), as trees: of at most `num_speculative_tokens` drafts per
    row the latest guesses."""

    reads_logits = True
    drafts_trees = True
    rows: dict[int, _Row]

    def __init__(self, options: LookaheadOptions, device: torch.device | str = "cpu") -> None:
        super().__init__(options.most_drafts)
        self._columns = options.lookahead_window_size
        self._n = options.lookahead_ngram_size
        self._most_guesses = options.lookahead_num_guesses
        self._pool_from_prompt = options.lookahead_pool_from_prompt
        self._device = device
        self.num_unverified_tokens = max(
            f * (self._columns + self._n - 1 - f) - 1 for f in range(1, self._n)
        )

    @override
    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        drafts: list[list[int]] = []
        parents: list[list[int]] = []
        unverified: list[int] = []
        for row, request in enumerate(requests):
            state = self._state(row, request)
            tokens, guessed_parents = merged(
                state.pool.guesses(request.token_ids[-1]),
                min(plan.limits[row], self.num_speculative_tokens),
                self._n - 1,
            )
            window: tuple[list[int], list[int]] = ([], [])
            # a row that is not drafted for gathers nothing either; near the context limit there is
            # no node left
            if plan.limits[row] and request.draft_limit >= self._columns + self._n - 3:
                window = state.window.tree(len(tokens))
            drafts.append(tokens + window[0])
            parents.append(guessed_parents + window[1])
            unverified.append(len(window[0]))
        return Proposal.deterministic(drafts, self._device, parents=parents, unverified=unverified)

    def _state(self, row: int, request: Request) -> _Row:
        text = request.token_ids
        n = self._n
        if row not in self.rows:
            self.rows[row] = _Row(
                JacobiWindow(text, self._columns, n), NgramPool(self._most_guesses)
            )
        state = self.rows[row]
        if self._pool_from_prompt:
            for end in range(max(state.pooled + 1, n), len(text) + 1):
                state.pool.add(text[end - n], tuple(text[end - n + 1 : end]))
            state.pooled = len(text)
        return state

    @override
    def see_logits(self, requests: Sequence[Request], proposal: Proposal, logits: Tensor) -> None:
        rows = [row for row, nodes in enumerate(proposal.unverified or []) if nodes]
        if not rows:
            return
        entries = [self.rows[row].window.read_at(proposal.counts[row]) for row in rows]
        index = on_device(rows, logits.device).unsqueeze(-1)
        best = argmax(logits[index, on_device(padded(entries), logits.device)]).tolist()
        for row, read, choices in zip(rows, entries, best, strict=True):
            state = self.rows[row]
            last_token = requests[row].token_ids[-1]
            for first, rest in state.window.advance(last_token, choices[: len(read)]):
                state.pool.add(first, rest)


def merged(
    guesses: Sequence[tuple[int, ...]], most: int, depth: int
) -> tuple[list[int], list[int]]:
    """Guesses as a tree of at most `most` tokens, `depth` levels deep: its tokens and their
    parents, which come first. Tokens that guesses begin with alike are there once."""
    tokens: list[int] = []
    parents: list[int] = []
    node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for guess in guesses:
        parent = -1
        for token in guess[:depth]:
            if (parent, token) not in node_of:
                if len(tokens) == most:
                    break
                node_of[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node_of[parent, token]
    return tokens, parents


class LookaheadOptions(MethodOptions):
    """The defaults are small: every node costs a token's computation, which a CPU has not to
    spare. The paper's for a large GPU are W = 15, N = 5, G = 15."""

    measured: ClassVar[dict[str, Any]] = {"rejection_sample_method": "auto"}  # of trees
    vllm_note: ClassVar[str] = "vLLM has no lookahead decoding; ngram and suffix are the nearest"

    lookahead_window_size: int = option(5, "columns of the window, W", ge=1)
    lookahead_ngram_size: int = option(4, "tokens of an n-gram, N", ge=3)
    lookahead_num_guesses: int = option(
        5, "n-grams kept per first token, and verified in a round, G", ge=1
    )
    lookahead_pool_from_prompt: bool = option(
        True, "n-grams of prompt and committed text are guesses too"
    )

    @override
    @property
    def fixed_shape(self) -> bool:
        """Its guesses and its window have the size of the options."""
        return True

    @property
    def default_tokens(self) -> int:
        """All guesses, without the first token that they share with the text."""
        return self.lookahead_num_guesses * (self.lookahead_ngram_size - 1)

    @override
    def make_proposer(self, device: torch.device | str = "cpu") -> LookaheadProposer:
        return LookaheadProposer(self, device)
