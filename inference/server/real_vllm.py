"""`serve --engine vllm`: this process becomes real vLLM's server.

vLLM guesses a drafter's method from its path; here it is read from the folder and always passed.
All other flags are passed on unchanged, so tensor parallelism, several nodes and everything else
work as in vLLM."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from inference.flags import FlagParser, add_flags, flag_name, json_or_text, spelled, validated
from inference.server.options import ServeFlags, take_model
from speculators.errors import ConfigError

logger = logging.getLogger(__name__)

PYTHON_VARIABLE = "DRAFTSMITH_VLLM_PYTHON"
SERVER = (
    "-m",
    "vllm.entrypoints.openai.api_server",
)  # the `vllm` command is missing from some of its builds
READ = (
    "engine",
    "vllm_python",
    "model",
    "revision",
    "trust_remote_code",
    "speculative_config",
)  # read here


def wants_vllm(arguments: Sequence[str]) -> bool:
    parser = add_flags(FlagParser("serve", add_help=False), ServeFlags, names=("engine",))
    return vars(parser.parse_known_args(spelled(arguments))[0]).get("engine") == "vllm"


def vllm_command(arguments: Sequence[str]) -> list[str]:
    """The command line of real vLLM for these flags. It refuses those that only our engine
    has."""
    from inference.entrypoints.vllm_options import DEPRECATED

    parser = add_flags(FlagParser("serve", add_help=False), ServeFlags, names=READ)
    for name in DEPRECATED:
        parser.add_argument(
            flag_name(name), dest=name, type=json_or_text, default=argparse.SUPPRESS
        )
    namespace, rest = parser.parse_known_args(spelled(arguments))
    given = vars(namespace)
    older = {name: given.pop(name) for name in DEPRECATED if name in given}
    if "model" not in given:
        given["model"], rest = take_model(rest)
    if not given["model"]:
        raise ConfigError("serve: --model is missing: the target, a folder or repository id")
    flags = validated(ServeFlags, "serve", given)
    drafting = _drafting(flags, older)
    source = ["--revision", flags.revision] if flags.revision else []
    source += ["--trust-remote-code"] if flags.trust_remote_code else []
    speculative = ["--speculative-config", json.dumps(drafting)] if drafting else []
    return [
        _python(flags.vllm_python),
        *SERVER,
        "--model",
        flags.model,
        *source,
        *speculative,
        *rest,
    ]


def speculative_config(flags: ServeFlags, older: dict[str, Any]) -> dict[str, Any] | None:
    """The option speculative_config, which may be spread over flags of older vLLM versions; a
    warning shows it then."""
    from inference.entrypoints.vllm_options import from_old_options

    config = from_old_options({name: value for name, value in older.items() if value is not None})
    if config is None:
        return flags.speculative_config
    if flags.speculative_config is not None:
        raise ConfigError(
            "serve: --speculative-config and also its older flags; give the former alone"
        )
    names = ", ".join(map(flag_name, older))
    logger.warning("%s: older flags; now --speculative-config '%s'", names, json.dumps(config))
    return config


def _drafting(flags: ServeFlags, older: dict[str, Any]) -> dict[str, Any] | None:
    """speculative_config under vLLM's names, with its method."""
    from inference.entrypoints.speculative_defaults import complete
    from inference.entrypoints.vllm_options import RULES
    from speculators.export.serving_commands import vllm_method

    options = speculative_config(flags, older)
    if options is None:
        return None
    options = complete(
        options, flags.model, trust_remote_code=flags.trust_remote_code, revision=flags.revision
    )
    if not options.get("method"):
        raise ConfigError(
            "serve: speculative_config names neither a method nor the model of a drafter"
        )
    if options["method"] == "lookahead":
        raise ConfigError(
            "serve: vLLM has no method 'lookahead'; use --engine hf, or method ngram or suffix"
        )
    rules = {ours: name for name, ours in RULES.items()}
    rule = options.pop("rejection_sample_method", "auto")
    if rule != "auto":  # vLLM chooses if the field is absent
        options["rejection_sample_method"] = rules.get(rule, rule)
    return options | vllm_method(options["method"])


def _python(given: str | None) -> str:
    python = given or os.environ.get(PYTHON_VARIABLE)
    if python is None and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if python is None:
        known = f"name the Python of its environment with --vllm-python or {PYTHON_VARIABLE}"
        raise ConfigError(f"serve --engine vllm: vLLM is not installed here; {known}")
    if (path := shutil.which(python)) is None:
        raise ConfigError(
            f"serve --engine vllm: {python} is no Python that can be run; give the path of vLLM's"
        )
    return path
