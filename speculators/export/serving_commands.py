"""The commands that serve a drafter: vLLM's --speculative-config, SGLang's flags, this runtime's
options.

A training-free method has no folder, but commands too. Where an engine cannot serve a drafter, or
would serve another one, the note gives the reason and the remedy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from speculators.config import DrafterConfig
from speculators.errors import ConfigError
from speculators.export.formats import layout_for
from speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS
from speculators.families.dflash import DFlashConfig

DEPTHS = (
    "max_depth",
    "num_depths",
    "num_heads",
    "n_predict",
)  # fields of a config that limit the drafts of a round
# Family -> the options by which vLLM's speculative_config names it, where `method` is not the
# family's name.
VLLM_METHODS: dict[str, dict[str, Any]] = {
    "dflash2": {"method": "dflash"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
# Families that no recent vLLM has a model for.
NOT_IN_VLLM = ("mlp",)
SGLANG_ALGORITHMS = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "EAGLE",
    "draft_model": "STANDALONE",
    "dflash": "DFLASH",
    "dflash2": "DFLASH",
    "dspark": "DSPARK",
}


class TrainingFree(Protocol):
    """How engines serve a method without a drafter; see MethodOptions of the runtime."""

    @property
    def num_speculative_tokens(self) -> int | None: ...
    @property
    def vllm(self) -> Mapping[str, Any] | None: ...
    @property
    def vllm_note(self) -> str: ...
    @property
    def sglang_algorithm(self) -> str | None: ...
    @property
    def sglang_note(self) -> str: ...


@dataclass(frozen=True)
class Way:
    """One engine. `options`: of its speculative_config, or its flags; None where it cannot serve
    the drafter."""

    engine: str
    command: str = ""
    options: dict[str, Any] | None = None
    note: str = ""  # the reason why not, or a remark


def serving(
    method: str,
    *,
    folder: str = "",
    target: str = "",
    tokens: int | None = None,
    config: DrafterConfig | None = None,
    format: str = "vllm",
    training_free: TrainingFree | None = None,
) -> list[Way]:
    """The command of every engine.

    `method`: a family, whose `folder` holds a drafter of `config` in `format`, or a training-free
    method with `training_free`, its options. `target`: folder or id, if known. `tokens`: drafts
    per round. ConfigError for neither a folder nor such a method."""
    if (config is None) == (training_free is None):
        raise ConfigError(
            f"serving {method!r}: expected the folder of a drafter, or a training-free method"
        )
    if training_free is not None:
        tokens = tokens or training_free.num_speculative_tokens
    most = next((getattr(config, name) for name in DEPTHS if hasattr(config, name)), None)
    tokens = tokens or most or NUM_SPECULATIVE_TOKENS
    tokens = min(tokens, most) if most else tokens
    drafter = _Served(
        method, folder or "DRAFTER", target or "TARGET", tokens, config, format, training_free
    )
    return [_vllm(drafter), _sglang(drafter), _draftsmith(drafter)]


@dataclass(frozen=True)
class _Served:
    method: str
    folder: str
    target: str
    tokens: int
    config: DrafterConfig | None
    format: str
    training_free: TrainingFree | None

    @property
    def base(self) -> dict[str, Any]:
        """Options that this runtime and vLLM share."""
        model = {} if self.config is None else {"model": self.folder}
        return {"method": self.method, **model, "num_speculative_tokens": self.tokens}

    def again(self, format_: str) -> str:
        return f"draftsmith export {shlex.quote(self.folder)} OUT --format {format_}"


def _vllm(drafter: _Served) -> Way:
    options, extra, note = drafter.base, "", ""
    options |= vllm_method(drafter.method)
    config = drafter.config
    if (method := drafter.training_free) is not None:
        note = method.vllm_note
        if method.vllm is None:
            return Way("vLLM", note=note or f"vLLM has no {drafter.method} decoding")
        options |= method.vllm
    elif drafter.format == "sglang" and drafter.method in ("eagle", "eagle3"):
        why = (
            "refuses its architecture"
            if drafter.method == "eagle"
            else "would read every tap one layer too early"
        )
        return Way(
            "vLLM",
            note=f"this folder is in SGLang's format, and vLLM {why}: {drafter.again('vllm')}",
        )
    elif drafter.format == "speculators":
        command = f"vllm serve {shlex.quote(drafter.folder)}"
        return Way(
            "vLLM",
            command,
            options,
            "config.json names the target; with other options: --speculative-config",
        )
    elif drafter.method == "mtp":
        if getattr(config, "layout", "mimo") != "mimo":
            note = (
                "vLLM reads such a module from the target's own checkpoint: write_back puts it"
                " there"
            )
            return Way("vLLM", note=note)
        extra = """ --hf-overrides '{"num_nextn_predict_layers": 1}'"""
    elif drafter.method in NOT_IN_VLLM:
        return Way("vLLM", note="no recent vLLM has such a model; this project's runtime serves it")
    elif drafter.method == "medusa":
        note = "vLLM up to 0.32; 0.33 dropped Medusa"
    elif getattr(config, "adapter_of", None):
        return Way(
            "vLLM",
            note="the folder holds an adapter, not a model: export it merged (drafter.peft_export)",
        )
    elif (kind := getattr(config, "markov_head_type", "vanilla")) != "vanilla":
        return Way("vLLM", note=f"vLLM runs vanilla Markov heads alone, and this one is {kind}")
    elif drafter.method in ("dspark", "dflash2"):
        note = "on a GPU: vLLM's runner for CPUs has no such drafter"
    elif getattr(config, "other_tokenizer", False):
        options["use_heterogeneous_vocab"] = True
    return Way("vLLM", vllm_command(drafter.target, options) + extra, options, note)


def vllm_method(family: str) -> dict[str, Any]:
    """The options of vLLM's speculative_config that name a family."""
    return VLLM_METHODS.get(family, {"method": family})


def vllm_command(target: str, options: Mapping[str, Any]) -> str:
    """`options`: of this runtime or of vLLM."""
    options = {**options, **vllm_method(options["method"])}
    return (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(options))}"
    )


def draftsmith_snippet(target: str, options: Mapping[str, Any]) -> str:
    """Python that loads both and generates."""
    return (
        "from inference import LLM, SamplingParams\n\n"
        f"llm = LLM({target!r}, speculative_config={dict(options)!r})\n"
        'for output in llm.generate(["Hello"], SamplingParams(max_tokens=64)):\n'
        "    print(output.outputs[0].text)"
    )


def _sglang(drafter: _Served) -> Way:
    head = f"python -m sglang.launch_server --model-path {shlex.quote(drafter.target)}"
    method = drafter.training_free
    if method is not None and method.sglang_algorithm is not None:
        flags: dict[str, Any] = {
            "speculative-algorithm": method.sglang_algorithm,
            "speculative-num-draft-tokens": drafter.tokens + 1,
        }
        return Way("SGLang", f"{head} {_flags(flags)}", flags, method.sglang_note)
    if drafter.config is None or drafter.method not in SGLANG_ALGORITHMS:
        return Way("SGLang", note=f"SGLang has no {drafter.method} decoding")
    if drafter.format == "speculators":
        return Way("SGLang", note=f"SGLang does not read this format: {drafter.again('sglang')}")
    try:
        layout_for("sglang", drafter.method).check(drafter.config)
    except ConfigError as error:
        return Way("SGLang", note=str(error).removeprefix("export format sglang: "))
    if drafter.format != "sglang" and drafter.method in ("eagle", "eagle3"):
        return Way(
            "SGLang", note=f"its tap numbers and names are others: {drafter.again('sglang')}"
        )
    if getattr(drafter.config, "adapter_of", None) or getattr(
        drafter.config, "other_tokenizer", False
    ):
        return Way("SGLang", note="STANDALONE wants a whole model with the target's own tokenizer")
    chain = {"speculative-num-steps": drafter.tokens, "speculative-eagle-topk": 1}
    flags = {
        "speculative-algorithm": SGLANG_ALGORITHMS[drafter.method],
        "speculative-draft-model-path": drafter.folder,
        **({} if isinstance(drafter.config, DFlashConfig) else chain),
        "speculative-num-draft-tokens": drafter.tokens + 1,
    }
    return Way("SGLang", f"{head} {_flags(flags)}", flags)


def _draftsmith(drafter: _Served) -> Way:
    options = drafter.base
    if getattr(drafter.config, "other_tokenizer", False):
        options["use_heterogeneous_vocab"] = True
    given = (
        f"--model {shlex.quote(drafter.target)} --speculative-config"
        f" {shlex.quote(json.dumps(options))}"
    )
    return Way("Draftsmith", f"draftsmith generate PROMPT {given}", options)


def _flags(flags: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
