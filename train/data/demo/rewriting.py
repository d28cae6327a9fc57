"""Copy-heavy edits of a short passage: the answer is fixed to the letter.

Only a line of introduction, ended by a colon, may stand before the edited text.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .shapes import Exchange, Style, Thread, capital, with_article
from .words import ANIMALS, CITIES, COLOURS, DAYS, FOODS, FRUITS, JOBS, PLACES, PRODUCTS, person

OPENERS = (
    "{name} lives in {city} and works as {job}.",
    "{name} moved to {city} last {day}.",
    "Last {day}, {name} took the train to {city}.",
    "{name} has a small shop in {city}.",
    "On {day}, {name} met an old friend in {city}.",
    "{name} grew up in {city} as the child of {job}.",
    "Every {day}, {name} walks to the {place} in {city}.",
)
MIDDLES = (
    "{She} bought a {colour} {product} at the {place}.",
    "{She} likes {food} with a slice of {food2}.",
    "The {animal} of {name} sleeps next to the {product}.",
    "After work {she} often goes to the {place}.",
    "{She} keeps a {colour} {product} in the kitchen.",
    "The {place} was closed, so {she} went home early.",
    "A neighbour gave {name} a basket with {food} and one {fruit}.",
    "It rained all day, but {she} did not mind.",
    "{She} wants to paint the door {colour}.",
    "{name} told the story of the lost {product} again.",
    "In the evening {she} makes something with {food} for the family.",
    "The old {product} broke on {day}.",
    "Some friends laughed about the {colour} {product}.",
    "There was a long line in front of the {place}.",
    "{She} fed the {animal} before breakfast.",
)
LASTS = (
    "{name} will visit {city} again next {day}.",
    "Now {she} plans to buy {product_a}.",
    "In the end it was a good day for {name}.",
    "{name} hopes to see the {animal} soon.",
    "Tomorrow {she} will bring {food} to the {place}.",
    "{name} went to bed late and slept well.",
)
KEYS = (
    "Most of all, {name} wants a new {product}.",
    "Most of all, {she} loves the {place} of {city}.",
    "Most of all, the {animal} needs more care.",
    "Most of all, {name} enjoys {food}.",
    "Most of all, {she} misses the {place}.",
)
INTROS = ("Here is the text:", "Here you go:", "Sure, here it is:", "The new text:", "", "", "", "")
WRAPS = ("{ask}\n\n{text}", "{text}\n\n{ask}", "{ask}\n\nText: {text}", "Please help me with a text. {ask}\n\n{text}")
AGAIN = (
    "Here is another text. {ask}\n\n{text}",
    "And one more: {ask}\n\n{text}",
    "{ask}\n\nThe next text: {text}",
)

RENAME = (
    "Replace the name {old} with {new}.",
    "Rewrite the text with {new} instead of {old}.",
    "Change every {old} to {new}.",
)
BULLETS = (
    "Put each sentence into a bullet point.",
    "Turn the text into a list of bullet points.",
    "Write the text as bullet points.",
)
NUMBERED = ("Number the sentences.", "Turn the text into a numbered list.", "Write each sentence as a numbered line.")
FIRST = ("Repeat only the first sentence.", "Give me the first sentence.", "Copy the first sentence of the text.")
LAST = ("Repeat only the last sentence.", "Give me the last sentence.", "Copy the last sentence of the text.")
SUMMARY = (
    "Summarise the text in one sentence.",
    "What is the main point? Answer with one sentence of the text.",
    "Give the key sentence of the text.",
)
DROP = ("Leave out the first sentence.", "Remove the first sentence and keep the rest.")
CAPITALS = (
    "Correct the capital letters.",
    "Fix the capitalisation of this text.",
    "This text has no capital letters. Correct it.",
)


@dataclass(frozen=True)
class Passage:
    """Sentences, with the words in them that an edit may replace."""

    sentences: list[str]
    slots: dict[str, str]
    other_name: str

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


POOLS = {"place": PLACES, "colour": COLOURS, "product": PRODUCTS, "food": FOODS, "animal": ANIMALS, "fruit": FRUITS}


def _passage(rng: random.Random) -> Passage:
    """Three to five short sentences about one person; what else occurs in one of them occurs in no other."""
    who = person(rng)
    slots = {
        "name": who.name,
        "she": who.she,
        "She": capital(who.she),
        "city": rng.choice(CITIES),
        "job": with_article(rng.choice(JOBS)),
        "day": rng.choice(DAYS),
    }
    forms = [rng.choice(OPENERS), *rng.sample(MIDDLES, rng.randint(1, 2))]
    forms.insert(rng.randint(1, len(forms)), rng.choice(KEYS))
    if rng.random() < 0.6 and len(forms) < 5:
        forms.append(rng.choice(LASTS))
    decks = {slot: rng.sample(pool, len(pool)) for slot, pool in POOLS.items()}
    sentences = []
    for form in forms:
        things = {slot: deck.pop() for slot, deck in decks.items()}
        things |= {"food2": decks["food"].pop(), "product_a": with_article(things["product"])}
        sentences.append(capital(form.format(**slots, **things)))
    return Passage(sentences, slots, who.other(rng))


def _swap(rng: random.Random, passage: Passage) -> tuple[str, str]:
    """A name, city or day that occurs, and its replacement."""
    pools = {"name": [passage.other_name], "city": CITIES, "day": DAYS}
    present = [s for s in pools if re.search(rf"\b{passage.slots[s]}\b", passage.text)]
    slot = "name" if rng.random() < 0.5 else rng.choice(present)
    old = passage.slots[slot]
    return old, rng.choice([w for w in pools[slot] if w != old])


def _edit(rng: random.Random, passage: Passage, kind: str) -> tuple[str, str]:
    """The request and the edited text."""
    sentences = passage.sentences
    if kind == "rename":
        old, new = _swap(rng, passage)
        return rng.choice(RENAME).format(old=old, new=new), re.sub(rf"\b{old}\b", new, passage.text)
    if kind == "bullets":
        return rng.choice(BULLETS), "\n".join(f"- {s}" for s in sentences)
    if kind == "numbered":
        return rng.choice(NUMBERED), "\n".join(f"{i}. {s}" for i, s in enumerate(sentences, 1))
    if kind == "drop":
        return rng.choice(DROP), " ".join(sentences[1:])
    if kind == "first":
        return rng.choice(FIRST), sentences[0]
    if kind == "last":
        return rng.choice(LAST), sentences[-1]
    return rng.choice(SUMMARY), next(s for s in sentences if s.startswith("Most of all"))


def _exchange(rng: random.Random, passage: Passage, form: str, kind: str, style: Style) -> Exchange:
    if kind == "capitals":
        ask, edited, shown = rng.choice(CAPITALS), passage.text, passage.text.lower()
    else:
        (ask, edited), shown = _edit(rng, passage, kind), passage.text
    intro = "" if style.brief else "Happy to help:" if style.cheerful else rng.choice(INTROS)
    return Exchange(form.format(ask=ask, text=shown), f"{intro}\n{edited}" if intro else edited, edited)


KINDS = (
    *("rename",) * 5,
    *("bullets",) * 3,
    *("numbered",) * 2,
    *("drop",) * 3,
    *("last",) * 2,
    "first",
    *("summary",) * 2,
    *("capitals",) * 3,
)


def start(rng: random.Random, style: Style) -> Thread:
    """A passage with an edit, and follow-ups with other passages."""

    def exchange(form: str) -> Exchange:
        return _exchange(rng, _passage(rng), form, rng.choice(KINDS), style)

    return exchange(rng.choice(WRAPS)), lambda: exchange(rng.choice(AGAIN))


def is_right(expected: str, answer: str) -> bool:
    """Is the answer, an introduction aside, the expected text to the letter?"""
    body = answer.strip()
    if body == expected:
        return True
    head, _, rest = body.partition("\n")
    return head.endswith(":") and rest.strip() == expected
