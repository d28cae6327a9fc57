"""The engine as many clients use it at once: one thread runs its rounds, requests join and leave in between.

    ticket = engine.admit(1)                    # or 429: too many wait
    try:
        ticket.submit([(prompt, params)], streaming=True)
        async for index, output in ticket.outputs(): ...
    finally:
        ticket.close()                          # what is unfinished gives its row back within a round

Everything of the engine is touched by its thread alone, which is told what to do by a list of calls and tells what
happened by calls into the event loop. Knows no HTTP but the errors that a client is told.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TypeVar

from inference.engine.round_trace import RoundTracer
from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt
from inference.outputs import RequestOutput
from inference.requests.request import Request
from inference.requests.response import Response
from inference.sampling_params import SamplingParams
from inference.server.api.errors import APIError, log_fault
from inference.server.fault_isolation import DeviceLost, guarded_step
from inference.server.metrics import ServerMetrics
from speculators.errors import DraftsmithError

logger = logging.getLogger(__name__)

LONGEST_RETRY_S = 60
HEALTH_S = 0.5  # how often it is looked whether an answer can still come
R = TypeVar("R")


@dataclass(eq=False)
class Generation:
    """One prompt of a ticket in the engine. `answer`: once it is there; of each of its responses, `written`: tokens
    counted, `scheduled` and `last_time`: when it got a row and its last token (perf_counter seconds)."""

    ticket: Ticket
    index: int
    prompt: Prompt
    params: SamplingParams
    streaming: bool
    deadline: float
    traced: bool = False  # its outputs have rounds
    answer: Response | None = None
    written: list[int] = field(default_factory=list)
    scheduled: list[float] = field(default_factory=list)
    last_time: list[float] = field(default_factory=list)


class Ticket:
    """One client's place, for so many responses. Used by the event loop only."""

    def __init__(self, engine: AsyncEngine, responses: int) -> None:
        self._engine, self.responses = engine, responses
        self._news: asyncio.Queue[tuple[int, RequestOutput | APIError]] = asyncio.Queue()
        self.generations: list[Generation] = []
        self.arrival = perf_counter()
        self._closed = False

    def submit(self, asked: Sequence[tuple[Prompt, SamplingParams]], *, streaming: bool, traced: bool = False) -> None:
        self._engine.require_health()
        deadline = self.arrival + self._engine.request_timeout_s
        self.generations = [
            Generation(self, i, prompt, params, streaming, deadline, traced) for i, (prompt, params) in enumerate(asked)
        ]
        self._engine.call(lambda: self._engine.begin(self.generations))

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(which prompt, what is new of it), until all are finished; whole outputs unless streaming. APIError if one
        could not be finished."""
        left = len(self.generations)
        while left:
            index, news = await self._news.get()
            if isinstance(news, APIError):
                raise news
            left -= news.finished
            yield index, news

    def put(self, index: int, news: RequestOutput | APIError) -> None:
        if not self._closed:
            self._news.put_nowait((index, news))

    def close(self) -> None:
        """Ends what is unfinished and gives the place to others."""
        if not self._closed:
            self._closed = True
            self._engine.leave(self)


class AsyncEngine:
    """max_num_queued_reqs  responses that may wait beyond those that have rows
    request_timeout_s       from arrival to the last token; what takes longer is ended

    `draining`: nothing new is admitted. `failure`: the thread has died of it, and with it the server's use."""

    def __init__(
        self, llm: LLM, metrics: ServerMetrics, *, max_num_queued_reqs: int = 256, request_timeout_s: float = math.inf
    ) -> None:
        self.llm, self.metrics, self.request_timeout_s = llm, metrics, request_timeout_s
        self._rows = llm.engine.scheduler.max_num_seqs
        self._most = self._rows + max_num_queued_reqs
        self.in_flight = 0  # responses of all tickets
        self.draining = False
        self.failure: BaseException | None = None
        self._tickets: set[Ticket] = set()
        self._mean_duration = 1.0  # of a ticket, in seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        self._warm = threading.Event()
        self._tracer = RoundTracer(llm.engine)
        self._active: dict[str, Generation] = {}  # by request id; the thread's own
        self._news: list[tuple[Generation, RequestOutput | APIError]] = []  # of this round; the thread's own

    # ------------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        """From within the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def ready(self) -> None:
        """Waits until every shape of a round is compiled, which takes minutes where rounds are compiled, and none where
        they are not. DraftsmithError if that failed."""
        await asyncio.to_thread(self._warm.wait)
        if self.failure is not None:
            raise DraftsmithError(f"the engine could not be started: {self.failure}") from self.failure

    async def stop(self) -> None:
        """Ends whatever is unfinished, and the thread."""
        self.cancel_all()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    @property
    def told_failure(self) -> str:
        """What a client is told of an engine that has stopped."""
        why = self.failure if isinstance(self.failure, DeviceLost) else None
        return f"the engine has stopped: {why}" if why else "the engine has stopped"

    def require_health(self) -> None:
        if self.draining or not self.healthy:
            raise APIError(503, "the server is shutting down" if self.draining else self.told_failure)

    def admit(self, responses: int) -> Ticket:
        """A place for so many responses. APIError: 429 if too many wait already, 503 if the server is going."""
        self.require_health()
        if self.in_flight >= self._most:
            self.metrics.rejections.inc()
            turns = (self.in_flight - self._rows) / self._rows
            wait = min(LONGEST_RETRY_S, max(1, math.ceil(turns * self._mean_duration)))
            raise APIError(
                429, f"{self.in_flight - self._rows} responses are waiting already; try again in about {wait} s",
                headers={"Retry-After": str(wait)},
            )  # fmt: skip
        ticket = Ticket(self, responses)
        self._tickets.add(ticket)
        self.in_flight += responses
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self.in_flight -= ticket.responses
        self._mean_duration += 0.1 * (perf_counter() - ticket.arrival - self._mean_duration)
        if ticket.generations:
            self.call(lambda: self._abort(ticket))

    def drain(self, timeout_s: float) -> None:
        """Admits nothing more; what is unfinished after so many seconds is ended. From any thread, or a signal."""
        self.draining = True
        self._in_loop(lambda: self._loop and self._loop.call_later(timeout_s, self.cancel_all))

    def cancel_all(self) -> None:
        """Tells every client that the server is going."""
        self.draining = True
        self._tell_all(APIError(503, "the server is shutting down; the response was not finished"))

    def _tell_all(self, error: APIError) -> None:
        for ticket in self._tickets:
            ticket.put(0, error)

    def call(self, what: Callable[[], None]) -> None:
        """Has the engine's thread do something between two rounds."""
        with self._wake:
            self._calls.append(what)
            self._wake.notify()

    async def between_rounds(self, what: Callable[[], R]) -> R:
        """The same, and what came of it. APIError if the thread has ended."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def run() -> None:
            try:
                told = partial(answer.set_result, what())
            except Exception as error:
                told = partial(answer.set_exception, error)
            self._in_loop(lambda: None if answer.done() else told())

        self.call(run)
        while not answer.done():
            self.require_health()
            await asyncio.wait([answer], timeout=HEALTH_S)
        return answer.result()

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            graphs = self.llm.warm_up()  # in this thread, whose own CUDA graphs are
            if graphs:
                logger.info("%d graphs are compiled", graphs)
            self._warm.set()
            while True:
                with self._wake:
                    while not (self._calls or self.llm.engine.has_unfinished or self._stopping):
                        self._wake.wait()
                    calls, self._calls = self._calls, []
                if self._stopping:
                    return
                for call in calls:
                    call()
                self._expire()
                if self.llm.engine.has_unfinished:  # perhaps another one by now
                    self._round()
                self._tell()
        except BaseException as error:  # nothing can be trusted any more
            self.failure = error
            log_fault("the engine's thread has died", error)
            self._in_loop(lambda: self._tell_all(APIError(500, "the engine has failed")))
            self._warm.set()

    def begin(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            try:
                answer = self.llm.submit(generation.prompt, generation.params, streaming=generation.streaming)
            except Exception as error:
                self._news.append((generation, self._told(error)))
                continue
            generation.answer = answer
            if generation.traced:
                self._tracer.watch(answer.requests)
            generation.written = [0] * len(answer.requests)
            generation.scheduled = [generation.ticket.arrival] * len(answer.requests)
            generation.last_time = list(generation.scheduled)
            for request in answer.requests:
                request.arrival_time = generation.ticket.arrival
            self._active[answer.request_id] = generation

    def _abort(self, ticket: Ticket) -> None:
        for generation in ticket.generations:
            self._end(generation)

    def _end(self, generation: Generation, error: APIError | None = None) -> None:
        """Takes an unfinished one out of the engine; `error`: what its client is told."""
        answer = generation.answer
        if answer is not None and self._active.pop(answer.request_id, None) is not None:
            self.llm.abort(answer.request_id)
            self._count_end(generation, answer)
        if error is not None:
            self._news.append((generation, error))

    def _expire(self) -> None:
        now = perf_counter()
        for generation in [each for each in self._active.values() if each.deadline < now]:
            limit = f"the response was not finished within {self.request_timeout_s:g} s, the server's limit"
            self._end(generation, APIError(408, limit, headers={"x-should-retry": "false"}))

    def _round(self) -> None:
        started = perf_counter()
        step = guarded_step(self.llm.engine)
        now = perf_counter()
        for request, error in step.failed:
            generation = self._active.get(request.request_id)
            log_fault(f"request {request.request_id} was ended", error)
            if generation is not None:
                self._end(generation, self._told(error))
        touched = dict.fromkeys(r.request_id for r in [*step.finished, *self.llm.engine.scheduler.running])
        for request_id in touched:
            generation = self._active.get(request_id)
            if generation is not None:
                self._publish(generation, started, now)

    def _publish(self, generation: Generation, started: float, now: float) -> None:
        """What a round wrote of one prompt's responses, to metrics and client."""
        answer = generation.answer
        assert answer is not None
        self._count(generation, answer.requests, started, now)
        try:
            news = answer.delta() if generation.streaming else answer.output() if answer.finished else None
        except Exception as error:
            log_fault(f"request {answer.request_id} could not be written", error)
            self._end(generation, self._told(error))
            return
        if news is not None:
            for each in news.outputs if generation.traced else ():
                each.rounds = self._tracer.take(answer.requests[each.index])
            self._news.append((generation, news))
        if answer.finished:
            del self._active[answer.request_id]
            self._count_end(generation, answer)

    def _count(self, generation: Generation, requests: Sequence[Request], started: float, now: float) -> None:
        for i, request in enumerate(requests):
            new = len(request.token_ids) - request.num_prompt_tokens - generation.written[i]
            if new <= 0:
                continue
            if generation.written[i] == 0:
                generation.scheduled[i] = started
                self.metrics.first_token(request, now - request.arrival_time)
            else:
                self.metrics.inter_token_latency.observe(now - generation.last_time[i])
            self.metrics.generation_tokens.inc(new)
            generation.written[i] += new
            generation.last_time[i] = now

    def _count_end(self, generation: Generation, answer: Response) -> None:
        self._tracer.forget(answer.requests)
        self.metrics.finished(generation.params, answer.requests, generation.scheduled)

    def _told(self, error: Exception) -> APIError:
        """A fault that a user can mend is told; what else failed is in the log."""
        if isinstance(error, DraftsmithError):
            return APIError(400, str(error))
        return APIError(500, "this request failed in the engine; the server's log says where")

    def _tell(self) -> None:
        """Hands what is new to the tickets."""
        if self._news:
            news, self._news = self._news, []
            self._in_loop(partial(_hand_out, news))

    def _in_loop(self, what: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed: nobody is listening
                self._loop.call_soon_threadsafe(what)


def _hand_out(news: Sequence[tuple[Generation, RequestOutput | APIError]]) -> None:
    for generation, each in news:
        generation.ticket.put(generation.index, each)
