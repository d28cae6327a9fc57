"""The command that serves: `draftsmith serve`, and `python -m inference.serve` (or `.server`) as guides start vLLM's.

Flags are vLLM's, dashes or underscores; the positional model too. What changes no output here is accepted, and what
would is an error (vllm_options). torch is imported once the flags are read.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from inference.console import print_error
from inference.server.flags import Value, read_flags, server_options
from inference.server.real_vllm import become_vllm, wants_vllm
from speculators.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from inference.entrypoints.llm import LLM
    from inference.server.options import ServerOptions

logger = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Adds `serve` to the project's command line; its flags are read here."""

    @app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        help="Serve a target and its drafter over HTTP, compatible with OpenAI's clients; flags as vLLM's.",
    )
    def serve(context: typer.Context) -> None:
        run(context.args)


def main() -> None:
    """With the arguments of this process."""
    try:
        run(sys.argv[1:])
    except DraftsmithError as error:
        print_error(error)
        sys.exit(2)


def run(arguments: Sequence[str]) -> None:
    if wants_vllm(arguments):
        become_vllm(arguments)
    flags, others = read_flags(arguments)
    logging.basicConfig(level=flags.uvicorn_log_level.upper(), format="%(levelname)s: %(message)s")
    llm = load(flags, others)
    serve_app(llm, server_options(flags, sampling_defaults(llm, flags)), flags)


def load(flags: argparse.Namespace, others: dict[str, Value]) -> LLM:
    """The LLM of the flags; `others`: options it knows from vLLM, or refuses."""
    from inference.entrypoints.llm import LLM

    named = ("tokenizer", "dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "device", "seed",
             "kv_cache_memory_bytes", "trust_remote_code", "revision", "tensor_parallel_size", "speculative_config",
             "enable_prefix_caching")  # fmt: skip
    others = _todays(others, flags)
    given = {name: value for name in named if (value := getattr(flags, name)) is not None}
    return LLM(flags.model, **given, **others)


def _todays(others: dict[str, Value], flags: argparse.Namespace) -> dict[str, Value]:
    """Without the flags of older versions, which become `flags.speculative_config`; a warning shows today's."""
    from inference.entrypoints.vllm_options import DEPRECATED, from_old_options

    old = {name: value for name, value in others.items() if name in DEPRECATED and value is not None}
    if old:
        if flags.speculative_config is not None:
            raise ConfigError("serve: --speculative-config and also its older flags; give the former alone")
        flags.speculative_config = from_old_options(old)
        names = ", ".join("--" + name.replace("_", "-") for name in old)
        logger.warning("%s: older flags; now --speculative-config '%s'", names, json.dumps(flags.speculative_config))
    return {name: value for name, value in others.items() if name not in DEPRECATED}


def sampling_defaults(llm: LLM, flags: argparse.Namespace) -> dict[str, Any]:
    """What a request that says nothing is sampled with: the model's generation_config.json ("auto"), that of a folder,
    or vLLM's neutral values ("vllm"); and the overrides."""
    from transformers import GenerationConfig

    source, config = flags.generation_config, None
    if source == "auto":
        config = getattr(llm.engine.target.model, "generation_config", None)
    elif source != "vllm":
        try:
            config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--generation-config {source}: expected auto, vllm or a folder: {error}") from error
    found = {} if config is None else config.to_diff_dict()
    found |= flags.override_generation_config or {}
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                                     "presence_penalty", "frequency_penalty")}  # fmt: skip
    names |= {"max_new_tokens": "max_tokens"}
    return {names[name]: value for name, value in found.items() if name in names and value is not None}


def serve_app(llm: LLM, options: ServerOptions, flags: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT; then nothing new is taken, and what runs gets `shutdown_timeout_s` seconds."""
    import uvicorn

    from inference.server.app import make_app

    app = make_app(llm, options)
    engine = app.state.server.engine

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.drain(options.shutdown_timeout_s)
            super().handle_exit(sig, frame)

    server = Uvicorn(
        uvicorn.Config(
            app,
            host=flags.host or "0.0.0.0",
            port=flags.port,
            uds=flags.uds,
            log_level=flags.uvicorn_log_level,
            access_log=options.enable_log_requests and not flags.disable_uvicorn_access_log,
            ssl_keyfile=flags.ssl_keyfile,
            ssl_certfile=flags.ssl_certfile,
            timeout_graceful_shutdown=int(options.shutdown_timeout_s) + 5,
        )
    )
    for each in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again when it is done: that is no failure
        signal.signal(each, lambda *_: None)
    server.run()
    if not server.started:
        sys.exit(3)
