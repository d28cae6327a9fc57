"""A server of hidden states in this process, as vLLM answers: for tests of what asks it."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from safetensors.torch import save_file

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features import state_servers

ONE_AT_A_TIME = threading.Lock()  # a target runs one forward


class FakeServer:
    """Answers with the states of a target, all of whose taps are asked for.

    `spoil(tensors, path)`: changes what is written; `status`: of all answers; `page`: the text of
    all, in place of JSON; `fields`: changes of the answer."""

    def __init__(self, target: FrozenTarget, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.status = 200
        self.limit = 512
        self.page = ""
        self.spoil = lambda tensors, path: tensors
        self.fields = lambda answer: answer
        self.unread = lambda: None
        self.asked: list[list[int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "no"}})
        if self.page:
            return httpx.Response(200, html=self.page)
        if request.url.path == "/v1/models":
            card = {"id": "target", "object": "model", "created": 0, "owned_by": "vllm"}
            card["max_model_len"] = self.limit
            return httpx.Response(200, json={"object": "list", "data": [card]})
        body = json.loads(request.content)
        self.asked.append(body["prompt"])
        states, token = states_of(self.target, body["prompt"])
        name = f"cmpl-{request.headers['X-Request-Id']}-0-{uuid.uuid4().hex[:8]}"
        path = self.folder / f"{name}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"hidden_states": states, "token_ids": torch.tensor(body["prompt"])}
        if (tensors := self.spoil(tensors, path)) is not None:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        self.unread()
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [token]}
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "target"}
        answer |= {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}
        return httpx.Response(200, json=self.fields(answer))


def states_of(target: FrozenTarget, text: list[int]) -> tuple[torch.Tensor, int]:
    """The taps of a text [T, layers, H], and the greedy token after it."""
    with ONE_AT_A_TIME:
        taps, last = target(torch.tensor([text]))
    states = taps[0].unflatten(-1, (len(target.tap_layers), -1))
    return states.contiguous(), int(target.logits(last[0, -1]).argmax())


def connect(monkeypatch, by_url: Mapping[str, FakeServer]) -> None:
    """Has the clients of these addresses reach these servers."""

    class Client(openai.OpenAI):
        def __init__(self, base_url: str, **options: Any) -> None:
            http = httpx.Client(transport=httpx.MockTransport(by_url[base_url]))
            super().__init__(base_url=base_url, http_client=http, **options)

    monkeypatch.setattr(state_servers, "OpenAI", Client)


@contextmanager
def listening(fake: FakeServer) -> Iterator[str]:
    """The address of the server on loopback, for other processes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = f"http://fake{self.path}"
            headers = dict(self.headers)
            answer = fake(httpx.Request(self.command, url, headers=headers, content=body))
            with suppress(ConnectionError):  # who asked was killed
                self.send_response(answer.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
