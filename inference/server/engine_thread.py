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
from inference.server.errors import APIError
from inference.server.metrics import ServerMetrics
from inference.server.options import ServerOptions
from speculators.errors import DraftsmithError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row, before the server calls itself unhealthy


@dataclass(eq=False)
class Generation:
    """One prompt of a ticket. `response` is set by the engine's thread; the lists have an entry per
    request of it. `traced`: its outputs have rounds."""

    ticket: Ticket
    index: int
    prompt: Prompt
    params: SamplingParams
    streaming: bool
    traced: bool = False
    response: Response | None = None
    num_written: list[int] = field(default_factory=list)  # tokens counted so far
    last_token_time: list[float] = field(default_factory=list)  # perf_counter seconds


class Ticket:
    """The place of one client in the queue, for some number of responses. Used by the event loop
    only."""

    def __init__(self, engine: EngineThread, responses: int) -> None:
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
        self._engine.require_running()
        self.generations = [
            Generation(self, i, *each, streaming, traced) for i, each in enumerate(prompts)
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


class EngineThread:
    """`max_num_queued_reqs` responses may wait beyond those that have rows. `draining`: nothing new
    is admitted. `failure`: the error that ended the thread, after which nothing is served;
    `on_failure` is called then, by the thread."""

    def __init__(self, llm: LLM, metrics: ServerMetrics, options: ServerOptions) -> None:
        self.llm, self.metrics, self.options = llm, metrics, options
        rows = llm.engine.scheduler.max_num_seqs
        self._max_in_flight = rows + options.max_num_queued_reqs
        self.in_flight = 0  # responses of all tickets
        self.draining = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._tickets: set[Ticket] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._calls: list[Callable[[], object]] = []
        self._stopping = False
        self._warm = threading.Event()
        # the thread's own
        self._failed_steps = 0  # in a row
        self._tracer = RoundTracer(llm.engine)
        self._active: dict[str, Generation] = {}  # by request id
        self._updates: list[tuple[Generation, RequestOutput | APIError]] = []  # of this round

    # ------------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        """Starts the thread, once, and waits until all shapes of a round are compiled (minutes;
        without compiled rounds at once). DraftsmithError if that failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._warm.wait()
        if self.failure is not None:
            raise DraftsmithError(
                f"the engine could not be started: {self.failure}"
            ) from self.failure

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Names the event loop that will use it."""
        self._loop = loop

    async def stop(self) -> None:
        """Aborts whatever is unfinished, and ends the thread."""
        self.cancel_all()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def require_running(self) -> None:
        """APIError 503 if the server shuts down or the thread has ended."""
        if self.draining:
            raise APIError(503, "the server is shutting down")
        if self.failure is not None or self._thread is None or not self._thread.is_alive():
            raise APIError(503, f"the engine has stopped: {self.failure}")

    def require_health(self) -> None:
        """APIError 503 if the thread has ended, or if its last steps have all failed."""
        self.require_running()
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise APIError(503, f"the last {self._failed_steps} steps of the engine have failed")

    def admit(self, responses: int) -> Ticket:
        """Reserves a place. APIError: 400 for more responses than there are places, 429 if too many
        wait already, 503 if the server shuts down or has failed."""
        self.require_running()
        if responses > self._max_in_flight:
            message = f"{responses} responses; this server has places for {self._max_in_flight}"
            raise APIError(400, message, "n")
        if self.in_flight + responses > self._max_in_flight:
            self.metrics.rejections.inc()
            message = f"{self.in_flight} responses run or wait already; try again later"
            raise APIError(429, message, headers={"Retry-After": "1"})
        ticket = Ticket(self, responses)
        self._tickets.add(ticket)
        self.in_flight += responses
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self.in_flight -= ticket.responses
        for generation in ticket.generations:
            self.call(partial(self._end, generation))

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
            with progress_bar("compiling") as report:
                # here, since CUDA graphs belong to the thread that captured them
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
                if self.llm.engine.has_unfinished:
                    self._round()
                updates, self._updates = self._updates, []
                if updates:
                    self._in_loop(partial(_deliver, updates))
        except BaseException as error:  # the engine's state cannot be trusted any more
            self.failure = error
            logger.error("the engine's thread has died", exc_info=error)
            self._in_loop(partial(self._fail_all, engine_error(error)))
            self._warm.set()
            self.on_failure()

    def begin(self, generations: Sequence[Generation]) -> None:
        """Hands the prompts to the engine."""
        for generation in generations:
            try:
                response = self.llm.submit(
                    generation.prompt, generation.params, streaming=generation.streaming
                )
            except Exception as error:
                refused = isinstance(error, DraftsmithError)
                answer = APIError(400, str(error)) if refused else engine_error(error)
                self._updates.append((generation, answer))
                continue
            if generation.traced:
                self._tracer.watch(response.requests)
            generation.response = response
            generation.num_written = [0] * len(response.requests)
            generation.last_token_time = [generation.ticket.arrival] * len(response.requests)
            for request in response.requests:
                request.arrival_time = generation.ticket.arrival
            self._active[response.request_id] = generation

    def _end(self, generation: Generation, error: APIError | None = None) -> None:
        """Takes an unfinished generation out of the engine: one whose client has gone, or one that
        failed, whose client receives `error`."""
        response = generation.response
        if response is not None and self._active.pop(response.request_id, None) is not None:
            for request in response.requests if error is not None else ():
                if not request.finished:
                    request.finish("error")
            self.llm.abort(response.request_id)
            self._count_end(response)
        if error is not None:
            self._updates.append((generation, error))

    def _round(self) -> None:
        """One step. If it fails, the requests that had rows end with the reason, and those that
        wait go on."""
        scheduler = self.llm.engine.scheduler
        try:
            finished = self.llm.engine.step()
        except Exception as error:
            self._failed_steps += 1
            logger.error("a step of the engine failed; its requests are ended", exc_info=error)
            failed = scheduler.running or list(scheduler.waiting)[: scheduler.max_num_seqs]
            for request_id in {request.request_id for request in failed}:
                self._end(self._active[request_id], engine_error(error))
            return
        self._failed_steps = 0
        now = perf_counter()
        for request_id in dict.fromkeys(r.request_id for r in [*finished, *scheduler.running]):
            if (generation := self._active.get(request_id)) is not None:
                self._publish(generation, now)

    def _publish(self, generation: Generation, now: float) -> None:
        """Adds the new tokens of a round to the metrics and to the client's updates."""
        response = generation.response
        assert response is not None
        self._count(generation, response, now)
        try:
            output = None
            if generation.streaming:
                output = response.delta()
            elif response.finished:
                output = response.output()
        except Exception as error:
            logger.error("request %s could not be written", response.request_id, exc_info=error)
            self._end(generation, engine_error(error))
            return
        if output is not None:
            for completion in output.outputs if generation.traced else ():
                completion.rounds = self._tracer.take(response.requests[completion.index])
            self._updates.append((generation, output))
        if response.finished:
            del self._active[response.request_id]
            self._count_end(response)

    def _count(self, generation: Generation, response: Response, now: float) -> None:
        for i, request in enumerate(response.requests):
            new = len(request.token_ids) - request.num_prompt_tokens - generation.num_written[i]
            if new <= 0:
                continue
            if generation.num_written[i] == 0:
                self.metrics.prompt_tokens.inc(request.num_prompt_tokens)
                self.metrics.time_to_first_token.observe(now - request.arrival_time)
            else:
                self.metrics.inter_token_latency.observe(now - generation.last_token_time[i])
            self.metrics.generation_tokens.inc(new)
            generation.num_written[i] += new
            generation.last_token_time[i] = now

    def _count_end(self, response: Response) -> None:
        self._tracer.forget(response.requests)
        for request in response.requests:
            self.metrics.finished(request)

    def _in_loop(self, work: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and with it all connections
                self._loop.call_soon_threadsafe(work)


def engine_error(error: BaseException) -> APIError:
    """A fault as the clients get it whose requests it ended."""
    reason = str(error).strip().partition("\n")[0]
    return APIError(500, f"the engine failed: {type(error).__name__}: {reason}")


def _deliver(updates: Sequence[tuple[Generation, RequestOutput | APIError]]) -> None:
    for generation, update in updates:
        generation.ticket.put(generation.index, update)
