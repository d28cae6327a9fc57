"""Conversations of the demo corpus, split by what they ask.

A user message that stands alone (the first one, and a task that begins after
some chat) is hashed into one of a hundred buckets, and a split owns buckets.
Conversation i of a split draws such messages again until they fall in buckets
of the split.  So no message that identifies a prompt of one split opens, or
begins a task in, a conversation of another, with or without a system prompt.
Follow-ups such as "Call it `head` instead." mean nothing on their own and are
not hashed; they belong to the conversation they are in.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

from train.recipe.data_sections import WORKLOADS

from . import chat, json_records, python_functions, rewriting, tables, word_problems
from .shapes import Conversation, Exchange, Start, Style, Thread

MODULES = dict(zip(WORKLOADS, (word_problems, python_functions, json_records, rewriting, tables, chat), strict=True))
CHECKABLE: tuple[str, ...] = ("math", "python", "json", "rewrite", "table")
BUCKETS = {"train": range(0, 94), "validation": range(94, 97), "test": range(97, 100)}

SYSTEM_SHARE = 0.5
MULTI_TURN_SHARE = 0.35
THREE_TURN_SHARE = 0.3
CHAT_FIRST_SHARE = 0.15
SYSTEMS: tuple[tuple[str, Style], ...] = (
    ("You are a helpful assistant.", Style()),
    ("You are a precise assistant. Follow the request exactly.", Style()),
    ("You work in a small office and help people with their texts and numbers.", Style()),
    ("You are a tutor for beginners. Use simple words.", Style()),
    ("You are a small language model. Do your best.", Style()),
    ("Answer briefly.", Style(brief=True)),
    ("Be short and clear.", Style(brief=True)),
    ("You are a friendly guide. Always sound cheerful.", Style(cheerful=True)),
    ("You are a cheerful helper.", Style(cheerful=True)),
    ("You are a curious assistant. End each chat answer with a question.", Style(curious=True)),
    ("Explain your work step by step.", Style(steps=True)),
    ("You are a careful assistant who shows every step.", Style(steps=True)),
)


def bucket(message: str) -> int:
    """The bucket, 0 to 99, of a user message that stands alone."""
    return int.from_bytes(hashlib.sha256(message.encode()).digest()[:8], "big") % 100


def _start_in(split: str, start: Start, rng: random.Random, style: Style) -> Thread:
    """A start whose user message falls in the split."""
    while True:
        thread = start(rng, style)
        if bucket(thread[0].user) in BUCKETS[split]:
            return thread


def _exchanges(split: str, workload: str, rng: random.Random, style: Style) -> list[Exchange]:
    turns = 1
    if rng.random() < MULTI_TURN_SHARE:
        turns = 3 if rng.random() < THREE_TURN_SHARE else 2
    exchanges: list[Exchange] = []
    if turns > 1 and workload != "chat" and rng.random() < CHAT_FIRST_SHARE:
        exchanges.append(_start_in(split, chat.start, rng, style)[0])
    first, follow = _start_in(split, MODULES[workload].start, rng, style)
    exchanges.append(first)
    while len(exchanges) < turns:
        exchanges.append(follow())
    return exchanges


def _conversation(split: str, workload: str, rng: random.Random) -> Conversation:
    messages: list[dict[str, str]] = []
    style = Style()
    if rng.random() < SYSTEM_SHARE:
        text, style = rng.choice(SYSTEMS)
        messages.append({"role": "system", "content": text})
    exchanges = _exchanges(split, workload, rng, style)
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.user})
        messages.append({"role": "assistant", "content": exchange.answer})
    return Conversation(workload, messages, exchanges[-1].expected)


def conversations(
    split: str, count: int, seed: int = 0, workloads: Sequence[str] = WORKLOADS
) -> Iterator[Conversation]:
    """`count` conversations of a split, the workloads in turn; the same for the same seed.

    The first n of a larger count are the same n conversations.
    """
    if split not in BUCKETS:
        raise ValueError(f"unknown split {split!r}; there are {', '.join(BUCKETS)}")
    unknown = [w for w in workloads if w not in MODULES]
    if unknown or not workloads:
        raise ValueError(f"unknown workloads {unknown}; there are {', '.join(WORKLOADS)}")
    for i in range(count):
        workload = workloads[i % len(workloads)]
        yield _conversation(split, workload, random.Random(f"{seed}/{split}/{workload}/{i // len(workloads)}"))


def prompts(
    split: str, count: int, seed: int = 0, workloads: Sequence[str] = WORKLOADS
) -> Iterator[tuple[list[dict[str, str]], Conversation]]:
    """Pairs of the messages before the last answer and the whole conversation."""
    for conversation in conversations(split, count, seed, workloads):
        yield conversation.messages[:-1], conversation


def check(conversation: Conversation, answer: str) -> bool:
    """Is `answer` right for the last turn?  For chat: is it well formed?"""
    return MODULES[conversation.workload].is_right(conversation.expected, answer)
