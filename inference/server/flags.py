"""Command-line flags of `serve`, read as vLLM reads its own. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from inference.server.options import ServerOptions
from speculators.errors import ConfigError

LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
GROUPS = {"model": "model", "http": "address and access", "limits": "limits", "answers": "answers"}


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"serve: {message}; `draftsmith serve --help` lists the flags")


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_object(text: str) -> dict[str, Any]:
    if not isinstance(value := json_or_text(text), dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object in single quotes, got {text}")
    return value


def json_list(text: str) -> list[Any]:
    if not isinstance(value := json_or_text(text), list):
        raise argparse.ArgumentTypeError(f'expected a JSON list such as ["https://example.com"], got {text}')
    return value


LLM_FLAGS: dict[str, dict[str, Any]] = {  # options of LLM under the same names
    "speculative_config": dict(short="-sc", type=json_object, metavar="JSON", help="how to draft, as in vLLM"),
    "tokenizer": dict(help="folder or repository id; default: the model's"),
    "dtype": dict(default="auto", help="precision of the target"),
    "device": dict(help="cpu, cuda, cuda:1, …; cuda if there is one"),
    "revision": dict(help="of the repository"),
    "trust_remote_code": dict(action="store_true", default=None, help="run the repository's code"),
    "seed": dict(type=int, default=0, help="for requests without a seed"),
    "max_model_len": dict(type=int, help="longest prompt and response"),
    "max_num_seqs": dict(type=int, help="responses generated at the same time (8)"),
    "max_num_batched_tokens": dict(type=int, help="prompt tokens per prefill forward (512)"),
    "kv_cache_memory_bytes": dict(type=int, help="most memory for keys and values"),
    "enable_prefix_caching": dict(action=argparse.BooleanOptionalAction, help="reuse common prefixes (on)"),
    "tensor_parallel_size": dict(short="-tp", type=int, help="accepted; one device is used"),
}
SERVER_FLAGS: dict[str, dict[str, dict[str, Any]]] = {  # beside those that ServerOptions declares
    "model": {
        "served_model_name": dict(nargs="+", help="names for clients; default: --model"),
        "chat_template": dict(help="file of a chat template, or the template itself"),
        "default_chat_template_kwargs": dict(type=json_object, metavar="JSON", help="for the chat template"),
        "generation_config": dict(default="auto", help="sampling defaults: auto (model's), vllm (neutral), a folder"),
        "override_generation_config": dict(type=json_object, metavar="JSON", help="replaces single defaults"),
    },
    "http": {
        "host": dict(help="address to listen on (all)"),
        "port": dict(type=int, default=8000),
        "uds": dict(help="a Unix socket in place of host and port"),
        "api_key": dict(nargs="+", help="keys that open the server, all but /health (or DRAFTSMITH_API_KEY)"),
        "ssl_keyfile": {},
        "ssl_certfile": {},
        "allowed_origins": dict(type=json_list, default=[], metavar="JSON", help="of web pages"),
        "uvicorn_log_level": dict(choices=LEVELS, default="info"),
        "disable_uvicorn_access_log": dict(action="store_true", help="not even with --enable-log-requests"),
    },
}


def spelled(arguments: Sequence[str]) -> list[str]:
    """Writes `--speculative_config=…` as `--speculative-config=…`: vLLM takes both."""
    written = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        written.append(argument)
    return written


def parser() -> argparse.ArgumentParser:
    parser = FlagParser("draftsmith serve", allow_abbrev=False, usage="%(prog)s [MODEL] [--model MODEL] [flags]")
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    add_engine(groups["model"])
    groups["model"].add_argument("--model", help="the target: folder or repository id")
    for group, flags in {"model": LLM_FLAGS | SERVER_FLAGS["model"], "http": SERVER_FLAGS["http"]}.items():
        for name, settings in flags.items():
            short = [settings["short"]] if "short" in settings else []
            settings = {key: value for key, value in settings.items() if key != "short"}
            groups[group].add_argument("--" + name.replace("_", "-"), *short, **settings)
    for option in fields(ServerOptions):
        if argument := option.metadata.get("argument"):
            name = "--" + option.name.removesuffix("_s").replace("_", "-")
            groups[option.metadata["group"]].add_argument(name, dest=option.name, **argument)
    return parser


def add_engine(group: Any) -> None:
    """Adds the flags that choose the engine, which must be known before the other flags are read."""
    group.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="this runtime, or real vLLM")
    group.add_argument("--vllm-python", help="Python of vLLM's environment (or DRAFTSMITH_VLLM_PYTHON)")


def read_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The flags declared above, and the values of all other flags by name."""
    flags, rest = parser().parse_known_args(spelled(arguments))
    positional, rest = take_model(rest)
    if positional and flags.model:
        raise ConfigError(f"serve: the model is given twice, {positional} and --model {flags.model}")
    flags.model = flags.model or positional
    if not flags.model:
        raise ConfigError("serve: --model is missing: the target, a folder or repository id")
    return flags, _undeclared(rest)


def take_model(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The positional model, as in vLLM's command: the first word that is neither a flag nor follows one. Also the
    other words."""
    follows = False
    for i, word in enumerate(words):
        if not (word.startswith("-") or follows):
            return word, [*words[:i], *words[i + 1 :]]
        follows = word.startswith("-") and "=" not in word
    return None, list(words)


def _undeclared(words: Sequence[str]) -> dict[str, Any]:
    """Values by name: JSON, else text; True and False for `--flag` and `--no-flag`."""
    values: dict[str, Any] = {}
    left = list(words)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if not word.startswith("--"):
            raise ConfigError(f"serve: {word!r} is no flag; `draftsmith serve --help` lists them")
        name = word.removeprefix("--").replace("-", "_")
        if not equals and left and not left[0].startswith("--"):
            value, equals = left.pop(0), "="
        if equals:
            values[name] = json_or_text(value)
        else:
            values[name.removeprefix("no_")] = not name.startswith("no_")
    return values


def server_options(flags: argparse.Namespace, sampling_defaults: dict[str, Any]) -> ServerOptions:
    key = os.environ.get("DRAFTSMITH_API_KEY")
    declared = [option.name for option in fields(ServerOptions) if "argument" in option.metadata]
    return ServerOptions(
        served_model_names=tuple(flags.served_model_name or (flags.model,)),
        api_keys=tuple(flags.api_key or ([key] if key else [])),
        allowed_origins=tuple(flags.allowed_origins),
        chat_template=_template(flags.chat_template),
        default_chat_template_kwargs=flags.default_chat_template_kwargs or {},
        sampling_defaults=sampling_defaults,
        **{name: getattr(flags, name) for name in declared},
    )


def _template(given: str | None) -> str | None:
    """The text of a template file; a template itself is returned as it is."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {given}: could not be read: {error.strerror}") from error
