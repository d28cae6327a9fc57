"""A server's completions as token ids and log-probabilities by id, by OpenAI's API and vLLM's
extensions of it.

Tokens are ids, and the server's own: texts of single tokens are not the text when joined, since
decoders strip spaces and characters span tokens, and two tokens may have one text. A server that
gives no ids is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from pydantic import BaseModel, Field

from draftsmith.inference.bench.load_generator import served_model
from draftsmith.speculators.errors import DraftsmithError

ID = re.compile(r"token_id:(\d+)")  # in place of the text of a token
NO_IDS = (
    "answers without token ids, and texts are not compared in place of them, since the text of a"
    " token does not say which one it is: certify needs `return_token_ids`, and of the baseline"
    " `return_tokens_as_token_ids` too. vLLM and draftsmith serve have both"
)
# Sampling parameters that change nothing, under vLLM's names. A server takes what a request leaves
# out from the model's generation_config.json, or from its flags, and another may not.
NEUTRAL = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}

PromptInput = str | list[int]  # a text, or its token ids


@dataclass(frozen=True)
class Completion:
    """A completion: ids of its prompt and tokens, and the leading log-probabilities at each token,
    by id; none unless they are asked for."""

    prompt: list[int]
    tokens: list[int]
    leading: list[dict[int, float]]


class Logprobs(BaseModel):
    """The leading tokens at each place, `token_id:<id>` -> log-probability."""

    top_logprobs: list[dict[str, float]]


class Choice(BaseModel):
    """One text of a completion."""

    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


class Answer(BaseModel):
    """The fields of a completion that are read."""

    choices: list[Choice] = Field(min_length=1)


class Completions:
    """One server. DraftsmithError if it does not answer, or without what is compared. `ended` is
    called after every completion."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        concurrency: int,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.ended = ended
        self.where = f"{client.base_url}completions"
        self._slots = asyncio.Semaphore(concurrency)
        self._model: str | None = None  # not yet asked for

    async def model(self) -> str:
        """The name of the server's model. Errors as of `served_model`."""
        if self._model is None:
            self._model = await served_model(self.client)
        return self._model

    async def complete(
        self, prompt: PromptInput, max_tokens: int, *, leading: int = 0, **fields: Any
    ) -> Completion:
        """The text of one request. `leading`: most probable tokens whose log-probabilities are
        asked for. `fields`: more of the request's body, in place of NEUTRAL ones too.
        DraftsmithError as of the class."""
        body = {"model": await self.model(), "prompt": prompt, "max_tokens": max_tokens}
        body |= {**NEUTRAL, "return_token_ids": True, **fields}
        if leading:
            body |= {"logprobs": leading, "return_tokens_as_token_ids": True}
        async with self._slots:
            try:
                answer = await self.client.post("/completions", cast_to=object, body=body)
                choice = Answer.model_validate(answer).choices[0]
            except openai.OpenAIError as error:
                raise DraftsmithError(f"{error}", where=self.where) from None
            except ValueError:  # no JSON, or JSON of another shape
                raise DraftsmithError(
                    "the answer is no completion of OpenAI's API; is this the server's address?",
                    where=self.where,
                ) from None
        if not choice.token_ids or choice.prompt_token_ids is None:
            raise DraftsmithError(NO_IDS, where=self.where)
        logprobs = self._leading(choice, leading) if leading else []
        self.ended()
        return Completion(choice.prompt_token_ids, choice.token_ids, logprobs)

    def _leading(self, choice: Choice, count: int) -> list[dict[int, float]]:
        """The `count` most probable tokens at each place: servers add the token that was drawn,
        which here would tell which server drew it."""
        places = choice.logprobs.top_logprobs if choice.logprobs else []
        if len(places) != len(choice.token_ids or ()) or not all(places):
            raise DraftsmithError(
                "answers without `logprobs` of every token, which are needed of a baseline",
                where=self.where,
            )
        return [self._by_id(entries, count) for entries in places]

    def _by_id(self, entries: Mapping[str, float], count: int) -> dict[int, float]:
        logprobs = {}
        for name, value in sorted(entries.items(), key=lambda entry: -entry[1])[:count]:
            match = ID.fullmatch(name)
            if match is None:
                raise DraftsmithError(NO_IDS, where=self.where)
            logprobs[int(match[1])] = value
        return logprobs

    async def greedy(
        self, prompts: Sequence[PromptInput], max_tokens: int, leading: int = 0
    ) -> list[Completion]:
        """A text at temperature 0 for each prompt."""
        requests = (
            self.complete(prompt, max_tokens, leading=leading, temperature=0) for prompt in prompts
        )
        return await asyncio.gather(*requests)

    async def sample(
        self, prompt: list[int], max_tokens: int, seeds: Sequence[int], leading: int = 0
    ) -> list[Completion]:
        """A text at temperature 1 for each seed."""
        requests = (
            self.complete(prompt, max_tokens, leading=leading, temperature=1, seed=seed)
            for seed in seeds
        )
        return await asyncio.gather(*requests)
