"""The HTTP server: OpenAI's endpoints over one LLM, for many clients at a time (docs/server.md).

    app = make_app(LLM("path/to/target", speculative_config=…),
    ServerOptions(served_model_name=("my-model",)))

Here are the routes. Requests are parsed in api/requests.py, answers are written in responses.py,
and async_engine.py decides whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import anyio
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from inference.entrypoints.llm import LLM
from inference.outputs import RequestOutput
from inference.provenance import package_version
from inference.server.api import schema
from inference.server.api.errors import APIError, add_error_handlers, error_json, log_fault
from inference.server.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from inference.server.api.requests import Prompts, RequestParser
from inference.server.async_engine import AsyncEngine, Ticket
from inference.server.metrics import ServerMetrics
from inference.server.middleware import RequestGuard
from inference.server.options import ServerOptions
from inference.server.responses import ChatWriter, CompletionWriter, TokenTexts, Writer

logger = logging.getLogger(__name__)

NUM_WORKERS = 4  # threads that tokenize requests
# The page is one file without data, so it needs no key. It may fetch nothing but this server's
# answers.
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
R = TypeVar("R")
Documented = dict[int | str, dict[str, Any]]  # responses, as FastAPI documents them
ERRORS: Documented = {
    "4XX": {"model": schema.ErrorResponse},
    "5XX": {"model": schema.ErrorResponse},
}


class Server:
    """One LLM behind HTTP. The app's lifespan starts and stops `engine`."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options, self.started = llm, options, int(time.time())
        self.metrics = ServerMetrics(options.served_model_name[0], llm.engine.max_model_len)
        self.engine = AsyncEngine(llm, self.metrics, options)
        self._workers = anyio.CapacityLimiter(NUM_WORKERS)
        engine = self.engine
        self.metrics.watch(llm, lambda: engine.in_flight)
        self.parser = RequestParser(llm, options)
        self.texts = TokenTexts(llm.get_tokenizer())

    def model_name(self, requested: str | None) -> str:
        """The name for the answer. APIError 404 for a model that is not served."""
        names = self.options.served_model_name
        if requested is not None and requested not in names:
            raise APIError(
                404, f"no model {requested!r} here; expected one of {', '.join(names)}", "model"
            )
        return requested or names[0]

    async def run_in_worker(self, work: Callable[[], R]) -> R:
        """Runs blocking work in a thread, so that the event loop goes on."""
        return await anyio.to_thread.run_sync(work, limiter=self._workers)

    async def generate(
        self,
        http: Request,
        request: GenerationRequest,
        prompts: int,
        parse: Callable[[], Prompts],
        writer_class: Callable[..., Writer],
        prefix: str,
    ) -> Response:
        """Answers a completion or a chat, whole or as a stream."""
        name = f"{prefix}-{request.request_id or uuid4().hex}"
        base = {
            "id": name,
            "created": int(time.time()),
            "model": self.model_name(request.model),
            "system_fingerprint": f"draftsmith-{package_version()}",
        }
        ticket = self.engine.admit(self.parser.count(request, prompts))
        with ExitStack() as closing:
            closing.callback(self._close, ticket, name)
            parsed = await self.run_in_worker(parse)
            ticket.submit(
                parsed, streaming=bool(request.stream), traced=bool(request.return_rounds)
            )
            proposer = self.llm.engine.proposer
            num_spec_tokens = None if proposer is None else proposer.num_speculative_tokens
            writer = writer_class(
                request, base, self.options, self.texts, ticket.generations, num_spec_tokens
            )
            if request.stream:
                return EventStream(_events(ticket, writer), closing.pop_all().close)
            outputs = await _while_connected(http, _collect(ticket))
            return Response(writer.whole(outputs).model_dump_json(), media_type="application/json")

    def _close(self, ticket: Ticket, name: str) -> None:
        ticket.close()
        if self.options.enable_log_requests:
            prompts = sum(len(generation.prompt.token_ids) for generation in ticket.generations)
            written = sum(sum(generation.num_written) for generation in ticket.generations)
            seconds = time.perf_counter() - ticket.arrival
            logger.info("%s: %d prompt tokens, %d written, %.3f s", name, prompts, written, seconds)


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


async def _events(ticket: Ticket, writer: Writer) -> AsyncIterator[str]:
    """Server-sent events. Errors after the first one are events too."""
    try:
        async for index, output in ticket.outputs():
            for chunk in writer.chunks(index, output):
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        for chunk in writer.last():
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    except APIError as error:
        yield f"data: {error_json(error).decode()}\n\n"
    except Exception as error:
        log_fault("a stream was ended", error)
        yield f"data: {error_json(APIError(500, 'the server failed to finish this')).decode()}\n\n"
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
        server.engine.start()
        try:
            await server.engine.ready()  # no port is open before
            yield
        finally:
            await server.engine.stop()

    app = FastAPI(
        title="Draftsmith",
        version=package_version(),
        lifespan=lifespan,
        root_path=options.root_path,
        openapi_url=None if options.disable_fastapi_docs else "/openapi.json",  # /docs needs it too
        responses=ERRORS,
    )
    app.state.server = server
    add_error_handlers(app)
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_state(app, server)
    app.add_middleware(RequestGuard, options=options)
    if origins := options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _streamed(model: type[BaseModel]) -> Documented:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"itemSchema": event}}
    return {
        200: {
            "model": model,
            "description": "whole, or with stream its chunks as events",
            "content": events,
        }
    }


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=_streamed(schema.CompletionResponse))
    async def completions(request: CompletionRequest, http: Request) -> Response:
        parse = partial(server.parser.completion, request)
        return await server.generate(
            http, request, len(request.prompts), parse, CompletionWriter, "cmpl"
        )

    @app.post("/v1/chat/completions", responses=_streamed(schema.ChatCompletionResponse))
    async def chat_completions(request: ChatCompletionRequest, http: Request) -> Response:
        return await server.generate(
            http, request, 1, partial(server.parser.chat, request), ChatWriter, "chatcmpl"
        )


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize")
    async def tokenize(
        request: TokenizeCompletionRequest | TokenizeChatRequest,
    ) -> schema.TokenizeResponse:
        server.model_name(request.model)
        tokens = await server.run_in_worker(partial(server.parser.tokens, request))
        texts = (
            server.texts.tokenizer.convert_ids_to_tokens(tokens)
            if request.return_token_strs
            else None
        )
        return schema.TokenizeResponse(
            count=len(tokens),
            max_model_len=server.llm.engine.max_model_len,
            tokens=tokens,
            token_strs=texts,
        )

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[Literal["prompt"], str]:
        server.model_name(request.model)
        return {"prompt": await server.run_in_worker(partial(server.parser.text, request.tokens))}


def _add_state(app: FastAPI, server: Server) -> None:
    def card(name: str) -> schema.ModelCard:
        engine = server.llm.engine
        root, limit = engine.target.name_or_path, engine.max_model_len
        return schema.ModelCard(id=name, created=server.started, root=root, max_model_len=limit)

    @app.get("/v1/models")
    async def models() -> schema.ModelList:
        return schema.ModelList(data=[card(name) for name in server.options.served_model_name])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> schema.ModelCard:
        return card(server.model_name(name))

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        if not server.engine.healthy:
            raise APIError(503, server.engine.failure_message)
        return Response()

    @app.get("/version")
    async def version() -> dict[Literal["version"], str]:
        return {"version": package_version()}

    text = {"text/plain": {"schema": {"type": "string"}}}
    prometheus: Documented = {200: {"description": "Prometheus text format", "content": text}}

    @app.get("/metrics", responses=prometheus, response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    page = PAGE.read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=PAGE_HEADERS)
