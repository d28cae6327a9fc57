"""Requests of the API: OpenAI's, with vLLM's fields for everything that SamplingParams holds.

Types are strict, and unknown fields are errors. Fields that change no answer are accepted, and so
are fields that are not implemented, at the value that stands for what is done anyway."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inference.server.options import SpecDecodeDetail

INT64 = 2**63 - 1
Count = Annotated[int, Field(ge=0, le=INT64)]
Positive = Annotated[int, Field(ge=1, le=INT64)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Count], Field(min_length=1)]


class Body(BaseModel):
    """Base of all requests and their parts."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    """`include_usage`: a last chunk with usage and without choices. `continuous_usage_stats`: the
    usage so far in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(Body):
    """Fields that completions and chats have in common."""

    model: str | None = None  # the first of /v1/models
    n: Positive | None = 1
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], float] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    skip_special_tokens: bool = True
    allowed_token_ids: Tokens | None = None
    bad_words: list[Text] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    per_request_spec_decode_metrics: SpecDecodeDetail | None = None  # None: the server's setting
    # not in vLLM: the most drafts of a round; and, in a stream, the fate of every draft
    num_speculative_tokens: Count | None = None
    return_rounds: bool | None = False

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None
    # accepted at these values only
    echo: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    truncate_prompt_tokens: None = None
    prompt_logprobs: None = None
    response_format: Any = None
    structured_outputs: Any = None

    @field_validator("response_format", "structured_outputs")
    @classmethod
    def _unconstrained(cls, value: Any) -> Any:
        if value not in (None, {"type": "text"}):
            raise ValueError(
                "output that follows a schema or grammar is not generated here; "
                "serve with vLLM for it (draftsmith serve --engine vllm)"
            )
        return value

    @model_validator(mode="after")
    def _streaming(self) -> GenerationRequest:
        for name in ("stream_options", "return_rounds"):
            if getattr(self, name) and not self.stream:
                raise ValueError(f"{name}: only with stream: true")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: Positive | None = 16
    logprobs: int | None = Field(None, ge=-1, le=INT64)
    add_special_tokens: bool = True
    best_of: None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ContentPart(Body):
    """Text: parts of other kinds are refused."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation. Unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Tools are for the chat template; calls are not parsed."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None  # instead of max_tokens
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=-1, le=INT64)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False  # chat templates write them
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("continue_final_message and add_generation_prompt; choose one")
        return self
