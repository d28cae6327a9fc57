"""`serve --engine vllm`: this process becomes real vLLM's server.

vLLM guesses a drafter's method from its path; here it is read from the folder and always passed.
All other flags are passed on unchanged, so tensor parallelism, several nodes and everything else
work as in vLLM."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from draftsmith.inference.flags import Values, flag_name, json_or_text, validated
from draftsmith.inference.server.options import ServeFlags, as_words
from draftsmith.inference.vllm_python import vllm_python, vllm_version
from draftsmith.speculators.errors import ConfigError

logger = logging.getLogger(__name__)

SERVER = "vllm.entrypoints.openai.api_server"  # some builds lack the `vllm` command
READ = ("engine", "vllm_python", "model", "revision", "trust_remote_code", "speculative_config")


def vllm_command(given: Values, words: Sequence[str]) -> list[str]:
    """The command line of real vLLM for these flags."""
    older, rest = take_older(words)
    read = {name: value for name, value in given.items() if name in READ}
    flags = validated(ServeFlags, "serve", read)
    command = [vllm_python(flags.vllm_python), "-m", SERVER, "--model", flags.model]
    if flags.revision:
        command += ["--revision", flags.revision]
    if flags.trust_remote_code:
        command.append("--trust-remote-code")
    if drafting := _drafting(flags, older, command[0]):
        command += ["--speculative-config", json.dumps(drafting)]
    return command + as_words({n: v for n, v in given.items() if n not in READ}) + rest


def take_older(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of flags of older vLLM versions by name, and the other words."""
    from draftsmith.inference.entrypoints.vllm_options import DEPRECATED

    older, rest, left = dict[str, Any](), list[str](), iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if (name := flag.removeprefix("--").replace("-", "_")) in DEPRECATED:
            older[name] = json_or_text(value if equals else next(left, ""))
        else:
            rest.append(word)
    return older, rest


def speculative_config(flags: ServeFlags, older: dict[str, Any]) -> dict[str, Any] | None:
    """The option speculative_config, which may be spread over flags of older vLLM versions; a
    warning shows it then."""
    from draftsmith.inference.entrypoints.vllm_options import from_old_options

    config = from_old_options({name: value for name, value in older.items() if value is not None})
    if config is None:
        return flags.speculative_config
    names = ", ".join(map(flag_name, older))
    if flags.speculative_config is not None:
        raise ConfigError(
            f"--speculative-config and older flags ({names}); give the former", where="serve"
        )
    logger.warning("%s: older flags; now --speculative-config '%s'", names, json.dumps(config))
    return config


def _drafting(flags: ServeFlags, older: dict[str, Any], python: str) -> dict[str, Any] | None:
    """speculative_config under vLLM's names, with its method."""
    from draftsmith.inference.entrypoints.speculative_defaults import complete
    from draftsmith.inference.entrypoints.vllm_options import RULES
    from draftsmith.inference.spec_decode.proposers.methods import method_options
    from draftsmith.speculators.export.formats import LAYOUTS, NATIVE
    from draftsmith.speculators.export.serving_commands import vllm_method

    options = speculative_config(flags, older)
    if options is None:
        return None
    source = {"trust_remote_code": flags.trust_remote_code, "revision": flags.revision}
    options = complete(options, flags.model, **source)
    method = options.get("method")
    kind = None if method is None else method_options(method)
    if kind is None or (kind.vllm is None and not kind.trained):
        raise ConfigError(
            f"--speculative-config: method {method!r}; expected a drafter's folder as"
            " model, or a method of vLLM such as ngram or suffix",
            where="serve",
        )
    layout = LAYOUTS.get((NATIVE, method))
    if layout is not None and not layout.in_vllm:
        raise ConfigError(
            f"no recent vLLM serves the family {method}; leave out --engine", where="serve"
        )
    if layout is not None and layout.last_vllm and (why := layout.dropped(vllm_version(python))):
        raise ConfigError(f"{why}; leave out --engine", where="serve")
    rule = options.pop("rejection_sample_method", "auto")
    if rule != "auto":  # vLLM chooses if the field is absent
        theirs = {ours: name for name, ours in RULES.items()}
        options["rejection_sample_method"] = theirs.get(rule, rule)
    return options | vllm_method(method)
