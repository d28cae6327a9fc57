"""Requests of the API as prompts and sampling parameters, within the server's limits. Errors name
the field.

Tokenizing and chat templates take time and change nothing but caches, so that worker threads can do
it."""

from __future__ import annotations

import inspect
import re
from typing import Any

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt, chat_prompts, require_short
from inference.sampling_params import SamplingParams
from inference.server.errors import APIError
from inference.server.options import SAMPLING_FIELDS, ServerOptions
from inference.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from speculators.errors import ConfigError

COPIED_FIELDS = (  # of SamplingParams, where the request sets them
    *SAMPLING_FIELDS,
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "num_speculative_tokens",
)
FIELDS = {*COPIED_FIELDS, "logit_bias", "logprobs", "max_tokens"}

Prompts = list[tuple[Prompt, SamplingParams]]


class RequestParser:
    """Parses all requests of one server."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options, self._tokenizer = llm, options, llm.get_tokenizer()
        if self._tokenizer is None:
            raise ConfigError("a server needs a tokenizer; pass one with the model, or --tokenizer")
        self._max_model_len = llm.engine.max_model_len
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        named = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._reserved_kwargs = named | {"self", "messages"}

    def completion(self, request: CompletionRequest) -> Prompts:
        try:
            prompts = [self._prompt(prompt, request) for prompt in request.prompts]
        except ConfigError as error:
            raise APIError(400, f"prompt: {error}", "prompt") from error
        return self._with_params(request, prompts, "prompt", "max_tokens", request.logprobs)

    def _prompt(self, given: str | list[int], request: CompletionRequest) -> Prompt:
        if isinstance(given, list):
            return Prompt(None, given)
        require_short(len(given), self._tokenizer, self._max_model_len)
        encoded = self._tokenizer(given, add_special_tokens=request.add_special_tokens)
        return Prompt(given, list(encoded.input_ids))

    def chat(self, request: ChatCompletionRequest) -> Prompts:
        options, given = self._options, request.chat_template_kwargs or {}
        if reserved := sorted(self._reserved_kwargs & set(given)):
            message = f"{', '.join(reserved)} cannot be set for the chat template"
            raise APIError(400, message, "chat_template_kwargs")
        template_options = {
            "add_generation_prompt": (
                request.add_generation_prompt and not request.continue_final_message
            ),
            "continue_final_message": request.continue_final_message,
            "chat_template": options.chat_template,
            "tools": None if request.tool_choice == "none" else request.tools,
            **options.default_chat_template_kwargs,
            **given,
        }
        turns = [message.model_dump(exclude_unset=True) for message in request.messages]
        try:
            prompts = chat_prompts(
                [turns], self._tokenizer, template_options, max_tokens=self._max_model_len
            )
        except ConfigError as error:
            raise APIError(400, str(error), "messages") from error
        longest = "max_completion_tokens"
        if request.max_completion_tokens is None:
            longest = "max_tokens"
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._with_params(request, prompts, "messages", longest, logprobs)

    def _with_params(
        self,
        request: GenerationRequest,
        prompts: list[Prompt],
        field: str,
        max_field: str,
        logprobs: int | None,
    ) -> Prompts:
        """Pairs the prompts with their parameters, checked against the model and the server's
        limits. `field`, `max_field`: where the request has the prompts and max_tokens."""
        most = self._options.max_logprobs
        if logprobs is not None and most != -1 and (logprobs == -1 or logprobs > most):
            name = "top_logprobs" if field == "messages" else "logprobs"
            message = f"{name}={logprobs}; this server gives at most {most} (--max-logprobs)"
            raise APIError(400, message, name)
        max_tokens = getattr(request, max_field)
        for prompt in prompts:
            tokens = len(prompt.token_ids)
            if tokens < self._max_model_len < tokens + (max_tokens or 0):
                message = f"{max_field}={max_tokens} and a prompt of {tokens} tokens exceed"
                context = f"the context of {self._max_model_len}"
                raise APIError(400, f"{message} {context}", max_field)
        try:
            params = self._params(request, max_tokens, logprobs)
            for prompt in prompts:
                self._llm.check(prompt, params)
        except ConfigError as error:
            message = str(error).removeprefix("SamplingParams: ")
            named = (word for word in re.findall(r"\w+", message) if word in FIELDS)
            raise APIError(400, message, next(named, field)) from error
        return [(prompt, params) for prompt in prompts]

    def _params(
        self, request: GenerationRequest, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        values: dict[str, Any] = dict(self._options.sampling_defaults)
        for name in COPIED_FIELDS:
            if (value := getattr(request, name)) is not None:
                values[name] = value
        if request.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        return SamplingParams(**{"max_tokens": None, **values}, n=request.n or 1, logprobs=logprobs)
