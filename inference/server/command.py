"""The command `draftsmith serve`, also `python -m inference.serve` and `python -m
inference.server`.

Flags are vLLM's, with dashes or underscores, and the model may be positional. Flags that change no
output here are accepted, all others that are not known are errors (vllm_options). torch is imported
after the flags are read."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from inference import console
from inference.engine_options import EngineOptions
from inference.server.options import SAMPLING_FIELDS, ServeFlags, read_flags
from inference.server.real_vllm import speculative_config, vllm_command, wants_vllm
from speculators.errors import ConfigError

if TYPE_CHECKING:
    from inference.entrypoints.llm import LLM

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# names in generation_config.json -> in SamplingParams
DEFAULTS = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}


def register(app: typer.Typer) -> None:
    """Adds `serve` to the project's command line."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command("serve", context_settings=settings)
    def serve(context: typer.Context) -> None:
        """Serve a target and its drafter over HTTP, for OpenAI's clients; flags as vLLM's."""
        run(context.args)


def main() -> None:
    """Runs the command with the arguments of this process."""
    console.run(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT. A signal ends a server that is still loading or compiling at
    once; one that serves admits nothing more, and gives what runs `shutdown_timeout_s`."""
    if wants_vllm(arguments):
        # this process is replaced, so that signals, output and exit code are vLLM's own
        command = vllm_command(arguments)
        os.execv(command[0], command)
    flags, others = read_flags(arguments)
    logging.basicConfig(level=flags.uvicorn_log_level.upper(), format="%(levelname)s: %(message)s")
    defaults = given_defaults(flags)
    listening = bind(flags.host, flags.port)
    before = {number: signal.signal(number, _exit) for number in SIGNALS}
    try:
        llm = load(flags, others)
        if flags.generation_config == "auto":
            config = getattr(llm.engine.target.model, "generation_config", None)
            values = {} if config is None else config.to_diff_dict()
            defaults = checked_defaults(values, "the model's generation_config.json") | defaults
        serve_app(llm, flags.model_copy(update={"sampling_defaults": defaults}), listening)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the server's address, before anything is loaded. ConfigError if it is taken."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = error.strerror or error
        raise ConfigError(f"serve: --host {host} --port {port}: {reason}") from None
    return listening


def load(flags: ServeFlags, others: dict[str, Any]) -> LLM:
    """Loads the LLM of these flags. `others`: flags that are not declared, which LLM knows from
    vLLM or refuses."""
    from inference.entrypoints.llm import LLM
    from inference.entrypoints.vllm_options import DEPRECATED

    names = flags.model_fields_set & set(EngineOptions.model_fields)
    given = {name: getattr(flags, name) for name in names}
    older = {name: others.pop(name) for name in DEPRECATED if name in others}
    if (config := speculative_config(flags, older)) is not None:
        given["speculative_config"] = config
    return LLM(flags.model, **given, **others)


def given_defaults(flags: ServeFlags) -> dict[str, Any]:
    """The sampling parameters that the flags set for requests without them: those of the folder
    --generation-config, then --override-generation-config. ConfigError for what no request could
    have."""
    source, overrides = flags.generation_config, flags.override_generation_config
    where = "--override-generation-config"
    if unknown := sorted(set(overrides) - set(DEFAULTS)):
        raise ConfigError(f"{where}: {', '.join(unknown)}; expected {', '.join(DEFAULTS)}")
    defaults = checked_defaults(overrides, where)
    if source in ("auto", "vllm"):
        return defaults
    from transformers import GenerationConfig

    where = f"--generation-config {source}"
    try:
        config = GenerationConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: expected auto, vllm or a folder: {error}") from error
    return checked_defaults(config.to_diff_dict(), where) | defaults


def checked_defaults(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sampling parameters among the values of a generation_config.json."""
    from inference.sampling_params import SamplingParams

    known = {DEFAULTS[name]: value for name, value in values.items() if name in DEFAULTS}
    defaults = {name: value for name, value in known.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return defaults


def serve_app(llm: LLM, flags: ServeFlags, listening: socket.socket) -> None:
    """Compiles, then serves at the socket. The exit code is 1 if the engine fails."""
    import uvicorn

    from inference.server.app import make_app

    app = make_app(llm, flags)
    engine = app.state.server.engine
    engine.warm_up()

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, number: int, frame: Any) -> None:
            if engine.draining:
                _exit(number, frame)
            engine.drain(flags.shutdown_timeout_s)
            super().handle_exit(number, frame)

    config = uvicorn.Config(
        app,
        log_level=flags.uvicorn_log_level,
        access_log=flags.enable_log_requests,
        timeout_graceful_shutdown=int(flags.shutdown_timeout_s) + 5,
    )
    server = Uvicorn(config)
    engine.on_failure = lambda: setattr(server, "should_exit", True)
    for number in SIGNALS:  # uvicorn raises the signal again after a clean exit
        signal.signal(number, lambda *_: None)
    gc.collect()
    gc.freeze()  # what is there stays: collections between tokens need not walk it
    server.run(sockets=[listening])
    if engine.failure is not None or not server.started:
        sys.exit(1)


def _exit(number: int, frame: Any) -> None:
    """Ends the process at once: its threads may be compiling, and do not listen."""
    os._exit(128 + number)
