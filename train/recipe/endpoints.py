"""The servers that a recipe names: their clients' arguments, and which of their models is the
target."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.train.recipe.data_sections import EndpointSection

REFUSALS = (400, 413, 422)  # statuses that blame the request, not the server


class EndpointError(DraftsmithError):
    """A server is unreachable, or does not serve the target."""


@contextmanager
def answers_of(url: str) -> Iterator[None]:
    """EndpointError where an answer is read that is not of OpenAI's API, such as a web page: its
    client and its models fail on one with errors of Python."""
    try:
        yield
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise EndpointError(
            f"answers otherwise than OpenAI's API does ({error}); give the address of a server of"
            " it, such as http://host:8000/v1",
            where=url,
        ) from error


def failure(url: str, error: Exception) -> str:
    """What became of a request, in a line."""
    return f"{url}: {type(error).__name__}: {str(error)[:300]}"


def base_url(section: EndpointSection) -> str:
    """The address below which OpenAI's routes lie."""
    return section.url.rstrip("/").removesuffix("/v1") + "/v1"


def api_key(section: EndpointSection, where: str) -> str:
    """The server's key. ConfigError if its environment variable holds none."""
    if section.api_key_env is None:
        return "none"
    key = os.environ.get(section.api_key_env)
    if not key:
        raise ConfigError(
            f"{base_url(section)}: the environment variable {section.api_key_env} holds no key",
            where=where,
        )
    return key


def card_of_target(cards: Sequence[Any], target: str, url: str) -> Any:
    """The one of a server's model cards that is the target's: by its name, or the only one.

    EndpointError if several are served and none or more than one has that name."""
    named = [card for card in cards if target in (card.id, getattr(card, "root", None))]
    fitting = named or list(cards)
    if len(fitting) != 1:
        served = ", ".join(card.id for card in cards) or "no model"
        raise EndpointError(
            f"serves {served}; which of them is {target}? Serve the target alone, or under that"
            " name",
            where=url,
        )
    return fitting[0]


def require_length(card: Any, tokens: int, url: str) -> None:
    """EndpointError if the server's longest text is shorter than `tokens`."""
    limit = getattr(card, "max_model_len", None) or tokens
    if limit < tokens:
        raise EndpointError(
            f"serves up to {limit} tokens; start it with --max-model-len {tokens}, or lower"
            " data.max_length",
            where=url,
        )
