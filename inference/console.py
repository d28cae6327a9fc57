"""Shared by the command lines of this project: an error the user can mend is one red paragraph and
exit code 2; options that are JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.speculators.errors import ConfigError, DraftsmithError


def print_error(error: DraftsmithError) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))


# The extra of this project that installs a module which some commands need.
EXTRAS = {
    "matplotlib": "report",
    **dict.fromkeys(("accelerate", "datasets", "peft", "psutil", "pyarrow", "ruamel"), "train"),
    **dict.fromkeys(("openai", "prometheus_client", "starlette", "uvicorn"), "serve"),
}


@contextmanager
def user_errors() -> Iterator[None]:
    """A DraftsmithError, or a missing module of an extra, is printed and becomes exit code 2; any
    other error is a bug and shows its traceback."""
    try:
        yield
    except DraftsmithError as error:
        print_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        install = f"pip install 'draftsmith[{extra}]'"
        print_error(ConfigError(f"this needs the package {error.name}: {install}"))
        sys.exit(2)


def run(app: Callable[[], object]) -> None:
    """Runs a command line."""
    with user_errors():
        app()


def json_option(name: str, text: str) -> dict[str, Any] | None:
    """An option that takes a JSON object; None if it is not given."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{name}: not JSON: {error}; write {{"method": "ngram", ...}} in single quotes'
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object of options, got {text}", where=name)
    return value


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
