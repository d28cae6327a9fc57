"""What a tree of drafts may look like: fixed in advance, or grown to a budget. Options in, numbers
out; no tensors."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from draftsmith.speculators.errors import ConfigError

# ranks on the way from the root: (0, 2) is the third child of the first child
Choice = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """The same tree every round: Medusa's choices (Cai et al. 2401.10774), vLLM's
    `speculative_token_tree`."""

    choices: tuple[Choice, ...]  # by depth, then rank: parents before their children

    @classmethod
    def parse(cls, tree: str | Sequence[Sequence[int]]) -> StaticTree:
        """A list of choices, or its text as vLLM takes it. ConfigError names a choice without its
        parent or an older sibling."""
        where = "speculative_token_tree"
        try:
            parsed = ast.literal_eval(tree) if isinstance(tree, str) else tree
            choices = {tuple(int(rank) for rank in choice) for choice in parsed}
        except (ValueError, SyntaxError, TypeError) as error:
            raise ConfigError(
                f"{tree!r} is no list of choices: {error}; expected such as [(0,), (0, 0)]",
                where=where,
            ) from None
        for choice in sorted(choices):
            if not choice or min(choice) < 0:
                raise ConfigError(f"choice {choice} needs ranks of 0 and more", where=where)
            before = (*choice[:-1], choice[-1] - 1) if choice[-1] else choice[:-1]
            if before and before not in choices:
                raise ConfigError(f"choice {choice} needs {before} as well", where=where)
        if not choices:
            raise ConfigError("empty; expected at least one choice, such as [(0,)]", where=where)
        return cls(tuple(sorted(choices, key=lambda choice: (len(choice), choice))))

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.choices[-1])

    @property
    def budget(self) -> int:
        """Places of a proposal."""
        return len(self.choices)

    @cached_property
    def levels(self) -> list[list[tuple[int, int]]]:
        """Per depth the nodes as (which of the parents that have children, rank)."""
        return [
            [(self.parents(d).index(c[:-1]), c[-1]) for c in self._at(d)]
            for d in range(1, self.depth + 1)
        ]

    @cached_property
    def frontiers(self) -> list[list[int]]:
        """Per depth which of its nodes have children; without the last depth."""
        return [[self._at(d).index(c) for c in self.parents(d + 1)] for d in range(1, self.depth)]

    @property
    def speculative_slots(self) -> int:
        """Drafts that are drafted from."""
        return sum(len(frontier) for frontier in self.frontiers)

    def cut(self, nodes: int) -> StaticTree:
        """Its first `nodes` (1 or more) places: by depth, then rank, so that no place lacks its
        parent or an older sibling."""
        return self if nodes >= self.budget else StaticTree(self.choices[:nodes])

    def _at(self, depth: int) -> list[Choice]:
        return [choice for choice in self.choices if len(choice) == depth]

    def parents(self, depth: int) -> list[Choice]:
        """Those of the nodes at a depth, in order."""
        return list(dict.fromkeys(choice[:-1] for choice in self._at(depth)))


@dataclass(frozen=True)
class DynamicTree:
    """Grown every round (EAGLE-2, Li et al. 2406.16858): `depth` levels, `topk` drafts of each are
    drafted from, and `budget` places are verified."""

    topk: int
    depth: int
    budget: int

    def __post_init__(self) -> None:
        if min(self.topk, self.depth) < 1 or self.budget < self.depth:
            raise ConfigError(
                f"a dynamic tree of speculative_eagle_topk={self.topk},"
                f" speculative_num_steps={self.depth} and num_speculative_tokens={self.budget};"
                " expected 1 or more each, and at least a token per step"
            )

    @property
    def speculative_slots(self) -> int:
        """Drafts that are drafted from."""
        return self.topk * (self.depth - 1)

    def cut(self, nodes: int) -> DynamicTree:
        """The same with at most `nodes` (1 or more) places."""
        return DynamicTree(self.topk, min(self.depth, nodes), min(self.budget, nodes))

    def draws(self, depth: int) -> int:
        """Tokens sampled at `depth` (from 0). What is drawn must be verified, so a sampled tree is
        not pruned: its budget is shared among the levels before anything is drawn."""
        left = self.budget
        for level in range(depth + 1):
            most = self.topk if level == 0 else self.topk**2  # the first level has one parent
            dealt = min(-(-left // (self.depth - level)), most)
            left -= dealt
        return dealt


TreeShape = StaticTree | DynamicTree
