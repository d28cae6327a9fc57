"""Options of the server, which are flags of `serve` under the same names. Imports no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from draftsmith.inference.engine_options import EngineOptions, option
from draftsmith.inference.entrypoints.vllm_options import DEPRECATED, ENGINE_OPTIONS
from draftsmith.inference.flags import JsonObject, Values, flag_name, json_or_text, validated
from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.speculators.errors import ConfigError

SpecDecodeDetail = Literal["none", "summary", "detailed"]
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)  # with server defaults


def _template(value: str | None) -> str | None:
    """The text of a template file; a template itself is returned as it is."""
    if value is None or "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
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


def _folder(path: Path | None) -> Path | None:
    """A folder that is there, without links. ValueError for any other path."""
    if path is not None and not path.is_dir():
        raise ValueError(f"{path} is no folder; give one that holds drafters")
    return None if path is None else path.resolve()


class ServerOptions(BaseModel):
    """Options of the routes, under vLLM's names where vLLM has them."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    served_model_name: tuple[str, ...] = Field(min_length=1)  # the first is in answers
    chat_template: Annotated[str | None, BeforeValidator(_template)] = option(
        None, "file of a chat template, or the template itself; default: the tokenizer's"
    )
    default_chat_template_kwargs: JsonObject = option(
        {},
        "variables of the chat template, where a request does not set them, such as"
        " '{\"enable_thinking\": false}'",
    )
    sampling_defaults: dict[str, Any] = Field({}, exclude=True)  # no flag: of generation_config
    api_key: Annotated[tuple[str, ...], AfterValidator(_sendable)] = option(
        (),
        "key that clients must send, as `Authorization: Bearer KEY`, for all but / and /health;"
        " default: $DRAFTSMITH_API_KEY; without it no key is asked for",
    )
    drafters_dir: Annotated[Path | None, AfterValidator(_folder)] = option(
        None,
        "folder of drafters of which POST /v1/drafter may put one in the place of the drafter that"
        " is served; needs an API key; default: no such route",
    )
    max_num_queued_reqs: int = option(
        256,
        "responses that may wait until one of --max-num-seqs has ended; beyond them the answer is"
        " 429",
        ge=0,
    )
    max_request_bytes: int = option(
        8 * 1024**2, "bytes of a request's body; beyond them the answer is 413", ge=1
    )
    max_logprobs: int = option(
        20,
        "most tokens whose log-probabilities a request may ask for at each place; -1: all of the"
        " vocabulary",
        ge=-1,
    )
    shutdown_timeout_s: int = option(
        20, "seconds that running requests are given to end after SIGTERM", ge=0
    )
    per_request_spec_decode_metrics: SpecDecodeDetail = option(
        "none",
        "what an answer says of the drafts that were accepted for it, where the request does not"
        " ask: nothing, totals, or totals and every round",
    )

    @field_validator("drafters_dir")
    @classmethod
    def _keyed(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if folder is not None and not info.data.get("api_key"):
            raise ValueError("needs --api-key: whoever reaches the server could use the route")
        return folder


class ServeFlags(EngineOptions, ServerOptions, LogOptions):
    """Serve a model and its drafter for OpenAI's clients. Options are those of `vllm serve`; those
    of vLLM's that change no output here are taken without effect, and others are errors."""

    served_model_name: tuple[str, ...] = option(
        (), "name by which clients ask for the model; default: that of --model"
    )
    model: str = option(
        "",
        "the model to serve, which is the target of drafting: folder or repository id; it may also"
        " come first, without --model",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every address of the machine")
    port: int = option(8000, "port to listen on; 0: any free one", ge=0, le=65535)
    generation_config: Literal["auto", "vllm"] = option(
        "auto",
        "values of sampling parameters that a request leaves out: auto: those in the model's"
        " generation_config.json; vllm: temperature 1, and no other restriction",
    )


def with_model(values: Values, words: Sequence[str]) -> tuple[Values, list[str]]:
    """The values of the flags with the model, which may be positional as in vLLM's command: the
    first word that is neither a flag nor follows one. Also the other words."""
    follows_flag = False
    for i, word in enumerate(words):
        if not (word.startswith("-") or follows_flag or "model" in values):
            return values | {"model": word}, [*words[:i], *words[i + 1 :]]
        follows_flag = word.startswith("-") and "=" not in word
    if not values.get("model"):
        raise ConfigError("give a folder or a repository id", where="serve --model")
    return values, list(words)


def read_flags(values: Values) -> ServeFlags:
    """The flags, with what the environment and the model's name say where they do not. `values`: as
    `with_model` returns them. ConfigError names the flag of a wrong value."""
    defaults: Values = {"served_model_name": (values["model"],)}
    if key := os.environ.get("DRAFTSMITH_API_KEY"):
        defaults["api_key"] = (key,)
    return validated(ServeFlags, "serve", defaults | values)


def undeclared(words: Sequence[str]) -> dict[str, Any]:
    """Values of flags that are not declared, by name: JSON, else text; True and False for `--flag`
    and `--no-flag`. ConfigError for one that `LLM` does not know from vLLM either."""
    values: dict[str, Any] = {}
    left = list(words)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if not word.startswith("--"):
            raise ConfigError("is no flag; see --help", where=f"serve {word}")
        name = word.removeprefix("--").replace("-", "_")
        if not equals and left and not left[0].startswith("--"):
            values[name] = json_or_text(left.pop(0))
        elif equals:
            values[name] = json_or_text(value)
        else:
            values[name.removeprefix("no_")] = not name.startswith("no_")
    for name in values:
        _require_known(name)
    return values


def _require_known(name: str) -> None:
    """ConfigError that says which flag was meant."""
    of_vllm = {*EngineOptions.model_fields, *ENGINE_OPTIONS, *DEPRECATED}
    if name in of_vllm:
        return
    declared = {name for name, field in ServeFlags.model_fields.items() if not field.exclude}
    flags = [flag_name(known) for known in sorted(declared | of_vllm)]
    near = difflib.get_close_matches(flag_name(name), flags, n=2)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"unknown option; {meant}--help lists all", where=f"serve {flag_name(name)}")
