"""The HTTP server: OpenAI's endpoints over one LLM, for many clients at a time (docs/runtime.md).

    llm = LLM("path/to/target", speculative_config=…)
    app = make_app(llm, ServerOptions(served_model_name=("my-model",)))

Here are the routes. Requests are read in protocol.py, answers are written in answers.py, and
engine_thread.py decides whose turn it is (ARCHITECTURE.md has the way of a request)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from draftsmith.inference.entrypoints.checks import TextLimit
from draftsmith.inference.entrypoints.llm import engine_with_drafter
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.server.answers import ChatWriter, CompletionWriter, EventStream
from draftsmith.inference.server.api_errors import SHUTTING_DOWN, APIError, error_response, fault
from draftsmith.inference.server.engine_thread import EngineThread, Ticket
from draftsmith.inference.server.logged_exchanges import exchanges_of
from draftsmith.inference.server.prometheus import ServerMetrics
from draftsmith.inference.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DrafterRequest,
    GenerationRequest,
)
from draftsmith.inference.server.serve_options import ServerOptions
from draftsmith.inference.traffic_log.recorder import Recorder
from draftsmith.speculators.errors import ConfigError, DraftsmithError

logger = logging.getLogger(__name__)

DISCONNECTED = "the client has disconnected"
NUM_WORKERS = 4  # threads that read requests and write long answers
# The page is one file without data, so it needs no key. It may fetch nothing but this server's
# answers.
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
R = TypeVar("R")
Endpoint = Callable[[Request], Awaitable[Response]]


class Server:
    """One LLM behind HTTP. The app's lifespan starts and stops `engine`. `recorder`: logs what is
    exchanged; None: nothing is logged."""

    def __init__(
        self, llm: TextGenerator, options: ServerOptions, recorder: Recorder | None = None
    ) -> None:
        if llm.get_tokenizer() is None:
            raise ConfigError("a server needs a tokenizer; pass one with the model, or --tokenizer")
        self.llm = llm
        self.options = options
        self.recorder = recorder
        self.started = int(time.time())  # seconds since 1970
        name = options.served_model_name[0]
        self.metrics = ServerMetrics(
            name, llm, lambda: self.engine.in_flight, lambda: self.engine.num_running
        )
        self.engine = EngineThread(llm, self.metrics, options)
        self._text_limit = TextLimit(llm.get_tokenizer(), llm.engine.max_model_len)
        self._workers = anyio.CapacityLimiter(NUM_WORKERS)

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(http, CompletionRequest, CompletionWriter)

    async def chat_completions(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(http, ChatRequest, ChatWriter)

    async def models(self, http: Request) -> Response:
        """GET /v1/models: one model under all of its names."""
        names = self.options.served_model_name
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def drafter(self, http: Request) -> Response:
        """POST /v1/drafter: responses that begin from now on are drafted by another head."""
        assert self.options.drafters_dir is not None
        body = await _body(http, self.options.max_request_bytes)
        folder = DrafterRequest.read(body).folder(self.options.drafters_dir)
        make = partial(engine_with_drafter, self.llm, folder)
        try:
            engine = await self.engine.replace_engine(make)
        except DraftsmithError as error:
            raise fault(error) from error
        proposer = engine.proposer
        assert proposer is not None
        logger.info("responses that begin from now on are drafted by %s", folder)
        drafts = proposer.num_speculative_tokens
        return JSONResponse({"model": str(folder), "num_speculative_tokens": drafts})

    async def prometheus(self, http: Request) -> Response:
        """GET /metrics, under vLLM's names (prometheus.py)."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, http: Request) -> Response:
        """GET /health: 200, with the state of the log if there is one; 503 if the engine has
        failed."""
        self.engine.require_running()
        if self.recorder is None:
            return Response()
        return JSONResponse({"log": self.recorder.health()})

    async def page(self, http: Request) -> Response:
        """GET /: the page, as a chat where the model has a template, else with a text to be
        continued."""
        text = PAGE.read_text(encoding="utf-8")
        if self.options.chat_template or self.llm.get_tokenizer().chat_template:
            text = text.replace('id="chat"', 'id="chat" checked', 1)
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    def _card(self, name: str) -> dict[str, Any]:
        """APIError 404 for a model that is not served."""
        names = self.options.served_model_name
        engine = self.llm.engine
        if name not in names:
            message = f"no model {name!r} here; expected one of {', '.join(names)}"
            raise APIError(404, message, "model")
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "draftsmith",
            "root": engine.target.name_or_path,
            "max_model_len": engine.max_model_len,
        }

    def with_key(self, endpoint: Endpoint) -> Endpoint:
        """Behind one of `api_key` as `Authorization: Bearer KEY`, if there are. APIError: 401
        without one, 503 for what --shutdown-timeout ends."""
        keys = [key.encode() for key in self.options.api_key]

        async def keyed(http: Request) -> Response:
            scheme, _, sent = http.headers.get("authorization", "").partition(" ")
            matches = [hmac.compare_digest(sent.strip().encode(), key) for key in keys]
            if keys and not (scheme.lower() == "bearer" and any(matches)):
                message = "no valid API key; send one as `Authorization: Bearer KEY`"
                raise APIError(401, message, headers={"WWW-Authenticate": "Bearer"})
            try:
                return await endpoint(http)
            except asyncio.CancelledError:  # uvicorn's: a client that leaves cancels a scope inside
                raise APIError(503, SHUTTING_DOWN) from None

        return keyed

    async def _in_worker(self, work: Callable[[], R]) -> R:
        """Calls `work` in a worker thread: the event loop and the engine serve all clients."""
        return await anyio.to_thread.run_sync(work, limiter=self._workers)

    async def _generate(
        self,
        http: Request,
        request_class: type[GenerationRequest],
        writer_class: type[CompletionWriter],
    ) -> Response:
        """Answers a completion or a chat, whole or as a stream."""
        draw = None if self.recorder is None else self.recorder.draw()
        body = await _body(http, self.options.max_request_bytes)
        read = partial(request_class.read, body, self.options)
        request, params = await self._in_worker(read)
        base = {
            "id": f"{writer_class.id_prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self._card(request.model or self.options.served_model_name[0])["id"],
        }
        ticket = self.engine.admit(
            request.num_prompts * params.n,
            request.prompt_field if params.n == 1 else "n",
            streaming=request.stream,
            traced=request.return_rounds,
        )
        with ExitStack() as closing:
            closing.callback(ticket.close)
            if self.recorder is not None and draw is not None:
                exchanges = partial(exchanges_of, draw.time, base["model"], request, ticket)
                record = partial(self.recorder.record, draw, exchanges, len(body))
                closing.callback(_record_if_written, ticket, record)
            parse = partial(request.parse, params, self.llm, self.options, self._text_limit)
            ticket.submit(await self._in_worker(parse))
            detail = request.per_request_spec_decode_metrics
            detail = detail or self.options.per_request_spec_decode_metrics
            writer = writer_class(request, base, self.llm, ticket, detail, self._in_worker)
            if request.stream:
                return EventStream(writer.events(), closing.pop_all().close)
            return await _while_connected(http, writer.response())


def _record_if_written(ticket: Ticket, record: Callable[[], None]) -> None:
    """Calls `record` if a token was written: a request that was refused is not left out of the log,
    it was none of it."""
    responses = list(ticket.begun.values())
    if any(writing.output_token_ids for response in responses for writing in response.requests):
        record()


async def _body(http: Request, most: int) -> bytes:
    """The body of a request. APIError 413 if it is longer than `most` bytes, which are the most
    that is read of it."""
    message = f"the body has more than {most} bytes; see --max-request-bytes"
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise APIError(413, message)
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > most:
                raise APIError(413, message)
    except ClientDisconnect:
        raise APIError(400, DISCONNECTED) from None
    return bytes(body)


async def _while_connected(http: Request, work: Awaitable[R]) -> R:
    """Awaits `work`, which is cancelled if the client disconnects."""

    async def cancel_on_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watching = asyncio.create_task(cancel_on_disconnect())
        try:
            return await work
        finally:
            watching.cancel()
    raise APIError(400, DISCONNECTED)


def make_app(
    llm: TextGenerator, options: ServerOptions, recorder: Recorder | None = None
) -> Starlette:
    """The application; `app.state.server` is its Server. The recorder is closed with it."""
    server = Server(llm, options, recorder)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(server.engine.run())
        yield
        running.cancel()
        await asyncio.to_thread(server.engine.stop)
        if recorder is not None:
            await asyncio.to_thread(recorder.close)

    keyed = server.with_key
    routes = [
        Route("/v1/completions", keyed(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", keyed(server.chat_completions), methods=["POST"]),
        Route("/v1/models", keyed(server.models)),
        Route("/metrics", keyed(server.prometheus)),
        Route("/health", server.health),
        Route("/", server.page),
    ]
    handlers: dict[Any, Any] = {HTTPException: error_response, Exception: error_response}
    if options.drafters_dir is not None:
        routes.append(Route("/v1/drafter", keyed(server.drafter), methods=["POST"]))
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.server = server
    return app
