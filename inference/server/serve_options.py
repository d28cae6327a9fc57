"""Options of the server, which are flags of `serve` under the same names. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from draftsmith.inference.engine_options import EngineOptions, option
from draftsmith.inference.flags import JsonObject, Values, json_or_text, validated
from draftsmith.speculators.errors import ConfigError

SpecDecodeDetail = Literal["none", "summary", "detailed"]
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)  # with server defaults


def _template(given: str | None) -> str | None:
    """The text of a template file; a template itself is returned as it is."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"could not be read: {error.strerror}") from error


def _sendable(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys as they are. ValueError for one that no client could send in a header: RFC 9110 has
    visible ASCII alone there, and drops blanks at the ends."""
    for place, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or not key or key != key.strip():
            raise ValueError(
                f"key {place} cannot be sent in a header; expected letters, digits and signs of"
                " ASCII, without blanks at the ends"
            )
    return keys


class ServerOptions(BaseModel):
    """Options of the routes, under vLLM's names where vLLM has them."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    served_model_name: tuple[str, ...] = Field(min_length=1)  # the first is in answers
    chat_template: Annotated[str | None, BeforeValidator(_template)] = option(
        None, "file of a chat template, or the template itself"
    )
    default_chat_template_kwargs: JsonObject = option({}, "for the chat template")
    sampling_defaults: dict[str, Any] = Field({}, exclude=True)  # no flag: of generation_config
    api_key: Annotated[tuple[str, ...], AfterValidator(_sendable)] = option(
        (), "keys that open the server, all but /health (or DRAFTSMITH_API_KEY)"
    )
    max_num_queued_reqs: int = option(256, "waiting responses; then 429", ge=0)
    max_request_bytes: int = option(8 * 1024**2, "longest body of a request; then 413", ge=1)
    max_logprobs: int = option(20, "most logprobs of a token; -1: the vocabulary", ge=-1)
    shutdown_timeout_s: int = option(20, "seconds for running requests after SIGTERM", ge=0)
    per_request_spec_decode_metrics: SpecDecodeDetail = option("none", "acceptance of each answer")


class ServeFlags(EngineOptions, ServerOptions):
    """Serve a target and its drafter over HTTP, for OpenAI's clients; flags are vLLM's."""

    served_model_name: tuple[str, ...] = option((), "names for clients; default: --model")
    model: str = option("", "the target: folder or repository id; may also come without --model")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every one of this machine")
    port: int = option(8000, ge=0, le=65535)
    generation_config: Literal["auto", "vllm"] = option(
        "auto", "sampling defaults: auto: the model's; vllm: neutral"
    )


def with_model(given: Values, words: Sequence[str]) -> tuple[Values, list[str]]:
    """The values of the flags with the model, which may be positional as in vLLM's command: the
    first word that is neither a flag nor follows one. Also the other words."""
    follows, rest = False, list(words)
    for i, word in enumerate(words):
        if not (word.startswith("-") or follows or "model" in given):
            del rest[i]
            return given | {"model": word}, rest
        follows = word.startswith("-") and "=" not in word
    if not given.get("model"):
        raise ConfigError("give a folder or a repository id", where="serve --model")
    return given, rest


def read_flags(given: Values) -> ServeFlags:
    values = {"served_model_name": (given["model"],)}
    if key := os.environ.get("DRAFTSMITH_API_KEY"):
        values["api_key"] = (key,)
    return validated(ServeFlags, "serve", values | given)


def undeclared(words: Sequence[str]) -> dict[str, Any]:
    """Values of flags that are not declared, by name: JSON, else text; True and False for `--flag`
    and `--no-flag`."""
    values: dict[str, Any] = {}
    left = list(words)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if not word.startswith("--"):
            raise ConfigError("is no flag; see --help", where=f"serve {word}")
        name = word.removeprefix("--").replace("-", "_")
        if not equals and left and not left[0].startswith("--"):
            value, equals = left.pop(0), "="
        if equals:
            values[name] = json_or_text(value)
        else:
            values[name.removeprefix("no_")] = not name.startswith("no_")
    return values
