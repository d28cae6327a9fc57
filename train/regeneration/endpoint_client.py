"""One server that writes responses: a request to it, its answer read strictly, and every way this can fail by its name.

Knows one request at a time; who is asked next and when again is `train.regeneration.endpoint_pool`'s.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import httpx2

from inference.vllm_bridge.engine import sampling_fields
from speculators.errors import ConfigError, DraftsmithError
from train.recipe.data_sections import EndpointSection
from train.regeneration.conversations import Ask

LOOK_S = 30.0  # what a server gets to say who it is
MESSAGE = 300  # characters of a server's own words
OPENAI = ("temperature", "top_p", "max_tokens", "seed")  # what servers that are not like vLLM know


class EndpointError(DraftsmithError):
    """Servers that write responses are not there, or not what they should be."""


class Refused(Exception):
    """The request's own fault: it would be refused again, and by any other server."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Trouble(Exception):
    """The same request may be answered later, or elsewhere. `retry_after`: seconds that the server asked for."""

    def __init__(self, reason: str, detail: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.retry_after = reason, detail, retry_after


@dataclass(frozen=True)
class TargetFacts:
    """What the endpoints should be serving."""

    name: str
    max_model_len: int  # longest prompt and response together
    vocab_size: int
    end: tuple[int, ...]  # tokens that end a response
    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A response. `proved`: these are the tokens that were written, to the prompt that was asked for."""

    token_ids: tuple[int, ...]
    proved: bool = True


@dataclass
class Endpoint:
    """A server and what it says of itself (`look`). `served` names the target there."""

    section: EndpointSection
    facts: TargetFacts
    timeout_s: float
    exchange: str = "tokens"
    served: str = ""
    root: str = ""
    version: str | None = None
    like_vllm: bool = False  # takes vLLM's fields beside OpenAI's
    answered: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    client: httpx2.AsyncClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.base = self.section.url.rstrip("/").removesuffix("/v1")
        self.url = f"{self.base}/v1"
        key = None
        if (name := self.section.api_key_env) is not None:
            key = os.environ.get(name)
            if not key:
                raise ConfigError(f"regenerate.endpoints: {self.url}: the environment variable {name} holds no key")
        self.client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=self.timeout_s,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),  # the pool has its own
        )

    # ------------------------------------------------------------------ who it is

    async def look(self) -> None:
        """Asks which models it serves and which of them is the target. Trouble if it does not answer; EndpointError
        if it is not what is wanted."""
        try:
            listed = await self._told("GET", f"{self.url}/models")
        except Trouble as trouble:
            if trouble.reason in ("http_401", "http_403"):
                raise EndpointError(
                    f"{self.url}: refused ({trouble}); name the variable that holds its key in api_key_env"
                ) from None
            raise
        models = listed.get("data")
        if not isinstance(models, list) or not all(isinstance(each, dict) and each.get("id") for each in models):
            raise Trouble("not_an_answer", f"{self.url}/models lists no models")
        self.served, card = self._chosen({str(each["id"]): each for each in models})
        self.root = str(card.get("root") or self.served)
        limit = card.get("max_model_len")
        if isinstance(limit, int) and limit < self.facts.max_model_len:
            raise EndpointError(
                f"{self.url}: serves up to {limit} tokens, prompts and responses have up to {self.facts.max_model_len};"
                f" start it with --max-model-len {self.facts.max_model_len}, or lower data.max_length"
            )
        try:
            self.version = str((await self._told("GET", f"{self.base}/version"))["version"])
            self.like_vllm = True
        except (Trouble, Refused, KeyError):
            self.version, self.like_vllm = None, False

    def _chosen(self, models: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
        wanted, names = self.section.model, ", ".join(models) or "none"
        if wanted is not None:
            if wanted not in models:
                raise EndpointError(f"{self.url}: serves {names}, and not {wanted} (regenerate.endpoints: model)")
            return wanted, models[wanted]
        fitting = [name for name, card in models.items() if self.facts.name in (name, card.get("root"))] or list(models)
        if len(fitting) != 1:
            raise EndpointError(
                f"{self.url}: serves {names}; which of them is {self.facts.name}? Name it: regenerate.endpoints: "
                f"[{{url: {self.url}, model: …}}]"
            )
        return fitting[0], models[fitting[0]]

    async def tokens_of(self, text: str) -> list[int] | None:
        """A text as this server tokenises it; None: it does not say."""
        try:
            body = {"model": self.served, "prompt": text, "add_special_tokens": False}
            found = (await self._told("POST", f"{self.base}/tokenize", json=body)).get("tokens")
        except (Trouble, Refused):
            return None
        return found if isinstance(found, list) else None

    def facts_found(self) -> dict[str, Any]:
        """For the record."""
        return {"url": self.url, "model": self.served, "root": self.root, "version": self.version}

    # ------------------------------------------------------------------ responses

    async def write(self, ask: Ask) -> Answer:
        """The response. Raises Refused or Trouble."""
        if self.exchange == "tokens":
            body = {"prompt": list(ask.prompt_ids), "return_token_ids": True}
            fields = sampling_fields(ask.params, self.facts.end)
            tree = await self._told("POST", f"{self.url}/completions", json={"model": self.served, **body, **fields})
            return self._tokens(ask, _choice(tree))
        body, fields = self._as_text(ask), sampling_fields(ask.params, self.facts.end)
        del fields["ignore_eos"], fields["stop_token_ids"]  # the server knows how its model ends
        if self.like_vllm:  # with the token that ended it, which is one of several
            fields |= {"skip_special_tokens": False, "include_stop_str_in_output": True}
        else:
            fields = {name: value for name, value in fields.items() if name in OPENAI}
        route = "completions" if "prompt" in body else "chat/completions"
        tree = await self._told("POST", f"{self.url}/{route}", json={"model": self.served, **body, **fields})
        return self._retokenised(ask, _choice(tree), tree.get("usage") or {})

    def _tokens(self, ask: Ask, choice: Mapping[str, Any]) -> Answer:
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if ids is None:
            raise Trouble("no_token_ids", "the answer has no token_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < self.facts.vocab_size for i in ids):
            raise Trouble("not_an_answer", f"tokens beyond 0..{self.facts.vocab_size - 1}, the target's")
        if (echoed := choice.get("prompt_token_ids")) is not None and echoed != list(ask.prompt_ids):
            raise Trouble("not_an_answer", "the prompt it read is not the one it was sent")
        ended = bool(ids) and ids[-1] in self.facts.end
        if ended != (reason == "stop") or len(ids) > (ask.params.max_tokens or 0):
            raise Trouble("not_an_answer", f"{len(ids)} tokens that end with {reason!r}")
        return Answer(tuple(ids))

    def _as_text(self, ask: Ask) -> dict[str, Any]:
        if ask.example.prompt is not None:
            return {"prompt": ask.example.prompt}
        body: dict[str, Any] = {"messages": [dict(message) for message in ask.example.messages]}
        if body["messages"][-1]["role"] == "assistant":  # the response that is to be replaced
            del body["messages"][-1]
        if self.facts.template_kwargs:
            body["chat_template_kwargs"] = dict(self.facts.template_kwargs)
        return body

    def _retokenised(self, ask: Ask, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> Answer:
        """Text to tokens. Proved if as many tokens as the server counted stand for this very text, after as many as
        our own prompt has. The end that other servers do not show is the tokenizer's; certain if there is no other."""
        text = choice["text"] if "text" in choice else (choice.get("message") or {}).get("content")
        if not isinstance(text, str):
            raise Trouble("not_an_answer", "the answer has no text")
        tokenizer, stopped = self.facts.tokenizer, choice.get("finish_reason") == "stop"
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []
        same = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
        if stopped and not self.like_vllm and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
            same = same and len(self.facts.end) == 1
        ended = bool(ids) and ids[-1] in self.facts.end
        counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        return Answer(tuple(ids), proved=same and ended == stopped and counted == (len(ask.prompt_ids), len(ids)))

    async def _told(self, verb: str, url: str, **content: Any) -> dict[str, Any]:
        """A JSON object that came with 200."""
        try:
            async with asyncio.timeout(self.timeout_s if verb == "POST" else LOOK_S):
                response = await self.client.request(verb, url, **content)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise Trouble("timeout", str(error) or type(error).__name__) from None
        except httpx2.HTTPError as error:
            raise Trouble("connection", f"{type(error).__name__}: {error}"[:MESSAGE]) from None
        status, words = response.status_code, response.text[:MESSAGE]
        if status in (400, 413, 414, 422):
            raise Refused(f"http_{status}", words)
        if status != 200:
            raise Trouble(f"http_{status}", words, retry_after=_seconds(response.headers.get("Retry-After")))
        try:
            tree = response.json()
        except ValueError:
            raise Trouble("not_an_answer", f"no JSON: {words!r}") from None
        if not isinstance(tree, dict):
            raise Trouble("not_an_answer", f"no JSON object: {words!r}")
        return tree


def _choice(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of an answer, whole."""
    choices = tree.get("choices")
    if not isinstance(choices, Sequence) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Trouble("not_an_answer", f"expected one choice, got {str(choices)[:MESSAGE]}")
    if (reason := choices[0].get("finish_reason")) not in ("stop", "length"):
        raise Trouble("cut_off", f"it ended with {reason!r}")  # a server that stops ends its requests with "abort"
    return choices[0]


def _seconds(header: str | None) -> float | None:
    """Retry-After: seconds, or a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except ValueError:
        return None
