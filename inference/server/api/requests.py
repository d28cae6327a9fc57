"""Requests to prompts and sampling parameters, within the server's limits; every refusal names the field.

Tokenizing, chat templates and grammars take time: this is done in worker threads, and changes nothing but caches.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt, chat_prompts
from inference.sampling_params import SamplingParams, StructuredOutputsParams
from inference.server.api.errors import APIError
from inference.server.api.protocol import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationRequest,
    Message,
    PlainFormat,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from inference.server.options import ServerOptions
from speculators.errors import ConfigError

# What a request may leave to the server's defaults.
SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
COPIED = (
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "allowed_token_ids", "bad_words", "num_speculative_tokens",
)  # fmt: skip

NAMED = {*SAMPLED, *COPIED, "logit_bias", "logprobs", "prompt_logprobs", "max_tokens", "structured_outputs"}


class Intake:
    """For all requests of one server."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options, self._tokenizer = llm, options, llm.get_tokenizer()
        if self._tokenizer is None:
            raise ConfigError("a server needs a tokenizer; pass one with the model, or --tokenizer")
        self._max_model_len = llm.engine.max_model_len
        named = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        self._template_options = {each.name for each in named if each.kind is not inspect.Parameter.VAR_KEYWORD}

    def count(self, request: GenerationRequest, prompts: int) -> int:
        """How many responses are asked for."""
        n, most = request.n or 1, self._options.max_n
        if n * prompts > most:
            many = f"{prompts} prompts times n={n}" if prompts > 1 else f"n={n}"
            raise APIError(
                400, f"{many}; this server writes at most {most} for one request", "n" if n > 1 else "prompt"
            )
        return n * prompts

    def completion(self, request: CompletionRequest) -> list[tuple[Prompt, SamplingParams]]:
        prompts = [self._prompt(each, request.add_special_tokens) for each in request.prompts]
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            if prompt_logprobs not in (None, request.logprobs):
                raise APIError(400, "prompt_logprobs and, with echo, logprobs ask for different counts", "logprobs")
            prompt_logprobs = request.logprobs
        return self._met(request, prompts, "prompt", request.max_tokens, request.logprobs, prompt_logprobs)

    def chat(self, request: ChatCompletionRequest) -> list[tuple[Prompt, SamplingParams]]:
        extra: dict[str, Any] = {}
        if request.reasoning_effort is not None:
            extra["reasoning_effort"] = request.reasoning_effort
        if request.documents is not None:
            extra["documents"] = request.documents
        prompt = self.conversation(request, extra, with_tools=request.tool_choice != "none")
        longest = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._met(request, [prompt], "messages", longest, logprobs, request.prompt_logprobs)

    def tokens(self, request: TokenizeCompletionRequest | TokenizeChatRequest) -> list[int]:
        if isinstance(request, TokenizeCompletionRequest):
            return self._prompt(request.prompt, request.add_special_tokens).token_ids
        return self.conversation(request, {}).token_ids

    def text(self, token_ids: list[int]) -> str:
        size = len(self._tokenizer)
        if any(token >= size for token in token_ids):
            raise APIError(400, f"token ids beyond 0..{size - 1}, the tokenizer's", "tokens")
        return self._tokenizer.decode(token_ids)

    def conversation(self, request: ChatFields, extra: dict[str, Any], *, with_tools: bool = True) -> Prompt:
        """Messages by the chat template. What the template cannot make of them is the client's to mend."""
        options, given = self._options, request.chat_template_kwargs or {}
        if request.chat_template is not None and not options.trust_request_chat_template:
            raise APIError(
                400, "this server uses its own chat template (see --trust-request-chat-template)", "chat_template"
            )
        if taken := sorted(self._template_options & set(given)):
            raise APIError(400, f"{', '.join(taken)} cannot be set for the chat template", "chat_template_kwargs")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] if with_tools else []
        template_options = {
            "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
            "continue_final_message": request.continue_final_message,
            "chat_template": request.chat_template or options.chat_template,
            "tools": tools or None,
            **options.default_chat_template_kwargs, **given, **extra,
        }  # fmt: skip
        try:
            (prompt,) = chat_prompts([[_turn(each) for each in request.messages]], self._tokenizer, template_options)
        except Exception as error:  # templates are programs that run on what was sent
            raise APIError(400, f"the chat template refuses these messages: {error}", "messages") from error
        if request.add_special_tokens and prompt.text is not None:
            prompt = self._prompt(prompt.text, True)
        return prompt

    # ------------------------------------------------------------------ limits and parameters

    def _prompt(self, given: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(given, list):
            return Prompt(None, given)
        return Prompt(given, list(self._tokenizer(given, add_special_tokens=add_special_tokens).input_ids))

    def _met(
        self, request: GenerationRequest, prompts: list[Prompt], field: str, max_tokens: int | None,
        logprobs: int | None, prompt_logprobs: int | None,
    ) -> list[tuple[Prompt, SamplingParams]]:  # fmt: skip
        """Prompts cut as asked, each with its parameters; checked against the model and the server's limits."""
        self._limit_logprobs("top_logprobs" if field == "messages" else "logprobs", logprobs)
        self._limit_logprobs("prompt_logprobs", prompt_logprobs)
        length = "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"
        most = self._options.max_output_tokens
        if max_tokens is not None and most is not None and max_tokens > most:
            raise APIError(400, f"{length}={max_tokens}; this server writes at most {most} tokens", length)
        if max_tokens is None:
            limits = [limit for limit in (self._options.sampling_defaults.get("max_tokens"), most) if limit is not None]
            max_tokens = min(limits, default=None)
        else:
            for prompt in prompts:
                self._limit_prompt(self._cut(request, prompt, max_tokens), field, max_tokens, length)
        try:
            params = self._params(request, max_tokens, logprobs, prompt_logprobs)
            for prompt in prompts:
                self._limit_prompt(self._cut(request, prompt, params.max_tokens or 1), field)
                self._llm.check(prompt, params)
        except ConfigError as error:
            raise _named(error, request, field) from error
        return [(prompt, params) for prompt in prompts]

    def _cut(self, request: GenerationRequest, prompt: Prompt, written: int) -> Prompt:
        """The end of the prompt, if the request asks for that."""
        kept = request.truncate_prompt_tokens
        if kept is not None:
            kept = max(1, self._max_model_len - max(written, 1)) if kept == -1 else kept
            prompt.token_ids = prompt.token_ids[-kept:] if kept else []
        return prompt

    def _limit_prompt(self, prompt: Prompt, field: str, max_tokens: int = 0, length: str = "max_tokens") -> None:
        tokens, limit, context = len(prompt.token_ids), self._options.max_prompt_tokens, self._max_model_len
        if tokens == 0:
            raise APIError(400, f"{field}: no tokens; at least one is needed", field)
        if limit is not None and tokens > limit:
            raise APIError(400, f"{field}: {tokens} tokens; this server reads at most {limit}", field)
        if tokens >= context:
            raise APIError(400, f"{field}: {tokens} tokens; the model's context of {context} leaves no room", field)
        if tokens + max_tokens > context:
            raise APIError(
                400,
                f"{length}={max_tokens} after a prompt of {tokens} tokens is beyond the model's context of {context}",
                length,
            )

    def _limit_logprobs(self, field: str, count: int | None) -> None:
        most = self._options.max_logprobs
        if count is not None and most != -1 and (count == -1 or count > most):
            raise APIError(400, f"{field}={count}; this server gives at most {most} (see --max-logprobs)", field)

    def _params(
        self, request: GenerationRequest, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        values = {name: value for name, value in self._options.sampling_defaults.items() if name != "max_tokens"}
        values |= {name: value for name in (*SAMPLED, *COPIED) if (value := getattr(request, name)) is not None}
        if request.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        return SamplingParams(
            n=request.n or 1,
            max_tokens=1 if max_tokens == 0 else max_tokens,  # the prompt alone is asked for: nothing of it is shown
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=_structure(request),
            **values,
        )


def _structure(request: GenerationRequest) -> StructuredOutputsParams | None:
    wanted, asked = request.response_format, request.structured_outputs
    if wanted is not None and wanted.type != "text":
        if asked is not None:
            raise APIError(400, "response_format and structured_outputs; choose one", "response_format")
        if isinstance(wanted, PlainFormat):
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=wanted.json_schema.json_schema)
    return None if asked is None else StructuredOutputsParams(**asked.model_dump(by_alias=True))


def _turn(message: Message) -> dict[str, Any]:
    """As chat templates read it: content is text, and the arguments of calls are objects."""
    turn = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        turn["content"] = "\n".join(part.text for part in message.content)
    for call in turn.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                raise ConfigError("tool_calls: arguments that are no JSON") from None
    return turn


def _named(error: ConfigError, request: GenerationRequest, field: str) -> APIError:
    """With the first parameter that the message speaks of; `field`: if it speaks of none."""
    message = str(error).removeprefix("SamplingParams: ")
    param = next((word for word in re.findall(r"\w+", message) if word in NAMED), field)
    if param == "structured_outputs" and request.structured_outputs is None:
        param = "response_format"
    return APIError(400, message, param)
