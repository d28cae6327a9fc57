"""What a server is told when it starts: names, limits, and what its answers hold. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from speculators.errors import ConfigError

SpecDecodeDetail = Literal["none", "summary", "detailed"]


@dataclass(frozen=True)
class ServerOptions:
    """Under vLLM's names where it has them.

    served_model_names      what clients may call the model; the first is what answers say
    api_keys                any of them opens the server; none: it is open
    max_body_bytes          longest body of a request
    max_prompt_tokens       longest prompt; None: what max_model_len leaves
    max_n                   most responses of one request, prompts times n
    max_output_tokens       longest response; None: what max_model_len leaves
    max_logprobs            most log-probabilities per token; -1: the whole vocabulary
    max_num_queued_reqs     responses that may wait for a row; beyond them requests are refused with 429
    request_timeout_s       from arrival to the last token
    shutdown_timeout_s      what unfinished responses get after SIGTERM
    chat_template           instead of the tokenizer's
    trust_request_chat_template     whether a request may bring its own
    default_chat_template_kwargs    for the template, where a request says nothing
    response_role           who speaks in answers to a chat
    sampling_defaults       sampling parameters where a request says nothing
    per_request_spec_decode_metrics   acceptance of each response, in the answer
    enable_per_request_metrics        times of each response, in the answer
    enable_prompt_tokens_details      how many prompt tokens were computed before, in the usage
    enable_force_include_usage        usage at the end of every stream
    enable_drafter_swap     whether the drafter can be changed while the server runs (docs/server.md)
    enable_log_requests     a line per request: its id, tokens, seconds; never a text
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_n: int = 128
    max_output_tokens: int | None = None
    max_logprobs: int = 20
    max_num_queued_reqs: int = 256
    request_timeout_s: float = 600.0
    shutdown_timeout_s: float = 20.0
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    per_request_spec_decode_metrics: SpecDecodeDetail = "none"
    enable_per_request_metrics: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_drafter_swap: bool = False
    enable_log_requests: bool = False
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    disable_fastapi_docs: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("served_model_names is empty; a server's model needs a name")
        least = {
            "max_body_bytes": 1, "max_prompt_tokens": 1, "max_n": 1, "max_output_tokens": 1, "max_logprobs": -1,
            "max_num_queued_reqs": 0, "request_timeout_s": 0.001, "shutdown_timeout_s": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"{name}={value}; expected {low} or more")
