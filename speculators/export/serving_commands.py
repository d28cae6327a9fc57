"""How an exported drafter is served: the commands for vLLM, SGLang and this runtime, as text to copy.

The one place that knows other engines' options of speculative decoding. It starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

VLLM_METHODS = {"mlp": "mlp_speculator"}  # where vLLM's name differs from the family's
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}


def speculative_config(family: str, drafter: str, num_speculative_tokens: int, **others: Any) -> dict[str, Any]:
    """The options that vLLM and this runtime share. `others`: such as use_heterogeneous_vocab."""
    return {"method": family, "model": drafter, "num_speculative_tokens": num_speculative_tokens, **others}


def vllm_command(target: str, options: Mapping[str, Any], layout: str | None = None) -> str:
    """`vllm serve`. `layout`: of an mtp module; one of MiMo's in a folder of its own is looked for only if the target's
    configuration says that there is one."""
    options = dict(options) | {"method": VLLM_METHODS.get(options["method"], options["method"])}
    extra = " \\\n  --hf-overrides '{\"num_nextn_predict_layers\": 1}'" if layout == "mimo" else ""
    return f"vllm serve {target} \\\n  --speculative-config '{json.dumps(options)}'{extra}"


def sglang_command(
    target: str, drafter: str, family: str, num_speculative_tokens: int, fields: Mapping[str, Any]
) -> str | None:
    """SGLang's launcher, drafting chains; None for a family that it has no algorithm for, and for an eagle3 head whose
    config.json (`fields`) does not name the taps where SGLang looks, which would then be others."""
    if family not in SGLANG_ALGORITHMS or (family == "eagle3" and "eagle_config" not in fields):
        return None
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm {SGLANG_ALGORITHMS[family]} --speculative-draft-model-path {drafter} \\\n"
        f"  --speculative-num-steps {num_speculative_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {num_speculative_tokens + 1}"
    )


def draftsmith_snippet(target: str, options: Mapping[str, Any]) -> str:
    """Python that loads both and generates."""
    return (
        "from inference import LLM, SamplingParams\n\n"
        f"llm = LLM({target!r}, speculative_config={dict(options)!r})\n"
        'for output in llm.generate(["Hello"], SamplingParams(max_tokens=64)):\n'
        "    print(output.outputs[0].text)"
    )
