"""The command `draftsmith log`. Imports no torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import AfterValidator, Field
from rich.console import Console

from draftsmith.inference import flags
from draftsmith.inference.engine_options import option
from draftsmith.inference.progress import HEARTBEAT
from draftsmith.inference.server.serve_command import bind
from draftsmith.inference.traffic_log.log_options import LogOptions

logger = logging.getLogger(__name__)

# Seconds for which one thread of Python may hold up the others: the one that writes the log must
# not hold up the traffic (Python's default is 5 ms).
SWITCH_INTERVAL_S = 0.0005


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"expected http:// or https://, host and port, got {text!r}")
    return text


class LogProxyOptions(LogOptions):
    """Log the traffic of a server, as a proxy before it. The server speaks OpenAI's API, as vLLM
    and SGLang do, and every byte is handed on as it comes. If the log fails, the traffic goes on,
    and /health says so. Of a request, only prompt, sampling parameters and response are kept."""

    log: Path = Field(description="folder of the log")
    upstream: Annotated[str, AfterValidator(_address)] = Field(
        description="address of the server, such as http://127.0.0.1:8000"
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every address of the machine")
    port: int = option(8001, "port to listen on; 0: any free one", ge=0, le=65535)
    shutdown_timeout_s: int = option(
        20, "seconds that running requests are given to end after SIGTERM", ge=0
    )


def register(app: typer.Typer) -> None:
    """Adds `log` to a command line."""
    flags.register(app, "log", LogProxyOptions, run)


def run(values: flags.Values, _: Sequence[str] = ()) -> None:
    """Hands on and logs until SIGTERM or SIGINT."""
    import uvicorn

    from draftsmith.inference.log_proxy.app import make_proxy
    from draftsmith.inference.traffic_log.recorder import Recorder

    options = flags.validated(LogProxyOptions, "log", values)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    recorder = Recorder(options.log, options)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with bind(options.host, options.port, "log") as listening:
        host, port = listening.getsockname()[:2]
        logger.info("%s:%d hands on to %s, logs in %s", host, port, options.upstream, options.log)
        config = uvicorn.Config(
            make_proxy(options.upstream, recorder),
            access_log=False,  # has paths
            date_header=False,  # those of the server behind go through
            server_header=False,
            timeout_graceful_shutdown=options.shutdown_timeout_s,
        )
        server = uvicorn.Server(config)
        with HEARTBEAT.activity("log", Console(stderr=True), shown=True):
            server.run(sockets=[listening])
    if not server.started:
        sys.exit(1)
