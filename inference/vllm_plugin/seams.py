"""Changing modules of vLLM while it runs: when, how, and what happens if they are not what was expected.

`when_imported` waits for a module instead of importing it: most processes of vLLM never load most of what the plugin
touches. `attempt` is the rule that nothing is raised into vLLM. Knows no module of vLLM.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.draftsmith")  # below vLLM's own, whose handlers and level it shares

Action = Callable[[ModuleType], None]


class Unsuitable(Exception):
    """This vLLM is not what a change was written for; the message says what is missing, and what to do."""


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is a warning that names `what` was left out and why."""
    try:
        yield
    except Unsuitable as reason:
        logger.warning("Draftsmith: %s left out: %s", what, reason)
    except Exception as error:
        logger.warning("Draftsmith: %s left out: %s: %s", what, type(error).__name__, error, exc_info=error)


def member(owner: Any, name: str) -> Any:
    """`owner.name`; Unsuitable if there is none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise Unsuitable(f"{_called(owner)} has no {name} in this version of vLLM") from None


def require_parameters(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Unsuitable unless `function` takes parameters of these names."""
    taken = inspect.signature(function).parameters
    if missing := [name for name in names if name not in taken]:
        raise Unsuitable(f"{_called(function)} takes no {', '.join(missing)} in this version of vLLM")


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `make` of what it was, under its name and documentation; once for every `make`."""
    original = member(owner, name)
    made = getattr(original, "_draftsmith", ())
    if make in made:
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement._draftsmith = (*made, make)
    setattr(owner, name, replacement)


def when_imported(name: str, what: str, action: Action) -> None:
    """Runs `action(module)` right after the module is loaded, at once if it is; `what` names it in a warning."""

    def guarded(module: ModuleType) -> None:
        with attempt(what):
            action(module)

    if name in sys.modules:
        guarded(sys.modules[name])
        return
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    _waiting.setdefault(name, []).append(guarded)


_waiting: dict[str, list[Action]] = {}


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find, and adds to what their loader does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _then(loader.exec_module)
        return spec


def _then(load: Action) -> Action:
    """`load`, and what waited for the module."""

    def exec_module(module: ModuleType) -> None:
        load(module)
        for action in _waiting.pop(module.__name__, ()):
            action(module)

    return exec_module


def _called(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or repr(thing)
