"""Covering designs: few configurations in which every possible pair of values occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

Partial = dict[str, str]
Value = tuple[str, str]  # of a factor, by its name


def cover(
    factors: Mapping[str, Sequence[str]],
    possible: Callable[[Partial], bool],
    slow: Container[str] = (),
) -> list[Partial]:
    """Configurations such that every pair of values that some possible one holds is in one of them.

    possible(partial) must be True unless the values given so far exclude each other. Greedy and
    deterministic: each configuration begins with an uncovered pair, and takes for every other
    factor the value that adds most pairs, of those the least used, and none of the `slow` where
    another adds as many, going back where none is possible."""
    design = _Design(factors, possible, slow)
    chosen: list[Partial] = []
    while design.uncovered:
        pair = design.first_uncovered()
        whole = design.complete(dict(pair))
        if whole is not None:
            chosen.append({name: whole[name] for name in factors})
            design.add(chosen[-1])
        design.uncovered.discard(pair)
    return chosen


class _Design:
    """`uncovered`: the pairs of (factor, value) that no configuration has yet, in the order of the
    factors. `used`: in how many configurations a value is."""

    def __init__(
        self,
        factors: Mapping[str, Sequence[str]],
        possible: Callable[[Partial], bool],
        slow: Container[str],
    ) -> None:
        self.factors = factors
        self.possible = possible
        self.slow = slow
        self.order = {name: place for place, name in enumerate(factors)}
        self.used: Counter[Value] = Counter()
        self.uncovered = {
            pair
            for one, other in itertools.combinations(factors, 2)
            for pair in itertools.product(self.values(one), self.values(other))
        }

    def values(self, name: str) -> list[Value]:
        return [(name, value) for value in self.factors[name]]

    def first_uncovered(self) -> tuple[Value, Value]:
        def place(pair: tuple[Value, Value]) -> list[tuple[int, int]]:
            return [(self.order[name], self.factors[name].index(value)) for name, value in pair]

        return min(self.uncovered, key=place)

    def add(self, configuration: Partial) -> None:
        self.used.update(configuration.items())
        self.uncovered -= set(itertools.combinations(configuration.items(), 2))

    def complete(self, partial: Partial) -> Partial | None:
        """A whole configuration that begins so; None: there is none."""
        if not self.possible(partial):
            return None
        left = [name for name in self.factors if name not in partial]
        if not left:
            return partial
        for name, value in sorted(self.values(left[0]), key=lambda new: self._cost(partial, new)):
            whole = self.complete(partial | {name: value})
            if whole is not None:
                return whole
        return None

    def _cost(self, partial: Partial, new: Value) -> tuple[int, bool, int]:
        """Less for a value that is to be taken before another."""
        pairs = [self._pair(old, new) for old in partial.items()]
        gain = sum(pair in self.uncovered for pair in pairs)
        return -gain, new[1] in self.slow, self.used[new]

    def _pair(self, one: Value, other: Value) -> tuple[Value, Value]:
        return (one, other) if self.order[one[0]] < self.order[other[0]] else (other, one)
