"""Covering designs: few configurations in which every possible pair of values occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

Partial = dict[str, str]


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
    uncovered = {
        pair
        for one, other in itertools.combinations(factors, 2)
        for pair in itertools.product(
            ((one, value) for value in factors[one]), ((other, value) for value in factors[other])
        )
    }

    def gain(partial: Partial, name: str, value: str) -> int:
        return sum(
            _pair((other, partial[other]), (name, value), order) in uncovered for other in partial
        )

    def complete(partial: Partial) -> Partial | None:
        if not possible(partial):
            return None
        left = [name for name in factors if name not in partial]
        if not left:
            return partial
        name = left[0]
        keys = {
            value: (-gain(partial, name, value), value in slow, used[name, value])
            for value in factors[name]
        }
        for value in sorted(keys, key=lambda value: keys[value]):
            whole = complete(partial | {name: value})
            if whole is not None:
                return whole
        return None

    order = {name: i for i, name in enumerate(factors)}
    used: Counter[tuple[str, str]] = Counter()
    chosen: list[Partial] = []
    while uncovered:
        pair = min(uncovered, key=lambda pair: [(order[n], factors[n].index(v)) for n, v in pair])
        whole = complete(dict(pair))
        if whole is not None:
            chosen.append({name: whole[name] for name in factors})
            used.update(whole.items())
            uncovered -= set(itertools.combinations(chosen[-1].items(), 2))
        uncovered.discard(pair)
    return chosen


def _pair(one: tuple[str, str], other: tuple[str, str], order: Mapping[str, int]) -> tuple:
    return (one, other) if order[one[0]] < order[other[0]] else (other, one)
