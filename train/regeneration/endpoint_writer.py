"""Conversations played at endpoints, many at a time, each response on disk before the next of its conversation is
asked for; and those that are not to be had, listed.

Endpoints are not spoken to where nothing is missing. Knows no HTTP (`train.regeneration.endpoint_client`) and no turns'
text (`train.regeneration.conversations`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inference import LLM
from speculators.errors import ConfigError, DataError, DraftsmithError
from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Account, Ask, Conversation
from train.regeneration.endpoint_check import PROBES, Check
from train.regeneration.endpoint_client import Endpoint, TargetFacts
from train.regeneration.endpoint_pool import EndpointPool, GaveUp
from train.regeneration.store import ResponseStore

UNPROVED = "unproved_tokens"
SURPLUS = 100  # failures beyond what is allowed, after which it is no use to go on
LOOK_BACK = 10  # seconds that the rate in the live line is a mean over


class FailureList:
    """What failed for good, a JSON line each; rewritten by every run. `retry`: earlier ones are asked for again."""

    def __init__(self, path: Path, *, retry: bool = False) -> None:
        self.path, self.reasons = path, dict[str, str]()
        self._retry, self._begun = retry, False

    def earlier(self, key: str, section: RegenerateSection, store: ResponseStore) -> str | None:
        """The reason why an earlier run went without it; None where it is to be asked for."""
        return None if self._retry or section.max_failures == 0 else store.given_up.get(key)

    def add(self, ask: Ask, failure: GaveUp) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {
            "origin": ask.example.origin, "conversation": ask.number, "turn": ask.turn, "key": ask.key,
            "reason": failure.reason, "attempts": failure.attempts, "endpoint": failure.url, "detail": failure.detail,
        }  # fmt: skip
        with self.path.open("a" if self._begun else "w", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._begun, self.reasons[ask.key] = True, failure.reason

    def stop_early(self, account: Account, section: RegenerateSection) -> None:
        """DataError once there is no hope."""
        if account.failed.total() > section.max_failures * account.wanted + SURPLUS:
            raise self._error(account, section)

    def judge(self, account: Account, section: RegenerateSection, store: ResponseStore) -> None:
        """At the end: DataError for more than are allowed; the others are remembered as gone without."""
        if account.failed.total() > section.max_failures * account.wanted:
            raise self._error(account, section)
        store.give_up(self.reasons)
        if not self._begun and not account.failed:
            self.path.unlink(missing_ok=True)

    def _error(self, account: Account, section: RegenerateSection) -> DataError:
        return DataError(
            f"regenerate: {account}; {section.max_failures:.2%} may fail (regenerate.max_failures). What was written "
            f"is kept and the failures are listed in {self.path}; the same command asks for them again"
        )


def write_there(
    conversations: Sequence[Conversation],
    store: ResponseStore,
    account: Account,
    section: RegenerateSection,
    facts: TargetFacts,
    llm: LLM | None,
    failures: FailureList,
    tell: Callable[[str], None],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Writes what is missing; returns what the endpoints said of themselves, and how much each of them answered."""
    if section.exchange == "text" and any(conversation.example.tools for conversation in conversations):
        raise ConfigError("regenerate.exchange: text cannot hand on the tools of conversations; use tokens")
    return asyncio.run(_Session(conversations, store, account, section, facts, llm, failures, tell, say).run())


class _Session:
    def __init__(
        self, conversations: Sequence[Conversation], store: ResponseStore, account: Account,
        section: RegenerateSection, facts: TargetFacts, llm: LLM | None, failures: FailureList,
        tell: Callable[[str], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.conversations, self.store, self.account, self.section = conversations, store, account, section
        self.facts, self.llm, self.failures, self.tell, self.say = facts, llm, failures, tell, say
        self.pool: EndpointPool | None = None
        self.check: Check | None = None
        self._opening = asyncio.Lock()
        self._under_way: dict[str, asyncio.Future[None]] = {}
        self._written: deque[tuple[float, int]] = deque(maxlen=LOOK_BACK + 1)  # (time, tokens) once a second

    async def run(self) -> list[dict[str, Any]]:
        left = iter(self.conversations)
        places = 2 * sum(each.max_concurrency for each in self.section.endpoints)  # some of them pause
        ticking = asyncio.create_task(self._tick())
        errors: Sequence[BaseException] = ()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(places, len(self.conversations))):
                    group.create_task(self._work(left))
        except* DraftsmithError as found:
            errors = found.exceptions
        finally:
            ticking.cancel()
            if self.pool is not None:
                await self.pool.close()
        if errors:
            raise errors[0]
        return self._endpoints()

    async def _work(self, left: Iterator[Conversation]) -> None:
        for conversation in left:  # shared: each is played by one
            while (ask := conversation.ask()) is not None:
                await self._settle(conversation, ask)
                self.tell(self._note())
            await asyncio.sleep(0)

    async def _settle(self, conversation: Conversation, ask: Ask) -> None:
        account = self.account
        while (under_way := self._under_way.get(ask.key)) is not None:
            await asyncio.wait([under_way])
        if (ids := self.store.known.get(ask.key)) is not None:
            account.reused += 1
            conversation.tell(ids)
            return
        if (reason := self.failures.earlier(ask.key, self.section, self.store)) is not None:
            account.failed[reason] += 1
            conversation.fail()
            return
        self._under_way[ask.key] = asyncio.get_running_loop().create_future()
        try:
            ids = await self._asked(ask)
        except GaveUp as failure:
            account.failed[failure.reason] += 1
            self.failures.add(ask, failure)
            self.failures.stop_early(account, self.section)
            conversation.fail()
        else:
            self.store.add(ask.key, ids)
            account.written += 1
            account.tokens += len(ids)
            conversation.tell(ids)
        finally:
            self._under_way.pop(ask.key).set_result(None)

    async def _asked(self, ask: Ask) -> list[int]:
        async with self._opening:
            if self.pool is None:
                self.pool = await self._opened()
        answer = await self.pool.write(ask)
        if not answer.proved:
            self.account.unproved += 1
            if self.section.unproved_tokens == "drop":
                raise GaveUp(UNPROVED, "tokens and prompt could not be proved to be those that were written", 1, "")
        return list(answer.token_ids)

    async def _opened(self) -> EndpointPool:
        section = self.section
        # Of all conversations, played or not: those that are missing may be what no server answers.
        some = self.conversations[:: max(len(self.conversations) // PROBES, 1)]
        self.check = Check([ask for each in some if (ask := each.first or each.ask()) is not None], section, self.llm)
        endpoints = [
            Endpoint(each, self.facts, section.request_timeout_s, section.exchange) for each in section.endpoints
        ]
        pool = EndpointPool(endpoints, section, self.account, self.check, self.say)
        try:
            await pool.open()
        except BaseException:
            await pool.close()
            raise
        return pool

    def _endpoints(self) -> list[dict[str, Any]]:
        if self.pool is None or self.check is None:
            return []
        endpoints = [member.endpoint for member in self.pool.members]
        return [
            {
                **each.facts_found(),
                "agreement": self.check.agreement.get(each.url),
                "written": each.answered,
                "faults": dict(sorted(each.faults.items())),
            }
            for each in endpoints
        ]

    # ------------------------------------------------------------------ the live line

    async def _tick(self) -> None:
        while True:
            self._written.append((time.monotonic(), self.account.tokens))
            self.tell(self._note())
            await asyncio.sleep(1)

    def _note(self) -> str:
        if self.pool is None or not self._written:
            return ""
        (began, before), now = self._written[0], time.monotonic()
        rate = (self.account.tokens - before) / (now - began) if now > began else 0.0
        parts = [f"{rate:,.0f} tokens/s", f"{self.pool.in_flight} in flight"]
        if self.account.retries:
            parts.append(f"{self.account.retries.total()} retries")
        if self.account.failed:
            parts.append(f"{self.account.failed.total()} failed")
        if self.pool.available < len(self.pool.members):
            parts.append(f"{self.pool.available} of {len(self.pool.members)} endpoints")
        return ", ".join(parts)
