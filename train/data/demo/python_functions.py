"""Short Python functions with a docstring and asserts that hold.

The arguments in the asserts come from small pools, so that a tiny model can
know every value it has to write.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from .shapes import Exchange, Style, Thread, capital

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINE_BUDGET = 2000
LARGEST_NUMBER = 1000
BUILTINS = {
    f.__name__: f
    for f in (len, sum, max, min, sorted, all, any, abs, list, set, str, int, bool, zip, enumerate, range, reversed)
}


@dataclass(frozen=True)
class Kind:
    """A function to ask for: names, what it does, its body, its arguments."""

    names: tuple[str, ...]
    does: str
    body: str
    takes: str
    constants: tuple[int, ...] = (0,)


def _loop(result: str, line: str, test: str = "") -> str:
    """A body that goes through the list {a} and changes `result`."""
    inner = f"    if {test}:\n        {line}" if test else f"    {line}"
    return f"result = {result}\nfor x in {{a}}:\n{inner}\nreturn result"


KINDS = (
    Kind(("count_items", "list_length", "how_many"), "return the number of items in a list", "return len({a})", "list"),
    Kind(("first_item", "get_first", "head"), "return the first item of a list", "return {a}[0]", "full"),
    Kind(("last_item", "get_last", "tail_item"), "return the last item of a list", "return {a}[-1]", "full"),
    Kind(("largest", "find_max", "biggest"), "return the largest number in a list", "return max({a})", "full"),
    Kind(("smallest", "find_min", "lowest"), "return the smallest number in a list", "return min({a})", "full"),
    Kind(("total", "add_all", "sum_list"), "return the sum of a list", "return sum({a})", "list"),
    Kind(("sum_loop", "add_numbers", "running_total"), "add up a list with a loop", _loop("0", "result += x"), "list"),
    Kind(("backwards", "reverse_list", "flip"), "return a list in reverse order", "return {a}[::-1]", "list"),
    Kind(
        ("sort_list", "in_order", "ordered"), "return a list sorted from small to large", "return sorted({a})", "list"
    ),
    Kind(
        ("sort_down", "from_large", "descending"),
        "return a list sorted from large to small",
        "return sorted({a}, reverse=True)",
        "list",
    ),
    Kind(("is_empty", "has_nothing", "no_items"), "check if a list is empty", "return len({a}) == 0", "list"),
    Kind(
        ("add_to_each", "shift_all", "increase_all"),
        "add {k} to every number in a list",
        "return [x + {k} for x in {a}]",
        "list",
        (1, 2, 3),
    ),
    Kind(
        ("multiply_each", "scale_all", "times_all"),
        "multiply every number in a list by {k}",
        "return [x * {k} for x in {a}]",
        "list",
        (2, 3),
    ),
    Kind(
        ("keep_above", "only_larger", "filter_above"),
        "keep the numbers of a list that are larger than {k}",
        "return [x for x in {a} if x > {k}]",
        "list",
        (1, 2, 3),
    ),
    Kind(
        ("keep_below", "only_smaller", "filter_below"),
        "keep the numbers of a list that are smaller than {k}",
        "return [x for x in {a} if x < {k}]",
        "list",
        (2, 3, 4),
    ),
    Kind(
        ("remove_value", "drop_value", "without"),
        "remove every {k} from a list",
        "return [x for x in {a} if x != {k}]",
        "list",
        (1, 2, 3),
    ),
    Kind(
        ("count_value", "times_seen", "how_often"),
        "count how often {k} is in a list",
        _loop("0", "result += 1", "x == {k}"),
        "list",
        (1, 2, 3),
    ),
    Kind(
        ("count_above", "number_above", "larger_count"),
        "count the numbers in a list that are larger than {k}",
        _loop("0", "result += 1", "x > {k}"),
        "list",
        (1, 2, 3),
    ),
    Kind(
        ("contains_value", "has_value", "is_inside"),
        "check if {k} is in a list",
        "return {k} in {a}",
        "list",
        (1, 2, 3, 4),
    ),
    Kind(
        ("keep_even", "only_even", "even_numbers"),
        "keep the even numbers of a list",
        "return [x for x in {a} if x % 2 == 0]",
        "list",
    ),
    Kind(
        ("keep_odd", "only_odd", "odd_numbers"),
        "keep the odd numbers of a list",
        "return [x for x in {a} if x % 2 == 1]",
        "list",
    ),
    Kind(
        ("count_even", "even_count", "number_of_even"),
        "count the even numbers in a list",
        _loop("0", "result += 1", "x % 2 == 0"),
        "list",
    ),
    Kind(
        ("take_first", "first_part", "front"),
        "return the first {k} items of a list",
        "return {a}[:{k}]",
        "list",
        (1, 2),
    ),
    Kind(
        ("skip_first", "drop_first", "rest"),
        "return a list without its first {k} items",
        "return {a}[{k}:]",
        "list",
        (1, 2),
    ),
    Kind(
        ("append_value", "put_at_end", "add_last"),
        "return a list with {k} added at the end",
        "return {a} + [{k}]",
        "list",
        (1, 2, 3, 7),
    ),
    Kind(
        ("put_in_front", "add_first", "prepend"),
        "return a list with {k} added at the front",
        "return [{k}] + {a}",
        "list",
        (1, 2, 3, 7),
    ),
    Kind(("copy_list", "same_items", "clone"), "return a copy of a list", "return list({a})", "list"),
    Kind(
        ("longer_than", "is_long", "has_more_items"),
        "check if a list has more than {k} items",
        "return len({a}) > {k}",
        "list",
        (1, 2),
    ),
    Kind(
        ("count_true", "yes_count", "number_true"),
        "count the true values in a list",
        _loop("0", "result += 1", "x"),
        "flags",
    ),
    Kind(
        ("all_true", "everything_true", "every_one"),
        "check if all values in a list are true",
        "return all({a})",
        "flags",
    ),
    Kind(("any_true", "one_true", "at_least_one"), "check if any value in a list is true", "return any({a})", "flags"),
    Kind(
        ("invert_all", "flip_flags", "negate_all"),
        "turn every true value in a list into false and the other way round",
        "return [not x for x in {a}]",
        "flags",
    ),
    Kind(("add_number", "plus", "increase"), "add {k} to a number", "return {a} + {k}", "int", (1, 2, 3, 4, 5)),
    Kind(("multiply_number", "times", "multiply"), "multiply a number by {k}", "return {a} * {k}", "int", (2, 3, 4, 5)),
    Kind(
        ("is_larger", "is_above", "exceeds"),
        "check if a number is larger than {k}",
        "return {a} > {k}",
        "int",
        (2, 3, 4, 5, 6),
    ),
    Kind(("is_even", "check_even", "even"), "check if a number is even", "return {a} % 2 == 0", "int"),
    Kind(("is_odd", "check_odd", "odd"), "check if a number is odd", "return {a} % 2 == 1", "int"),
    Kind(
        ("at_most", "limit", "clip_high"),
        "return a number, but never more than {k}",
        "if {a} > {k}:\n    return {k}\nreturn {a}",
        "int",
        (3, 4, 5, 6),
    ),
    Kind(
        ("count_up", "numbers_to", "make_range"),
        "return the list of numbers from 1 up to a number",
        "return list(range(1, {a} + 1))",
        "size",
    ),
    Kind(
        ("repeat_value", "make_list", "fill"),
        "return a list with a number of copies of {k}",
        "return [{k}] * {a}",
        "size",
        (0, 1, 5),
    ),
    Kind(("add_two", "add_pair", "sum_of_two"), "add two numbers", "return {a} + {b}", "pair"),
    Kind(
        ("larger_of", "max_of_two", "pick_larger"),
        "return the larger of two numbers",
        "if {a} > {b}:\n    return {a}\nreturn {b}",
        "pair",
    ),
    Kind(
        ("smaller_of", "min_of_two", "pick_smaller"),
        "return the smaller of two numbers",
        "if {a} < {b}:\n    return {a}\nreturn {b}",
        "pair",
    ),
    Kind(("are_equal", "same_value", "is_same"), "check if two numbers are equal", "return {a} == {b}", "pair"),
    Kind(("as_list", "make_pair", "pack"), "put two numbers into a list", "return [{a}, {b}]", "pair"),
)

LISTS = ([1, 2, 3], [3, 1, 2], [4, 5], [5, 2], [2, 4, 6], [1, 1, 2], [6, 3, 3], [7])
FLAGS = ([True, False], [True, True], [False, False], [False, True, True], [False])
CASES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "full": tuple((x,) for x in LISTS),
    "list": tuple((x,) for x in (*LISTS, [])),
    "flags": tuple((x,) for x in FLAGS),
    "int": tuple((x,) for x in range(1, 9)),
    "size": tuple((x,) for x in range(1, 5)),
    "pair": ((1, 2), (2, 1), (3, 3), (4, 2), (2, 5), (5, 1), (0, 4), (3, 6)),
}
ARGUMENTS = {
    "full": ("items", "numbers", "values", "data"),
    "list": ("items", "numbers", "values", "data"),
    "flags": ("flags", "values", "answers", "checks"),
    "int": ("n", "number", "value", "amount"),
    "size": ("n", "size", "count", "length"),
    "pair": ("a", "left", "one", "p"),
}
SECOND = {"a": "b", "left": "right", "one": "two", "p": "q"}

ASKS = (
    "Write a Python function `{name}` to {does}. Call the argument `{args}`.",
    "Write a function `{name}({args})` to {does}.",
    "I need a Python function `{name}({args})`. It should {does}.",
    "Please write `{name}({args})`: it should {does}. Add tests.",
    "Can you write a function to {does}? The name is `{name}` and the input is `{args}`.",
    "How do I {does} in Python? Make it a function `{name}({args})`.",
    "Define `{name}({args})` to {does}, with a docstring and asserts.",
)
RENAMES = ("Call it `{name}` instead.", "Please rename the function to `{name}`.", "Good. Now use the name `{name}`.")
ARGUMENT_CHANGES = ("Use `{args}` as the input name.", "Now name the input `{args}`.")
CONSTANT_CHANGES = ("Now with {k} instead of {old}.", "Change the {old} to {k}.", "And the same for {k}?")
MORE_TESTS = ("Show it again with other tests.", "Give me different asserts.", "Can you test it with other values?")
OPENINGS = (
    "Here is the function:",
    "Here is `{name}` with tests:",
    "This function should do it:",
    "You can write it like this:",
    "Sure:",
)
CLOSINGS = ("The asserts show how it works.", "All asserts pass.", "It takes `{args}` and the tests show the result.")


@cache
def _reference(kind: Kind, k: int) -> Callable[..., Any]:
    """The kind's own function, for the values in the asserts."""
    body = kind.body.format(a="a", b="b", k=k).replace("\n", "\n    ")
    namespace: dict[str, Any] = {"__builtins__": BUILTINS}
    exec(f"def f(a, b=None):\n    {body}", namespace)
    return namespace["f"]


def _answer(rng: random.Random, kind: Kind, name: str, arg: str, k: int, style: Style) -> tuple[str, dict[str, Any]]:
    function = _reference(kind, k)
    second = SECOND.get(arg, "b") if kind.takes == "pair" else ""
    args = f"{arg}, {second}" if second else arg
    lines = kind.body.format(a=arg, b=second, k=k).split("\n")
    does = capital(kind.does.format(k=k))
    tests = [
        f"assert {name}({', '.join(map(repr, case))}) == {function(*case)!r}"
        for case in rng.sample(CASES[kind.takes], 2 if style.brief else rng.choice((2, 2, 3)))
    ]
    code = "\n".join([f"def {name}({args}):", f'    """{does}."""', *(f"    {line}" for line in lines), "", *tests])
    block = f"```python\n{code}\n```"
    hidden = [[list(case), function(*case)] for case in CASES[kind.takes]]
    expected = {"name": name, "cases": hidden}
    if style.brief:
        return block, expected
    opening = "Happy to help!" if style.cheerful else rng.choice(OPENINGS).format(name=name)
    closing = "\n" + rng.choice(CLOSINGS).format(args=args) if rng.random() < 0.4 else ""
    return f"{opening}\n{block}{closing}", expected


def start(rng: random.Random, style: Style) -> Thread:
    """A function to write, and follow-ups that change its name, input or constant."""
    kind = rng.choice(KINDS)
    name, arg, k = rng.choice(kind.names), rng.choice(ARGUMENTS[kind.takes]), rng.choice(kind.constants)

    def args() -> str:
        return f"{arg}, {SECOND[arg]}" if kind.takes == "pair" else arg

    user = rng.choice(ASKS).format(name=name, does=kind.does.format(k=k), args=args())
    if kind.takes == "pair":
        user = user.replace("the argument", "the arguments").replace("the input is", "the inputs are")

    def follow() -> Exchange:
        nonlocal name, arg, k
        change = rng.choice(("name", "tests", "arg", "k", "k") if len(kind.constants) > 1 else ("name", "tests", "arg"))
        old = k
        if change == "name":
            name = rng.choice([n for n in kind.names if n != name])
            text = rng.choice(RENAMES).format(name=name)
        elif change == "arg":
            arg = rng.choice([a for a in ARGUMENTS[kind.takes] if a != arg])
            text = rng.choice(ARGUMENT_CHANGES).format(args=args())
        elif change == "k":
            k = rng.choice([c for c in kind.constants if c != k])
            text = rng.choice(CONSTANT_CHANGES).format(k=k, old=old)
        else:
            text = rng.choice(MORE_TESTS)
        return Exchange(text, *_answer(rng, kind, name, arg, k, style))

    return Exchange(user, *_answer(rng, kind, name, arg, k, style)), follow


def _is_tame(tree: ast.Module) -> bool:
    """Only definitions and asserts, nothing that reaches outside or grows large."""
    if not all(isinstance(node, (ast.FunctionDef, ast.Assert)) for node in tree.body):
        return False
    for node in ast.walk(tree):
        if isinstance(
            node,
            (
                ast.Import,
                ast.ImportFrom,
                ast.Pow,
                ast.LShift,
                ast.Lambda,
                ast.Global,
                ast.Try,
                ast.ClassDef,
                ast.Attribute,
                ast.While,
            ),
        ):
            return False
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > LARGEST_NUMBER:
            return False
    return any(isinstance(node, ast.Assert) for node in tree.body)


def _is_huge(value: Any) -> bool:
    """A value that keeps growing in a loop, long before it hurts."""
    if isinstance(value, int):
        return abs(value) > LARGEST_NUMBER**2
    return isinstance(value, (list, str, tuple)) and len(value) > LARGEST_NUMBER


def _within_budget(work: Callable[[], bool]) -> bool:
    """Run `work`, stopped after LINE_BUDGET lines; any failure is False."""
    left = LINE_BUDGET

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or any(map(_is_huge, frame.f_locals.values())):
            raise RuntimeError("too many lines or too large a value")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return work()
    except Exception:
        return False
    finally:
        sys.settrace(before)


def is_right(expected: dict[str, Any], answer: str) -> bool:
    """Do the answer's own asserts hold, and does the function give the right values?"""
    found = BLOCK.search(answer)
    if found is None:
        return False
    try:
        tree = ast.parse(found.group(1))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not _is_tame(tree):
        return False
    code = compile(tree, "<answer>", "exec")

    def work() -> bool:
        namespace: dict[str, Any] = {"__builtins__": BUILTINS}
        exec(code, namespace)
        function = namespace[expected["name"]]
        return all(function(*case) == value for case, value in expected["cases"])

    return _within_budget(work)
