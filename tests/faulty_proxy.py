"""A proxy on loopback in front of a server, which breaks a share of the requests in every way a
network knows, and can be killed and started again at the same port."""

from __future__ import annotations

import itertools
import json
import random
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("http_500", "http_503", "reset", "silence", "half_json", "no_answer", "aborted")


class FaultyProxy:
    """`share` of the POST and GET requests fail; `seen`: what became of them."""

    def __init__(
        self, upstream: str, share: float, *, seed: int = 0, silence_s: float = 12.0
    ) -> None:
        self.upstream, self.share, self.silence_s = upstream, share, silence_s
        self.seen: Counter[str] = Counter()
        self._dice, self._lock = random.Random(seed), threading.Lock()
        self._turns = itertools.cycle(FAULTS)
        self._open: set[socket.socket] = set()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        class Server(ThreadingHTTPServer):
            daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

            def handle_error(self, request, client_address):
                """Connections are broken on purpose."""

        self._server = Server(("127.0.0.1", self.port), self._handler())
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        """As a process that is killed: nobody listens, and whoever was connected is cut off."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            self.seen["kill"] += 1
            for each in self._open:
                _reset(each)
            self._open.clear()

    def _fate(self, path: str) -> str:
        """Chance says which requests fail; those for texts fail in each way in turn, so that none
        is left out."""
        with self._lock:
            fault = "ok"
            if self._dice.random() < self.share:
                fault = (
                    next(self._turns) if path.endswith("completions") else self._dice.choice(FAULTS)
                )
            if (
                fault == "silence" and self.seen["silence"] == 3
            ):  # each costs the client its patience
                fault = "reset"
            self.seen[fault] += 1
            return fault

    def _handler(self):
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with proxy._lock:
                    proxy._open.add(self.connection)

            def log_message(self, *_):
                pass

            def do_GET(self):
                self._pass(None)

            def do_POST(self):
                body = self.rfile.read(length := int(self.headers["Content-Length"]))
                if len(body) == length:  # else it was killed meanwhile
                    self._pass(body)

            def _pass(self, body):
                fate = proxy._fate(self.path)
                if fate in ("http_500", "http_503"):
                    return self._answer(
                        int(fate[5:]),
                        b'{"error": {"message": "on purpose"}}',
                        {"Retry-After": "0.05"},
                    )
                if (
                    fate == "silence"
                ):  # as a host that is gone: nobody is told, also if the proxy is killed meanwhile
                    with proxy._lock:
                        proxy._open.discard(self.connection)
                    time.sleep(proxy.silence_s)
                if fate in ("silence", "no_answer"):
                    return _reset(self.connection)
                status, answer = proxy._forward(self.path, body)
                if fate == "half_json":
                    answer = answer[: len(answer) // 2]
                if fate == "aborted" and body is not None and status == 200:
                    tree = json.loads(answer)
                    for choice in tree.get("choices", ()):
                        choice["finish_reason"] = "abort"
                    answer = json.dumps(tree).encode() if "choices" in tree else b"{}"
                if fate == "reset":
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer[: len(answer) // 2])
                    return _reset(self.connection)
                return self._answer(status, answer, {})

            def _answer(self, status, body, headers):
                with proxy._lock:
                    if self.connection not in proxy._open:  # killed meanwhile
                        self.close_connection = True
                        return
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": len(body),
                    **headers,
                }.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

        return Handler

    def _forward(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.upstream.removesuffix("/v1") + path,
            data=body,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def _reset(connection: socket.socket) -> None:
    """Closes it so that the other side is told at once (RST)."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()
    except OSError:
        pass
