"""A seeded generator of small conversations in six workloads, the training data of the quickstart
and of its target.

All text is in corpus.yaml; this file combines it. A user message that stands alone (the first one,
and a task that begins after some chat) is hashed into one of a hundred buckets, and each split owns
some buckets. Messages are redrawn until they fall into the split's, so that no prompt of one split
begins a task in another. Follow-ups such as "Call it `head` instead." mean nothing on their own and
are not hashed.

A workload is a function (rng, style) -> (first turn, function that gives one more turn about the
same task)."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

TEXT = yaml.safe_load(Path(__file__).with_name("corpus.yaml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {name: words.split() for name, words in TEXT["words"].items()}
WORDS["names"] = WORDS["women"] + WORDS["men"]
BUCKETS = {"train": range(0, 94), "validation": range(94, 97), "test": range(97, 100)}
SYSTEM_SHARE = 0.5
MULTI_TURN_SHARE = 0.35
THREE_TURN_SHARE = 0.3
CHAT_FIRST_SHARE = 0.15
# The committed files: (seed, conversations) one after the other. The recipes take the first 1140 of
# train, and the distillation's base the next 1140.
FILES = {
    "train": ((11, 1140), (12, 1140), (13, 1920)),
    "validation": ((0, 300),),
    "test": ((0, 600),),
}


@dataclass(frozen=True)
class Turn:
    """A user message, a right answer, and the value that checks other answers (None: they cannot be
    checked)."""

    user: str
    answer: str
    expected: Any = None


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the assistant, and the value that checks its last answer."""

    workload: str
    messages: list[dict[str, str]]
    expected: Any

    def row(self) -> dict[str, Any]:
        """The conversation as a row of a JSONL file."""
        checked = {} if self.expected is None else {"expected": self.expected}
        return {"messages": self.messages, "workload": self.workload, **checked}


Thread = tuple[Turn, Callable[[], Turn]]


def bucket(message: str) -> int:
    """The bucket, 0 to 99, of a user message that stands alone."""
    return int.from_bytes(hashlib.sha256(message.encode()).digest()[:8], "big") % 100


def conversations(
    split: str, count: int, seed: int = 0, workloads: Sequence[str] | None = None
) -> Iterator[Conversation]:
    """`count` conversations of a split, the workloads in turn, determined by the seed; a smaller
    count gives the first of them. ValueError for an unknown split or workload."""
    workloads = WORKLOADS if workloads is None else workloads
    if split not in BUCKETS:
        raise ValueError(f"unknown split {split!r}; there are {', '.join(BUCKETS)}")
    unknown = [name for name in workloads if name not in GENERATORS]
    if unknown or not workloads:
        raise ValueError(f"unknown workloads {unknown}; there are {', '.join(WORKLOADS)}")
    for i in range(count):
        workload = workloads[i % len(workloads)]
        yield _conversation(
            split, workload, Random(f"{seed}/{split}/{workload}/{i // len(workloads)}")
        )


def prompts(
    split: str, count: int, seed: int = 0, workloads: Sequence[str] | None = None
) -> Iterator[tuple[list[dict[str, str]], Conversation]]:
    """Pairs of the messages before the last answer and the whole conversation."""
    for conversation in conversations(split, count, seed, workloads):
        yield conversation.messages[:-1], conversation


def write_files(folder: Path) -> None:
    """Write FILES as compressed JSONL below `folder`, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in FILES.items():
        rows = (made.row() for seed, count in parts for made in conversations(split, count, seed))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _conversation(split: str, workload: str, rng: Random) -> Conversation:
    system, style = rng.choice(TEXT["systems"]) if rng.random() < SYSTEM_SHARE else ("", "")
    turns = 1
    if rng.random() < MULTI_TURN_SHARE:
        turns = 3 if rng.random() < THREE_TURN_SHARE else 2
    turns_so_far: list[Turn] = []
    if turns > 1 and workload != "chat" and rng.random() < CHAT_FIRST_SHARE:
        turns_so_far.append(_start(split, "chat", rng, style)[0])
    first, follow = _start(split, workload, rng, style)
    turns_so_far.append(first)
    while len(turns_so_far) < turns:
        turns_so_far.append(follow())
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns_so_far:
        messages += [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer},
        ]
    return Conversation(workload, messages, turns_so_far[-1].expected)


def _start(split: str, workload: str, rng: Random, style: str) -> Thread:
    """Draws starts of the workload until the user message falls into the split."""
    while True:
        thread = GENERATORS[workload](rng, style)
        if bucket(thread[0].user) in BUCKETS[split]:
            return thread


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _with_article(noun: str) -> str:
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def _person(rng: Random) -> dict[str, str]:
    """A random person: the slots name, she and She."""
    pool, she = ("women", "she") if rng.random() < 0.5 else ("men", "he")
    return {"name": rng.choice(WORDS[pool]), "she": she, "She": _capital(she)}


def _friend(rng: Random, person: dict[str, str]) -> str:
    """Another name that takes the same pronouns."""
    pool = WORDS["women" if person["she"] == "she" else "men"]
    while (name := rng.choice(pool)) == person["name"]:
        pass
    return name


# --------------------------------------------------------------------------------------------------
# math

Numbers = dict[str, int]


def _steps(recipe: str, numbers: Numbers) -> list[tuple[str, int]]:
    """The equation and the result of each step; "1" and "2" in a recipe are results of earlier
    steps."""
    steps: list[tuple[str, int]] = []
    for step in TEXT["math"]["recipes"][recipe]:
        left, operator, right = step.split()
        x, y = (steps[int(s) - 1][1] if s.isdigit() else numbers[s] for s in (left, right))
        value = x * y if operator == "*" else x + y if operator == "+" else x - y
        steps.append((f"{x} {operator} {y} = {value}", value))
    return steps


def _fits(recipe: str, numbers: Numbers) -> bool:
    """True if every result is above one, so that plurals are right."""
    return all(value > 1 for _, value in _steps(recipe, numbers))


def _math(rng: Random, style: str) -> Thread:
    """A word problem of two or three steps, and follow-ups that change one of its numbers."""
    text = TEXT["math"]
    story = rng.choice(text["stories"])
    recipe = story["recipe"]
    ranges = text["ranges"] | text["ranges_of"].get(recipe, {})
    slots = _person(rng)
    slots |= {"friend": _friend(rng, slots), "items": rng.choice(WORDS["countables"])}
    slots |= {"place": rng.choice(WORDS["places"])}
    numbers: Numbers = {}
    while not numbers or not _fits(recipe, numbers):
        numbers = {slot: rng.randint(*ranges[slot]) for slot in "mknabc"}
    question = story["question"].format(**slots)

    def turn(user: str) -> Turn:
        steps = _steps(recipe, numbers)
        filled = {**slots, **numbers, "r": steps[-1][1]}
        final = rng.choice(text["finals"]).format(**filled)
        if style == "brief":
            return Turn(
                user, " ".join(f"{equation}." for equation, _ in steps) + " " + final, steps[-1][1]
            )
        opening = "Let us go step by step. " if style == "steps" else rng.choice(text["openings"])
        opening = "Happy to help! " if style == "cheerful" else opening
        named = rng.random() < 0.75
        labels = (
            f"{_capital(label.format(**filled))}: " if named else "" for label in story["labels"]
        )
        lines = [f"{label}{equation}." for label, (equation, _) in zip(labels, steps)]
        gap = "\n" if rng.random() < 0.3 else " "
        closing = story["closing"].format(**filled) + " " if rng.random() < 0.7 else ""
        return Turn(user, opening + gap.join([*lines, closing + final]), steps[-1][1])

    def follow() -> Turn:
        nonlocal numbers
        changed = sorted(story["changes"])
        rng.shuffle(changed)
        for slot in changed:
            values = range(ranges[slot][0], ranges[slot][1] + 1)
            choices = [{**numbers, slot: value} for value in values if value != numbers[slot]]
            if choices := [choice for choice in choices if _fits(recipe, choice)]:
                break
        numbers = rng.choice(choices)
        change = story["changes"][slot].format(**slots, **numbers)
        return turn(rng.choice(text["changes"]).format(change=change, question=question))

    return (
        turn(
            rng.choice(text["asks"]).format(
                story=story["text"].format(**slots, **numbers), question=question
            )
        ),
        follow,
    )


# ------------------------------------------------------------------------------------------------
# python


@cache
def _reference(body: str) -> Callable[..., Any]:
    """The reference function, which gives the values in the asserts."""
    namespace: dict[str, Any] = {}
    exec("def f(a, b=None):\n    " + body.replace("\n", "\n    "), namespace)
    return namespace["f"]


def _python(rng: Random, style: str) -> Thread:
    """A function to write, and follow-ups that change its name, input or constant, or want other
    tests."""
    text = TEXT["python"]
    kind = rng.choice(text["kinds"])
    takes, constants = kind["takes"], kind.get("constants", [0])
    name, arg, k = (
        rng.choice(kind["names"]),
        rng.choice(text["arguments"][takes]),
        rng.choice(constants),
    )

    def args() -> str:
        return f"{arg}, {text['second'][arg]}" if takes == "pair" else arg

    def turn(user: str) -> Turn:
        function, cases = _reference(kind["body"].format(a="a", b="b", k=k)), text["cases"][takes]
        tests = [
            f"assert {name}({', '.join(map(repr, case))}) == {function(*case)!r}"
            for case in rng.sample(cases, 2 if style == "brief" else rng.choice((2, 2, 3)))
        ]
        lines = kind["body"].format(a=arg, b=text["second"].get(arg), k=k).split("\n")
        doc = f'    """{_capital(kind["does"].format(k=k))}."""'
        code = "\n".join(
            [f"def {name}({args()}):", doc, *(f"    {line}" for line in lines), "", *tests]
        )
        answer = f"```python\n{code}\n```"
        if style != "brief":
            opening = (
                "Happy to help!"
                if style == "cheerful"
                else rng.choice(text["openings"]).format(name=name)
            )
            answer = f"{opening}\n{answer}"
            answer += (
                "\n" + rng.choice(text["closings"]).format(args=args())
                if rng.random() < 0.4
                else ""
            )
        return Turn(
            user, answer, {"name": name, "cases": [[case, function(*case)] for case in cases]}
        )

    def follow() -> Turn:
        nonlocal name, arg, k
        change = rng.choice(
            ("name", "tests", "arg", "k", "k") if len(constants) > 1 else ("name", "tests", "arg")
        )
        old = k
        if change == "name":
            name = rng.choice([other for other in kind["names"] if other != name])
            return turn(rng.choice(text["renames"]).format(name=name))
        if change == "arg":
            arg = rng.choice([other for other in text["arguments"][takes] if other != arg])
            return turn(rng.choice(text["argument_changes"]).format(args=args()))
        if change == "k":
            k = rng.choice([other for other in constants if other != k])
            return turn(rng.choice(text["constant_changes"]).format(k=k, old=old))
        return turn(rng.choice(text["more_tests"]))

    user = rng.choice(text["asks"]).format(name=name, does=kind["does"].format(k=k), args=args())
    if takes == "pair":
        user = user.replace("the argument", "the arguments").replace(
            "the input is", "the inputs are"
        )
    return turn(user), follow


# --------------------------------------------------------------------------------------------------
# json


def _json(rng: Random, style: str) -> Thread:
    """A record, an email or an invoice with keys to extract, and follow-ups for other keys."""
    text, record = TEXT["json"], dict[str, Any]()
    of_person = rng.random() < 0.45
    record["name"] = f"{rng.sample(WORDS['names'], 1)[0]} {rng.choice(WORDS['surnames'])}"
    if of_person:
        record |= {
            "age": rng.randint(18, 70),
            "job": rng.choice(WORDS["jobs"]),
            "city": rng.choice(WORDS["cities"]),
        }
        record |= {"phone": f"555-{rng.randint(1000, 9999)}", "month": rng.choice(WORDS["months"])}
        record |= {"member": rng.random() < 0.5}
        forms = text["people"]
    else:
        record |= {"city": rng.choice(WORDS["cities"]), "product": rng.choice(WORDS["products"])}
        record |= {"colour": rng.choice(WORDS["colours"])}
        record |= {
            "quantity": rng.randint(2, 30),
            "price": rng.randint(3, 99),
            "day": rng.choice(WORDS["days"]),
        }
        record |= {"order": rng.randint(1000, 9999)}
        forms = text["emails"] if rng.random() < 0.55 else text["invoices"]
    article, _, _ = _with_article(record.get("job", "job")).partition(" ")
    slots = {"member_word": "yes" if record.get("member") else "no", "article": article}
    document = rng.choice(forms).format(**record, **slots)
    layout = 0 if style == "brief" else rng.choice((0, 0, 1, 1, 2))  # one line, indented, fenced

    def turn(forms: list[str]) -> Turn:
        form = rng.choice(forms)
        keys = rng.sample(list(record), rng.randint(2, 6))
        expected, quoted = {key: record[key] for key in keys}, [f'"{key}"' for key in keys]
        wanted = (
            ", ".join(quoted)
            if rng.random() < 0.5
            else ", ".join(quoted[:-1]) + " and " + quoted[-1]
        )
        body = json.dumps(expected, indent=2 if layout == 1 else None)
        answer = f"```json\n{body}\n```" if layout == 2 else body
        return Turn(form.format(keys=wanted, text=document), answer, expected)

    return turn(text["asks"]), lambda: turn(text["again"])


# -----------------------------------------------------------------------------------------------
# rewrite

POOLS = {
    "place": "places",
    "colour": "colours",
    "product": "products",
    "food": "foods",
    "animal": "animals",
}
POOLS["fruit"] = "fruits"


def _passage(rng: Random) -> tuple[list[str], dict[str, str]]:
    """Three to five sentences about one person, and their slots; no other thing occurs in two
    sentences."""
    text, slots = TEXT["rewrite"], _person(rng)
    slots |= {"city": rng.choice(WORDS["cities"]), "job": _with_article(rng.choice(WORDS["jobs"]))}
    slots |= {"day": rng.choice(WORDS["days"])}
    forms = [rng.choice(text["openers"]), *rng.sample(text["middles"], rng.randint(1, 2))]
    forms.insert(rng.randint(1, len(forms)), rng.choice(text["keys"]))
    if rng.random() < 0.6 and len(forms) < 5:
        forms.append(rng.choice(text["lasts"]))
    decks = {slot: rng.sample(WORDS[pool], len(WORDS[pool])) for slot, pool in POOLS.items()}
    sentences = []
    for form in forms:
        things = {slot: deck.pop() for slot, deck in decks.items()}
        things |= {"food2": decks["food"].pop(), "product_a": _with_article(things["product"])}
        sentences.append(_capital(form.format(**slots, **things)))
    return sentences, slots | {"friend": _friend(rng, slots)}


def _edit(rng: Random) -> tuple[str, str, str]:
    """(request, passage, edited passage)"""
    sentences, slots = _passage(rng)
    kind = rng.choice(
        [kind for kind, times in TEXT["rewrite"]["kinds"].items() for _ in range(times)]
    )
    passage, old, new = " ".join(sentences), "", ""
    if kind == "rename":  # a name, city or day that occurs
        pools = {"name": [slots["friend"]], "city": WORDS["cities"], "day": WORDS["days"]}
        present = [slot for slot in pools if re.search(rf"\b{slots[slot]}\b", passage)]
        slot = "name" if rng.random() < 0.5 else rng.choice(present)
        old = slots[slot]
        new = rng.choice([word for word in pools[slot] if word != old])
    edited = {
        "rename": re.sub(rf"\b{old}\b", new, passage),
        "bullets": "\n".join(f"- {sentence}" for sentence in sentences),
        "numbered": "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(sentences, 1)),
        "drop": " ".join(sentences[1:]),
        "first": sentences[0],
        "last": sentences[-1],
        "summary": next(sentence for sentence in sentences if sentence.startswith("Most of all")),
        "capitals": passage,
    }[kind]
    ask = rng.choice(TEXT["rewrite"]["asks"][kind]).format(old=old, new=new)
    return ask, passage.lower() if kind == "capitals" else passage, edited


def _rewrite(rng: Random, style: str) -> Thread:
    """A passage with an edit that has exactly one result, and follow-ups with other passages."""
    text = TEXT["rewrite"]

    def turn(forms: list[str]) -> Turn:
        form = rng.choice(forms)
        ask, passage, edited = _edit(rng)
        intro = (
            ""
            if style == "brief"
            else "Happy to help:"
            if style == "cheerful"
            else rng.choice(text["intros"])
        )
        return Turn(
            form.format(ask=ask, text=passage), f"{intro}\n{edited}" if intro else edited, edited
        )

    return turn(text["wraps"]), lambda: turn(text["again"])


# -------------------------------------------------------------------------------------------------
# table

Table = dict[str, list[str]]  # column -> cells; the first column names the rows


def draw_table(rng: Random) -> tuple[str, Table]:
    """(noun for a row, the table)"""
    theme = rng.choice(TEXT["table"]["themes"])
    count = rng.choice((3, 3, 4))
    table = {theme["key"]: rng.sample(WORDS[theme["rows"]], count)}
    for head, form, *bounds in rng.sample(theme["columns"], rng.choice((1, 1, 2))):
        if bounds:  # numbers with different last digits
            digits = rng.sample(range(10), count)
            cells = [
                form.format(rng.choice([n for n in range(*bounds) if n % 10 == digit]))
                for digit in digits
            ]
        else:
            cells = rng.sample(WORDS[form], count)
        table[head] = cells
    return theme["noun"], table


def markdown(table: Table) -> str:
    """The table as markdown."""
    rows = ["| " + " | ".join(row) + " |" for row in (tuple(table), *zip(*table.values()))]
    return "\n".join([rows[0], "|" + " --- |" * len(table), *rows[1:]])


def _number(cell: str) -> int:
    """The number in a cell such as "$40"."""
    return int(re.sub(r"\D", "", cell))


def _question(rng: Random, noun: str, table: Table, style: str) -> tuple[str, str, str, str]:
    """(question, answer, the bold part, column). An answer repeats the rows that it needs before
    its conclusion."""
    text = TEXT["table"]
    col = rng.choice(list(table)[1:])
    names, cells = next(iter(table.values())), table[col]
    compared = ("cell", "cell", "row", "list", "compare", "compare")
    kind = rng.choice(
        compared if col in text["compared"] else ("cell", "cell", "row", "row", "list")
    )
    slots = {"col": col, "noun": noun}
    if kind == "compare":
        i, j = rng.sample(range(len(cells)), 2)
        higher = rng.random() < 0.5
        both = ((_number(cells[at]), cells[at], names[at]) for at in (i, j))
        (_, big, bigger), (_, small, smaller) = sorted(both, reverse=True)
        slots |= {
            "row": names[i],
            "other": names[j],
            "x": cells[i],
            "y": cells[j],
            "big": big,
            "bigger": bigger,
        }
        slots |= {"small": small, "smaller": smaller, "word": "higher" if higher else "lower"}
        bold = slots["best"] = bigger if higher else smaller
        said = rng.choice(text["compare_says"]).format(**slots)
        return (
            rng.choice(text["more_asks" if higher else "less_asks"]).format(**slots),
            said,
            bold,
            col,
        )
    at = rng.randrange(len(cells))
    pairs = [f"{name}: {cell}" for name, cell in zip(names, cells)]
    slots |= {"row": names[at], "v": ", ".join(pairs) if kind == "list" else cells[at]}
    read, bold = "", slots["v"]
    if kind == "row":
        read, bold = ", ".join(pairs[: at + 1]) + ". ", names[at]
    elif kind == "cell" and style != "brief":
        row = "| " + " | ".join(column[at] for column in table.values()) + " |"
        read = rng.choice(text["row_reads"]).format(row=row)
    question = rng.choice(text[f"{kind}_asks"]).format(**slots)
    return question, read + rng.choice(text[f"{kind}_says"]).format(**slots), bold, col


def _table(rng: Random, style: str) -> Thread:
    """A small table with a question, and follow-ups about the same table; the answer is in bold."""
    text = TEXT["table"]
    noun, table = draw_table(rng)

    def turn(forms: list[str]) -> Turn:
        form = rng.choice(forms)
        question, said, bold, col = _question(rng, noun, table, style)
        context = rng.choice(text["context"]).format(col=col)
        if style == "cheerful":
            context = "Happy to help! "
        elif style == "steps":
            context = f"I looked at the {col} column. "
        user = form.format(table=markdown(table), question=question)
        return Turn(user, ("" if style == "brief" else context) + said, bold)

    return turn(text["asks"]), lambda: turn(text["follow"])


# --------------------------------------------------------------------------------------------------
# chat


def _chat(rng: Random, style: str) -> Thread:
    """A question about a topic, answered from its few facts, and follow-ups about it or about one
    like it."""
    text = TEXT["chat"]
    kind = text["kinds"][rng.choice(text["shares"])]
    used: set[str] = set()  # facts of earlier answers

    def about(facts: dict[str, str]) -> dict[str, str]:
        """The slots of a topic."""
        slots = {**facts, "Topic": _capital(facts["topic"])}
        slots["other"] = rng.choice([city for city in WORDS["cities"] if city != facts["topic"]])
        pets = [pet["topic"] for pet in text["kinds"]["pet"]["topics"]]
        slots["other_pet"] = rng.choice([pet for pet in pets if pet != facts["topic"]])
        return slots | {"name": rng.sample(WORDS["names"], 1)[0], "day": rng.choice(WORDS["days"])}

    def turn(user: str, focus: str, greeting: str = "") -> Turn:
        """A greeting or an opener, one to three facts not used yet (`focus` first), and at times a
        closer."""
        more = bool(used)
        count = 1 if style == "brief" or more else rng.choice((1, 2, 2, 3))
        parts = [] if more and rng.random() < 0.5 else [rng.choice(kind["openers"])]
        facts = sorted(kind["facts"])
        rng.shuffle(facts)
        facts.sort(key=lambda fact: (fact in used, fact != focus))
        used.update(facts[:count])
        parts += [rng.choice(kind["facts"][fact]) for fact in facts[:count]]
        if style != "brief":
            parts += rng.sample(
                kind["closers"], rng.choice((1, 2)) if more else rng.choice((0, 1, 1))
            )
        cheer, question = [rng.choice(text["cheers"])], [rng.choice(text["questions"])]
        parts = (
            [greeting] * bool(greeting)
            + cheer * (style == "cheerful")
            + parts
            + question * (style == "curious")
        )
        return Turn(user, " ".join(_capital(part.format(**slots)) for part in parts))

    def follow() -> Turn:
        nonlocal slots
        others = [facts for facts in kind["topics"] if facts["topic"] != slots["topic"]]
        if not others or rng.random() < 0.35:
            return turn(rng.choice(text["more"]), "")
        slots = about(rng.choice(others))
        used.clear()
        topic = f"a {slots['topic']}" if kind is text["kinds"]["pet"] else slots["topic"]
        return turn(rng.choice(text["follow"]).format(topic=topic), focus)

    slots = about(rng.choice(kind["topics"]))
    me = rng.sample(WORDS["names"], 1)[0]
    meeting = rng.choice(text["meetings"]).format(name=me, city=slots["other"], day=slots["day"])
    greeting = text["greetings"][0] if meeting.startswith(("H", "Good")) else ""
    if me in meeting:
        greeting = rng.choice(text["greetings"][1:]).format(name=me)
    focus, question = rng.choice(kind["questions"]).split("|")
    return turn(meeting + question.format(**slots), focus, greeting), follow


GENERATORS: dict[str, Callable[[Random, str], Thread]] = {
    "math": _math,
    "python": _python,
    "json": _json,
    "rewrite": _rewrite,
    "table": _table,
    "chat": _chat,
}
WORKLOADS = tuple(GENERATORS)
CHECKABLE = tuple(name for name in WORKLOADS if name != "chat")
