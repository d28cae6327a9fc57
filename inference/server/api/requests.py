"""Requests of the API as prompts and sampling parameters, within the server's limits. Errors name
the field.

Tokenizing, chat templates and grammars take time and change nothing but caches, so that worker
threads can do it."""

from __future__ import annotations

import inspect
import re
from typing import Any

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt, chat_prompts, require_short
from inference.sampling_params import SamplingParams, StructuredOutputsParams
from inference.server.api.errors import APIError
from inference.server.api.protocol import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationRequest,
    PlainFormat,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from inference.server.options import SAMPLING_FIELDS, ServerOptions
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
FIELDS = {
    *COPIED_FIELDS,
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "max_tokens",
    "structured_outputs",
}

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

    def count(self, request: GenerationRequest, prompts: int) -> int:
        """The number of responses asked for."""
        n, most = request.n or 1, self._options.max_n
        if n * prompts > most:
            asked = f"{prompts} prompts times n={n}" if prompts > 1 else f"n={n}"
            field = "n" if n > 1 else "prompt"
            raise APIError(
                400,
                f"{asked}; this server generates at most {most} responses for one request",
                field,
            )
        return n * prompts

    def completion(self, request: CompletionRequest) -> Prompts:
        prompts = [self._prompt(prompt, request.add_special_tokens) for prompt in request.prompts]
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            if prompt_logprobs not in (None, request.logprobs):
                raise APIError(
                    400,
                    "prompt_logprobs and, with echo, logprobs ask for different counts",
                    "logprobs",
                )
            prompt_logprobs = request.logprobs
        return self._with_params(
            request, prompts, "prompt", request.max_tokens, request.logprobs, prompt_logprobs
        )

    def chat(self, request: ChatCompletionRequest) -> Prompts:
        template_fields = {
            "reasoning_effort": request.reasoning_effort,
            "documents": request.documents,
        }
        kwargs = {name: value for name, value in template_fields.items() if value is not None}
        prompt = self._conversation(request, kwargs, with_tools=request.tool_choice != "none")
        longest = (
            request.max_tokens
            if request.max_completion_tokens is None
            else request.max_completion_tokens
        )
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._with_params(
            request, [prompt], "messages", longest, logprobs, request.prompt_logprobs
        )

    def tokens(self, request: TokenizeCompletionRequest | TokenizeChatRequest) -> list[int]:
        if isinstance(request, TokenizeCompletionRequest):
            return self._prompt(request.prompt, request.add_special_tokens).token_ids
        return self._conversation(request, {}).token_ids

    def text(self, token_ids: list[int]) -> str:
        size = len(self._tokenizer)
        if any(token >= size for token in token_ids):
            raise APIError(400, f"token ids outside the tokenizer's range 0..{size - 1}", "tokens")
        return self._tokenizer.decode(token_ids)

    def _conversation(
        self, request: ChatFields, kwargs: dict[str, Any], *, with_tools: bool = True
    ) -> Prompt:
        """Renders messages by the chat template. APIError if the template fails on them."""
        options, given = self._options, request.chat_template_kwargs or {}
        if request.chat_template is not None and not options.trust_request_chat_template:
            message = "this server uses its own chat template (see --trust-request-chat-template)"
            raise APIError(400, message, "chat_template")
        if reserved := sorted(self._reserved_kwargs & set(given)):
            raise APIError(
                400,
                f"{', '.join(reserved)} cannot be set for the chat template",
                "chat_template_kwargs",
            )
        tools = (
            [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
            if with_tools
            else []
        )
        template_options = {
            "add_generation_prompt": (
                request.add_generation_prompt and not request.continue_final_message
            ),
            "continue_final_message": request.continue_final_message,
            "chat_template": request.chat_template or options.chat_template,
            "tools": tools or None,
            **options.default_chat_template_kwargs,
            **given,
            **kwargs,
        }
        try:
            turns = [message.model_dump(exclude_unset=True) for message in request.messages]
            (prompt,) = chat_prompts(
                [turns], self._tokenizer, template_options, max_tokens=self._max_model_len
            )
        except ConfigError as error:
            raise APIError(400, str(error), "messages") from error
        if request.add_special_tokens and prompt.text is not None:
            prompt = self._prompt(prompt.text, True, "messages")
        return prompt

    def _prompt(
        self, given: str | list[int], add_special_tokens: bool, field: str = "prompt"
    ) -> Prompt:
        if isinstance(given, list):
            return Prompt(None, given)
        try:
            require_short(len(given), self._tokenizer, self._max_model_len)
        except ConfigError as error:
            raise APIError(400, f"{field}: {error}", field) from error
        return Prompt(
            given, list(self._tokenizer(given, add_special_tokens=add_special_tokens).input_ids)
        )

    def _with_params(
        self,
        request: GenerationRequest,
        prompts: list[Prompt],
        field: str,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Prompts:
        """Truncates the prompts as asked and pairs them with their parameters, checked against the
        model and the server's limits. `field`: the name of the prompts in the request."""
        self._check_logprobs("top_logprobs" if field == "messages" else "logprobs", logprobs)
        self._check_logprobs("prompt_logprobs", prompt_logprobs)
        max_field = (
            "max_tokens"
            if getattr(request, "max_completion_tokens", None) is None
            else "max_completion_tokens"
        )
        most, asked = self._options.max_output_tokens, max_tokens or 0
        if max_tokens is None:
            defaults = (self._options.sampling_defaults.get("max_tokens"), most)
            max_tokens = min((limit for limit in defaults if limit is not None), default=None)
        elif most is not None and max_tokens > most:
            raise APIError(
                400,
                f"{max_field}={max_tokens}; this server generates at most {most} tokens",
                max_field,
            )
        kept = request.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, self._max_model_len - (max_tokens or 1))
        for prompt in prompts:
            if kept is not None:
                prompt.token_ids = prompt.token_ids[-kept:] if kept else []
            self._check_length(prompt, field, asked, max_field)
        try:
            params = self._params(request, max_tokens, logprobs, prompt_logprobs)
            for prompt in prompts:
                self._llm.check(prompt, params)
        except ConfigError as error:
            raise _with_field(error, request, field) from error
        return [(prompt, params) for prompt in prompts]

    def _check_logprobs(self, field: str, count: int | None) -> None:
        most = self._options.max_logprobs
        if count is not None and most != -1 and (count == -1 or count > most):
            raise APIError(
                400,
                f"{field}={count}; this server gives at most {most} (see --max-logprobs)",
                field,
            )

    def _check_length(self, prompt: Prompt, field: str, max_tokens: int, max_field: str) -> None:
        tokens, limit, context = (
            len(prompt.token_ids),
            self._options.max_prompt_tokens,
            self._max_model_len,
        )
        if tokens == 0:
            raise APIError(400, f"{field}: no tokens; at least one is needed", field)
        if limit is not None and tokens > limit:
            raise APIError(
                400, f"{field}: {tokens} tokens; this server reads at most {limit}", field
            )
        if tokens >= context:
            raise APIError(
                400,
                f"{field}: {tokens} tokens; the model's context of {context} leaves no room",
                field,
            )
        if tokens + max_tokens > context:
            message = (
                f"{max_field}={max_tokens} and {tokens} tokens of the prompt exceed the context of"
                f" {context}"
            )
            raise APIError(400, message, max_field)

    def _params(
        self,
        request: GenerationRequest,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        values = {
            name: value
            for name, value in self._options.sampling_defaults.items()
            if name != "max_tokens"
        }
        values |= {
            name: value for name in COPIED_FIELDS if (value := getattr(request, name)) is not None
        }
        if request.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        return SamplingParams(
            n=request.n or 1,
            max_tokens=(
                1 if max_tokens == 0 else max_tokens
            ),  # with echo alone; the answer leaves that token out
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=_structure(request),
            **values,
        )


def _structure(request: GenerationRequest) -> StructuredOutputsParams | None:
    response_format, structured = request.response_format, request.structured_outputs
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise APIError(
                400, "response_format and structured_outputs; choose one", "response_format"
            )
        if isinstance(response_format, PlainFormat):
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=response_format.json_schema.json_schema)
    return (
        None
        if structured is None
        else StructuredOutputsParams(**structured.model_dump(by_alias=True))
    )


def _with_field(error: ConfigError, request: GenerationRequest, field: str) -> APIError:
    """Names the first parameter in the message as the field at fault, else `field`."""
    message = str(error).removeprefix("SamplingParams: ")
    param = next((word for word in re.findall(r"\w+", message) if word in FIELDS), field)
    if param == "structured_outputs" and request.structured_outputs is None:
        param = "response_format"
    return APIError(400, message, param)
