"""Extraction of a JSON object from a record, an email or an invoice."""

from __future__ import annotations

import json
import random

from .shapes import Exchange, Style, Thread
from .words import CITIES, COLOURS, DAYS, JOBS, MONTHS, PRODUCTS, SURNAMES, names

Record = dict[str, object]

EMAILS = (
    "Hello,\nmy name is {name} and I live in {city}. I would like to order {quantity} pieces of the {colour} {product}. "
    "The price on your page is {price} dollars. Please send it on {day}.\nMy order number is {order}.",
    "Dear team,\non {day} I got the {colour} {product} with order number {order}. I paid {price} dollars for each, and "
    "{quantity} came in the box. Please write to me in {city}.\nBest wishes, {name}",
    "Hi,\nthis is {name} from {city}. Order {order} should have {quantity} of the {colour} {product} for {price} dollars "
    "each. Can you bring it on {day}?",
    "{name} called from {city} about order {order}. The {product} in {colour} costs {price} dollars. "
    "The customer wants {quantity} of them by {day}.",
)
INVOICES = (
    "Invoice {order}\nCustomer: {name}\nCity: {city}\nItem: {product} ({colour})\nQuantity: {quantity}\nPrice: {price}\nDelivery: {day}",
    "INVOICE\nNumber: {order}\nBill to: {name}, {city}\nLine 1: {quantity} x {product}, {colour}, at {price}\nDue: {day}",
    "Order {order} | {name} | {city} | {product} | {colour} | {quantity} pieces | {price} dollars | {day}",
)
PEOPLE = (
    "Name: {name}\nAge: {age}\nJob: {job}\nCity: {city}\nPhone: {phone}\nStart: {month}\nMember: {member_word}",
    "{name} is {age} years old and works as {article} {job} in {city}. The phone number is {phone}. "
    "The work started in {month}. Member of the club: {member_word}.",
    "New entry for the list: {name}, {age}, from {city}. Job: {job}. Phone: {phone}. Member: {member_word}. Starts in {month}.",
    "Please add {name} to our files. Our new {job} is {age}, lives in {city} and starts in {month}. "
    "Call {phone} for questions. Member: {member_word}.",
)
ORDER_KEYS = ("name", "city", "product", "colour", "quantity", "price", "day", "order")
PERSON_KEYS = ("name", "age", "job", "city", "phone", "month", "member")

ASKS = (
    "Extract {keys} as a JSON object.\n\n{text}",
    "Return a JSON object with the keys {keys} from this text:\n\n{text}",
    "Read the text and give me {keys} as JSON.\n\n{text}",
    "{text}\n\nWrite the JSON object with {keys}.",
    "Turn this into JSON with the keys {keys}:\n\n{text}",
    "{text}\n\nFrom the text above, extract {keys}. Answer only with JSON.",
)
AGAIN = (
    "Now give me {keys} from the same text.",
    "And now a JSON object with {keys}, please.",
    "Do the same with the keys {keys}.",
    "I also need {keys} as JSON.",
)


def _order(rng: random.Random) -> tuple[str, Record]:
    record: Record = {
        "name": f"{names(rng, 1)[0]} {rng.choice(SURNAMES)}",
        "city": rng.choice(CITIES),
        "product": rng.choice(PRODUCTS),
        "colour": rng.choice(COLOURS),
        "quantity": rng.randint(2, 30),
        "price": rng.randint(3, 99),
        "day": rng.choice(DAYS),
        "order": rng.randint(1000, 9999),
    }
    return rng.choice(EMAILS if rng.random() < 0.55 else INVOICES).format(**record), record


def _person(rng: random.Random) -> tuple[str, Record]:
    record: Record = {
        "name": f"{names(rng, 1)[0]} {rng.choice(SURNAMES)}",
        "age": rng.randint(18, 70),
        "job": rng.choice(JOBS),
        "city": rng.choice(CITIES),
        "phone": f"555-{rng.randint(1000, 9999)}",
        "month": rng.choice(MONTHS),
        "member": rng.random() < 0.5,
    }
    extra = {
        "member_word": "yes" if record["member"] else "no",
        "article": "an" if str(record["job"])[0] in "aeiou" else "a",
    }
    return rng.choice(PEOPLE).format(**record, **extra), record


def _ask(rng: random.Random, record: Record, keys: tuple[str, ...], form: str, text: str, layout: int) -> Exchange:
    chosen = rng.sample(keys, rng.randint(2, 6))
    expected = {key: record[key] for key in chosen}
    quoted = [f'"{key}"' for key in chosen]
    wanted = ", ".join(quoted) if rng.random() < 0.5 else ", ".join(quoted[:-1]) + " and " + quoted[-1]
    body = json.dumps(expected, indent=2 if layout == 1 else None)
    answer = f"```json\n{body}\n```" if layout == 2 else body
    return Exchange(form.format(keys=wanted, text=text), answer, expected)


def start(rng: random.Random, style: Style) -> Thread:
    """A text and the keys wanted from it, and follow-ups that want other keys."""
    of_people = rng.random() < 0.45
    text, record = _person(rng) if of_people else _order(rng)
    keys = PERSON_KEYS if of_people else ORDER_KEYS
    layout = 0 if style.brief else rng.choice((0, 0, 1, 1, 2))
    first = _ask(rng, record, keys, rng.choice(ASKS), text, layout)
    return first, lambda: _ask(rng, record, keys, rng.choice(AGAIN), text, layout)


def is_right(expected: Record, answer: str) -> bool:
    """Does the answer, a code fence aside, parse to exactly the expected object?"""
    body = answer.strip()
    if body.startswith("```json") and body.endswith("```"):
        body = body[len("```json") : -3]
    try:
        found = json.loads(body)
    except ValueError:
        return False
    return isinstance(found, dict) and json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
