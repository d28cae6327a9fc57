"""The engine for many clients at once: one thread runs its rounds, requests join and leave between
two of them.

    ticket = engine.admit(1, streaming=True)    # or 429: too many wait
    try:
        ticket.submit(llm.checker.check([prompt], [params]))
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
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from starlette.exceptions import HTTPException

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.entrypoints.checks import CheckedRequest
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.requests.response import Response
from draftsmith.inference.server.api_errors import APIError, fault, reason
from draftsmith.inference.server.prometheus import ServerMetrics
from draftsmith.inference.server.serve_options import ServerOptions
from draftsmith.speculators.precision import free_memory

logger = logging.getLogger(__name__)

# Steps that may fail one after the other, each ending its requests, before the engine is given up.
MOST_FAILED_STEPS = 8

Update = tuple["Ticket", int, RequestOutput | HTTPException]  # of the prompt with this index


class EngineFailure(RuntimeError):
    """Nothing can be served any more."""


def require_device(device: torch.device) -> None:
    """EngineFailure if the device does not compute any more: after some CUDA errors (an illegal
    address, a card that is gone) every later call of the process fails. Being out of memory is no
    such error."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        raise EngineFailure(f"the device {device} is lost: {reason(error)}") from error


class Ticket:
    """The place of one client in the queue, for some number of responses. `streaming`: outputs are
    deltas. `traced`: they have rounds. `begun`: what the engine has, by index of the prompt.
    `most_drafts`: of a round of that engine; None while nothing has begun, and without a drafter.
    """

    def __init__(self, engine: EngineThread, responses: int, streaming: bool, traced: bool) -> None:
        self._engine = engine
        self.responses = responses
        self.streaming = streaming
        self.traced = traced
        self.prompts: Sequence[Prompt] = ()
        self.begun: dict[int, Response] = {}
        self.most_drafts: int | None = None
        self.updates: asyncio.Queue[tuple[int, RequestOutput | HTTPException]] = asyncio.Queue()

    def submit(self, requests: Sequence[CheckedRequest]) -> None:
        """Of one client, a request for each prompt."""
        self._engine.require_running()
        self.prompts = [request.prompt for request in requests]
        for index, request in enumerate(requests):
            self._engine.call(partial(self._engine.begin, self, index, request))

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, output) until all are finished. APIError if one could not be
        finished."""
        unfinished = len(self.prompts)
        while unfinished:
            index, update = await self.updates.get()
            if isinstance(update, HTTPException):
                raise update
            unfinished -= update.finished
            yield index, update

    def close(self) -> None:
        """Aborts what is unfinished and frees the place."""
        self._engine.leave(self)


class EngineThread:
    """`max_num_queued_reqs` responses may wait beyond those that have rows. `failure`: the error
    after which nothing is served; `on_failure` is called then.

    New requests go to the engine of `llm`. One that `replace_engine` has taken out of it runs what
    it has until that is finished."""

    def __init__(self, llm: TextGenerator, metrics: ServerMetrics, options: ServerOptions) -> None:
        self.llm = llm
        self.metrics = metrics
        self._places = llm.engine.scheduler.max_num_seqs + options.max_num_queued_reqs
        self.in_flight = 0  # responses of all tickets
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._tickets: set[Ticket] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._replacement: Future[Engine] | None = None  # that somebody waits for
        self._wake = asyncio.Event()
        # one thread, since CUDA graphs belong to the thread that captured them
        self._thread = ThreadPoolExecutor(1, "engine")
        self._stopping = False
        # the thread's own
        self._failed_steps = 0  # in a row
        self._replaced: list[Engine] = []  # engines that finish what they have
        self._active: dict[str, tuple[Ticket, int]] = {}  # by request id
        self._updates: list[Update] = []  # of this round

    # ------------------------------------------------------------------ clients

    def require_running(self) -> None:
        """APIError 503 if the engine has failed."""
        if self.failure is not None:
            raise APIError(503, f"the engine has stopped: {self.failure}")

    def admit(
        self, responses: int, field: str = "n", *, streaming: bool = False, traced: bool = False
    ) -> Ticket:
        """Reserves a place. `field`: of the request, that says how many responses it has. APIError:
        400 for more responses than there are places, 429 if too many wait already, 503 if nothing
        is served."""
        self.require_running()
        if responses > self._places:
            message = f"{responses} responses; this server has places for {self._places}"
            raise APIError(400, f"{field}: {message}", field)
        if self.in_flight + responses > self._places:
            message = f"{self.in_flight} responses run or wait already"
            message += "; try again later, or serve with more --max-num-queued-reqs"
            raise APIError(429, message, headers={"Retry-After": "1"})
        ticket = Ticket(self, responses, streaming, traced)
        self._tickets.add(ticket)
        self.in_flight += responses
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Frees the place of a ticket; what it has unfinished is aborted between two rounds."""
        self._tickets.remove(ticket)
        self.in_flight -= ticket.responses
        self.call(partial(self._end_all, ticket))

    @property
    def num_running(self) -> int:
        """Responses that have rows."""
        return sum(len(engine.scheduler.running) for engine in self._engines)

    def call(self, work: Callable[[], object]) -> None:
        """Has the thread call `work` between two rounds."""
        self._calls.append(work)
        self._wake.set()

    async def replace_engine(self, make: Callable[[], Engine]) -> Engine:
        """Has the thread call `make` between two rounds, and returns its engine. Requests that
        begin afterwards run in it, those before finish in the engine that they began in.

        What `make` raises is raised here, and all goes on as it was. APIError: 409 while another
        call is waited for, 503 if nothing is served."""
        self.require_running()
        if self._replacement is not None:
            raise APIError(409, "another drafter is being loaded; try again later")
        self._replacement = Future()
        self.call(partial(self._replace_engine, make, self._replacement))
        try:
            return await asyncio.wrap_future(self._replacement)
        finally:
            self._replacement = None

    # ------------------------------------------------------------------ the engine

    def warm_up(self) -> None:
        """Compiles all shapes of a round (minutes; without compiled rounds nothing is done)."""
        self._thread.submit(self.llm.warm_up).result()

    async def run(self) -> None:
        """Serves until it is cancelled or the engine fails."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await loop.run_in_executor(self._thread, self._rounds, loop)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the engine's state cannot be trusted any more
            self.failure = error
            logger.error("the engine has failed", exc_info=error)
            for ticket in self._tickets:
                ticket.updates.put_nowait((0, fault(error)))
            if self._replacement is not None and not self._replacement.done():
                self._replacement.set_exception(fault(error))
            self.on_failure()

    def stop(self) -> None:
        """Waits for the round that runs."""
        self._stopping = True
        self._thread.shutdown()

    def _rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        """Rounds until nothing is left to do. `loop`: hands their outputs to the clients."""
        while not self._stopping and (self._calls or any(e.has_unfinished for e in self._engines)):
            try:
                self.round()
            finally:
                updates = self._updates
                self._updates = []
                loop.call_soon_threadsafe(_deliver, updates)

    def round(self) -> None:
        """Does what was asked for, then one step of every engine. If that fails, the requests that
        had rows end with the reason, and those that wait go on.

        EngineFailure if they cannot: the device is lost, or `MOST_FAILED_STEPS` failed in a row."""
        while self._calls:
            self._calls.popleft()()
        for engine in self._engines:
            if engine.has_unfinished:
                self._step(engine)
        self._let_go()

    @property
    def _engines(self) -> list[Engine]:
        return [*self._replaced, self.llm.engine]

    def _step(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        try:
            finished = engine.step()
        except Exception as error:
            self._end_failed_step(engine, error)
            return
        self._failed_steps = 0
        for request_id in dict.fromkeys(r.request_id for r in [*finished, *scheduler.running]):
            try:
                self._publish(request_id)
            except Exception as error:
                logger.error("request %s could not be written", request_id, exc_info=error)
                self._fail(request_id, error)

    def _end_failed_step(self, engine: Engine, error: Exception) -> None:
        logger.error("a step of the engine failed; its requests are ended", exc_info=error)
        scheduler = engine.scheduler
        failed = scheduler.running or list(scheduler.waiting)[: scheduler.max_num_seqs]
        for request_id in {request.request_id for request in failed}:
            self._fail(request_id, error)
        self._failed_steps += 1
        require_device(engine.target.device)
        if self._failed_steps >= MOST_FAILED_STEPS:
            message = f"{self._failed_steps} steps failed in a row, the last: {reason(error)}"
            raise EngineFailure(message) from error

    def _replace_engine(self, make: Callable[[], Engine], replacement: Future[Engine]) -> None:
        if not replacement.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        engine = self.llm.engine
        try:
            successor = make()
        except Exception as error:
            replacement.set_exception(error)
            require_device(engine.target.device)
            return
        successor.counters = engine.counters  # those of a server never fall
        self.llm.engine = successor
        self._replaced.append(engine)
        replacement.set_result(successor)

    def _let_go(self) -> None:
        """Frees the replaced engines that have finished."""
        finished = [engine for engine in self._replaced if not engine.has_unfinished]
        if not finished:
            return
        self._replaced = [engine for engine in self._replaced if engine.has_unfinished]
        in_use = [engine.target for engine in self._engines]
        for engine in finished:
            if engine.target not in in_use:
                engine.target.close()  # the hooks of its taps, which the model holds
        del engine, finished
        free_memory()

    def begin(self, ticket: Ticket, index: int, request: CheckedRequest) -> None:
        """Hands a prompt to the engine."""
        try:
            response = self.llm.start(request, streaming=ticket.streaming, decodes_logprobs=False)
        except Exception as error:
            self._updates.append((ticket, index, fault(error)))
            return
        for writing in response.requests if ticket.traced else ():
            writing.rounds = []
        proposer = self.llm.engine.proposer
        ticket.most_drafts = None if proposer is None else proposer.num_speculative_tokens
        ticket.begun[index] = response
        self._active[response.request_id] = (ticket, index)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Ends a response with an error, which its client receives."""
        ticket, index = self._active[request_id]
        for request in ticket.begun[index].requests:
            if not request.finished:
                request.finish("error")
        self._end(ticket.begun[index])
        self._updates.append((ticket, index, fault(error)))

    def _end_all(self, ticket: Ticket) -> None:
        for response in ticket.begun.values():
            self._end(response)

    def _end(self, response: Response) -> None:
        """Takes a response out of the engine, if it is there."""
        if self._active.pop(response.request_id, None) is not None:
            for engine in self._engines:
                engine.abort(response.request_id)
            for request in response.requests:
                self.metrics.finished(request)

    def _publish(self, request_id: str) -> None:
        """Hands on what a round has written of a response."""
        ticket, index = self._active[request_id]
        response = ticket.begun[index]
        output = None
        if ticket.streaming:
            output = response.delta()
        elif response.finished:
            output = response.output()
        if output is not None:
            self._updates.append((ticket, index, output))
        if response.finished:
            self._end(response)


def _deliver(updates: Sequence[Update]) -> None:
    for ticket, index, update in updates:
        ticket.updates.put_nowait((index, update))
