"""Async HTTP client of OpenAI-compatible servers: JSON answers, event streams, vLLM's counters.

The load generator and the evaluation of running vLLM servers use it. It knows routes and failures,
and leaves the meaning of an answer to its callers."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from inference.metrics import SpecDecodeCounters
from speculators.errors import DraftsmithError

QUERY_TIMEOUT_S = 30.0  # of a GET, and of /tokenize
MAX_MESSAGE = 500  # characters of a server's own words in an error


class RequestFailed(DraftsmithError):
    """A request without a usable answer. `reason`: "timeout", "connection", "http_<status>" or
    "not_an_answer"; a caller may add its own."""

    def __init__(self, reason: str, detail: str = "", *, url: str = "") -> None:
        super().__init__(f"{url}: {reason}: {detail}" if url else f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class ServerClient:
    """The routes of one server. Every method raises RequestFailed, and none retries.

    url          with or without /v1
    timeout_s    seconds for a whole answer
    key_env      environment variable that holds the API key
    trust_env    obey the proxy variables of the environment
    """

    def __init__(
        self, url: str, timeout_s: float, *, key_env: str | None = None, trust_env: bool = True
    ) -> None:
        self.url, self.timeout_s, self.key_env = (
            url.rstrip("/").removesuffix("/v1"),
            timeout_s,
            key_env,
        )
        key = os.environ.get(key_env) if key_env else None
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None
            ),  # callers have their own
            trust_env=trust_env,
        )

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, route: str) -> dict[str, Any]:
        return self._object(route, await self._text("GET", route, None, QUERY_TIMEOUT_S))

    async def post(
        self, route: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        return self._object(
            route, await self._text("POST", route, body, timeout_s or self.timeout_s)
        )

    async def events(self, route: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to `[DONE]` or its end. An error
        that the server sends within the stream fails the request. `timeout_s` limits the silence
        between two events alone."""
        with self._failures(route):
            async with self._http.stream("POST", self.url + route, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._require_success(route, response)
                async for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        return
                    content = self._object(route, event.data)
                    if content.get("error"):
                        raise self._failed(
                            route, "not_an_answer", f"the stream ended: {_message(event.data)}"
                        )
                    yield content

    async def models(self) -> list[dict[str, Any]]:
        """The cards of `/v1/models`, at least one."""
        cards = (await self.get("/v1/models")).get("data")
        if (
            not isinstance(cards, list)
            or not cards
            or not all(isinstance(c, dict) and c.get("id") for c in cards)
        ):
            raise self._failed("/v1/models", "not_an_answer", "expected a list of models")
        return cards

    async def version(self) -> str:
        """vLLM's `/version`. Servers of other kinds fail."""
        answer = await self.get("/version")
        if "version" not in answer:
            raise self._failed("/version", "not_an_answer", "expected a version")
        return str(answer["version"])

    async def metrics(self) -> dict[str, float]:
        """See `parse_metrics`."""
        text = await self._text("GET", "/metrics", None, QUERY_TIMEOUT_S)
        try:
            return parse_metrics(text)
        except ValueError as error:
            raise self._failed("/metrics", "not_an_answer", str(error)) from None

    async def _text(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> str:
        with self._failures(route):
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, self.url + route, json=body)
        self._require_success(route, response)
        return response.text

    @contextmanager
    def _failures(self, route: str) -> Iterator[None]:
        """Gives exceptions of the network their reason."""
        try:
            yield
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise self._failed(route, "timeout", str(error) or type(error).__name__) from None
        except httpx2.HTTPError as error:
            hint = (
                "; is the server running, and is this its address?"
                if isinstance(error, httpx2.ConnectError)
                else ""
            )
            raise self._failed(
                route, "connection", f"{type(error).__name__}: {error}{hint}"
            ) from None

    def _require_success(self, route: str, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        message = _message(response.text)
        if status in (401, 403):
            message += (
                f"; the server's key is read from ${self.key_env}"
                if self.key_env
                else "; it asks for a key"
            )
        raise self._failed(route, f"http_{status}", message)

    def _object(self, route: str, text: str) -> dict[str, Any]:
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise self._failed(
                route, "not_an_answer", f"expected a JSON object, got {text[:MAX_MESSAGE]!r}"
            )
        return content

    def _failed(self, route: str, reason: str, detail: str) -> RequestFailed:
        return RequestFailed(reason, detail, url=self.url + route)


def _message(text: str) -> str:
    """The message of an error in OpenAI's format, or the text as it is."""
    try:
        error = json.loads(text)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return text[:MAX_MESSAGE]


# -----------------------------------------------------------------------------------------------
# /metrics


def parse_metrics(text: str) -> dict[str, float]:
    """vLLM's metrics, summed over engines and models. Keys are names without `vllm:` and `_total`,
    followed by the position or finish reason where a metric is split by it ("request_success
    stop"). ValueError for another format."""
    totals: dict[str, float] = defaultdict(float)
    for sample in (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ):
        if sample.name.startswith("vllm:") and "le" not in sample.labels:
            split_by = sample.labels.get("position") or sample.labels.get("finished_reason") or ""
            totals[
                f"{sample.name.removeprefix('vllm:').removesuffix('_total')} {split_by}".strip()
            ] += sample.value
    return dict(totals)


def drafting_counters(metrics: Mapping[str, float]) -> SpecDecodeCounters | None:
    """The counters of speculative decoding. None if the server does not draft."""
    prefix = "spec_decode_num_"
    if f"{prefix}drafts" not in metrics:
        return None
    drafts, drafted, accepted = (
        int(metrics.get(prefix + name, 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    per_position = f"{prefix}accepted_tokens_per_pos "
    positions = [
        int(name.removeprefix(per_position)) for name in metrics if name.startswith(per_position)
    ]
    counts = [
        int(metrics.get(f"{per_position}{i}", 0)) for i in range(max(positions, default=-1) + 1)
    ]
    return SpecDecodeCounters(drafts, drafted, accepted, counts)
