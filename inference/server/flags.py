"""The flags of `serve`, read from a command line as vLLM would read it. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.server.options import ServerOptions
from speculators.errors import ConfigError

Value = Any  # of a flag that is not declared here: JSON, or text
LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"serve: {message}; `draftsmith serve --help` lists the flags")


def spelled(arguments: Sequence[str]) -> list[str]:
    """`--speculative_config=…` as `--speculative-config=…`: vLLM takes both."""
    written = []
    for each in arguments:
        if each.startswith("--"):
            name, equals, value = each.partition("=")
            each = name.replace("_", "-") + equals + value
        written.append(each)
    return written


def read_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Value]]:
    """What is declared below, and every other flag by its name."""
    flags, rest = parser().parse_known_args(spelled(arguments))
    named, rest = take_model(rest)
    if named and flags.model:
        raise ConfigError(f"serve: the model is given twice, {named} and --model {flags.model}")
    flags.model = flags.model or named
    if not flags.model:
        raise ConfigError("serve: --model is missing: the target, a folder or repository id")
    return flags, _others(rest)


def take_model(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model where vLLM's command has it, as the first word that is neither a flag nor what follows one; and the
    other words."""
    follows = False
    for i, word in enumerate(words):
        if not (word.startswith("-") or follows):
            return word, [*words[:i], *words[i + 1 :]]
        follows = word.startswith("-") and "=" not in word
    return None, list(words)


def _others(rest: Sequence[str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    left = list(rest)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"serve: {flag!r} is no flag; `draftsmith serve --help` lists them")
        name = flag.removeprefix("--").replace("-", "_")
        if not equals and left and not left[0].startswith("--"):
            value, equals = left.pop(0), "="
        if equals:
            found[name] = _value(value)
        elif name.startswith("no_"):
            found[name.removeprefix("no_")] = False
        else:
            found[name] = True
    return found


def _value(text: str) -> Value:
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_object(text: str) -> dict[str, Any]:
    value = _value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in single quotes, got {text}")
    return value


def _origins(text: str) -> list[str]:
    value = _value(text)
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError(f'expected a JSON list such as ["https://example.com"], got {text}')
    return value


def parser() -> argparse.ArgumentParser:
    """All flags that have a meaning of their own here."""
    made = FlagParser("draftsmith serve", allow_abbrev=False, usage="%(prog)s [MODEL] [--model MODEL] [flags]")
    _add_model(made.add_argument_group("what is served"))
    _add_http(made.add_argument_group("where, and to whom"))
    _add_limits(made.add_argument_group("limits"))
    _add_answers(made.add_argument_group("answers"))
    return made


def add_engine(group: Any) -> None:
    """Which engine, which is known before the other flags mean anything."""
    group.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="this runtime, or real vLLM instead")
    group.add_argument("--vllm-python", help="Python of vLLM's environment (or DRAFTSMITH_VLLM_PYTHON)")


def _add_model(group: Any) -> None:
    add_engine(group)
    add = group.add_argument
    add("--model", help="the target: folder or repository id")
    add("--speculative-config", "-sc", type=json_object, metavar="JSON", help="how to draft, as in vLLM")
    add("--served-model-name", nargs="+", help="what clients may call it; default: --model")
    add("--tokenizer", help="folder or repository id; default: the model's")
    add("--dtype", default="auto", help="precision of the target")
    add("--device", help="cpu, cuda, cuda:1, …; cuda if there is one")
    add("--revision", help="of the repository")
    add("--trust-remote-code", action="store_true", default=None, help="run the repository's code")
    add("--seed", type=int, default=0, help="of requests that bring none")
    add("--max-model-len", type=int, help="longest prompt and response")
    add("--max-num-seqs", type=int, help="responses written at the same time (8)")
    add("--max-num-batched-tokens", type=int, help="prompt tokens per prefill forward (512)")
    add("--kv-cache-memory-bytes", type=int, help="most memory for keys and values")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="reuse common beginnings (on)")
    add("--tensor-parallel-size", "-tp", type=int, help="accepted; one device is used")
    add("--chat-template", help="file of a chat template, or the template itself")
    add("--trust-request-chat-template", action="store_true", help="requests may bring their own")
    add("--default-chat-template-kwargs", type=json_object, metavar="JSON", help="for the chat template")
    add("--response-role", default="assistant", help="who answers a chat")
    add("--generation-config", default="auto", help="sampling defaults: auto (the model's), vllm (neutral), a folder")
    add("--override-generation-config", type=json_object, metavar="JSON", help="over those")


def _add_http(group: Any) -> None:
    add = group.add_argument
    add("--host", help="address to listen on (all)")
    add("--port", type=int, default=8000)
    add("--uds", help="a Unix socket instead")
    add("--api-key", nargs="+", help="keys that open the server, all but /health (or DRAFTSMITH_API_KEY)")
    add("--ssl-keyfile")
    add("--ssl-certfile")
    add("--root-path", default="", help="where a proxy puts this server")
    add("--allowed-origins", type=_origins, default=[], metavar="JSON", help="of pages in browsers")
    add("--disable-fastapi-docs", action="store_true", help="no /docs, no /openapi.json")
    add("--uvicorn-log-level", choices=LEVELS, default="info")
    add("--disable-uvicorn-access-log", action="store_true", help="not even with --enable-log-requests")
    add("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False,
        help="a line per request: id, tokens, seconds; never a text")  # fmt: skip
    add("--disable-log-requests", dest="enable_log_requests", action="store_false", help="the default")


def _add_limits(group: Any) -> None:
    add, own = group.add_argument, ServerOptions
    add("--max-num-queued-reqs", type=int, default=own.max_num_queued_reqs, help="that wait; then 429 (%(default)s)")
    add("--request-timeout", type=float, default=own.request_timeout_s, help="seconds per request (%(default)s)")
    add("--shutdown-timeout", type=float, default=own.shutdown_timeout_s,
        help="seconds that running requests get after SIGTERM (%(default)s)")  # fmt: skip
    add("--max-body-bytes", type=int, default=own.max_body_bytes, help="of a request (%(default)s)")
    add("--max-prompt-tokens", type=int, help="longest prompt; default: what the model has room for")
    add("--max-output-tokens", type=int, help="longest response; default: what the model has room for")
    add("--max-n", type=int, default=own.max_n, help="responses of a request, prompts times n (%(default)s)")
    add("--max-logprobs", type=int, default=own.max_logprobs, help="per token; -1: no limit (%(default)s)")


def _add_answers(group: Any) -> None:
    add = group.add_argument
    add("--per-request-spec-decode-metrics", choices=("none", "summary", "detailed"), default="none",
        help="acceptance of each response (%(default)s)")  # fmt: skip
    add("--enable-per-request-metrics", action="store_true", help="times of each response")
    add("--enable-prompt-tokens-details", action="store_true", help="cached prompt tokens in the usage")
    add("--enable-drafter-swap", action="store_true", help="POST /drafter changes the drafter of a running server")
    add("--enable-force-include-usage", action="store_true", help="usage at the end of every stream")


def server_options(flags: argparse.Namespace, sampling_defaults: dict[str, Any]) -> ServerOptions:
    key = os.environ.get("DRAFTSMITH_API_KEY")
    same = ("max_body_bytes", "max_prompt_tokens", "max_n", "max_output_tokens", "max_logprobs", "response_role",
            "max_num_queued_reqs", "trust_request_chat_template", "per_request_spec_decode_metrics", "root_path",
            "enable_per_request_metrics", "enable_prompt_tokens_details", "enable_force_include_usage",
            "enable_log_requests", "enable_drafter_swap", "disable_fastapi_docs")  # fmt: skip
    return ServerOptions(
        served_model_names=tuple(flags.served_model_name or (flags.model,)),
        api_keys=tuple(flags.api_key or ([key] if key else [])),
        request_timeout_s=flags.request_timeout,
        shutdown_timeout_s=flags.shutdown_timeout,
        chat_template=_template(flags.chat_template),
        default_chat_template_kwargs=flags.default_chat_template_kwargs or {},
        sampling_defaults=sampling_defaults,
        allowed_origins=tuple(flags.allowed_origins),
        **{name: getattr(flags, name) for name in same},
    )


def _template(given: str | None) -> str | None:
    """A file's text; a template in one line as it is."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: could not be read: {error.strerror}") from error
