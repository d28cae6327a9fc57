"""Requests of the API, as prompts and sampling parameters: OpenAI's fields, and vLLM's for
everything that SamplingParams holds.

Unknown fields are errors. Fields that change no answer are accepted, and so are fields that are not
implemented, at the value that stands for what is done anyway. Errors name the field."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any, get_args

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt, chat_prompts, require_short
from inference.sampling_params import SamplingParams
from inference.server.errors import APIError
from inference.server.options import SAMPLING_FIELDS, ServerOptions, SpecDecodeDetail
from speculators.errors import ConfigError

STOPS = ("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens")
COPIED = (  # to SamplingParams, which checks them
    *(*SAMPLING_FIELDS, "n", "seed", *STOPS, "skip_special_tokens", "allowed_token_ids"),
    *("bad_words", "logit_bias", "num_speculative_tokens"),
)
IGNORED = {
    *("user", "metadata", "store", "service_tier", "length_penalty"),
    *("spaces_between_special_tokens", "parallel_tool_calls"),
}
FIXED: dict[str, Any] = {  # accepted at this value, or null, only
    **dict.fromkeys(("echo", "use_beam_search"), False),
    "best_of": 1,
    "response_format": {"type": "text"},
    **dict.fromkeys(("structured_outputs", "suffix", "prompt_logprobs", "truncate_prompt_tokens")),
}
DETAILS = get_args(SpecDecodeDetail)


class GenerationRequest:
    """What completions and chats have in common. APIError 400 for a field that is wrong.

    params     everything but the prompts
    responses  how many are asked for
    """

    prompt_field = "prompt"
    max_field = "max_tokens"
    max_tokens: int | None = 16  # where the request says nothing

    def __init__(self, body: dict[str, Any], options: ServerOptions) -> None:
        # null stands for the default, as in OpenAI's API
        self._fields = {name: value for name, value in body.items() if value is not None}
        self._read = {*COPIED, *IGNORED}
        for name, value in FIXED.items():
            if self.take(name, object, value) != value:
                raise APIError(
                    400,
                    f"{name}: not done here at this value; leave it out, or serve with vLLM for it"
                    " (draftsmith serve --engine vllm)",
                    name,
                )
        self.model = self.take("model", str, options.served_model_name[0])
        self.stream: bool = self.take("stream", bool, False)
        stream_options = self.take("stream_options", dict, {})
        self.usage_at_end = bool(stream_options.get("include_usage"))
        self.usage_in_chunks = bool(stream_options.get("continuous_usage_stats"))
        self.return_token_ids: bool = self.take("return_token_ids", bool, False)
        self.return_rounds: bool = self.take("return_rounds", bool, False)
        for name in ("stream_options", "return_rounds"):
            if self._fields.get(name) and not self.stream:
                raise APIError(400, f"{name}: only with stream: true", name)
        default = options.per_request_spec_decode_metrics
        self.detail: str = self.take("per_request_spec_decode_metrics", DETAILS, default)
        self.special_tokens: bool = self.take("add_special_tokens", bool, True)
        self.read_more()
        self.params = self._params(options)
        if unknown := sorted(set(self._fields) - self._read):
            raise APIError(400, f"{unknown[0]}: no such field", unknown[0])
        self.responses = len(self.prompts) * self.params.n

    def read_more(self) -> None:
        """The fields of one kind of request, its `prompts` among them."""
        prompt = self.take("prompt", (str, list), None)
        several = isinstance(prompt, list) and not _is_tokens(prompt)
        self.prompts: list[Any] = prompt if several else [prompt]
        if not self.prompts or not all(isinstance(p, str) or _is_tokens(p) for p in self.prompts):
            message = "prompt: expected a text, token ids, or a list of either"
            raise APIError(400, message, "prompt")
        self.logprobs: int | None = self.take("logprobs", int, None)

    def tokenize(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        """ConfigError for prompts that cannot be. Takes time and changes nothing but caches, so
        that worker threads can do it."""
        return [self._prompt(prompt, llm) for prompt in self.prompts]

    def _prompt(self, given: str | list[int], llm: LLM) -> Prompt:
        if isinstance(given, list):
            return Prompt(None, given)
        require_short(len(given), llm.get_tokenizer(), llm.engine.max_model_len)
        encoded = llm.get_tokenizer()(given, add_special_tokens=self.special_tokens)
        return Prompt(given, list(encoded.input_ids))

    def parse(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        """The prompts, checked with the parameters against the model."""
        context = llm.engine.max_model_len
        try:
            prompts = self.tokenize(llm, options)
            for prompt in prompts:
                llm.check(prompt, self.params)
        except ConfigError as error:
            raise self._named(error, self.prompt_field) from error
        for prompt in prompts:
            tokens = len(prompt.token_ids)
            if (asked := self._fields.get(self.max_field, 0)) + tokens > context:
                message = f"{self.max_field}={asked}, a prompt of {tokens} tokens; the context"
                raise APIError(400, f"{message} is {context}", self.max_field)
        return prompts

    def _params(self, options: ServerOptions) -> SamplingParams:
        values: dict[str, Any] = {"max_tokens": self.max_tokens, **options.sampling_defaults}
        values |= {name: self._fields[name] for name in COPIED if name in self._fields}
        if (most := self.take(self.max_field, int, None)) is not None:
            values["max_tokens"] = most
        most = options.max_logprobs
        if self.logprobs is not None and most != -1 and not 0 <= self.logprobs <= most:
            name = "logprobs" if self.prompt_field == "prompt" else "top_logprobs"
            raise APIError(400, f"{name}: expected {most} at most (--max-logprobs)", name)
        bias = self.take("logit_bias", dict, {})
        if not all(re.fullmatch("[0-9]{1,18}", token) for token in bias):
            raise APIError(400, "logit_bias: expected token ids and numbers", "logit_bias")
        values["logit_bias"] = {int(token): number for token, number in bias.items()} or None
        try:
            return SamplingParams(**values, logprobs=self.logprobs)
        except ConfigError as error:
            raise self._named(error, None) from error

    def take(self, name: str, kind: Any, default: Any) -> Any:
        """The value of a field, which is of a type or one of some values."""
        self._read.add(name)
        value = self._fields.get(name, default)
        if name not in self._fields:
            return value
        if isinstance(kind, tuple) and isinstance(kind[0], str):
            fits = value in kind
        else:
            fits = isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
        if not fits:
            raise APIError(400, f"{name}: expected {_name(kind)}", name)
        return value

    def _named(self, error: ConfigError, field: str | None) -> APIError:
        """With the first parameter in the message as the field at fault, else `field`."""
        message = str(error).removeprefix("SamplingParams: ")
        words = re.findall(r"\w+", message)
        param = next((word for word in words if word in COPIED or word == "max_tokens"), field)
        return APIError(400, message, self.max_field if param == "max_tokens" else param)


class ChatRequest(GenerationRequest):
    """Tools are for the chat template; calls are not parsed."""

    prompt_field = "messages"
    max_tokens = None

    def read_more(self) -> None:
        self.prompts = [self.take("messages", list, [])]
        if "max_completion_tokens" in self._fields:
            self.take(self.max_field, int, None)
            self.max_field = "max_completion_tokens"
        asked = self.take("logprobs", bool, False)
        self.logprobs = self.take("top_logprobs", int, 0) if asked else None
        if not asked and self.take("top_logprobs", int, 0):
            raise APIError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
        continues = self.take("continue_final_message", bool, False)
        generates = self.take("add_generation_prompt", bool, not continues)
        if continues and generates:
            message = "continue_final_message and add_generation_prompt; choose one"
            raise APIError(400, message, "continue_final_message")
        self._template_options = {
            "continue_final_message": continues,
            "add_generation_prompt": generates,
            "tools": self.take("tools", list, None),
        }
        if self.take("tool_choice", ("none", "auto"), "auto") == "none":
            self._template_options["tools"] = None
        self._template_kwargs: dict[str, Any] = self.take("chat_template_kwargs", dict, {})

    @property
    def role(self) -> str:
        """Of the answer: a message that is continued is the answer's."""
        continues = self._template_options["continue_final_message"]
        return self.prompts[0][-1]["role"] if continues else "assistant"

    def tokenize(self, llm: LLM, options: ServerOptions) -> list[Prompt]:
        tokenizer, given = llm.get_tokenizer(), self._template_kwargs
        named = inspect.signature(tokenizer.apply_chat_template).parameters
        if reserved := sorted(({*named, "self", "messages"} - {"kwargs"}) & given.keys()):
            message = f"chat_template_kwargs: {', '.join(reserved)} cannot be set"
            raise APIError(400, message, "chat_template_kwargs")
        template_options = {
            "chat_template": options.chat_template,
            **self._template_options,
            **options.default_chat_template_kwargs,
            **given,
        }
        context = llm.engine.max_model_len
        return chat_prompts(self.prompts, tokenizer, template_options, max_tokens=context)


def read_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request. APIError 400 if it is none."""
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()  # JSON can spell what is no Unicode
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise APIError(400, "the body is not a JSON object")
    return fields


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _name(kind: Any) -> str:
    if isinstance(kind, tuple):
        return " or ".join(_name(each) for each in kind)
    return kind if isinstance(kind, str) else kind.__name__
