"""Requests distributed over several endpoints, with retries and failover.

A request goes to the endpoint with the lowest load. A failed one is sent again after a pause that
doubles, to another endpoint if there is one. An endpoint that fails several times in a row rests:
it gets no requests until it answers `identify` again, so that a restart costs no request its
attempts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

from inference.http_client import RequestFailed, pause_before_retry, with_retries
from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Account, Ask
from train.regeneration.endpoint import Answer, Endpoint, EndpointError
from train.regeneration.job import GaveUp

FAULTS_IN_ROW = 4  # after which an endpoint rests
MAX_RETRY_AFTER_S = 300.0


class _Member:
    """An endpoint's state in the pool. `examined`: its identity was checked; `excluded`: it serves
    another model."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.max_concurrency = endpoint, endpoint.section.max_concurrency
        self.in_flight = self.faults_in_row = self.rests = 0
        self.not_before = 0.0  # monotonic
        self.resting: asyncio.Task[None] | None = None
        self.examined = self.excluded = False

    @property
    def available(self) -> bool:
        return self.examined and not self.excluded and self.resting is None


class EndpointPool:
    """`examine` checks an endpoint before its first request. It raises RequestFailed or
    EndpointError."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        section: RegenerateSection,
        account: Account,
        examine: Callable[[Endpoint], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self.members = [_Member(endpoint) for endpoint in endpoints]
        self.section, self.account, self._examine, self._say = section, account, examine, say
        self._changed = asyncio.Condition()
        self._last_success = time.monotonic()  # of any endpoint

    @property
    def in_flight(self) -> int:
        return sum(member.in_flight for member in self.members)

    @property
    def available(self) -> int:
        return sum(member.available for member in self.members)

    async def open(self) -> None:
        """Examines all endpoints. Those that do not answer join later; EndpointError if none
        answers, or if one does not serve the target."""
        failures = []
        for member in self.members:  # one after another: others are compared with the first
            try:
                await with_retries(partial(self._examine, member.endpoint), FAULTS_IN_ROW)
                member.examined = True
            except RequestFailed as failure:
                failures.append(f"{member.endpoint.url}: {failure}")
        if len(failures) == len(self.members):
            what = (
                "regenerate.endpoints: none of them answers; start them, or correct their addresses"
            )
            raise EndpointError("\n  ".join([what, *failures]))
        for failure_text in failures:
            self._say(f"      not there yet, and waited for: {failure_text}")
        for member in self.members:
            if not member.examined:
                self._rest(member)
        self._last_success = time.monotonic()

    async def close(self) -> None:
        resting = [member.resting for member in self.members if member.resting is not None]
        for task in resting:
            task.cancel()
        await asyncio.gather(*resting, return_exceptions=True)
        for member in self.members:
            await member.endpoint.client.close()

    async def write(self, ask: Ask) -> Answer:
        """The response, from any endpoint. GaveUp: no endpoint writes it; EndpointError: no
        endpoint is left."""
        last: _Member | None = None
        for attempt in count(1):
            member = await self._acquire(avoid=last)
            try:
                answer = await member.endpoint.write(ask)
                self._succeeded(member)
                member.endpoint.answered += 1
                return answer
            except RequestFailed as failure:
                if failure.retryable:
                    self._failed(member, failure)
                else:
                    self._succeeded(member)
                if not failure.retryable or attempt == self.section.max_attempts:
                    raise GaveUp(
                        failure.reason, failure.detail, attempt, member.endpoint.url
                    ) from None
                self.account.retries[failure.reason] += 1
                last = member
            finally:
                member.in_flight -= 1
                async with self._changed:
                    self._changed.notify()
            await asyncio.sleep(pause_before_retry(attempt))
        raise AssertionError("count() has no end")

    async def _acquire(self, avoid: _Member | None) -> _Member:
        """Waits for an endpoint with a free slot, and takes the slot."""
        while True:
            now = time.monotonic()
            free = [
                m
                for m in self.members
                if m.available and m.not_before <= now and m.in_flight < m.max_concurrency
            ]
            if free:
                best = min(free, key=lambda m: (m is avoid, m.in_flight / m.max_concurrency))
                best.in_flight += 1
                return best
            self._require_patience(now)
            due = [m.not_before - now for m in self.members if m.not_before > now]
            async with self._changed:
                # not wait_for: before Python 3.12 it waits in a task of its own, which, cancelled
                # at the wrong moment, takes the lock back and keeps it
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min([*due, 1.0])):
                        await self._changed.wait()

    def _require_patience(self, now: float) -> None:
        if all(member.excluded for member in self.members):
            raise EndpointError(
                "regenerate.endpoints: none is left that serves the target; what was written is"
                " kept"
            )
        if self.in_flight == 0 and now - self._last_success > self.section.patience_s:
            urls = ", ".join(member.endpoint.url for member in self.members if not member.excluded)
            silent_s = now - self._last_success
            raise EndpointError(
                f"regenerate.endpoints: no answer for {silent_s:.0f} s from {urls}; what was"
                " written is kept, and the same command continues once they are back"
                " (regenerate.patience_s)"
            )

    # ------------------------------------------------------------------ failures and rests

    def _succeeded(self, member: _Member) -> None:
        member.faults_in_row = member.rests = 0
        self._last_success = time.monotonic()

    def _failed(self, member: _Member, failure: RequestFailed) -> None:
        member.endpoint.faults[failure.reason] += 1
        now = time.monotonic()
        if failure.retry_after is not None:
            member.not_before = max(
                member.not_before, now + min(failure.retry_after, MAX_RETRY_AFTER_S)
            )
        if failure.reason == "http_429":  # busy, and not broken
            self._last_success = now
            return
        member.faults_in_row += 1
        if member.faults_in_row >= FAULTS_IN_ROW and member.resting is None:
            self._rest(member)

    def _rest(self, member: _Member) -> None:
        member.rests += 1
        member.resting = asyncio.create_task(self._wait_until_back(member))

    async def _wait_until_back(self, member: _Member) -> None:
        """Asks for its identity at growing intervals, until it answers."""
        for attempt in count(member.rests):
            await asyncio.sleep(pause_before_retry(attempt))
            try:
                await (
                    member.endpoint.identify()
                    if member.examined
                    else self._examine(member.endpoint)
                )
                member.examined = True
            except RequestFailed:
                continue
            except EndpointError as error:
                member.excluded = True
                self._say(f"      left out from now on: {error}")
            break
        member.faults_in_row, member.resting = 0, None
        if not member.excluded and member.rests == 1:
            self._last_success = time.monotonic()
        async with self._changed:
            self._changed.notify_all()
