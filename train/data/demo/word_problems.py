"""Arithmetic stories in two or three steps, with numbers a tiny model can learn.

Products stay in the tables of 2 to 5 and sums below 70, so that the pairs of
numbers met in training cover nearly all those met in a test.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .shapes import Exchange, Style, Thread, capital
from .words import COUNTABLES, PLACES, Person, person

Numbers = dict[str, int]


@dataclass(frozen=True)
class Story:
    """A story with {slots}, what its steps are called and what may be changed later."""

    recipe: str
    text: str
    question: str
    labels: tuple[str, ...]
    closing: str
    changes: dict[str, str]


# A recipe is a list of steps (left, operator, right); "1" and "2" name earlier results.
RECIPES = {
    "a+mn": (("m", "*", "n"), ("a", "+", "1")),
    "a+mn-c": (("m", "*", "n"), ("a", "+", "1"), ("2", "-", "c")),
    "mn-c": (("m", "*", "n"), ("1", "-", "c")),
    "mn+c": (("m", "*", "n"), ("1", "+", "c")),
    "a+b-c": (("a", "+", "b"), ("1", "-", "c")),
    "a-b-c": (("a", "-", "b"), ("1", "-", "c")),
    "mn+km": (("m", "*", "n"), ("k", "*", "c"), ("1", "+", "2")),
    "mn-b+c": (("m", "*", "n"), ("1", "-", "b"), ("2", "+", "c")),
}

STORIES = (
    Story(
        "a+mn",
        "{name} starts with {a} {items}. {She} buys {m} bags of {n} {items}.",
        "How many {items} does {she} have now?",
        ("the bags hold", "with the first {items}"),
        "{name} has {r} {items} now.",
        {"m": "{she} buys {m} bags", "a": "{she} starts with {a} {items}"},
    ),
    Story(
        "a+mn-c",
        "{name} has {a} {items}. {She} gets {m} boxes with {n} {items} each and then gives {c} away.",
        "How many {items} are left?",
        ("the boxes hold", "all together", "after giving {c} away"),
        "{name} has {r} {items} left.",
        {"c": "{she} gives {c} away", "m": "{she} gets {m} boxes"},
    ),
    Story(
        "mn-c",
        "A shop has {m} shelves with {n} {items} on each. {name} buys {c} of the {items}.",
        "How many {items} stay in the shop?",
        ("on the shelves", "after the sale"),
        "The shop keeps {r} {items}.",
        {"c": "{name} buys {c}", "m": "the shop has {m} shelves"},
    ),
    Story(
        "mn+c",
        "{name} fills {m} baskets with {n} {items} each. {She} has {c} more {items} at home.",
        "How many {items} is that in total?",
        ("in the baskets", "with those at home"),
        "That makes {r} {items}.",
        {"c": "{she} has {c} more at home", "m": "{she} fills {m} baskets"},
    ),
    Story(
        "a+b-c",
        "{name} finds {a} {items} in the morning and {b} in the evening. On the way home {she} loses {c}.",
        "How many {items} does {she} bring home?",
        ("found that day", "without the lost ones"),
        "{name} brings home {r} {items}.",
        {"c": "{she} loses {c}", "b": "{she} finds {b} in the evening"},
    ),
    Story(
        "a-b-c",
        "There are {a} {items} on the table. {name} takes {b} and {friend} takes {c}.",
        "How many {items} remain on the table?",
        ("after {name}", "after {friend}"),
        "There are {r} {items} on the table.",
        {"c": "{friend} takes {c}", "b": "{name} takes {b}"},
    ),
    Story(
        "mn+km",
        "At the {place}, {name} buys {m} bags of {n} {items} and {friend} buys {k} bags of {c}.",
        "How many {items} do they have together?",
        ("{name} has", "{friend} has", "together"),
        "They have {r} {items}.",
        {"c": "the bags of {friend} hold {c}", "m": "{name} buys {m} bags"},
    ),
    Story(
        "mn-b+c",
        "{name} packs {m} boxes of {n} {items}. {She} sells {b} {items} and later finds {c} more.",
        "How many {items} does {name} have in the end?",
        ("in the boxes", "after the sale", "with the ones found"),
        "In the end {name} has {r} {items}.",
        {"c": "{she} finds {c} more", "b": "{she} sells {b}"},
    ),
    Story(
        "mn+c",
        "A ticket to the {place} costs {n} dollars. {name} buys {m} tickets and a map for {c} dollars.",
        "How many dollars does {she} pay?",
        ("the tickets", "with the map"),
        "{name} pays {r} dollars.",
        {"c": "the map costs {c} dollars", "m": "{she} buys {m} tickets"},
    ),
    Story(
        "a-b-c",
        "{name} has {a} dollars. At the {place} {she} spends {b} dollars on food and {c} dollars on a bus.",
        "How many dollars are left?",
        ("after the food", "after the bus"),
        "{name} has {r} dollars left.",
        {"c": "the bus costs {c} dollars", "b": "the food costs {b} dollars"},
    ),
    Story(
        "a+mn",
        "{name} has read {a} pages. For {m} days {she} reads {n} pages a day.",
        "How many pages has {she} read in all?",
        ("in {m} days", "with the first pages"),
        "{name} has read {r} pages.",
        {"m": "{she} reads for {m} days", "a": "{she} had read {a} pages before"},
    ),
    Story(
        "a+b-c",
        "A bus leaves the {place} with {a} people. Then {b} people get on and {c} get off.",
        "How many people are on the bus?",
        ("after {b} get on", "after {c} get off"),
        "The bus carries {r} people.",
        {"c": "{c} people get off", "b": "{b} people get on"},
    ),
    Story(
        "mn-c",
        "{name} plants {m} rows of {n} trees near the {place}. A storm breaks {c} of them.",
        "How many trees still stand?",
        ("planted", "after the storm"),
        "There are {r} trees standing.",
        {"c": "the storm breaks {c}", "m": "{she} plants {m} rows"},
    ),
    Story(
        "a+mn-c",
        "{name} saved {a} dollars. {She} works {m} hours for {n} dollars an hour and pays {c} dollars for lunch.",
        "How many dollars does {she} have?",
        ("the work pays", "with the savings", "after lunch"),
        "{name} has {r} dollars.",
        {"c": "lunch costs {c} dollars", "m": "{she} works {m} hours"},
    ),
    Story(
        "mn-b+c",
        "A class has {m} groups of {n} children. Today {b} children are ill and {c} guests come to visit.",
        "How many children are in the room?",
        ("in the class", "without the ill ones", "with the guests"),
        "There are {r} children in the room.",
        {"c": "{c} guests come", "b": "{b} children are ill"},
    ),
    Story(
        "mn+km",
        "{name} runs {n} miles a day for {m} days, then {c} miles a day for {k} days.",
        "How many miles does {she} run?",
        ("the first days", "the other days", "together"),
        "{name} runs {r} miles.",
        {"c": "{she} later runs {c} miles a day", "n": "{she} first runs {n} miles a day"},
    ),
)

ASKS = (
    "{story} {question}",
    "{story} {question}",
    "Please solve this: {story} {question}",
    "{story} {question} Show the steps.",
    "Here is a problem. {story} {question}",
    "{question} {story}",
    "Help me with this one: {story} {question}",
)
CHANGES = (
    "What if {change}?",
    "And if {change} instead?",
    "Now suppose {change}. {question}",
    "What changes if {change}?",
)
OPENINGS = ("Let us work it out. ", "Let us see. ", "We go in steps. ", "", "", "")
FINALS = ("The answer is {r}.", "So the answer is {r}.", "Thus the answer is {r}.")
RANGES = {"m": (2, 5), "k": (2, 4), "n": (2, 9), "a": (6, 20), "b": (2, 9), "c": (2, 9)}
FINAL = re.compile(r"answer is (-?\d+)")


def _range(slot: str, recipe: str) -> tuple[int, int]:
    """The least and the greatest number a slot takes in a recipe."""
    if recipe == "a-b-c" and slot == "a":
        return 20, 50
    if recipe == "mn+km" and slot == "c":
        return 2, 6
    return RANGES[slot]


def _steps(recipe: str, numbers: Numbers) -> list[tuple[str, int]]:
    """Each step's equation and result."""
    results: list[int] = []
    steps = []
    for left, operator, right in RECIPES[recipe]:
        x, y = (results[int(s) - 1] if s.isdigit() else numbers[s] for s in (left, right))
        value = x * y if operator == "*" else x + y if operator == "+" else x - y
        results.append(value)
        steps.append((f"{x} {operator} {y} = {value}", value))
    return steps


def _fits(recipe: str, numbers: Numbers) -> bool:
    """Does every step stay above one, so that plurals hold?"""
    return all(value > 1 for _, value in _steps(recipe, numbers))


def _numbers(rng: random.Random, recipe: str) -> Numbers:
    """Numbers that fit the recipe."""
    while True:
        numbers = {slot: rng.randint(*_range(slot, recipe)) for slot in "mknabc"}
        if _fits(recipe, numbers):
            return numbers


def _one_changed(rng: random.Random, recipe: str, numbers: Numbers, changes: list[str]) -> tuple[str, Numbers]:
    """One of the slots in `changes`, and the numbers with another value there that fits."""
    rng.shuffle(changes)
    for slot in changes:
        low, high = _range(slot, recipe)
        choices = [{**numbers, slot: value} for value in range(low, high + 1) if value != numbers[slot]]
        choices = [choice for choice in choices if _fits(recipe, choice)]
        if choices:
            return slot, rng.choice(choices)
    raise ValueError(f"no number of {recipe} can change: {numbers}")


def _answer(
    rng: random.Random, story: Story, slots: dict[str, object], numbers: Numbers, style: Style
) -> tuple[str, int]:
    steps = _steps(story.recipe, numbers)
    slots = {**slots, **numbers, "r": steps[-1][1]}
    final = rng.choice(FINALS).format(**slots)
    if style.brief:
        return " ".join(f"{equation}." for equation, _ in steps) + " " + final, steps[-1][1]
    opening = "Let us go step by step. " if style.steps else rng.choice(OPENINGS)
    if style.cheerful:
        opening = "Happy to help! "
    named = rng.random() < 0.75
    lines = []
    for label, (equation, _) in zip(story.labels, steps):
        lines.append(f"{capital(label.format(**slots))}: {equation}." if named else f"{equation}.")
    gap = "\n" if rng.random() < 0.3 else " "
    closing = story.closing.format(**slots) + " " if rng.random() < 0.7 else ""
    return opening + gap.join([*lines, closing + final]), steps[-1][1]


def _slots(rng: random.Random) -> dict[str, object]:
    who: Person = person(rng)
    return {
        "name": who.name,
        "she": who.she,
        "She": capital(who.she),
        "friend": who.other(rng),
        "items": rng.choice(COUNTABLES),
        "place": rng.choice(PLACES),
    }


def start(rng: random.Random, style: Style) -> Thread:
    """A problem, and follow-ups that change one of its numbers."""
    story = rng.choice(STORIES)
    slots = _slots(rng)
    state = _numbers(rng, story.recipe)
    question = story.question.format(**slots)
    user = rng.choice(ASKS).format(story=story.text.format(**slots, **state), question=question)
    answer, result = _answer(rng, story, slots, state, style)

    def follow() -> Exchange:
        nonlocal state
        change, state = _one_changed(rng, story.recipe, state, sorted(story.changes))
        phrase = story.changes[change].format(**slots, **state)
        text = rng.choice(CHANGES).format(change=phrase, question=question)
        return Exchange(text, *_answer(rng, story, slots, state, style))

    return Exchange(user, answer, result), follow


def is_right(expected: int, answer: str) -> bool:
    """Is the last "answer is N" the expected number?"""
    found = FINAL.findall(answer)
    return bool(found) and int(found[-1]) == expected
