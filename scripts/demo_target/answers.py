"""Checks of answers to the conversations of corpus.py against the `expected` of a row."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from typing import Any

LINE_BUDGET = 2000
LARGEST_NUMBER = 1000
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
BUILTINS = {
    f.__name__: f
    for f in (
        len,
        sum,
        max,
        min,
        sorted,
        all,
        any,
        abs,
        list,
        set,
        str,
        int,
        bool,
        zip,
        enumerate,
        range,
        reversed,
    )
}
# Nodes that reach outside the function or can grow without limit.
FORBIDDEN = (
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
)


def is_right(workload: str, expected: Any, answer: str) -> bool:
    """True if the answer to the last user message is right; for chat, if it ends a sentence."""
    return CHECKS[workload](expected, answer)


def _math(expected: int, answer: str) -> bool:
    """The last "answer is N" is the expected number."""
    numbers = re.findall(r"answer is (-?\d+)", answer)
    return bool(numbers) and int(numbers[-1]) == expected


def _table(expected: str, answer: str) -> bool:
    """The last bold part is the expected one."""
    bold = re.findall(r"\*\*(.+?)\*\*", answer)
    return bool(bold) and bold[-1] == expected


def _json(expected: dict[str, Any], answer: str) -> bool:
    """The answer, a code fence aside, parses to exactly the expected object."""
    body = answer.strip()
    if body.startswith("```json") and body.endswith("```"):
        body = body[len("```json") : -3]
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and json.dumps(value, sort_keys=True) == json.dumps(
        expected, sort_keys=True
    )


def _rewrite(expected: str, answer: str) -> bool:
    """The answer, a line of introduction with a colon aside, is the expected text to the letter."""
    body = answer.strip()
    head, _, rest = body.partition("\n")
    return body == expected or (head.endswith(":") and rest.strip() == expected)


def _chat(expected: None, answer: str) -> bool:
    body = answer.strip()
    return bool(body) and body[-1] in ".!?" and any(c.isalpha() for c in body)


def _python(expected: dict[str, Any], answer: str) -> bool:
    """The answer's own asserts hold, and its function gives the right values."""
    block = CODE.search(answer)
    try:
        tree = ast.parse(block.group(1) if block else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not _is_tame(tree):
        return False

    def holds() -> bool:
        namespace: dict[str, Any] = {"__builtins__": BUILTINS}
        exec(compile(tree, "<answer>", "exec"), namespace)
        function = namespace[expected["name"]]
        return all(function(*case) == value for case, value in expected["cases"])

    return _within_budget(holds)


def _is_tame(tree: ast.Module) -> bool:
    """True if there are only definitions and asserts, nothing that reaches outside or grows
    large."""
    for node in ast.walk(tree):
        if isinstance(node, FORBIDDEN) or (isinstance(node, ast.Name) and node.id.startswith("_")):
            return False
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int)
            and node.value > LARGEST_NUMBER
        ):
            return False
    only = all(isinstance(node, ast.FunctionDef | ast.Assert) for node in tree.body)
    return only and any(isinstance(node, ast.Assert) for node in tree.body)


def _is_huge(value: Any) -> bool:
    """True for a value that grows in a loop, long before it fills the memory."""
    if isinstance(value, int):
        return abs(value) > LARGEST_NUMBER**2
    return isinstance(value, list | str | tuple) and len(value) > LARGEST_NUMBER


def _within_budget(work: Callable[[], bool]) -> bool:
    """Runs `work`, but stops it after LINE_BUDGET lines; False if it fails in any way."""
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


CHECKS: dict[str, Callable[[Any, str], bool]] = {
    "math": _math,
    "python": _python,
    "json": _json,
    "rewrite": _rewrite,
    "table": _table,
    "chat": _chat,
}
