"""The command `draftsmith serve`; `python -m draftsmith.inference.serve` is the same.

Flags are vLLM's, with dashes or underscores. Flags that change no output here are accepted, all
others that are not known are errors (vllm_options). torch is imported after the flags are read."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from draftsmith.inference import flags
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.progress import HEARTBEAT
from draftsmith.inference.server.serve_options import (
    SAMPLING_FIELDS,
    ServeFlags,
    read_flags,
    undeclared,
    with_model,
)
from draftsmith.inference.traffic_log.recorder import Recorder
from draftsmith.speculators.errors import ConfigError

if TYPE_CHECKING:
    from draftsmith.inference.entrypoints.llm import LLM
    from draftsmith.inference.entrypoints.text_generator import TextGenerator

logger = logging.getLogger(__name__)

# names in generation_config.json -> in SamplingParams
DEFAULTS = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}


def register(app: typer.Typer) -> None:
    """Adds `serve` to a command line."""
    flags.register(app, "serve", ServeFlags, run, others=True)


def run(values: flags.Values, words: Sequence[str] = ()) -> None:
    """Serves until SIGTERM or SIGINT. A signal ends a server that is still loading or compiling at
    once; one that serves takes nothing more, and gives what runs `shutdown_timeout_s`."""
    values, words = with_model(values, words)
    options = read_flags(values)
    others = undeclared(words)
    for needed in ("prometheus_client", "starlette", "uvicorn"):
        import_module(needed)  # what is not installed is said before the minutes of loading
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an exception would wait for what compiles
    with bind(options.host, options.port) as listening:
        log_address(listening, keyed=bool(options.api_key))
        recorder = None if options.log is None else Recorder(options.log, options)
        llm = load(options, others)
        if options.generation_config == "auto":
            config = getattr(llm.engine.target.model, "generation_config", None)
            defaults = sampling_defaults({} if config is None else config.to_diff_dict())
            options = options.model_copy(update={"sampling_defaults": defaults})
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serve_app(llm, options, listening, recorder)


def bind(host: str, port: int, command: str = "serve") -> socket.socket:
    """A socket that listens at the server's address, before anything is loaded: from here on nobody
    else can take the port. Who connects while the model loads waits. ConfigError if the address
    cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        # without the address, which Python adds and `where` has
        why = (error.strerror or f"{error}").partition(" (while")[0]
        where = f"{command} --host {host} --port {port}"
        raise ConfigError(f"{why}; give another address or port", where=where) from None
    # Connections inherit it. asyncio sets it for sockets that name their protocol, which those of
    # create_server do not; without it a piece waits until the client has confirmed the one before,
    # up to 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def log_address(listening: socket.socket, keyed: bool) -> None:
    """Logs where the server listens, who can reach it, and whether it asks for a key."""
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = "an API key is asked for" if keyed else "no API key is asked for"
    if ipaddress.ip_address(host).is_loopback:
        logger.info("listening on %s, for this machine alone; %s", url, key)
    else:
        level = logging.INFO if keyed else logging.WARNING
        logger.log(level, "listening on %s, for whoever can reach this machine; %s", url, key)


def load(options: ServeFlags, others: Mapping[str, Any]) -> LLM:
    """Loads the LLM of these flags. `others`: flags that are not declared, which LLM knows from
    vLLM of today or before."""
    from draftsmith.inference.entrypoints.llm import LLM

    names = options.model_fields_set & set(EngineOptions.model_fields)
    values = {name: getattr(options, name) for name in names}
    return LLM(options.model, **values, **others)


def sampling_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the values of the model's generation_config.json."""
    known = DEFAULTS.keys() & values.keys()
    return {DEFAULTS[name]: values[name] for name in known if values[name] is not None}


def serve_app(
    llm: TextGenerator,
    options: ServeFlags,
    listening: socket.socket,
    recorder: Recorder | None = None,
) -> None:
    """Compiles, and serves at a socket. The exit code is 1 if the engine fails."""
    import uvicorn

    from draftsmith.inference.server.app import make_app

    app = make_app(llm, options, recorder)
    engine = app.state.server.engine
    engine.warm_up()
    timeout = options.shutdown_timeout_s
    server = uvicorn.Server(
        uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=timeout)
    )
    engine.on_failure = lambda: setattr(server, "should_exit", True)
    with HEARTBEAT.activity("serve", Console(stderr=True), shown=True):
        server.run(sockets=[listening])
    if engine.failure is not None or not server.started:
        sys.exit(1)
