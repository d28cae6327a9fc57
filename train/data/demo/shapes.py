"""The shapes every workload of the demo corpus shares.

A workload's `start(rng, style)` gives the first exchange of a conversation and
a function that gives one more exchange about the same matter.  The first user
message of a start must stand alone: it is what decides the split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the assistant, and what checks its last answer."""

    workload: str
    messages: list[dict[str, str]]
    expected: Any


@dataclass(frozen=True)
class Exchange:
    """One user message, one right answer, and what a check needs to know."""

    user: str
    answer: str
    expected: Any = None


@dataclass(frozen=True)
class Style:
    """How the system prompt asks the assistant to answer."""

    brief: bool = False
    cheerful: bool = False
    curious: bool = False
    steps: bool = False


Thread = tuple[Exchange, Callable[[], Exchange]]
Start = Callable[[random.Random, Style], Thread]


def capital(text: str) -> str:
    """The text with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """The noun behind "a" or "an"."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def listing(words: list[str]) -> str:
    """Words joined by commas, with "and" before the last."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
