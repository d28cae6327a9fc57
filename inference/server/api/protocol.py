"""Requests of the API: OpenAI's, with vLLM's fields for everything that SamplingParams holds.

Types are strict, and unknown fields are errors. Fields that change no answer are accepted. Fields
of vLLM that would change one, and are not implemented here, are accepted at the value that stands
for what is done anyway."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference.server.options import SpecDecodeDetail

INT64 = 2**63 - 1
MAX_STOPS = 64

TokenId = Annotated[int, Field(ge=0, le=INT64)]
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """Base of all requests and their parts."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _require_unicode(cls, data: Any) -> Any:
        """JSON can spell unpaired surrogates, also in values of any type, which pydantic does not
        look into."""
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ValueError("text with an unpaired surrogate, which is no Unicode") from None
        return data


class StreamOptions(Body):
    include_usage: bool | None = Field(
        False, description="a last chunk with usage and without choices"
    )
    continuous_usage_stats: bool | None = Field(
        False, description="the usage so far in every chunk"
    )


class JsonSchema(Body):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Exactly one of the first five, as in StructuredOutputsParams."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None


class GenerationRequest(Body):
    """Fields that completions and chats have in common."""

    model: str | None = Field(None, description="one of /v1/models; the first of them if not given")
    n: int | None = Field(1, ge=1, le=INT64)
    temperature: float | None = Field(None, ge=0, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], float] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=INT64)
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[Text] | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=INT64)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=INT64, description="last tokens kept; -1: what fits"
    )
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = Field(
        False, description="tokens in logprobs as token_id:7"
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, le=INT64, description="most drafts of a round; 0: none"
    )
    return_rounds: bool | None = Field(
        False, description="in a stream, the fate of every draft: choices[].rounds"
    )
    request_id: (
        Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None
    ) = None
    per_request_spec_decode_metrics: SpecDecodeDetail | None = Field(
        None,
        description=(
            "acceptance in the answer's metrics; the server's setting if not given (n=1, one"
            " prompt)"
        ),
    )

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    # accepted at these values only
    use_beam_search: Literal[False] | None = None
    priority: Literal[0] | None = None
    logprob_token_ids: None = None
    cache_salt: None = None
    kv_transfer_params: None = None
    thinking_token_budget: None = None
    truncation_side: Literal["left"] | None = None
    vllm_xargs: None = None

    @model_validator(mode="after")
    def _streaming(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.return_rounds and not self.stream:
            raise ValueError("return_rounds needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs cannot be streamed; leave out stream, or use echo with logprobs"
            )
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: int | None = Field(16, ge=0, le=INT64, description="0 needs echo: the prompt alone")
    echo: bool | None = Field(False, description="the prompt before the text")
    logprobs: int | None = Field(None, ge=-1, le=INT64)
    best_of: int | None = Field(None, ge=1, le=INT64, description="n, if given")
    add_special_tokens: bool = True
    suffix: None = None
    prompt_embeds: None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 and echo is off: the answer would be empty")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported; leave it out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ContentPart(Body):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            raise ValueError(
                f"a part of type {kind} is not supported: this server reads text alone"
            )
        return part


class Message(Body):
    """One turn of a conversation. Unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ChatFields(Body):
    """Fields of chats and of /tokenize: the messages and how they are rendered."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = Field(False, description="chat templates usually write them")
    chat_template: str | None = Field(None, description="if the server was started to trust it")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(
        None, description="for the chat template; calls are not parsed"
    )

    @model_validator(mode="after")
    def _one_ending(self) -> ChatFields:
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("continue_final_message and add_generation_prompt; choose one")
        return self


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=1, le=INT64)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT64, description="instead of max_tokens"
    )
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=-1, le=INT64)
    echo: bool = Field(False, description="the last message before the text, if it is continued")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="for the chat template")
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="for the chat template")
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _logprobs_asked(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        return self


class TokenizeCompletionRequest(Body):
    """POST /tokenize for a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields):
    """POST /tokenize for a conversation."""

    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
