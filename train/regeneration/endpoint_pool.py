"""Many requests over several endpoints: who is asked, how often again and after how long, and who is left to rest.

The least loaded endpoint is asked. A request that ran into trouble is sent again, after a pause that doubles, elsewhere
if there is an elsewhere. An endpoint that fails several times in a row rests, so that a restart costs no request its
attempts: it is asked for its models now and then, and takes part again once it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from train.recipe.data_sections import RegenerateSection
from train.regeneration.conversations import Account, Ask
from train.regeneration.endpoint_client import Answer, Endpoint, EndpointError, Refused, Trouble

FAULTS_IN_ROW = 4  # after which an endpoint rests
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
LONGEST_ASKED_S = 300.0  # that a Retry-After is obeyed for

Say = Callable[[str], None]
Examine = Callable[[Endpoint], Awaitable[None]]  # raises Trouble, Refused or EndpointError


class GaveUp(Exception):
    """A response that is not to be had."""

    def __init__(self, reason: str, detail: str, attempts: int, url: str) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.attempts, self.url = reason, detail, attempts, url


class _Member:
    """An endpoint in the pool."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.in_flight, self.faults_in_row, self.rests = 0, 0, 0
        self.not_before = 0.0  # monotonic
        self.resting: asyncio.Task[None] | None = None
        self.examined, self.out = False, False

    def open(self, now: float) -> bool:
        return (
            self.examined
            and not self.out
            and self.resting is None
            and self.not_before <= now
            and self.in_flight < self.endpoint.section.max_concurrency
        )


class EndpointPool:
    """`examine` makes sure of an endpoint before it is asked for the first time."""

    def __init__(
        self, endpoints: Sequence[Endpoint], section: RegenerateSection, account: Account, examine: Examine, say: Say
    ) -> None:
        self.members = [_Member(endpoint) for endpoint in endpoints]
        self.section, self.account, self._examine, self._say = section, account, examine, say
        self._changed = asyncio.Condition()
        self._alive = time.monotonic()  # when an endpoint last did what it is for
        self._dice = random.Random(0)

    @property
    def in_flight(self) -> int:
        return sum(member.in_flight for member in self.members)

    @property
    def concurrency(self) -> int:
        return sum(member.endpoint.section.max_concurrency for member in self.members)

    @property
    def available(self) -> int:
        return sum(member.examined and not member.out and member.resting is None for member in self.members)

    async def open(self) -> None:
        """Examines all endpoints. Those that do not answer are waited for; EndpointError if none does, or if one is
        not what it should be."""
        troubles = []
        for member in self.members:  # one after another: the first is what others are compared with
            for attempt in range(1, FAULTS_IN_ROW + 1):
                try:
                    await self._examine(member.endpoint)
                    member.examined = True
                    break
                except (Trouble, Refused) as trouble:
                    if attempt == FAULTS_IN_ROW:
                        troubles.append(f"{member.endpoint.url}: {trouble}")
                    else:
                        await asyncio.sleep(self._pause(attempt))
        if len(troubles) == len(self.members):
            raise EndpointError(
                "regenerate.endpoints: none of them answers; start them, or mend their addresses\n  "
                + "\n  ".join(troubles)
            )
        for trouble in troubles:
            self._say(f"      not there yet, and waited for: {trouble}")
        for member in self.members:
            if not member.examined:
                self._rest(member)
        self._alive = time.monotonic()

    async def close(self) -> None:
        for member in self.members:
            if member.resting is not None:
                member.resting.cancel()
        await asyncio.gather(*(m.resting for m in self.members if m.resting), return_exceptions=True)
        for member in self.members:
            await member.endpoint.client.aclose()

    async def write(self, ask: Ask) -> Answer:
        """The response, whichever endpoint writes it. GaveUp: none will; EndpointError: there is no endpoint left."""
        before, trouble = None, None
        for attempt in range(1, self.section.max_attempts + 1):
            member = await self._turn(before)
            try:
                answer = await member.endpoint.write(ask)
            except Refused as refused:
                self._did_well(member)
                raise GaveUp(refused.reason, refused.detail, attempt, member.endpoint.url) from None
            except Trouble as found:
                before, trouble = member, found
                self._note(member, found)
                if attempt < self.section.max_attempts:
                    self.account.retries[found.reason] += 1
            else:
                self._did_well(member)
                member.endpoint.answered += 1
                return answer
            finally:
                member.in_flight -= 1
                await self._tell_others()
            if attempt < self.section.max_attempts:
                await asyncio.sleep(self._pause(attempt))
        assert trouble is not None and before is not None
        raise GaveUp(trouble.reason, trouble.detail, self.section.max_attempts, before.endpoint.url)

    # ------------------------------------------------------------------ turns

    async def _turn(self, avoid: _Member | None) -> _Member:
        """Waits for an endpoint with room, and takes a place there."""
        while True:
            now = time.monotonic()
            if found := [member for member in self.members if member.open(now)]:
                best = min(found, key=lambda m: (m is avoid, m.in_flight / m.endpoint.section.max_concurrency))
                best.in_flight += 1
                return best
            self._require_patience(now)
            due = [m.not_before - now for m in self.members if m.not_before > now]
            async with self._changed:
                # not wait_for: before Python 3.12 it waits in a task of its own, which, cancelled at the wrong moment,
                # takes the lock back and keeps it
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min([*due, 1.0])):
                        await self._changed.wait()

    def _require_patience(self, now: float) -> None:
        if all(member.out for member in self.members):
            raise EndpointError("regenerate.endpoints: none is left that serves the target; what was written is kept")
        if self.in_flight == 0 and now - self._alive > self.section.patience_s:
            urls = ", ".join(member.endpoint.url for member in self.members if not member.out)
            raise EndpointError(
                f"regenerate.endpoints: no answer for {now - self._alive:.0f} s from {urls}; what was written is kept, "
                "and the same command continues once they are back (regenerate.patience_s)"
            )

    async def _tell_others(self) -> None:
        async with self._changed:
            self._changed.notify()

    def _pause(self, attempt: int) -> float:
        """Doubling, and never the same for two requests that failed together."""
        return min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) * self._dice.uniform(0.5, 1.0)

    # ------------------------------------------------------------------ good and bad times

    def _did_well(self, member: _Member) -> None:
        member.faults_in_row = member.rests = 0
        self._alive = time.monotonic()

    def _note(self, member: _Member, trouble: Trouble) -> None:
        member.endpoint.faults[trouble.reason] += 1
        now = time.monotonic()
        if trouble.retry_after is not None:
            member.not_before = max(member.not_before, now + min(trouble.retry_after, LONGEST_ASKED_S))
        if trouble.reason == "http_429":  # busy is not broken
            self._alive = now
            return
        member.faults_in_row += 1
        if member.faults_in_row >= FAULTS_IN_ROW and member.resting is None:
            self._rest(member)

    def _rest(self, member: _Member) -> None:
        member.rests += 1
        member.resting = asyncio.create_task(self._come_back(member))

    async def _come_back(self, member: _Member) -> None:
        """Asks it who it is, at growing intervals, until it answers."""
        endpoint, attempt = member.endpoint, member.rests
        while True:
            await asyncio.sleep(self._pause(attempt))
            attempt += 1
            try:
                if member.examined:
                    await endpoint.look()
                else:
                    await self._examine(endpoint)
                    member.examined = True
            except (Trouble, Refused):
                continue
            except EndpointError as error:
                member.out = True
                self._say(f"      left out from now on: {error}")
            break
        member.faults_in_row, member.resting = 0, None
        if not member.out and member.rests == 1:
            self._alive = time.monotonic()
        async with self._changed:
            self._changed.notify_all()
