"""What is removed from an exchange before it is written: by a user's Python file, or by regular
expressions."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.speculators.errors import ConfigError

REDACTED = "[redacted]"

Redaction = Callable[[LoggedExchange], LoggedExchange | None]


def unredacted(exchange: LoggedExchange) -> LoggedExchange:
    """The exchange as it is."""
    return exchange


def read_redaction(path: Path) -> Redaction:
    """The function `redact` of a Python file (*.py), or one that replaces what the regular
    expressions of a file find, one a line; lines that begin with # are comments. ConfigError names
    the file, and the line."""
    try:
        if path.suffix == ".py":
            return _function(path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=f"--log-redact {path}") from None
    expressions = [
        _expression(line, f"--log-redact {path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not expressions:
        raise ConfigError(
            "has no regular expression; give one a line", where=f"--log-redact {path}"
        )
    return partial(redact_matches, expressions)


def _function(path: Path) -> Redaction:
    try:
        redact = runpy.run_path(str(path)).get("redact")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot be run: {reason}", where=f"--log-redact {path}") from error
    if not callable(redact):
        raise ConfigError(
            "has no function `redact`; define redact(exchange), which returns the exchange to write"
            " or None",
            where=f"--log-redact {path}",
        )
    return redact


def _expression(line: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(line)
    except re.error as error:
        raise ConfigError(f"is no regular expression: {error}", where=where) from None


def redact_matches(
    expressions: Sequence[re.Pattern[str]], exchange: LoggedExchange
) -> LoggedExchange | None:
    """The exchange with what is found replaced in every text; token ids are left out with the text
    that they spell. None for token ids without their text, in which nothing can be found."""
    if exchange.messages is None and exchange.prompt is None:
        return None
    if exchange.text is None and exchange.token_ids is not None:
        return None
    clean = partial(_without, expressions)
    prompt = (exchange.messages, exchange.chat_template_kwargs, exchange.prompt)
    clean_prompt = clean(prompt)
    text = clean(exchange.text)
    return replace(
        exchange,
        messages=clean_prompt[0],
        chat_template_kwargs=clean_prompt[1],
        prompt=clean_prompt[2],
        prompt_token_ids=exchange.prompt_token_ids if clean_prompt == prompt else None,
        text=text,
        token_ids=exchange.token_ids if text == exchange.text else None,
        sampling=clean(exchange.sampling),
    )


def _without(expressions: Sequence[re.Pattern[str]], value: Any) -> Any:
    """Of JSON, and tuples of it; keys too."""
    clean = partial(_without, expressions)
    if isinstance(value, str):
        for expression in expressions:
            value = expression.sub(REDACTED, value)
        return value
    if isinstance(value, dict):
        return {clean(name): clean(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(clean, value))
    return value
