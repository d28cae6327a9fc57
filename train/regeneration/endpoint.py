"""One server that writes responses: its identity, its agreement with the target, and requests whose
answers are read strictly. The pool decides which server gets a request, and when it is sent
again."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference import LLM, SamplingParams
from inference.http_client import QUERY_TIMEOUT_S, RequestFailed, ServerClient, with_retries
from inference.vllm_bridge.engine import sampling_fields
from speculators.errors import ConfigError, DraftsmithError
from train.recipe.data_sections import EndpointSection, RegenerateSection
from train.regeneration.conversations import Ask

OPENAI_FIELDS = ("temperature", "top_p", "max_tokens", "seed")  # known to servers other than vLLM
PROBES, PROBE_TOKENS = 8, 8
PROBE_TEXT = "def f(x):\n    return x**2  # 3.14, naïve – \u4f60\u597d\n"
PROBE_ATTEMPTS = 4


class EndpointError(DraftsmithError):
    """An endpoint is unreachable, or does not serve the target."""


@dataclass(frozen=True)
class TargetFacts:
    """The model that the endpoints should serve."""

    name: str
    max_model_len: int  # longest prompt and response together
    vocab_size: int
    end: tuple[int, ...]  # tokens that end a response
    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A response. `proved`: the server wrote these very tokens, after the very prompt."""

    token_ids: tuple[int, ...]
    proved: bool = True


class Endpoint:
    """A server, and what it says of itself once `identify` was called. `served`: the target's name
    there.

    Requests raise RequestFailed; its reason may also be "no_token_ids" or "cut_off".
    """

    def __init__(
        self, section: EndpointSection, regenerate: RegenerateSection, facts: TargetFacts
    ) -> None:
        self.section, self.exchange, self.facts = section, regenerate.exchange, facts
        self.client = ServerClient(
            section.url, regenerate.request_timeout_s, key_env=section.api_key_env
        )
        self.url = f"{self.client.url}/v1"
        if section.api_key_env is not None and not os.environ.get(section.api_key_env):
            where = f"regenerate.endpoints: {self.url}"
            raise ConfigError(
                f"{where}: the environment variable {section.api_key_env} holds no key"
            )
        self.served = self.root = ""
        self.version: str | None = None
        self.answered, self.faults = 0, Counter[str]()

    @property
    def like_vllm(self) -> bool:
        """It takes vLLM's fields beside OpenAI's."""
        return self.version is not None

    async def identify(self) -> None:
        """Asks which models it serves, and which of them is the target. EndpointError if that is
        not the target."""
        try:
            cards = await self.client.models()
        except RequestFailed as failure:
            if failure.reason in ("http_401", "http_403"):
                raise EndpointError(
                    f"{failure}; name the variable that holds its key in api_key_env"
                ) from None
            raise
        card = self._card_of_target(cards)
        self.served, self.root = str(card["id"]), str(card.get("root") or card["id"])
        limit = card.get("max_model_len")
        if isinstance(limit, int) and limit < self.facts.max_model_len:
            raise EndpointError(
                f"{self.url}: serves up to {limit} tokens, prompts and responses have up to"
                f" {self.facts.max_model_len}; start it with --max-model-len"
                f" {self.facts.max_model_len}, or lower data.max_length"
            )
        try:
            self.version = await self.client.version()
        except RequestFailed:
            self.version = None

    def _card_of_target(self, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
        wanted, names = self.section.model, ", ".join(str(card["id"]) for card in cards)
        if wanted is not None:
            fitting = [card for card in cards if card["id"] == wanted]
            if not fitting:
                raise EndpointError(
                    f"{self.url}: serves {names}, and not {wanted} (regenerate.endpoints: model)"
                )
            return fitting[0]
        fitting = [
            card for card in cards if self.facts.name in (card["id"], card.get("root"))
        ] or list(cards)
        if len(fitting) != 1:
            how = f"regenerate.endpoints: [{{url: {self.url}, model: …}}]"
            raise EndpointError(
                f"{self.url}: serves {names}; which of them is {self.facts.name}? Name it: {how}"
            )
        return fitting[0]

    async def require_same_tokenizer(self) -> None:
        """EndpointError if the server tokenizes a probe differently. Servers without /tokenize
        pass."""
        body = {"model": self.served, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            theirs = (await self.client.post("/tokenize", body, QUERY_TIMEOUT_S)).get("tokens")
        except RequestFailed:
            return
        ours = list(
            self.facts.tokenizer(PROBE_TEXT, add_special_tokens=False, verbose=False)["input_ids"]
        )
        if isinstance(theirs, list) and theirs != ours:
            raise EndpointError(
                f"{self.url}: reads {PROBE_TEXT!r} as {theirs[:12]}…, the target's tokenizer as"
                f" {ours[:12]}…; serve the recipe's target with its own tokenizer"
            )

    def record(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self.served,
            "root": self.root,
            "version": self.version,
            "written": self.answered,
            "faults": dict(sorted(self.faults.items())),
        }

    # ------------------------------------------------------------------ responses

    async def write(self, ask: Ask) -> Answer:
        fields = sampling_fields(ask.params, self.facts.end)
        if self.exchange == "tokens":
            body = {"prompt": list(ask.prompt_ids), "return_token_ids": True}
            tree = await self.client.post(
                "/v1/completions", {"model": self.served, **body, **fields}
            )
            return self._from_tokens(ask, _choice(tree))
        body = self._text_prompt(ask)
        del fields["ignore_eos"], fields["stop_token_ids"]  # the server knows how its model ends
        if self.like_vllm:  # with the token that ended it, which is one of several
            fields |= {"skip_special_tokens": False, "include_stop_str_in_output": True}
        else:
            fields = {name: value for name, value in fields.items() if name in OPENAI_FIELDS}
        route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        tree = await self.client.post(route, {"model": self.served, **body, **fields})
        return self._from_text(ask, _choice(tree), tree.get("usage") or {})

    def _from_tokens(self, ask: Ask, choice: Mapping[str, Any]) -> Answer:
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if ids is None:
            raise RequestFailed("no_token_ids", "the answer has no token_ids")
        if not isinstance(ids, list) or not all(
            type(i) is int and 0 <= i < self.facts.vocab_size for i in ids
        ):
            raise RequestFailed(
                "not_an_answer", f"tokens beyond 0..{self.facts.vocab_size - 1}, the target's"
            )
        if choice.get("prompt_token_ids") not in (None, list(ask.prompt_ids)):
            raise RequestFailed("not_an_answer", "the server read another prompt than it was sent")
        ended = bool(ids) and ids[-1] in self.facts.end
        if ended != (reason == "stop") or len(ids) > (ask.params.max_tokens or 0):
            raise RequestFailed("not_an_answer", f"{len(ids)} tokens that end with {reason!r}")
        return Answer(tuple(ids))

    def _text_prompt(self, ask: Ask) -> dict[str, Any]:
        if ask.example.prompt is not None:
            return {"prompt": ask.example.prompt}
        messages = [dict(message) for message in ask.example.messages]
        if messages[-1]["role"] == "assistant":  # the response that is to be replaced
            messages.pop()
        kwargs = dict(self.facts.template_kwargs)
        return {"messages": messages} | ({"chat_template_kwargs": kwargs} if kwargs else {})

    def _from_text(self, ask: Ask, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> Answer:
        """Tokenizes a response. It is proved if its tokens decode to the same text and are as many
        as the server counted, after a prompt of as many tokens as ours. Other servers than vLLM
        hide the token that ended it: the tokenizer's is taken, which is certain if the target has
        no other."""
        text = choice["text"] if "text" in choice else (choice.get("message") or {}).get("content")
        if not isinstance(text, str):
            raise RequestFailed("not_an_answer", "the answer has no text")
        tokenizer, stopped = self.facts.tokenizer, choice.get("finish_reason") == "stop"
        ids = (
            list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            if text
            else []
        )
        same = (
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            == text
        )
        if stopped and not self.like_vllm and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
            same = same and len(self.facts.end) == 1
        ended = bool(ids) and ids[-1] in self.facts.end
        counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        return Answer(
            tuple(ids),
            proved=same and ended == stopped and counted == (len(ask.prompt_ids), len(ids)),
        )


def _choice(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of an answer."""
    choices = tree.get("choices")
    if not isinstance(choices, Sequence) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestFailed("not_an_answer", f"expected one choice, got {str(choices)[:300]}")
    if (reason := choices[0].get("finish_reason")) not in ("stop", "length"):
        raise RequestFailed(
            "cut_off", f"it ended with {reason!r}"
        )  # a server that stops ends requests with "abort"
    return choices[0]


# ------------------------------------------------------------------ agreement with the target

Tokens = tuple[int, ...] | None  # None: the server rejects this probe


class AgreementCheck:
    """Compares the greedy tokens of endpoints with those of the target loaded here, or of the first
    endpoint.

    asks        wanted responses, whose prompts are the probes
    llm         the target, if it is loaded here
    agreement   result: the ratio of equal tokens by the endpoint's URL; None: compared with nothing
    """

    def __init__(self, asks: Sequence[Ask], section: RegenerateSection, llm: LLM | None) -> None:
        self.asks, self.section, self.llm = (
            [_greedy(ask, PROBE_TOKENS) for ask in asks[:PROBES]],
            section,
            llm,
        )
        self.agreement: dict[str, float | None] = {}
        self._reference: list[Tokens] | None = None
        self._reference_name, self._unproved = "the target loaded here", 0

    async def __call__(self, endpoint: Endpoint) -> None:
        """EndpointError if it does not serve the target; RequestFailed if it does not answer."""
        await endpoint.identify()
        if self.section.top_k and endpoint.exchange == "text" and not endpoint.like_vllm:
            raise EndpointError(
                f"{endpoint.url}: is no server that knows top_k; set regenerate.top_k: 0"
            )
        await endpoint.require_same_tokenizer()
        if self._reference is None and self.llm is not None:
            prompts = [{"prompt_token_ids": list(ask.prompt_ids)} for ask in self.asks]
            outputs = self.llm.generate(prompts, [ask.params for ask in self.asks], use_tqdm=False)
            self._reference = [tuple(output.outputs[0].token_ids) for output in outputs]
        if self._reference is None:
            self._reference, self._reference_name = (
                await self._write(endpoint, self.asks),
                endpoint.url,
            )
            self.agreement[endpoint.url] = None
            return
        measure = self._by_prefix if endpoint.exchange == "tokens" else self._by_text
        self.agreement[endpoint.url] = agreement = await measure(endpoint, self._reference)
        if agreement < self.section.min_agreement:
            raise EndpointError(
                f"{endpoint.url}: serves {endpoint.served} ({endpoint.root}), which agrees with"
                f" {self._reference_name} in {agreement:.0%} of greedy tokens, expected"
                f" {self.section.min_agreement:.0%}: another model, revision or chat template, or a"
                " coarser precision; serve the recipe's target, or lower regenerate.min_agreement"
            )

    async def _by_prefix(self, endpoint: Endpoint, reference: Sequence[Tokens]) -> float:
        """Compares each token of the reference, written after those before it."""
        asks, expected = [], []
        for ask, tokens in zip(self.asks, reference, strict=True):
            for n, token in enumerate(tokens or ()):
                asks.append(
                    replace(_greedy(ask, 1), prompt_ids=(*ask.prompt_ids, *(tokens or ())[:n]))
                )
                expected.append(token)
        written = await self._write(endpoint, asks)
        same = [
            token in tokens
            for token, tokens in zip(expected, written, strict=True)
            if tokens is not None
        ]
        return sum(same) / max(len(same), 1)

    async def _by_text(self, endpoint: Endpoint, reference: Sequence[Tokens]) -> float:
        """Compares texts up to the first token that differs. Only their first half counts, because
        rounding makes greedy texts diverge sooner or later."""
        same = total = 0
        for ours, theirs in zip(reference, await self._write(endpoint, self.asks), strict=True):
            if ours is not None and theirs is not None:
                ours = ours[: PROBE_TOKENS // 2]
                same += next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    len(ours),
                )
                total += len(ours)
        return same / max(total, 1)

    async def _write(self, endpoint: Endpoint, asks: Sequence[Ask]) -> list[Tokens]:
        limit = asyncio.Semaphore(endpoint.section.max_concurrency)
        rejection: RequestFailed | None = None

        async def attempt(ask: Ask) -> Answer:
            async with limit:
                return await endpoint.write(ask)

        async def write(ask: Ask) -> Tokens:
            nonlocal rejection
            try:
                answer = await with_retries(lambda: attempt(ask), PROBE_ATTEMPTS)
            except RequestFailed as failure:
                if failure.reason == "no_token_ids":
                    raise EndpointError(
                        f"{endpoint.url}: its answers have no token_ids, so what it writes is not"
                        " known as tokens; serve with `draftsmith serve` or a vLLM that knows"
                        " return_token_ids, or set regenerate.exchange: text"
                    ) from None
                if failure.retryable:
                    raise
                rejection = failure
                return None
            self._require_proofs(endpoint, answer)
            return answer.token_ids

        written = await asyncio.gather(*(write(ask) for ask in asks), return_exceptions=True)
        for result in written:
            if isinstance(result, BaseException):
                raise result
        if written and all(tokens is None for tokens in written):
            hint = "; a server that takes no token ids needs regenerate.exchange: text"
            raise EndpointError(
                f"{endpoint.url}: rejects every request:"
                f" {rejection}{hint if endpoint.exchange == 'tokens' else ''}"
            )
        return [tokens for tokens in written if not isinstance(tokens, BaseException)]

    def _require_proofs(self, endpoint: Endpoint, answer: Answer) -> None:
        self._unproved += not answer.proved
        if self._unproved == PROBES and self.section.unproved_tokens == "drop":
            raise EndpointError(
                f"{endpoint.url}: not one of {PROBES} responses could be proved to be the tokens"
                " that were written: it counts no tokens (usage), or its chat template differs"
                " from ours; use exchange: tokens, mend the template, or set"
                " regenerate.unproved_tokens: keep"
            )


def _greedy(ask: Ask, tokens: int) -> Ask:
    return replace(
        ask,
        params=SamplingParams(
            temperature=0, max_tokens=min(tokens, ask.params.max_tokens or tokens)
        ),
    )
