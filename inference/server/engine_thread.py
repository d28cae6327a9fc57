"""The engine for many clients at once: one thread runs its rounds, requests join and leave between
two of them.

    ticket = engine.admit(1)                    # or 429: too many wait
    try:
        ticket.submit([(prompt, params)], streaming=True)
        async for index, output in ticket.outputs(): ...
    finally:
        ticket.close()                          # unfinished requests leave within a round

The thread alone touches the LLM: the event loop queues calls for it, and is handed the outputs of
each round."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from inference.server.errors import APIError, fault
from inference.server.metrics import ServerMetrics
from inference.server.options import ServerOptions
from speculators.errors import DraftsmithError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row, before the server calls itself unhealthy


@dataclass(eq=False)
class Generation:
    """One prompt of a ticket. `traced`: its outputs have rounds. `response`: once the engine has
    it; the lists have an entry per request of that."""

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
    """The place of one client in the queue, for some number of responses."""

    def __init__(self, engine: EngineThread, responses: int) -> None:
        self._engine, self.responses = engine, responses
        self._updates: asyncio.Queue[tuple[int, RequestOutput | APIError]] = asyncio.Queue()
        self.generations: list[Generation] = []
        self.arrival = perf_counter()

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        streaming: bool,
        traced: bool = False,
    ) -> None:
        self._engine.require_running()
        self.generations = [
            Generation(self, i, prompt, params, streaming, traced)
            for i, prompt in enumerate(prompts)
        ]
        for generation in self.generations:
            self._engine.call(partial(self._engine.begin, generation))

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
        self._updates.put_nowait((index, update))

    def close(self) -> None:
        """Aborts what is unfinished and frees the place."""
        self._engine.leave(self)


class EngineThread:
    """`max_num_queued_reqs` responses may wait beyond those that have rows. `draining`: nothing new
    is admitted. `failure`: the error after which nothing is served; `on_failure` is called then."""

    def __init__(self, llm: LLM, metrics: ServerMetrics, options: ServerOptions) -> None:
        self.llm, self.metrics, self.options = llm, metrics, options
        self._most = llm.engine.scheduler.max_num_seqs + options.max_num_queued_reqs
        self.in_flight = 0  # responses of all tickets
        self.draining = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._tickets: set[Ticket] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # one thread, since CUDA graphs belong to the thread that captured them
        self._thread = ThreadPoolExecutor(1, "engine")
        self._warm = False
        self._stopping = False
        # the thread's own
        self._active: dict[str, Generation] = {}  # by request id
        self._updates: list[tuple[Generation, RequestOutput | APIError]] = []  # of this round
        self._failed_steps = 0  # in a row
        self._tracer = RoundTracer(llm.engine)

    # ------------------------------------------------------------------ clients

    def require_running(self) -> None:
        """APIError 503 if the server shuts down or the engine has failed."""
        if self.draining:
            raise APIError(503, "the server is shutting down")
        if self.failure is not None:
            raise APIError(503, f"the engine has stopped: {self.failure}")

    def require_health(self) -> None:
        """APIError 503 if nothing is served, or if the last steps have all failed."""
        self.require_running()
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise APIError(503, f"the last {self._failed_steps} steps of the engine have failed")

    def admit(self, responses: int) -> Ticket:
        """Reserves a place. APIError: 400 for more responses than there are places, 429 if too many
        wait already, 503 if nothing is served."""
        self.require_running()
        if responses > self._most:
            message = f"{responses} responses; this server has places for {self._most}"
            raise APIError(400, message, "n")
        if self.in_flight + responses > self._most:
            self.metrics.rejections.inc()
            message = f"{self.in_flight} responses run or wait already; try again later"
            raise APIError(429, message, headers={"Retry-After": "1"})
        ticket = Ticket(self, responses)
        self._tickets.add(ticket)
        self.in_flight += responses
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self.in_flight -= ticket.responses
        for generation in ticket.generations:
            self.call(partial(self._end, generation))

    def drain(self, timeout_s: float) -> None:
        """Admits nothing more and aborts what is unfinished after `timeout_s`. From any thread, or
        a signal handler."""
        self.draining = True
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(loop.call_later, timeout_s, self.cancel_all)

    def cancel_all(self) -> None:
        self.draining = True
        for ticket in self._tickets:
            ticket.put(0, APIError(503, "the server is shutting down; it was not finished"))

    def call(self, work: Callable[[], object]) -> None:
        """Has the thread call `work` between two rounds."""
        self._calls.append(work)
        self._wake.set()

    # ------------------------------------------------------------------ the engine

    def warm_up(self) -> None:
        """Compiles all shapes of a round, once (minutes; without compiled rounds nothing is done).
        To be called before `run`."""
        if not self._warm:
            with progress_bar("compiling") as report:
                work = self._thread.submit(self.llm.warm_up, report, self.options.warm_up_limit_s)
                graphs = work.result()
            if graphs:
                logger.info("%d graphs are compiled", graphs)
            self._warm = True

    async def run(self) -> None:
        """Serves until it is cancelled or the engine fails."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._loop.run_in_executor(self._thread, self._rounds)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the engine's state cannot be trusted any more
            self.failure = error
            logger.error("the engine has failed", exc_info=error)
            for ticket in self._tickets:
                ticket.put(0, fault(error))
            self.on_failure()

    def stop(self) -> None:
        """Waits for the round that runs."""
        self._stopping = True
        self._thread.shutdown()

    def _rounds(self) -> None:
        while not self._stopping and (self._calls or self.llm.engine.has_unfinished):
            self.round()
            updates, self._updates = self._updates, []
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, updates)

    def round(self) -> None:
        """Does what was asked for, then one step. If that fails, the requests that had rows end
        with the reason, and those that wait go on."""
        while self._calls:
            self._calls.popleft()()
        if not self.llm.engine.has_unfinished:
            return
        scheduler = self.llm.engine.scheduler
        try:
            finished = self.llm.engine.step()
        except Exception as error:
            self._failed_steps += 1
            logger.error("a step of the engine failed; its requests are ended", exc_info=error)
            failed = scheduler.running or list(scheduler.waiting)[: scheduler.max_num_seqs]
            for request_id in {request.request_id for request in failed}:
                self._end(self._active[request_id], fault(error))
            return
        self._failed_steps = 0
        now = perf_counter()
        for request_id in dict.fromkeys(r.request_id for r in [*finished, *scheduler.running]):
            generation = self._active[request_id]
            try:
                self._publish(generation, now)
            except Exception as error:
                logger.error("request %s could not be written", request_id, exc_info=error)
                self._end(generation, fault(error))

    def begin(self, generation: Generation) -> None:
        """Hands a prompt to the engine."""
        try:
            response = self.llm.submit(
                generation.prompt, generation.params, streaming=generation.streaming
            )
        except Exception as error:
            refused = isinstance(error, DraftsmithError)
            answer = APIError(400, str(error)) if refused else fault(error)
            self._updates.append((generation, answer))
            return
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
        if response is not None and response.request_id in self._active:
            for request in response.requests if error is not None else ():
                if not request.finished:
                    request.finish("error")
            self.llm.abort(response.request_id)
            self._forget(response)
        if error is not None:
            self._updates.append((generation, error))

    def _forget(self, response: Response) -> None:
        """It has ended."""
        del self._active[response.request_id]
        self._tracer.forget(response.requests)
        for request in response.requests:
            self.metrics.finished(request)

    def _publish(self, generation: Generation, now: float) -> None:
        """Adds the new tokens of a round to the metrics and to the client's updates."""
        response = generation.response
        assert response is not None
        for i, request in enumerate(response.requests):
            written = len(request.token_ids) - request.num_prompt_tokens
            if written > generation.num_written[i]:
                self.metrics.tokens(
                    request, generation.num_written[i], now - generation.last_token_time[i]
                )
                generation.num_written[i] = written
                generation.last_token_time[i] = now
        output = None
        if generation.streaming:
            output = response.delta()
        elif response.finished:
            output = response.output()
        if output is not None:
            for completion in output.outputs if generation.traced else ():
                completion.rounds = self._tracer.take(response.requests[completion.index])
            self._updates.append((generation, output))
        if response.finished:
            self._forget(response)


def _deliver(updates: Sequence[tuple[Generation, RequestOutput | APIError]]) -> None:
    for generation, update in updates:
        generation.ticket.put(generation.index, update)
