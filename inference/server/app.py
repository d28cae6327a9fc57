"""The HTTP server: OpenAI's endpoints over one LLM, for many clients at a time (docs/server.md).

    app = make_app(LLM("path/to/target", speculative_config=…),
    ServerOptions(served_model_name=("my-model",)))

Here are the routes. Requests are parsed in parsing.py, answers are written in answers.py, and
engine_loop.py decides whose turn it is."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

from inference.entrypoints.llm import LLM
from inference.outputs import RequestOutput
from inference.provenance import package_version
from inference.server.answers import ChatWriter, CompletionWriter
from inference.server.engine_loop import EngineLoop, Ticket
from inference.server.errors import APIError, add_error_handlers, error_json
from inference.server.metrics import ServerMetrics
from inference.server.options import ServerOptions
from inference.server.parsing import Prompts, RequestParser
from inference.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

logger = logging.getLogger(__name__)

NUM_WORKERS = 4  # threads that tokenize requests
# The page is one file without data, so it needs no key. It may fetch nothing but this server's
# answers.
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
R = TypeVar("R")


class Server:
    """One LLM behind HTTP. The app's lifespan starts and stops `engine`."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options, self.started = llm, options, int(time.time())
        self.metrics = ServerMetrics(
            options.served_model_name[0], llm, lambda: self.engine.in_flight
        )
        self.engine = EngineLoop(llm, self.metrics, options)
        self.parser = RequestParser(llm, options)
        self._workers = anyio.CapacityLimiter(NUM_WORKERS)

    def model_name(self, requested: str | None) -> str:
        """The name for the answer. APIError 404 for a model that is not served."""
        names = self.options.served_model_name
        if requested is not None and requested not in names:
            raise APIError(
                404, f"no model {requested!r} here; expected one of {', '.join(names)}", "model"
            )
        return requested or names[0]

    def model_card(self, name: str) -> dict[str, Any]:
        engine = self.llm.engine
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "draftsmith",
            "root": engine.target.name_or_path,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }

    async def require_key(self, http: Request) -> None:
        """APIError 401 without one of `api_key` as `Authorization: Bearer KEY`, if there are."""
        keys = self.options.api_key
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
        if keys and not (scheme.lower() == "bearer" and any(matches)):
            message = "no valid API key; send one as `Authorization: Bearer KEY`"
            raise APIError(401, message, headers={"WWW-Authenticate": "Bearer"})

    async def generate(
        self,
        http: Request,
        request: GenerationRequest,
        responses: int,
        parse: Callable[[], Prompts],
        writer_class: type[CompletionWriter],
    ) -> Response:
        """Answers a completion or a chat, whole or as a stream."""
        base = {
            "id": f"{writer_class.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self.model_name(request.model),
            "system_fingerprint": f"draftsmith-{package_version()}",
        }
        ticket = self.engine.admit(responses)
        with ExitStack() as closing:
            closing.callback(ticket.close)
            parsed = await anyio.to_thread.run_sync(parse, limiter=self._workers)
            ticket.submit(
                parsed, streaming=bool(request.stream), traced=bool(request.return_rounds)
            )
            proposer = self.llm.engine.proposer
            writer = writer_class(
                request,
                base,
                self.llm.get_tokenizer(),
                ticket,
                None if proposer is None else proposer.num_speculative_tokens,
                request.per_request_spec_decode_metrics
                or self.options.per_request_spec_decode_metrics,
            )
            if request.stream:
                return EventStream(_events(ticket, writer), closing.pop_all().close)
            outputs = await _while_connected(http, _collect(ticket))
            return JSONResponse(writer.whole(outputs))


async def _collect(ticket: Ticket) -> list[RequestOutput]:
    outputs = {index: output async for index, output in ticket.outputs()}
    return [outputs[index] for index in range(len(outputs))]


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
    raise APIError(400, "the client has disconnected")


async def _events(ticket: Ticket, writer: CompletionWriter) -> AsyncIterator[str]:
    """Server-sent events. Errors after the first one are events too."""
    try:
        async for index, output in ticket.outputs():
            for chunk in writer.chunks(index, output):
                yield f"data: {json.dumps(chunk)}\n\n"
        for chunk in writer.last():
            yield f"data: {json.dumps(chunk)}\n\n"
    except APIError as error:
        yield f"data: {error_json(error).decode()}\n\n"
    except Exception as error:
        logger.error("a stream was ended", exc_info=error)
        yield f"data: {error_json(APIError(500, f'the server failed: {error}')).decode()}\n\n"
    yield "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Calls `on_close` when the stream ends, also if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def make_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The application; `app.state.server` is its Server."""
    server = Server(llm, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(server.engine.warm_up)
        running = asyncio.create_task(server.engine.run())
        yield
        server.engine.cancel_all()
        running.cancel()
        await asyncio.to_thread(server.engine.stop)

    app = FastAPI(title="Draftsmith", version=package_version(), lifespan=lifespan)
    app.state.server = server
    add_error_handlers(app)
    app.include_router(_keyed_routes(server))

    @app.get("/health")
    async def health() -> Response:
        server.engine.require_health()
        return Response()

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    return app


def _keyed_routes(server: Server) -> APIRouter:
    """All routes but the page and /health."""
    router = APIRouter(dependencies=[Depends(server.require_key)])
    parser = server.parser

    @router.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        responses = len(request.prompts) * (request.n or 1)
        parse = partial(parser.completion, request)
        return await server.generate(http, request, responses, parse, CompletionWriter)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: ChatCompletionRequest, http: Request) -> Response:
        parse = partial(parser.chat, request)
        return await server.generate(http, request, request.n or 1, parse, ChatWriter)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = server.options.served_model_name
        return {"object": "list", "data": [server.model_card(name) for name in names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return server.model_card(server.model_name(name))

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": package_version()}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
