"""The HTTP server: OpenAI's endpoints over one LLM, many clients at a time (docs/server.md).

    app = make_app(LLM("path/to/target", speculative_config=…), ServerOptions(("my-model",)))

`python -m inference.server --model …` starts it, as `draftsmith serve` does. Routes only: what requests mean is in
server_prompts, what answers say in server_responses, and whose turn it is in async_engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from inference.entrypoints.llm import LLM
from inference.entrypoints.prompts import Prompt
from inference.outputs import RequestOutput
from inference.provenance import package_version
from inference.sampling_params import SamplingParams
from inference.server.api import protocol_responses as told
from inference.server.api.errors import APIError, error_json, install, log_fault
from inference.server.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from inference.server.api.requests import Intake
from inference.server.async_engine import AsyncEngine, Ticket
from inference.server.drafter_swap import Drafters, add_drafters
from inference.server.metrics import ServerMetrics
from inference.server.middleware import Gate
from inference.server.options import ServerOptions
from inference.server.page import add_page
from inference.server.responses import ChatWriter, CompletionWriter, TokenTexts

logger = logging.getLogger(__name__)

WORKERS = 4  # requests tokenized at the same time
R = TypeVar("R")
Asked = list[tuple[Prompt, SamplingParams]]
Writer = CompletionWriter | ChatWriter
Responses = dict[int | str, dict[str, Any]]  # as FastAPI documents them


class Server:
    """One LLM and who asks it. `engine` is started by the app's lifespan."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options, self.started = llm, options, int(time.time())
        self.metrics = ServerMetrics(options.served_model_names[0], llm.engine.max_model_len)
        self.engine = AsyncEngine(
            llm,
            self.metrics,
            max_num_queued_reqs=options.max_num_queued_reqs,
            request_timeout_s=options.request_timeout_s,
        )
        self._workers = anyio.CapacityLimiter(WORKERS)
        self.drafters = Drafters(llm, self.engine, self.aside)
        scheduler, length = llm.engine.scheduler, llm.engine.max_model_len
        self.metrics.watch(
            lambda: len(scheduler.running),
            lambda: max(0, self.engine.in_flight - len(scheduler.running)),
            lambda: sum(len(r.token_ids) for r in scheduler.running) / scheduler.max_num_seqs / length,
            lambda: llm.engine.counters,
            self.drafters,
        )
        self.intake = Intake(llm, options)
        self.texts = TokenTexts(llm.get_tokenizer())

    @property
    def num_spec_tokens(self) -> int | None:
        """Of the drafter that drafts now."""
        proposer = self.llm.engine.proposer
        return None if proposer is None else proposer.num_speculative_tokens

    def named(self, model: str | None) -> str:
        """The name that answers carry; 404 for a model that is not here."""
        names = self.options.served_model_names
        if model is not None and model not in names:
            raise APIError(404, f"no model {model!r} here; expected one of {', '.join(names)}", "model")
        return model or names[0]

    async def aside(self, work: Callable[[], R]) -> R:
        """In a worker thread: the event loop goes on."""
        return await anyio.to_thread.run_sync(work, limiter=self._workers)

    async def answer(
        self, http: Request, request: GenerationRequest, prompts: int, prepare: Callable[[], Asked],
        writer: Callable[..., Writer], prefix: str,
    ) -> Response:  # fmt: skip
        """Admits, prepares, runs and answers one request of either kind."""
        name, kept = f"{prefix}-{request.request_id or uuid4().hex}", False
        base = {
            "id": name,
            "created": int(time.time()),
            "model": self.named(request.model),
            "system_fingerprint": f"draftsmith-{package_version()}",
        }
        ticket = self.engine.admit(self.intake.count(request, prompts))
        streaming = bool(request.stream)
        try:
            asked = await self.aside(prepare)
            ticket.submit(asked, streaming=streaming, traced=bool(request.return_rounds))
            written = writer(request, base, self.options, self.texts, ticket.generations, self.num_spec_tokens)
            if streaming:
                kept = True  # by the stream, which closes it
                return EventStream(self._events(ticket, written), partial(self._close, ticket, name))
            outputs = await _unless_gone(http, _collected(ticket))
            return Response(written.whole(outputs).model_dump_json(), media_type="application/json")
        finally:
            if not kept:
                self._close(ticket, name)

    async def _events(self, ticket: Ticket, writer: Writer) -> AsyncIterator[str]:
        """Server-sent events. What goes wrong after the first one is an event as well."""
        try:
            async for index, output in ticket.outputs():
                for chunk in writer.chunks(index, output):
                    yield _event(chunk)
            for chunk in writer.last():
                yield _event(chunk)
        except APIError as error:
            yield f"data: {error_json(error).decode()}\n\n"
        except Exception as error:
            log_fault("a stream was ended", error)
            yield f"data: {error_json(APIError(500, 'the server failed to finish this')).decode()}\n\n"
        yield "data: [DONE]\n\n"

    def _close(self, ticket: Ticket, name: str) -> None:
        ticket.close()
        if self.options.enable_log_requests:
            prompts = sum(len(each.prompt.token_ids) for each in ticket.generations)
            written = sum(sum(each.written) for each in ticket.generations)
            seconds = time.perf_counter() - ticket.arrival
            logger.info("%s: %d prompt tokens, %d written, %.3f s", name, prompts, written, seconds)


class EventStream(StreamingResponse):
    """`closed` is called when it ends, however that comes."""

    def __init__(self, events: AsyncIterator[str], closed: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._closed()


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
        openapi_url=None if options.disable_fastapi_docs else "/openapi.json",  # without it there are no pages either
    )
    app.state.server = server
    install(app)
    _add_generation(app, server)
    _add_tokens(app, server)
    _add_state(app, server)
    add_page(app)
    if options.enable_drafter_swap:
        add_drafters(app, server.drafters, _errors(400, 401, 413, 500, 503))
    _tell_the_truth(app)
    app.add_middleware(
        Gate,
        api_keys=options.api_keys,
        max_body_bytes=options.max_body_bytes,
        body_timeout_s=options.request_timeout_s,
    )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


# ------------------------------------------------------------------ routes


def _errors(*codes: int) -> Responses:
    return {code: {"model": told.ErrorResponse} for code in codes}


GENERATION_ERRORS = _errors(400, 401, 404, 408, 413, 429, 500, 503)
PLAIN_ERRORS = _errors(400, 401, 404, 413, 500)


def _streamed(model: type[BaseModel]) -> Responses:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"itemSchema": event}}
    return {200: {"model": model, "description": "whole, or with stream its chunks as events", "content": events}}


def _add_generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=_streamed(told.CompletionResponse) | GENERATION_ERRORS)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        work = partial(server.intake.completion, request)
        return await server.answer(http, request, len(request.prompts), work, CompletionWriter, "cmpl")

    @app.post("/v1/chat/completions", responses=_streamed(told.ChatCompletionResponse) | GENERATION_ERRORS)
    async def chat_completions(request: ChatCompletionRequest, http: Request) -> Response:
        return await server.answer(http, request, 1, partial(server.intake.chat, request), ChatWriter, "chatcmpl")


def _add_tokens(app: FastAPI, server: Server) -> None:
    @app.post("/tokenize", responses=PLAIN_ERRORS)
    async def tokenize(request: TokenizeCompletionRequest | TokenizeChatRequest) -> told.TokenizeResponse:
        server.named(request.model)
        tokens = await server.aside(partial(server.intake.tokens, request))
        texts = server.texts.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
        return told.TokenizeResponse(
            count=len(tokens), max_model_len=server.llm.engine.max_model_len, tokens=tokens, token_strs=texts
        )

    @app.post("/detokenize", responses=PLAIN_ERRORS)
    async def detokenize(request: DetokenizeRequest) -> told.DetokenizeResponse:
        server.named(request.model)
        return told.DetokenizeResponse(prompt=await server.aside(partial(server.intake.text, request.tokens)))


def _add_state(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", responses=_errors(401))
    async def models() -> told.ModelList:
        root, limit = server.llm.engine.target.name_or_path, server.llm.engine.max_model_len
        names = server.options.served_model_names
        cards = [told.ModelCard(id=name, created=server.started, root=root, max_model_len=limit) for name in names]
        return told.ModelList(data=cards)

    @app.get("/health", responses=_errors(503), response_class=Response)
    async def health() -> Response:
        if not server.engine.healthy:
            raise APIError(503, server.engine.told_failure)
        return Response()

    @app.get("/version", responses=_errors(401))
    async def version() -> told.VersionResponse:
        return told.VersionResponse(version=package_version())

    plain = {"text/plain": {"schema": {"type": "string"}}}
    text: Responses = {200: {"description": "Prometheus' text format", "content": plain}}

    @app.get("/metrics", responses=text | _errors(401), response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _tell_the_truth(app: FastAPI) -> None:
    """FastAPI documents its own errors (422), which are never sent: a wrong request is 400, as everywhere."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        fresh = app.openapi_schema is None
        schema = described()
        if fresh:
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


# ------------------------------------------------------------------ answers


async def _collected(ticket: Ticket) -> Sequence[RequestOutput]:
    outputs = {index: output async for index, output in ticket.outputs()}
    return [outputs[index] for index in range(len(outputs))]


async def _unless_gone(http: Request, work: Any) -> Any:
    """What `work` comes to, unless the client hangs up first: then nobody reads an answer, and the work is ended."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise APIError(400, "the client has hung up")
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
