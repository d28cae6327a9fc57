"""How often every short pattern occurred in some texts, and what followed it most often. Knows no
request and no rule.

A suffix automaton: a state stands for patterns that end at the same places of the texts, so one
count serves them all (Blumer et al., 1985; of several texts: Mohri et al., 2009). Counts are kept
for patterns of at most `depth` tokens: adding a token raises those of the patterns that end with
it, at most `depth` states and as a rule a handful.

States are numbers, and the automaton a few arrays over them; state 0 is the empty pattern. Most
states have a single follower, so the most frequent one stands in the arrays and only the others in
dictionaries."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class SuffixCounts:
    """`extend` goes on with the current text, `begin` starts another one."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._length = array("i", [0])  # of the longest pattern
        # the state of its longest suffix that ends at more places; the shortest is 1 longer
        self._link = array("i", [-1])
        # occurrences; wrong, and never read, where the shortest is beyond the depth
        self._count = array("i", [0])
        # the most frequent follower, of equals the last to become so; -1: none
        self._token = array("i", [-1])
        self._next = array("i", [0])  # and the state it leads to
        self._others: dict[int, dict[int, int]] = {}  # state -> its other followers -> states
        self.begin()

    def __len__(self) -> int:
        """States in use."""
        return len(self._length)

    def begin(self) -> None:
        # states of the whole text so far, and of its last `depth` tokens
        self._last = self._window = 0
        self._seen = 0  # tokens of it

    def extend(self, tokens: Iterable[int]) -> None:
        """Counts the patterns that end with each of the tokens."""
        link, count, best, follower = self._link, self._count, self._token, self._next
        for token in tokens:
            self._last = self._grown(self._last, token)
            v = self._suffix(self._window, min(self._seen, self.depth - 1))
            self._window, self._seen = self._step(v, token), self._seen + 1
            counted = 0
            while v >= 0:
                u = self._step(v, token)
                if u != counted:
                    count[u] += 1
                if best[v] != token and count[u] >= count[follower[v]]:
                    others = self._others[v]
                    del others[token]
                    others[best[v]] = follower[v]
                    best[v], follower[v] = token, u
                counted = u
                v = link[v]

    def endings(self) -> list[tuple[int, int, int]]:
        """`matches` of the current text itself."""
        longest = min(self._seen, self.depth - 1)
        return self._shorter(self._suffix(self._window, longest), longest)

    def matches(self, context: Sequence[int]) -> list[tuple[int, int, int]]:
        """(state, shortest, longest): the lengths of those suffixes of the context that occurred,
        longest first; the context is at most `depth` - 1 tokens."""
        v = matched = 0
        for token in context:
            u = self._step(v, token)
            while u < 0 and v:
                v = self._link[v]
                matched = self._length[v]
                u = self._step(v, token)
            if u >= 0:
                v, matched = u, matched + 1
        return self._shorter(v, matched)

    def follow(
        self, state: int, most: int, least_probability: float
    ) -> tuple[list[int], float, list[float]]:
        """The most frequent continuation of a state's patterns, `most` tokens at most, as long as
        its estimated probability, the product of the counts' ratios, is not below
        `least_probability`; the sum of these probabilities, the number of tokens expected to be
        right; and how sure each token is once those before it were right, which is surer the more
        often the pattern was seen."""
        count, best, follower = self._count, self._token, self._next
        tokens: list[int] = []
        sure: list[float] = []
        probability, score = 1.0, 0.0
        while len(tokens) < most and best[state] >= 0:
            after = follower[state]
            probability *= count[after] / count[state]
            if probability < least_probability:
                break
            tokens.append(best[state])
            sure.append(count[after] / (count[state] + 1))
            score += probability
            state = after
        return tokens, score, sure

    def _step(self, state: int, token: int) -> int:
        """The state of the patterns followed by the token, or -1."""
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return others.get(token, -1) if others else -1

    def _shorter(self, state: int, longest: int) -> list[tuple[int, int, int]]:
        """A pattern of a state and its suffixes, as `matches` gives them."""
        suffixes = []
        while state:
            shorter = self._length[self._link[state]]
            suffixes.append((state, shorter + 1, longest))
            state, longest = self._link[state], shorter
        return suffixes

    def _suffix(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of the pattern that led to the state."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state

    def _grown(self, last: int, token: int) -> int:
        """The state of a whole text, `last`, with one more token; made if it is new."""
        known = self._step(last, token)
        if known >= 0:
            return self._only(last, token, known)
        state = self._new(self._length[last] + 1, 0)
        p = last
        while p >= 0:
            known = self._step(p, token)
            if known >= 0:
                self._link[state] = self._only(p, token, known)
                break
            if self._token[p] < 0:
                self._token[p], self._next[p] = token, state
            else:
                self._others.setdefault(p, {})[token] = state
            p = self._link[p]
        return state

    def _only(self, p: int, token: int, q: int) -> int:
        """The state of p's longest pattern followed by the token: q, or split off from q if q has
        longer ones too."""
        if self._length[q] == self._length[p] + 1:
            return q
        clone = self._new(
            self._length[p] + 1, self._link[q], self._count[q], self._token[q], self._next[q]
        )
        if q in self._others:
            self._others[clone] = dict(self._others[q])
        self._link[q] = clone
        while p >= 0 and self._step(p, token) == q:
            if self._token[p] == token:
                self._next[p] = clone
            else:
                self._others[p][token] = clone
            p = self._link[p]
        return clone

    def _new(
        self, length: int, link: int, count: int = 0, token: int = -1, follower: int = 0
    ) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._token.append(token)
        self._next.append(follower)
        return len(self._length) - 1


class SuffixStore:
    """The patterns of the last `max_texts` texts at least, and of fewer than twice as many: a
    second automaton is filled with the later ones, and takes over when it holds enough."""

    def __init__(self, depth: int, max_texts: int) -> None:
        self.counts = SuffixCounts(depth)
        self._successor: SuffixCounts | None = None
        self._added = 0  # texts in `counts`
        self._max_texts = max_texts

    def add(self, tokens: Sequence[int]) -> None:
        if not self._max_texts:
            return
        if self._added == self._max_texts:
            self._successor = SuffixCounts(self.counts.depth)
        for counts in (self.counts, self._successor):
            if counts is not None:
                counts.begin()
                counts.extend(tokens)
        self._added += 1
        if self._successor is not None and self._added == 2 * self._max_texts:
            self.counts, self._successor, self._added = self._successor, None, self._max_texts
