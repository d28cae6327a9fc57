"""Requests of the API, as prompts and sampling parameters: OpenAI's fields, and vLLM's for
everything that SamplingParams holds.

What is no field here goes to SamplingParams, which refuses unknown ones, and takes those of vLLM
that are not implemented at the value that stands for what is done anyway. Errors name the field."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draftsmith.inference.entrypoints.llm import LLM
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.server.api_errors import APIError
from draftsmith.inference.server.serve_options import ServerOptions, SpecDecodeDetail
from draftsmith.speculators.errors import ConfigError

# change no answer
IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
FIXED: dict[str, Any] = {  # accepted at this value, or null, only; SamplingParams has others
    "echo": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "response_format": {"type": "text"},
    "suffix": None,
}


def _prompts(given: Any) -> list[Any]:
    """A text, token ids, or a list of either -> a list of prompts."""
    prompts = given if isinstance(given, list) and not _is_tokens(given) else [given]
    if not prompts or not all(isinstance(prompt, str) or _is_tokens(prompt) for prompt in prompts):
        raise ValueError("expected a text, token ids, or a list of either")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class GenerationRequest(BaseModel):
    """What completions and chats have in common. `read` and `parse` raise an APIError 400 for a
    field that is wrong."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    max_tokens: int | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], Any] = {}
    return_token_ids: bool = False
    return_rounds: bool = False
    per_request_spec_decode_metrics: SpecDecodeDetail | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The request in a body of JSON. null stands for the default, as in OpenAI's API."""
        try:
            fields = json.loads(body)
            json.dumps(fields, ensure_ascii=False).encode()  # JSON can spell what is no Unicode
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not JSON: {type(error).__name__}") from None
        if not isinstance(fields, dict):
            raise APIError(400, "the body is not a JSON object")
        try:
            request = cls.model_validate({n: v for n, v in fields.items() if v is not None})
        except ValidationError as error:
            fault = error.errors()[0]
            name = str(fault["loc"][0])
            raise APIError(400, f"{name}: {fault['msg']}", name) from None
        request.check()
        return request

    def check(self) -> None:
        for name, value in FIXED.items():
            if self.extra.get(name, value) != value:
                raise APIError(400, f"{name}: only vLLM does it", name)
        for name in ("stream_options", "return_rounds"):
            if getattr(self, name) and not self.stream:
                raise APIError(400, f"{name}: only with stream: true", name)

    @property
    def extra(self) -> dict[str, Any]:
        return self.model_extra or {}

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options.get("include_usage"))

    @property
    def max_field(self) -> str:
        """The field that says how long a response may be."""
        return "max_tokens"

    @abstractmethod
    def tokenize(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        """ConfigError for prompts that cannot be."""

    @abstractmethod
    def num_logprobs(self) -> int | None: ...

    def parse(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        """The prompts, checked with the parameters against the model. Takes time and changes
        nothing but caches, so that worker threads can do it."""
        params = self.params(options)
        try:
            prompts = self.tokenize(llm, options)
            for prompt in prompts:
                llm.check(prompt, params)
        except ConfigError as error:
            raise self._named(error, self.prompt_field) from error
        context, most = llm.engine.max_model_len, getattr(self, self.max_field) or 0
        for prompt in prompts:
            if (tokens := len(prompt.token_ids)) + most > context:
                sizes = f"{self.max_field}={most}, a prompt of {tokens} tokens"
                raise APIError(400, f"{sizes}; the context is {context}", self.max_field)
        return prompts

    def params(self, options: ServerOptions) -> SamplingParams:
        """Everything but the prompts."""
        values: dict[str, Any] = {"max_tokens": self.default_max_tokens}
        values |= options.sampling_defaults
        values |= {n: v for n, v in self.extra.items() if n not in (*IGNORED, *FIXED)}
        if (most := getattr(self, self.max_field)) is not None:
            values["max_tokens"] = most
        bias = {int(token): value for token, value in self.logit_bias.items()} or None
        try:
            return SamplingParams(**values, logit_bias=bias, logprobs=self.num_logprobs())
        except ConfigError as error:
            raise self._named(error, None) from error

    def _named(self, error: ConfigError, field: str | None) -> APIError:
        """With the first parameter in the message as the field at fault, else `field`."""
        message = str(error).removeprefix("SamplingParams: ")
        names = {*self.extra, "logit_bias", "logprobs", "max_tokens"}
        param = next((word for word in re.findall(r"\w+", message) if word in names), field)
        return APIError(400, message, self.max_field if param == "max_tokens" else param)


class CompletionRequest(GenerationRequest):
    prompt_field = "prompt"
    default_max_tokens = 16

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def tokenize(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        tokenizer = llm.get_tokenizer()
        return [
            Prompt(None, given)
            if isinstance(given, list)
            else Prompt(given, list(tokenizer(given).input_ids))
            for given in self.prompt
        ]


class ChatRequest(GenerationRequest):
    """Tools are for the chat template; calls are not parsed."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def max_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def tokenize(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        template_options = {
            "chat_template": options.chat_template,
            "add_generation_prompt": True,
            "tools": None if self.tool_choice == "none" else self.tools,
            **options.default_chat_template_kwargs,
            **self.chat_template_kwargs,
        }
        return chat_prompts([self.messages], llm.get_tokenizer(), template_options)
