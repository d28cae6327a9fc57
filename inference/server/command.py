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
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from inference import console
from inference.server.options import LLM_OPTIONS, SAMPLING_FIELDS, ServeFlags, read_flags
from inference.server.real_vllm import speculative_config, vllm_command, wants_vllm
from speculators.errors import ConfigError

if TYPE_CHECKING:
    from inference.entrypoints.llm import LLM


def register(app: typer.Typer) -> None:
    """Adds `serve` to the project's command line."""

    @app.command(
        "serve",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        help=(
            "Serve a target and its drafter over HTTP, compatible with OpenAI's clients; flags as"
            " vLLM's."
        ),
    )
    def serve(context: typer.Context) -> None:
        run(context.args)


def main() -> None:
    """Runs the command with the arguments of this process."""
    console.run(lambda: run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> None:
    if wants_vllm(
        arguments
    ):  # this process is replaced, so that signals, output and exit code are vLLM's own
        command = vllm_command(arguments)
        os.execv(command[0], command)
    flags, others = read_flags(arguments)
    logging.basicConfig(level=flags.uvicorn_log_level.upper(), format="%(levelname)s: %(message)s")
    llm = load(flags, others)
    serve_app(llm, flags.model_copy(update={"sampling_defaults": sampling_defaults(llm, flags)}))


def load(flags: ServeFlags, others: dict[str, Any]) -> LLM:
    """Loads the LLM of these flags. `others`: flags that are not declared, which LLM knows from
    vLLM or refuses."""
    from inference.entrypoints.llm import LLM
    from inference.entrypoints.vllm_options import DEPRECATED

    given = {name: getattr(flags, name) for name in LLM_OPTIONS if name in flags.model_fields_set}
    older = {name: others.pop(name) for name in DEPRECATED if name in others}
    if (config := speculative_config(flags, older)) is not None:
        given["speculative_config"] = config
    return LLM(flags.model, **given, **others)


def sampling_defaults(llm: LLM, flags: ServeFlags) -> dict[str, Any]:
    """Sampling parameters for requests that do not set them: the model's generation_config.json
    ("auto"), that of a folder, or vLLM's neutral values ("vllm"); then the overrides."""
    from transformers import GenerationConfig

    source, config = flags.generation_config, None
    if source == "auto":
        config = getattr(llm.engine.target.model, "generation_config", None)
    elif source != "vllm":
        try:
            config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--generation-config {source}: expected auto, vllm or a folder: {error}"
            ) from error
    values = ({} if config is None else config.to_diff_dict()) | flags.override_generation_config
    names = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}
    return {
        names[name]: value for name, value in values.items() if name in names and value is not None
    }


def serve_app(llm: LLM, flags: ServeFlags) -> None:
    """Serves until SIGTERM or SIGINT. Then no request is admitted, and those that run get
    `shutdown_timeout_s`."""
    import uvicorn

    from inference.server.app import make_app

    app = make_app(llm, flags)
    engine = app.state.server.engine

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.drain(flags.shutdown_timeout_s)
            super().handle_exit(sig, frame)

    server = Uvicorn(
        uvicorn.Config(
            app,
            host=flags.host,
            port=flags.port,
            uds=flags.uds,
            log_level=flags.uvicorn_log_level,
            access_log=flags.enable_log_requests and not flags.disable_uvicorn_access_log,
            ssl_keyfile=flags.ssl_keyfile,
            ssl_certfile=flags.ssl_certfile,
            timeout_graceful_shutdown=int(flags.shutdown_timeout_s) + 5,
        )
    )
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # uvicorn raises the signal again after a clean exit
        signal.signal(number, lambda *_: None)
    gc.collect()
    gc.freeze()  # what is there stays: collections between tokens need not walk it
    server.run()
    if not server.started:
        sys.exit(3)
