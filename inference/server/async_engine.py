"""The engine for many clients at once: one thread runs its rounds, requests join and leave between
two of them.

    ticket = engine.admit(1)                    # or 429: too many wait
    try:
        ticket.submit([(prompt, params)], streaming=True)
        async for index, output in ticket.outputs(): ...
    finally:
        ticket.close()                          # unfinished requests leave their rows within a
        round

The LLM is used by the engine's thread alone. The event loop queues calls for that thread, and the
thread hands outputs to the event loop."""

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

from inference.console import progress_bar
from inference.engine.round_trace import RoundTracer
from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt
from inference.outputs import RequestOutput
from inference.requests.response import Response
from inference.sampling_params import SamplingParams
from inference.server.api.errors import APIError, log_fault
from inference.server.fault_isolation import DeviceLost, guarded_step
from inference.server.metrics import ServerMetrics
from inference.server.options import ServerOptions
from speculators.errors import DraftsmithError

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60


@dataclass(eq=False)
class Generation:
    """One prompt of a ticket. `response` is set by the engine's thread; the lists have an entry per
    request of it."""

    ticket: Ticket
    index: int
    prompt: Prompt
    params: SamplingParams
    streaming: bool
    deadline: float
    traced: bool = False  # its outputs have rounds
    response: Response | None = None
    num_written: list[int] = field(default_factory=list)  # tokens counted so far
    scheduled: list[float] = field(default_factory=list)  # when it got a row, perf_counter seconds
    last_token_time: list[float] = field(default_factory=list)


class Ticket:
    """The place of one client in the queue, for some number of responses. Used by the event loop
    only."""

    def __init__(self, engine: AsyncEngine, responses: int) -> None:
        self._engine, self.responses = engine, responses
        self._updates: asyncio.Queue[tuple[int, RequestOutput | APIError]] = asyncio.Queue()
        self.generations: list[Generation] = []
        self.arrival = perf_counter()
        self._closed = False

    def submit(
        self,
        prompts: Sequence[tuple[Prompt, SamplingParams]],
        *,
        streaming: bool,
        traced: bool = False,
    ) -> None:
        self._engine.require_health()
        deadline = self.arrival + self._engine.options.request_timeout_s
        self.generations = [
            Generation(self, i, *p, streaming, deadline, traced) for i, p in enumerate(prompts)
        ]
        self._engine.call(lambda: self._engine.begin(self.generations))

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, output) until all are finished: deltas with `streaming`, else whole
        outputs. APIError if one could not be finished."""
        unfinished = len(self.generations)
        while unfinished:
            index, update = await self._updates.get()
            if isinstance(update, APIError):
                raise update
            unfinished -= update.finished
            yield index, update

    def put(self, index: int, update: RequestOutput | APIError) -> None:
        if not self._closed:
            self._updates.put_nowait((index, update))

    def close(self) -> None:
        """Aborts what is unfinished and frees the place."""
        if not self._closed:
            self._closed = True
            self._engine.leave(self)


class AsyncEngine:
    """`max_num_queued_reqs` responses may wait beyond those that have rows. A request is aborted
    `request_timeout_s` after its arrival. `draining`: nothing new is admitted. `failure`: the error
    that ended the thread, after which nothing is served."""

    def __init__(self, llm: LLM, metrics: ServerMetrics, options: ServerOptions) -> None:
        self.llm, self.metrics, self.options = llm, metrics, options
        self._rows = llm.engine.scheduler.max_num_seqs
        self._max_in_flight = self._rows + options.max_num_queued_reqs
        self.in_flight = 0  # responses of all tickets
        self.draining = False
        self.failure: BaseException | None = None
        self._tickets: set[Ticket] = set()
        self._mean_duration = 1.0  # of a ticket, in seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._calls: list[Callable[[], object]] = []
        self._stopping = False
        self._warm = threading.Event()
        # the thread's own
        self._tracer = RoundTracer(llm.engine)
        self._active: dict[str, Generation] = {}  # by request id
        self._updates: list[tuple[Generation, RequestOutput | APIError]] = []  # of this round

    # ------------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        """Starts the thread. To be called from within the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def ready(self) -> None:
        """Waits until all shapes of a round are compiled (minutes; without compiled rounds at
        once). DraftsmithError if that failed."""
        await asyncio.to_thread(self._warm.wait)
        if self.failure is not None:
            raise DraftsmithError(
                f"the engine could not be started: {self.failure}"
            ) from self.failure

    async def stop(self) -> None:
        """Aborts whatever is unfinished, and ends the thread."""
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
    def failure_message(self) -> str:
        """The message for clients of an engine that has stopped."""
        reason = f": {self.failure}" if isinstance(self.failure, DeviceLost) else ""
        return f"the engine has stopped{reason}"

    def require_health(self) -> None:
        if self.draining or not self.healthy:
            raise APIError(
                503, "the server is shutting down" if self.draining else self.failure_message
            )

    def admit(self, responses: int) -> Ticket:
        """Reserves a place. APIError: 429 if too many wait already, 503 if the server shuts down or
        has failed."""
        self.require_health()
        if self.in_flight >= self._max_in_flight:
            self.metrics.rejections.inc()
            waiting = self.in_flight - self._rows
            wait = min(
                MAX_RETRY_AFTER_S, max(1, math.ceil(waiting / self._rows * self._mean_duration))
            )
            message = f"{waiting} responses are waiting already; try again in about {wait} s"
            raise APIError(429, message, headers={"Retry-After": str(wait)})
        ticket = Ticket(self, responses)
        self._tickets.add(ticket)
        self.in_flight += responses
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self.in_flight -= ticket.responses
        self._mean_duration += 0.1 * (perf_counter() - ticket.arrival - self._mean_duration)
        for generation in ticket.generations:
            self.call(partial(self._abort, generation))

    def drain(self, timeout_s: float) -> None:
        """Admits nothing more and aborts what is unfinished after `timeout_s`. From any thread, or
        a signal handler."""
        self.draining = True
        self._in_loop(lambda: self._loop and self._loop.call_later(timeout_s, self.cancel_all))

    def cancel_all(self) -> None:
        self.draining = True
        self._fail_all(APIError(503, "the server is shutting down; the response was not finished"))

    def _fail_all(self, error: APIError) -> None:
        for ticket in self._tickets:
            ticket.put(0, error)

    def call(self, work: Callable[[], object]) -> None:
        """Has the engine's thread call `work` between two rounds."""
        with self._wake:
            self._calls.append(work)
            self._wake.notify()

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            with progress_bar(
                "compiling"
            ) as report:  # here, since CUDA graphs belong to the thread that captured them
                graphs = self.llm.warm_up(report, self.options.warm_up_limit_s)
            if graphs:
                logger.info("%d graphs are compiled", graphs)
            self._warm.set()
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._calls or self.llm.engine.has_unfinished or self._stopping
                    )
                    calls, self._calls = self._calls, []
                if self._stopping:
                    return
                for call in calls:
                    call()
                self._expire()
                if self.llm.engine.has_unfinished:
                    self._round()
                updates, self._updates = self._updates, []
                if updates:
                    self._in_loop(partial(_deliver, updates))
        except BaseException as error:  # the engine's state cannot be trusted any more
            self.failure = error
            log_fault("the engine's thread has died", error)
            self._in_loop(lambda: self._fail_all(APIError(500, "the engine has failed")))
            self._warm.set()

    def begin(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            try:
                response = self.llm.submit(
                    generation.prompt, generation.params, streaming=generation.streaming
                )
            except Exception as error:
                self._updates.append((generation, to_api_error(error)))
                continue
            if generation.traced:
                self._tracer.watch(response.requests)
            generation.response = response
            generation.num_written = [0] * len(response.requests)
            generation.scheduled = [generation.ticket.arrival] * len(response.requests)
            generation.last_token_time = list(generation.scheduled)
            for request in response.requests:
                request.arrival_time = generation.ticket.arrival
            self._active[response.request_id] = generation

    def _abort(self, generation: Generation, error: APIError | None = None) -> None:
        """Takes an unfinished generation out of the engine; its client receives `error`."""
        response = generation.response
        if response is not None and self._active.pop(response.request_id, None) is not None:
            self.llm.abort(response.request_id)
            self._count_end(generation, response)
        if error is not None:
            self._updates.append((generation, error))

    def _expire(self) -> None:
        now = perf_counter()
        for generation in [g for g in self._active.values() if g.deadline < now]:
            message = (
                f"the response was not finished within {self.options.request_timeout_s:g} s, the"
                " server's limit"
            )
            self._abort(generation, APIError(408, message, headers={"x-should-retry": "false"}))

    def _round(self) -> None:
        started = perf_counter()
        step = guarded_step(self.llm.engine)
        now = perf_counter()
        for request, error in step.failed:
            log_fault(f"request {request.request_id} was aborted", error)
            if (generation := self._active.get(request.request_id)) is not None:
                self._abort(generation, to_api_error(error))
        touched = dict.fromkeys(
            r.request_id for r in [*step.finished, *self.llm.engine.scheduler.running]
        )
        for request_id in touched:
            if (generation := self._active.get(request_id)) is not None:
                self._publish(generation, started, now)

    def _publish(self, generation: Generation, started: float, now: float) -> None:
        """Adds the new tokens of a round to the metrics and to the client's updates."""
        response = generation.response
        assert response is not None
        self._count(generation, response, started, now)
        try:
            output = (
                response.delta()
                if generation.streaming
                else response.output()
                if response.finished
                else None
            )
        except Exception as error:
            log_fault(f"request {response.request_id} could not be written", error)
            self._abort(generation, to_api_error(error))
            return
        if output is not None:
            for completion in output.outputs if generation.traced else ():
                completion.rounds = self._tracer.take(response.requests[completion.index])
            self._updates.append((generation, output))
        if response.finished:
            del self._active[response.request_id]
            self._count_end(generation, response)

    def _count(
        self, generation: Generation, response: Response, started: float, now: float
    ) -> None:
        for i, request in enumerate(response.requests):
            new = len(request.token_ids) - request.num_prompt_tokens - generation.num_written[i]
            if new <= 0:
                continue
            if generation.num_written[i] == 0:
                generation.scheduled[i] = started
                self.metrics.first_token(request, now - request.arrival_time)
            else:
                self.metrics.inter_token_latency.observe(now - generation.last_token_time[i])
            self.metrics.generation_tokens.inc(new)
            generation.num_written[i] += new
            generation.last_token_time[i] = now

    def _count_end(self, generation: Generation, response: Response) -> None:
        self._tracer.forget(response.requests)
        self.metrics.finished(generation.params, response.requests, generation.scheduled)

    def _in_loop(self, work: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and with it all connections
                self._loop.call_soon_threadsafe(work)


def to_api_error(error: Exception) -> APIError:
    """Errors that the user can mend are passed on; for all others the client is pointed to the
    server's log."""
    if isinstance(error, DraftsmithError):
        return APIError(400, str(error))
    return APIError(500, "this request failed in the engine; the server's log says where")


def _deliver(updates: Sequence[tuple[Generation, RequestOutput | APIError]]) -> None:
    for generation, update in updates:
        generation.ticket.put(generation.index, update)
