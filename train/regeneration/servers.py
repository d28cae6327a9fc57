"""Responses written by servers that speak OpenAI's protocol, such as vLLM and `draftsmith serve`.

Prompts and responses are exchanged as token ids where a server knows vLLM's `return_token_ids`;
elsewhere as text, which is tokenised again. The client of the `openai` package repeats a request
that fails. A server that goes on failing is dropped, and the run stops when none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import openai

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.vllm_bridge.vllm_engine import sampling_fields
from draftsmith.train.recipe.data_sections import EndpointSection
from draftsmith.train.recipe.endpoints import (
    REFUSALS,
    EndpointError,
    answers_of,
    api_key,
    base_url,
    card_of_target,
    failure,
    require_length,
)
from draftsmith.train.regeneration.conversations import Ask, ConversationRules
from draftsmith.train.regeneration.writers import REPORT_EVERY_S, UnreadStates, Written

RETRIES = 8  # of a request at one server, after pauses that double: about 40 s
# A response may take TIMEOUT_S seconds, or its tokens at SLOWEST tokens/s, if that is longer.
TIMEOUT_S = 600.0
SLOWEST = 5.0
PROBES = 8  # prompts that are continued greedily
PROBE_TOKENS = 8  # by so many tokens each
MIN_AGREEMENT = 0.7  # of these tokens stand before the first that differs from the reference's
PROBE_TEXT = "def f(x):\n    return x**2  # 3.14, naïve – \u4f60\u597d\n"


class Server:
    """One server, and what it says of itself: `model` is the target's name there, `engine` what
    runs it, and `by_tokens` tells whether it exchanges token ids. Known once `check` returned."""

    def __init__(
        self, section: EndpointSection, rules: ConversationRules, unread: UnreadStates | None
    ) -> None:
        self.section = section
        self.facts = rules.facts
        self.tokenizer = rules.tokenizer
        self._unread = unread
        self.url = base_url(section)
        self.client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=api_key(section, "regenerate.endpoints"),
            timeout=max(TIMEOUT_S, rules.section.max_new_tokens / SLOWEST),
            max_retries=RETRIES,
        )
        self.model = ""
        self.engine = ""
        self.by_tokens = True
        self.in_flight = 0
        self._slots = asyncio.Semaphore(section.max_concurrency)

    async def check(self) -> None:
        """EndpointError unless it serves the target, with its tokenizer and room for its texts."""
        with answers_of(self.url):
            cards = list((await self.client.models.list()).data)
        card = card_of_target(cards, self.facts.name, self.url)
        self.model = card.id
        self.engine = card.owned_by
        require_length(card, self.facts.max_model_len, self.url)
        try:
            choice = await self._complete(PROBE_TEXT, {"max_tokens": 1, "temperature": 0})
        except (openai.NotFoundError, openai.BadRequestError):  # it may know chats alone
            self.by_tokens = False
            return
        self.by_tokens = getattr(choice, "token_ids", None) is not None
        tokenize = self.tokenizer.tokenizer
        ids = [list(tokenize(PROBE_TEXT, add_special_tokens=i).input_ids) for i in (True, False)]
        if getattr(choice, "prompt_token_ids", None) not in (None, *ids):
            raise EndpointError(
                f"reads {PROBE_TEXT!r} as {choice.prompt_token_ids[:12]}…, the target's tokenizer"
                f" as {ids[0][:12]}…; serve the recipe's target with its own tokenizer",
                where=self.url,
            )

    async def compare(self, asks: Sequence[Ask], reference: Sequence[Sequence[int]]) -> None:
        """EndpointError if it continues prompts otherwise than the target: what counts is the share
        of greedy tokens before the first that differs."""
        answers = await asyncio.gather(*map(self.write, asks))
        same = 0
        total = sum(map(len, reference))
        for pairs in map(zip, answers, reference):
            same += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if same < MIN_AGREEMENT * total:
            raise EndpointError(
                f"{self.model} writes {same} of {total} greedy tokens as the target does, expected"
                f" {MIN_AGREEMENT:.0%}: another model or revision, or a coarser precision",
                where=self.url,
            )

    async def write(self, ask: Ask) -> tuple[int, ...]:
        """The response's tokens. openai.APIError or EndpointError: there is none."""
        self.in_flight += 1
        try:
            async with self._slots:
                return await (self._by_tokens(ask) if self.by_tokens else self._by_text(ask))
        finally:
            self.in_flight -= 1

    async def _complete(self, prompt: str | list[int], fields: dict[str, Any]) -> Any:
        """The one choice of an answer of /v1/completions."""
        more = {"return_token_ids": True, **fields}
        answer = await self.client.completions.create(
            model=self.model, prompt=prompt, extra_body=more, extra_headers=self._headers()
        )
        return await self._choice(answer)

    def _headers(self) -> dict[str, str]:
        """Of the next request: vLLM names what it leaves by it."""
        return {} if self._unread is None else {"X-Request-Id": self._unread.request_name()}

    async def _choice(self, answer: Any) -> Any:
        """The one choice of an answer. States that came with it are not needed."""
        params = getattr(answer, "kv_transfer_params", None)
        if params and self._unread is not None:
            await asyncio.to_thread(self._unread.discard, params)
        with answers_of(self.url):
            reasons = [choice.finish_reason for choice in answer.choices or ()]
        if reasons not in (["stop"], ["length"]):  # a server that stops says "abort"
            raise EndpointError(f"expected a whole response, got {reasons}", where=self.url)
        return answer.choices[0]

    async def _by_tokens(self, ask: Ask) -> tuple[int, ...]:
        fields = sampling_fields(ask.params, self.facts.end)
        choice = await self._complete(list(ask.prompt_ids), fields)
        ids = getattr(choice, "token_ids", None)
        known = range(self.facts.vocab_size)
        if not isinstance(ids, list) or not all(i in known for i in ids):
            raise EndpointError(f"expected token_ids, got {str(ids)[:80]}", where=self.url)
        return tuple(ids)

    async def _by_text(self, ask: Ask) -> tuple[int, ...]:
        params = ask.params
        tokenizer = self.tokenizer.tokenizer
        names = ("max_tokens", "temperature", "top_p", "seed")
        fields: dict[str, Any] = {name: getattr(params, name) for name in names}
        if ask.example.prompt is not None:
            choice = await self._complete(ask.example.prompt, fields)
            text = choice.text
        else:
            messages = [dict(message) for message in ask.example.messages]
            if messages[-1]["role"] == "assistant":  # the response that is to be replaced
                messages.pop()
            if kwargs := self.tokenizer.template_kwargs:
                fields["chat_template_kwargs"] = kwargs
            create: Any = self.client.chat.completions.create
            choice = await self._choice(
                await create(
                    model=self.model,
                    messages=messages,
                    extra_body=fields,
                    extra_headers=self._headers(),
                )
            )
            text = choice.message.content or ""
        ids = list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
        stopped = choice.finish_reason == "stop" and tokenizer.eos_token_id is not None
        return (*ids, tokenizer.eos_token_id) if stopped else tuple(ids)


class ServerWriter:
    """The servers of a recipe. `llm`: the target, if it is loaded here, to compare them with.
    `unread`: the hidden states that they leave of responses; what an earlier start of the run has
    left is removed at once."""

    def __init__(
        self,
        rules: ConversationRules,
        llm: LLM | None,
        say: Callable[[str], None],
        unread: UnreadStates | None = None,
    ) -> None:
        self.section = rules.section
        self.llm = llm
        self.say = say
        self._unread = unread
        self.servers = [Server(endpoint, rules, unread) for endpoint in self.section.endpoints]
        self.capacity = sum(endpoint.max_concurrency for endpoint in self.section.endpoints)
        self._clients = [server.client for server in self.servers]
        self._runner = asyncio.Runner()
        self._last_failure = ""
        self._new: list[Ask] = []
        self._tasks: set[asyncio.Task[Written]] = set()
        self._checked = False
        self._refused = False
        if unread is not None:
            unread.remove_left_over()

    @property
    def tokens_under_way(self) -> int:
        """Always 0: a server tells of whole responses."""
        return 0  # a server tells of whole responses

    async def _check(self, probes: Sequence[Ask]) -> None:
        """Checks all servers, and their greedy tokens against the target's, or the first one's."""
        for server in list(self.servers):
            try:
                await server.check()
            except openai.APIError as error:
                self._drop(server, error)
        self._require_server()
        for server in self.servers:
            self._check_abilities(server)
        params = SamplingParams(temperature=0, max_tokens=PROBE_TOKENS)
        await self._compare([replace(ask, params=params) for ask in probes], params)

    def _check_abilities(self, server: Server) -> None:
        """EndpointError: the recipe wants of a server without token ids what it may not know."""
        if server.by_tokens:
            return
        if self.section.top_k:
            raise EndpointError("may not know top_k; set regenerate.top_k: 0", where=server.url)
        self.say(
            f"      warning: {server.url} returns no token ids (vLLM does): its texts, by"
            " its own chat template, are tokenised again, perhaps not as it wrote them"
        )

    async def _compare(self, asks: Sequence[Ask], params: SamplingParams) -> None:
        """Compares the servers' greedy tokens with the target's, or else with those of the first
        server that answers. EndpointError: they are another model's."""
        reference: list[tuple[int, ...]] | None = None
        if self.llm is not None:
            prompts = [{"prompt_token_ids": list(ask.prompt_ids)} for ask in asks]
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            reference = [tuple(output.outputs[0].token_ids) for output in outputs]
        for server in list(self.servers):
            try:
                if reference is None:
                    reference = [await server.write(ask) for ask in asks]
                else:
                    await server.compare(asks, reference)
            except openai.APIError as error:
                if getattr(error, "status_code", None) not in REFUSALS:
                    self._drop(server, error)

    def begin(self, ask: Ask) -> None:
        """Takes a response to be written; it is sent when `collect` is called next."""
        self._new.append(ask)

    async def _write(self, ask: Ask) -> Written:
        while True:
            self._require_server()
            self.servers.append(self.servers.pop(0))  # in turn, where loads are equal
            server = min(self.servers, key=lambda s: s.in_flight / s.section.max_concurrency)
            if ask.example.tools and not server.by_tokens:
                return Written(ask, None, reason="a server without token ids takes no tools")
            try:
                return Written(ask, await server.write(ask), server.engine)
            except (openai.APIError, EndpointError) as error:
                status = getattr(error, "status_code", None)
                if status not in REFUSALS:
                    self._drop(server, error)
                    continue
                if not self._refused:
                    self.say(f"      {server.url} refuses a prompt: {str(error)[:300]}")
                self._refused = True
                return Written(ask, None, reason=f"a server refused it (HTTP {status})")

    def _drop(self, server: Server, error: Exception) -> None:
        """Goes on without a server."""
        if server in self.servers:
            self.servers.remove(server)
            self._last_failure = failure(server.url, error)
            self.say(f"      warning: a server is left out from now on: {self._last_failure}")

    def _require_server(self) -> None:
        if not self.servers:
            raise EndpointError(
                f"no server is left; the last was {self._last_failure}. The same command goes on",
                where="regenerate.endpoints",
            )

    def collect(self) -> list[Written]:
        """The responses that have ended since the last call; waits up to REPORT_EVERY_S seconds for
        one. EndpointError: no server is left."""
        return self._runner.run(self._collect())

    async def _collect(self) -> list[Written]:
        if not self._checked:
            await self._check(self._new[:PROBES])
            self._checked = True
        self._tasks |= {asyncio.create_task(self._write(ask)) for ask in self._new}
        self._new.clear()
        done, _ = await asyncio.wait(
            self._tasks, timeout=REPORT_EVERY_S, return_when=asyncio.FIRST_COMPLETED
        )
        whole = {task for task in done if task.exception() is None}
        self._tasks -= whole
        for task in done - whole if not whole else ():  # once the others have been collected
            task.result()
        return [task.result() for task in whole]

    def close(self) -> None:
        """Ends what is under way, closes the connections, and removes what nobody reads."""

        async def close() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for client in self._clients:
                await client.close()

        self._runner.run(close())
        self._runner.close()
        if self._unread is not None:
            self._unread.remove_left_over()
