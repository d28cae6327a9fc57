"""What the server behind counts of its drafts, read at intervals beside the traffic."""

from __future__ import annotations

import asyncio
import time

import httpx2

from draftsmith.inference.log_proxy.forwarding import Forwarder
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.server_counters import read_counters
from draftsmith.inference.traffic_log.recorder import Recorder
from draftsmith.inference.traffic_log.records import LoggedCounters

EVERY_S = 60.0
TIMEOUT_S = 5.0


class UpstreamCounters:
    """The counters of a server under vLLM's names in /metrics. One without them, or whose /metrics
    asks for a key, has none in the log."""

    def __init__(self, forwarder: Forwarder, recorder: Recorder) -> None:
        self._forwarder = forwarder
        self._recorder = recorder
        self._before: tuple[float, SpecDecodeCounters] | None = None

    async def watch(self) -> None:
        """Reads them every EVERY_S seconds, until it is cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(EVERY_S)

    async def read(self) -> None:
        """Records what they grew by since the last time. A server that was started again counts
        from 0, and is not recorded that time."""
        counters = await self._counters()
        if counters is None:
            return
        now = time.time()
        if self._before is not None:
            then, before = self._before
            grown = counters.since(before)
            if grown.num_drafts > 0 and grown.num_accepted_tokens >= 0:
                self._recorder.record_counters(LoggedCounters(now, now - then, grown))
        self._before = (now, counters)

    async def _counters(self) -> SpecDecodeCounters | None:
        try:
            status, text = await self._forwarder.get(b"/metrics", TIMEOUT_S)
            if status != 200:
                return None
            return await asyncio.to_thread(read_counters, text.decode())
        except (httpx2.HTTPError, ValueError):
            return None
