"""Conversations written at endpoints, many at a time. Each response is on disk before the next of
its conversation is asked for. The endpoints are contacted only if a response is missing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inference import LLM
from speculators.errors import ConfigError, DraftsmithError
from train.regeneration.conversations import Ask, Conversation
from train.regeneration.endpoint import PROBES, AgreementCheck, Endpoint, TargetFacts
from train.regeneration.endpoint_pool import EndpointPool
from train.regeneration.job import GaveUp, Job

RATE_WINDOW_S = 10  # of the mean tokens/s in the progress line


def write_at_endpoints(
    job: Job, facts: TargetFacts, llm: LLM | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Writes the missing responses. Returns a record of every endpoint; empty if none was
    contacted."""
    if job.section.exchange == "text" and any(
        conversation.example.tools for conversation in job.conversations
    ):
        raise ConfigError(
            "regenerate.exchange: text cannot hand on the tools of conversations; use tokens"
        )
    return asyncio.run(_Session(job, facts, llm, say).run())


class _Session:
    def __init__(
        self, job: Job, facts: TargetFacts, llm: LLM | None, say: Callable[[str], None]
    ) -> None:
        self.job, self.facts, self.llm, self.say = job, facts, llm, say
        self.pool: EndpointPool | None = None
        self.agreement: dict[str, float | None] = {}
        self._opening = asyncio.Lock()
        self._in_progress: dict[str, asyncio.Event] = {}  # by key
        self._written: deque[tuple[float, int]] = deque(
            maxlen=RATE_WINDOW_S + 1
        )  # (time, tokens) once a second

    async def run(self) -> list[dict[str, Any]]:
        remaining = iter(self.job.conversations)
        workers = 2 * sum(
            endpoint.max_concurrency for endpoint in self.job.section.endpoints
        )  # some of them pause
        clock = asyncio.create_task(self._every_second())
        errors: Sequence[BaseException] = ()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(workers, len(self.job.conversations))):
                    group.create_task(self._work(remaining))
        except* DraftsmithError as raised:
            errors = raised.exceptions
        finally:
            clock.cancel()
            if self.pool is not None:
                await self.pool.close()
        if errors:
            raise errors[0]
        endpoints = [member.endpoint for member in self.pool.members] if self.pool else []
        return [
            endpoint.record() | {"agreement": self.agreement.get(endpoint.url)}
            for endpoint in endpoints
        ]

    async def _work(self, remaining: Iterator[Conversation]) -> None:
        for conversation in remaining:  # shared by the workers
            while (ask := conversation.ask()) is not None:
                await self._settle(conversation, ask)
                self.job.report(self._note())
            await asyncio.sleep(0)

    async def _settle(self, conversation: Conversation, ask: Ask) -> None:
        while (event := self._in_progress.get(ask.key)) is not None:
            await event.wait()
        if self.job.settle_known(conversation, ask):
            return
        self._in_progress[ask.key] = asyncio.Event()
        try:
            token_ids = await self._write(ask)
            self.job.store.add(ask.key, token_ids)
            self.job.account.written += 1
            self.job.account.tokens += len(token_ids)
            conversation.add_response(token_ids)
        except GaveUp as failure:
            self.job.fail(conversation, ask, failure)
        finally:
            self._in_progress.pop(ask.key).set()

    async def _write(self, ask: Ask) -> list[int]:
        async with self._opening:
            if self.pool is None:
                self.pool = await self._open_pool()
        answer = await self.pool.write(ask)
        if not answer.proved:
            self.job.account.unproved += 1
            if self.job.section.unproved_tokens == "drop":
                raise GaveUp(
                    "unproved_tokens",
                    "tokens and prompt could not be proved to be those written",
                    1,
                    "",
                )
        return list(answer.token_ids)

    async def _open_pool(self) -> EndpointPool:
        section, conversations = self.job.section, self.job.conversations
        # Probes are spread over all conversations: those that are missing may be the ones that no
        # server answers.
        probes = [
            c.first or c.ask() for c in conversations[:: max(len(conversations) // PROBES, 1)]
        ]
        check = AgreementCheck([ask for ask in probes if ask is not None], section, self.llm)
        self.agreement = check.agreement
        endpoints = [Endpoint(endpoint, section, self.facts) for endpoint in section.endpoints]
        pool = EndpointPool(endpoints, section, self.job.account, check, self.say)
        try:
            await pool.open()
        except BaseException:
            await pool.close()
            raise
        return pool

    # ------------------------------------------------------------------ the progress line

    async def _every_second(self) -> None:
        while True:
            self._written.append((time.monotonic(), self.job.account.tokens))
            self.job.report(self._note())
            await asyncio.sleep(1)

    def _note(self) -> str:
        if self.pool is None or not self._written:
            return ""
        account, (start, tokens) = self.job.account, self._written[0]
        rate = (account.tokens - tokens) / max(time.monotonic() - start, 1e-3)
        parts = [f"{rate:,.0f} tokens/s", f"{self.pool.in_flight} in flight"]
        if account.retries:
            parts.append(f"{account.retries.total()} retries")
        if account.failed:
            parts.append(f"{account.failed.total()} failed")
        if self.pool.available < len(self.pool.members):
            parts.append(f"{self.pool.available} of {len(self.pool.members)} endpoints")
        return ", ".join(parts)
