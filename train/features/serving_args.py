"""The `vllm serve` command of a server that gives a recipe's hidden states."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hs_connectors.mooncake_store import MooncakeStoreConfig

from draftsmith.inference.vllm_bridge.hidden_states import CONNECTORS
from draftsmith.train.features.states_spec import StatesSpec
from draftsmith.train.recipe.recipe import Recipe

OVER_MOONCAKE = {
    "kv_connector": "MooncakeHiddenStatesConnector",
    "kv_connector_module_path": "hs_connectors.mooncake_hidden_states_connector",
}
COMMAND = ("vllm", "serve")
# The CPU build's own command `vllm` does not start (docs/serve.md).
COMMAND_OF_CPU = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model")
HOSTNAME = "@HOSTNAME@"  # stands for the server's address, which its own shell finds
ADDRESS = "'$(hostname -i | cut -d' ' -f1)'"  # between two parts in quotes; the first of several
LEAST_BATCHED_TOKENS = 2048  # of a step, so that short prompts are computed together
# vLLM's own connector copies on CUDA streams; this project's stands in for it on a CPU.
ON_GPU = {"kv_connector": "ExampleHiddenStatesConnector"}
ON_CPU = {
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": "cpu_hidden_states",
}


def serving_args(
    recipe: Recipe, spec: StatesSpec, root: Path, *, on_cpu: bool = False
) -> list[str]:
    """The command, a word an item. `root`: the folder that the states' folder lies in.

    Prefixes are not cached: a text's states are then computed in the same way each time. vLLM's CPU
    build fails on a request with a seed whose prompt is computed in parts, so there it is not."""
    target = recipe.target
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layers)}
        },
    }
    transfer = _transfer(recipe.features.mooncake, str(root / spec.label), on_cpu)
    words = [*(COMMAND_OF_CPU if on_cpu else COMMAND), target.model, "--dtype", spec.dtype_name]
    if target.revision is not None:
        words += ["--revision", target.revision]
    if target.trust_remote_code:
        words.append("--trust-remote-code")
    length = spec.longest + 1
    words += ["--max-model-len", str(length), "--no-enable-prefix-caching"]
    if on_cpu:
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(max(length, LEAST_BATCHED_TOKENS))]
    words += ["--speculative-config", json.dumps(extraction)]
    return [*words, "--kv-transfer-config", json.dumps(transfer)]


def _transfer(mooncake: str | None, folder: str, on_cpu: bool) -> dict[str, Any]:
    """vLLM's configuration of the connector: through files in `folder`, or through Mooncake."""
    if mooncake is None:
        connector = ON_CPU if on_cpu else ON_GPU
        extra: dict[str, Any] = {"shared_storage_path": folder}
    else:
        store = MooncakeStoreConfig(local_hostname=HOSTNAME, master_server_address=mooncake)
        connector = OVER_MOONCAKE
        extra = {"mooncake": asdict(store)}
    return {**connector, "kv_role": "kv_producer", "kv_connector_extra_config": extra}


def shell_command(words: Sequence[str], *, on_cpu: bool = False) -> str:
    """The command as one prints it: an option a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    command = " \\\n  ".join(map(shlex.join, lines)).replace(HOSTNAME, ADDRESS)
    return f"PYTHONPATH={shlex.quote(str(CONNECTORS))} {command}" if on_cpu else command
