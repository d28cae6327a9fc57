"""`serve --engine vllm`: this process becomes real vLLM's server.

vLLM guesses a drafter's method from its path; here it is read from the folder and always passed. All other flags are
passed on unchanged, so tensor parallelism, several nodes and everything else work as in vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from inference.server.flags import FlagParser, add_engine, json_object, json_or_text, spelled, take_model
from speculators.errors import ConfigError

PYTHON_VARIABLE = "DRAFTSMITH_VLLM_PYTHON"
SERVER = ("-m", "vllm.entrypoints.openai.api_server")  # the `vllm` command is missing from some of its builds
VLLM_METHODS = {"mlp": "mlp_speculator"}  # methods with other names in vLLM
HF_FLAGS = ("request-timeout", "max-body-bytes", "max-prompt-tokens", "max-output-tokens", "max-n")


def wants_vllm(arguments: Sequence[str]) -> bool:
    chooser = FlagParser(add_help=False, allow_abbrev=False)
    add_engine(chooser)
    return chooser.parse_known_args(spelled(arguments))[0].engine == "vllm"


def become_vllm(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process, so that signals, output and exit code are vLLM's own."""
    command = vllm_command(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def vllm_command(arguments: Sequence[str]) -> list[str]:
    """The command line of real vLLM for these flags. ConfigError for flags that only our own engine has."""
    from inference.entrypoints.vllm_options import DEPRECATED

    flags = FlagParser(add_help=False, allow_abbrev=False)
    add_engine(flags)
    flags.add_argument("--model")
    flags.add_argument("--revision")
    flags.add_argument("--trust-remote-code", action="store_true")
    flags.add_argument("--speculative-config", "-sc", type=json_object)
    for name in HF_FLAGS:
        flags.add_argument(f"--{name}")
    for name in DEPRECATED:
        flags.add_argument("--" + name.replace("_", "-"), type=json_or_text)
    given, rest = flags.parse_known_args(spelled(arguments))
    if given.model is None:
        given.model, rest = take_model(rest)
    if not given.model:
        raise ConfigError("serve: --model is missing: the target, a folder or repository id")
    if foreign := [f"--{name}" for name in HF_FLAGS if getattr(given, name.replace("-", "_")) is not None]:
        raise ConfigError(f"serve: {', '.join(foreign)} belong to --engine hf; vLLM has no such flag. Leave them out")
    drafting = _drafting(given, {name: getattr(given, name) for name in DEPRECATED})
    source = ["--revision", given.revision] if given.revision else []
    source += ["--trust-remote-code"] if given.trust_remote_code else []
    speculative = ["--speculative-config", json.dumps(drafting)] if drafting else []
    return [_python(given.vllm_python), *SERVER, "--model", given.model, *source, *speculative, *rest]


def _drafting(given: argparse.Namespace, old: dict[str, Any]) -> dict[str, Any] | None:
    """speculative_config under vLLM's names, with its method."""
    from inference.entrypoints.speculative_defaults import complete
    from inference.entrypoints.vllm_options import RULES, from_old_options

    options = from_old_options({name: value for name, value in old.items() if value is not None})
    if options is not None and given.speculative_config is not None:
        raise ConfigError("serve: --speculative-config and also its older flags; give the former alone")
    options = options or given.speculative_config
    if options is None:
        return None
    options = complete(options, given.model, trust_remote_code=given.trust_remote_code, revision=given.revision)
    if not options.get("method"):
        raise ConfigError("serve: speculative_config names neither a method nor the model of a drafter")
    if options["method"] == "lookahead":
        raise ConfigError("serve: vLLM has no method 'lookahead'; use --engine hf, or method ngram or suffix")
    rules = {ours: name for name, ours in RULES.items()}
    rule = options.pop("rejection_sample_method", "auto")
    if rule != "auto":  # vLLM chooses if the field is absent
        options["rejection_sample_method"] = rules.get(rule, rule)
    return options | {"method": VLLM_METHODS.get(options["method"], options["method"])}


def _python(given: str | None) -> str:
    python = given or os.environ.get(PYTHON_VARIABLE)
    if python is None and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if python is None:
        raise ConfigError(
            f"serve --engine vllm: vLLM is not installed here; name the Python of its environment with --vllm-python "
            f"or {PYTHON_VARIABLE}"
        )
    path = shutil.which(python)
    if path is None:
        raise ConfigError(f"serve --engine vllm: {python} is no Python that can be run; give the path of vLLM's")
    return path
