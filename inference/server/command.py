"""The command `draftsmith serve`, also `python -m inference.serve` and `python -m inference.server`.

Flags are vLLM's, with dashes or underscores, and the model may be positional. Flags that change no output here are
accepted, all others that are not known are errors (vllm_options). torch is imported after the flags are read.
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
from inference.server.flags import LLM_FLAGS, read_flags, server_options
from inference.server.options import SAMPLING_FIELDS, ServerOptions
from inference.server.real_vllm import become_vllm, wants_vllm
from speculators.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from inference.entrypoints.llm import LLM

logger = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Adds `serve` to the project's command line."""

    @app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        help="Serve a target and its drafter over HTTP, compatible with OpenAI's clients; flags as vLLM's.",
    )
    def serve(context: typer.Context) -> None:
        run(context.args)


def main() -> None:
    """Runs the command with the arguments of this process."""
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


def load(flags: argparse.Namespace, others: dict[str, Any]) -> LLM:
    """Loads the LLM of these flags. `others`: flags that are not declared, which LLM knows from vLLM or refuses."""
    from inference.entrypoints.llm import LLM

    others = _todays(others, flags)
    given = {name: value for name in LLM_FLAGS if (value := getattr(flags, name)) is not None}
    return LLM(flags.model, **given, **others)


def _todays(others: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Moves flags of older vLLM versions from `others` to `flags.speculative_config`, with a warning that shows it."""
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
    """Sampling parameters for requests that do not set them: the model's generation_config.json ("auto"), that of a
    folder, or vLLM's neutral values ("vllm"); then the overrides."""
    from transformers import GenerationConfig

    source, config = flags.generation_config, None
    if source == "auto":
        config = getattr(llm.engine.target.model, "generation_config", None)
    elif source != "vllm":
        try:
            config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--generation-config {source}: expected auto, vllm or a folder: {error}") from error
    values = ({} if config is None else config.to_diff_dict()) | (flags.override_generation_config or {})
    names = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}
    return {names[name]: value for name, value in values.items() if name in names and value is not None}


def serve_app(llm: LLM, options: ServerOptions, flags: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT. Then no request is admitted, and those that run get `shutdown_timeout_s`."""
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
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again after a clean exit
        signal.signal(number, lambda *_: None)
    server.run()
    if not server.started:
        sys.exit(3)
