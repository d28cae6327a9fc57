"""Requests of the API, as prompts and sampling parameters: OpenAI's fields, and vLLM's for
everything that SamplingParams holds.

What is no field here goes to SamplingParams, which takes those of vLLM that are not implemented at
the value that stands for what is done anyway. Errors name the field."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draftsmith.inference.entrypoints.checks import CheckedRequest, TextLimit
from draftsmith.inference.entrypoints.prompts import Prompt, chat_prompts
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.sampling_params import ACCEPTED, FIELDS, SamplingParams
from draftsmith.inference.server.api_errors import APIError, reason
from draftsmith.inference.server.serve_options import ServerOptions, SpecDecodeDetail
from draftsmith.speculators.errors import ConfigError

# change no answer
IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
)
FIXED: dict[str, Any] = {  # accepted at this value, or null, only; SamplingParams has others
    "echo": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "response_format": {"type": "text"},
    "suffix": None,
}
Model = TypeVar("Model", bound=BaseModel)
PARAMETERS = FIELDS | ACCEPTED.keys()

# Limits of one request, so that it cannot hold up the others. Every round looks at every stop
# string and bad word.
MOST_LEVELS = 64  # of JSON in each other
MOST_ENTRIES = {"stop": 64, "bad_words": 256, "stop_token_ids": 1024, "logit_bias": 1024}
MOST_CHARACTERS = 1024  # of a stop string, and of a bad word


def _nested_too_deeply(value: Any) -> bool:
    """True for JSON with more than `MOST_LEVELS` levels, which no function may walk by calling
    itself."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [v for v in chain.from_iterable(inner) if isinstance(v, (dict, list))]
        if not level:
            return False
    return True


def _prompts(value: Any) -> list[Any]:
    """A text, token ids, or a list of either -> a list of prompts."""
    prompts = value if isinstance(value, list) and not _is_tokens(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or _is_tokens(prompt) for prompt in prompts):
        raise ValueError("expected a text, token ids, or a list of either")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _object(body: bytes) -> dict[str, Any]:
    """The fields of a body of JSON. APIError 400 for any other body."""
    try:
        fields_of_body = json.loads(body)
        text = json.dumps(fields_of_body, ensure_ascii=False)
        text.encode()  # JSON can spell what is no Unicode
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {reason(error)}") from None
    if not isinstance(fields_of_body, dict):
        raise APIError(400, "the body is not a JSON object")
    for name, value in fields_of_body.items():
        if _nested_too_deeply([value]):
            raise APIError(400, f"{name}: more than {MOST_LEVELS} levels", name)
    return fields_of_body


def _validated(model: type[Model], body_fields: dict[str, Any]) -> Model:
    """The fields as an object of their class. APIError 400 for the first that is wrong."""
    try:
        return model.model_validate(body_fields)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        path = ".".join(map(str, fault["loc"]))
        raise APIError(400, f"{path}: {fault['msg']}", name) from None


class DrafterRequest(BaseModel):
    """The body of /v1/drafter. `model`: an exported drafter in the server's folder of drafters,
    relative to it or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str

    @classmethod
    def read(cls, body: bytes) -> Self:
        """APIError 400 for a body that is no such request."""
        return _validated(cls, _object(body))

    def folder(self, drafters: Path) -> Path:
        """Without links. APIError 400 for what is no folder below `drafters`."""
        try:
            folder = (drafters / self.model).resolve()
            if folder.is_dir() and drafters in folder.parents:
                return folder
        except (OSError, ValueError):  # no path at all
            pass
        message = f"model: {self.model!r} is no folder below --drafters-dir; export it there"
        raise APIError(400, message, "model")


class StreamOptions(BaseModel):
    """What a stream holds beside the text, as in OpenAI's API, and by `continuous_usage_stats` as
    in vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding, which this server never writes
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chats have in common. `read` and `parse` raise an APIError 400 for a
    field that is wrong."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    prompt_field: ClassVar[str]
    logprobs_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], Any] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_rounds: bool = False
    per_request_spec_decode_metrics: SpecDecodeDetail | None = None

    @classmethod
    def read(cls, body: bytes, options: ServerOptions) -> tuple[Self, SamplingParams]:
        """The request in a body of JSON, and its sampling parameters, which are all but the
        prompts. null stands for the default, as in OpenAI's API."""
        body_fields = _object(body)
        request = _validated(cls, {n: v for n, v in body_fields.items() if v is not None})
        request.check()
        return request, request.params(options)

    def check(self) -> None:
        """APIError 400 for fields that are not of this API, do not go together, or hold too
        much."""
        for name, value in FIXED.items():
            if self.extra.get(name, value) != value:
                served = f"only {json.dumps(value)} is served here, and others by vLLM"
                raise APIError(400, f"{name}: {served}; leave it out", name)
        of_streams = {
            "stream_options": self.stream_options != StreamOptions(),
            "return_rounds": self.return_rounds,
        }
        for name, asked in of_streams.items():
            if asked and not self.stream:
                raise APIError(400, f"{name}: only with stream: true", name)
        for name in self.extra:
            if name not in PARAMETERS and name not in IGNORED and name not in FIXED:
                raise APIError(400, f"{name}: there is no such field", name)
        for name, most in MOST_ENTRIES.items():
            self._require_few(name, getattr(self, name, None), most)

    def _require_few(self, name: str, entries: Any, most: int) -> None:
        if isinstance(entries, str):
            entries = [entries]
        if not isinstance(entries, (list, tuple, dict)):
            return
        if len(entries) > most:
            raise APIError(400, f"{name}: {len(entries)} entries; at most {most}", name)
        if any(isinstance(entry, str) and len(entry) > MOST_CHARACTERS for entry in entries):
            raise APIError(400, f"{name}: at most {MOST_CHARACTERS} characters each", name)

    @property
    @abstractmethod
    def num_prompts(self) -> int:
        """How many prompts there are, each with n responses."""

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that are none of this class, such as those of SamplingParams."""
        return self.model_extra or {}

    @property
    def usage_at_end(self) -> bool:
        """True if a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        """True if every chunk counts the tokens of its choice so far."""
        return self.usage_at_end and bool(self.stream_options.continuous_usage_stats)

    @property
    def max_field(self) -> str:
        """The field that says how long a response may be."""
        return "max_tokens"

    @abstractmethod
    def tokenize(
        self, llm: TextGenerator, options: ServerOptions, limit: TextLimit
    ) -> Iterator[Prompt]:
        """ConfigError for prompts that cannot be, of texts beyond the limit before they are
        tokenized."""

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """`logprobs` of SamplingParams."""

    def parse(
        self, params: SamplingParams, llm: TextGenerator, options: ServerOptions, limit: TextLimit
    ) -> list[CheckedRequest]:
        """The prompts, checked with the parameters against the model. Takes time and changes
        nothing but caches, so that worker threads can do it."""
        vocab_size = llm.engine.target.vocab_size
        self._require_few("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self._require_few_logprobs(params, vocab_size, options.max_logprobs)
        context = llm.engine.max_model_len
        most = getattr(self, self.max_field) or 0
        prompts = []
        try:
            for prompt in self.tokenize(llm, options, limit):
                prompts.append(prompt)
                if len(prompt.token_ids) + most > context:
                    break  # refused below: the others need not be tokenized
            checked = llm.checker.check(prompts, [params] * len(prompts))
        except ConfigError as error:
            raise self._named(error) from error
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest + most > context:
            sizes = f"{self.max_field}={most}, a prompt of {longest} tokens"
            raise APIError(400, f"{sizes}; the context is {context}", self.max_field)
        return checked

    def _require_few_logprobs(self, params: SamplingParams, vocab_size: int, most: int) -> None:
        """vLLM's --max-logprobs: -1 is the vocabulary, in a request as well."""
        logprobs = vocab_size if params.logprobs == -1 else params.logprobs or 0
        if logprobs > (vocab_size if most == -1 else most):
            name = self.logprobs_field
            raise APIError(400, f"{name}: at most {most} here; see --max-logprobs", name)

    def params(self, options: ServerOptions) -> SamplingParams:
        """Everything but the prompts."""
        values: dict[str, Any] = {"max_tokens": self.default_max_tokens}
        values |= options.sampling_defaults
        values |= {n: v for n, v in self.extra.items() if n in PARAMETERS}
        if (most := getattr(self, self.max_field)) is not None:
            values["max_tokens"] = most
        bias = {int(token): value for token, value in self.logit_bias.items()} or None
        try:
            return SamplingParams(**values, logit_bias=bias, logprobs=self.num_logprobs())
        except ConfigError as error:
            raise self._named(error) from error

    def _named(self, error: ConfigError) -> APIError:
        """With the parameter that the error is about as the field at fault, else the prompts."""
        parameter = "SamplingParams."
        where = error.where or ""
        if not where.startswith(parameter):
            return APIError(400, str(error), self.prompt_field)
        name = where.removeprefix(parameter)
        field = {"max_tokens": self.max_field, "logprobs": self.logprobs_field}.get(name, name)
        return APIError(400, field + str(error).removeprefix(where), field)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt_field = "prompt"
    logprobs_field = "logprobs"
    default_max_tokens = 16

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        """As the field says."""
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        """Texts, and lists of token ids."""
        return len(self.prompt)

    def tokenize(
        self, llm: TextGenerator, options: ServerOptions, limit: TextLimit
    ) -> Iterator[Prompt]:
        """One after the other; token ids as they are."""
        tokenizer = llm.get_tokenizer()
        for prompt in self.prompt:
            if isinstance(prompt, list):
                yield Prompt(None, prompt)
            else:
                limit.check(prompt)
                yield Prompt(prompt, list(tokenizer(prompt).input_ids))


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions. Tools are for the chat template; calls are not parsed."""

    prompt_field = "messages"
    logprobs_field = "top_logprobs"
    default_max_tokens = None

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    def num_logprobs(self) -> int | None:
        """`top_logprobs` with `logprobs`, else none. APIError 400 for the one without the other."""
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def max_field(self) -> str:
        """OpenAI's name of today where the request has it, else that of before."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_prompts(self) -> int:
        """1: the conversation."""
        return 1

    def check(self) -> None:
        """APIError 400 also for a chat template."""
        super().check()
        # a template is a program, which may run for ever
        if "chat_template" in self.chat_template_kwargs:
            name = "chat_template_kwargs"
            raise APIError(400, f"{name}: templates come with --chat-template", name)

    def tokenize(
        self, llm: TextGenerator, options: ServerOptions, limit: TextLimit
    ) -> Iterator[Prompt]:
        """The prompt that the chat template makes of the conversation."""
        template_options = {
            "chat_template": options.chat_template,
            "add_generation_prompt": True,
            "tools": None if self.tool_choice == "none" else self.tools,
            **options.default_chat_template_kwargs,
            **self.chat_template_kwargs,
        }
        tokenizer = llm.get_tokenizer()
        yield from chat_prompts([self.messages], tokenizer, template_options, limit.check)
