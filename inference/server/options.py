"""Options of the server, and which of them are flags of `serve`. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from speculators.errors import ConfigError

SpecDecodeDetail = Literal["none", "summary", "detailed"]
SAMPLING_FIELDS = (  # of requests, with defaults on the server
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def flag(group: str, default: Any, help: str, *, at_least: float | None = None, **argument: Any) -> Any:
    """A field of ServerOptions that is also a flag of `serve`. `argument`: keywords of argparse, where the type of the
    default does not settle them; a default of None stands for an optional int."""
    if default is False:
        argument = {"action": "store_true"} | argument
    elif "action" not in argument:
        argument = {"type": int if default is None else type(default)} | argument
    argument |= {"default": default, "help": help}
    return field(default=default, metadata={"group": group, "at_least": at_least, "argument": argument})


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server, under vLLM's names where vLLM has them; `flag` marks those that the command line has too."""

    served_model_names: tuple[str, ...]  # names that clients may use for the model; answers carry the first
    api_keys: tuple[str, ...] = ()  # any of them opens the server; none: it is open
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the server
    chat_template: str | None = None  # in place of the tokenizer's
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # for requests that do not set them

    trust_request_chat_template: bool = flag("model", False, "requests may bring a chat template of their own")
    response_role: str = flag("model", "assistant", "role of the answers to a chat")

    root_path: str = flag("http", "", "path under which a proxy serves this server")
    disable_fastapi_docs: bool = flag("http", False, "no /docs, no /openapi.json")
    enable_log_requests: bool = flag(
        "http", False, "a line per request: id, tokens, seconds; never a text", action=argparse.BooleanOptionalAction
    )

    max_num_queued_reqs: int = flag("limits", 256, "waiting responses; then 429 (%(default)s)", at_least=0)
    request_timeout_s: float = flag("limits", 600.0, "seconds per request (%(default)s)", at_least=0.001)
    shutdown_timeout_s: float = flag(
        "limits", 20.0, "seconds that running requests get after SIGTERM (%(default)s)", at_least=0
    )
    max_body_bytes: int = flag("limits", 4 << 20, "longest body of a request (%(default)s)", at_least=1)
    max_prompt_tokens: int | None = flag(
        "limits", None, "longest prompt; default: what the model has room for", at_least=1
    )
    max_output_tokens: int | None = flag(
        "limits", None, "longest response; default: what the model has room for", at_least=1
    )
    max_n: int = flag("limits", 128, "responses of a request, prompts times n (%(default)s)", at_least=1)
    max_logprobs: int = flag("limits", 20, "log-probabilities per token; -1: no limit (%(default)s)", at_least=-1)

    per_request_spec_decode_metrics: SpecDecodeDetail = flag(  # noqa: RUF009
        "answers", "none", "acceptance of each response (%(default)s)", choices=("none", "summary", "detailed")
    )
    enable_per_request_metrics: bool = flag("answers", False, "times of each response")
    enable_prompt_tokens_details: bool = flag("answers", False, "cached prompt tokens in the usage")
    enable_drafter_swap: bool = flag("answers", False, "POST /drafter changes the drafter of a running server")
    enable_force_include_usage: bool = flag("answers", False, "usage at the end of every stream")

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("served_model_names is empty; a server's model needs a name")
        for option in fields(self):
            value, low = getattr(self, option.name), option.metadata.get("at_least")
            if value is not None and low is not None and not value >= low:
                raise ConfigError(f"{option.name}={value}; expected {low} or more")
