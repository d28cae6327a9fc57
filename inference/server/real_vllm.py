"""`serve --engine vllm`: this process becomes real vLLM's server.

vLLM guesses a drafter's method from its path; here it is read from the folder and always passed.
All other flags are passed on unchanged, so tensor parallelism, several nodes and everything else
work as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftsmith.inference.flags import Values, validated
from draftsmith.inference.server.serve_options import ServeFlags, as_words
from draftsmith.inference.vllm_python import vllm_python
from draftsmith.speculators.errors import ConfigError

SERVER = "vllm.entrypoints.openai.api_server"  # some builds lack the `vllm` command
OURS = ("engine", "vllm_python", "speculative_config")  # flags that are not passed on
READ = (*OURS, "model", "revision", "trust_remote_code")


def vllm_command(given: Values, words: Sequence[str]) -> list[str]:
    """The command line of real vLLM for these flags."""
    read = {name: value for name, value in given.items() if name in READ}
    flags = validated(ServeFlags, "serve", read)
    passed_on = {name: value for name, value in given.items() if name not in OURS}
    command = [vllm_python(flags.vllm_python), "-m", SERVER, *as_words(passed_on), *words]
    drafting = _drafting(flags)
    return command + (["--speculative-config", json.dumps(drafting)] if drafting else [])


def _drafting(flags: ServeFlags) -> dict[str, Any] | None:
    """speculative_config under vLLM's names, with its method. What vLLM does not know it refuses
    itself."""
    from draftsmith.inference.entrypoints.speculative_config import complete
    from draftsmith.inference.entrypoints.vllm_options import RULES
    from draftsmith.speculators.export.serving_commands import vllm_method

    if flags.speculative_config is None:
        return None
    source = {"trust_remote_code": flags.trust_remote_code, "revision": flags.revision}
    options = dict(complete(flags.speculative_config, flags.model, **source) or {})
    if "method" not in options:
        raise ConfigError("names neither a drafter nor a method", where="--speculative-config")
    rule = options.pop("rejection_sample_method", "auto")
    if rule != "auto":  # vLLM chooses if the field is absent
        theirs = {ours: name for name, ours in RULES.items()}
        options["rejection_sample_method"] = theirs.get(rule, rule)
    return options | vllm_method(options["method"])
