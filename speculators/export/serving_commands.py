"""The commands that serve a drafter: vLLM's --speculative-config, SGLang's flags, this runtime's
options.

A training-free method has no folder, but commands too. Where an engine cannot serve a drafter, or
would serve another one, the note gives the reason and the remedy; the layouts know both."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export.formats import LAYOUTS, NATIVE, layout_for
from draftsmith.speculators.export.layouts.base import NUM_SPECULATIVE_TOKENS, minor
from draftsmith.speculators.hub import may_be_on_hub
from draftsmith.speculators.target.adapted import adapted_model

Options = Mapping[str, Any]
ADAPTER = (
    "the target is the folder of an adapter, which is loaded here alone; export it whole"
    " (joint.export: merged)"
)


@dataclass(frozen=True)
class ServingCommand:
    """Of one engine. `options`: its speculative_config or flags; None: it cannot serve this."""

    engine: str
    command: str = ""
    options: Options | None = None
    note: str = ""  # the reason why not, or a remark


def serving(
    method: str,
    *,
    folder: str = "",
    target: str = "",
    tokens: int | None = None,
    config: DrafterConfig | None = None,
    format: str = NATIVE,
    training_free: Any = None,
    vllm_version: str | None = None,
) -> list[ServingCommand]:
    """The command of every engine.

    `method`: a family, whose `folder` holds a drafter of `config` in `format`, or a training-free
    method with `training_free`, its MethodOptions of the runtime. `target`: folder or id, if
    known; that `folder` where the drafter lies in its target's checkpoint. `tokens`: drafts per
    round. `vllm_version`: such as 0.33.0, ConfigError for what is none; None: the newest vLLM that
    serves it."""
    target = target or "TARGET"
    speculative_config: dict[str, Any] = {"method": method}
    if config is None:
        tokens = tokens or training_free.num_speculative_tokens or NUM_SPECULATIVE_TOKENS
        speculative_config |= {"num_speculative_tokens": tokens}
        engines = _without_drafter(training_free, target, speculative_config, vllm_version)
    else:
        tokens = tokens or config.usual_drafts or NUM_SPECULATIVE_TOKENS
        tokens = min(tokens, config.max_drafts or tokens)
        speculative_config |= {"model": folder or "DRAFTER", "num_speculative_tokens": tokens}
        if getattr(config, "other_tokenizer", False):
            speculative_config |= {"use_heterogeneous_vocab": True}
        engines = [_vllm(speculative_config, target, config, format, vllm_version)]
        engines.append(_sglang(speculative_config, target, config, format))
    if adapted_model(target) is not None:
        engines = [ServingCommand(name, note=ADAPTER) for name in ("vLLM", "SGLang")]
    quoted = shlex.quote(json.dumps(speculative_config))
    arguments = f"--model {shlex.quote(target)} --speculative-config {quoted}"
    command = f"draftsmith generate PROMPT {arguments}"
    return [*engines, ServingCommand("Draftsmith", command, speculative_config)]


def _without_drafter(
    options: Any, target: str, speculative_config: Options, version: str | None
) -> list[ServingCommand]:
    method = speculative_config["method"]
    newer = [
        note
        for first, note in options.vllm_notes_since.items()
        if version is None or minor(version) >= minor(first)
    ]
    note = "; ".join(filter(None, [options.vllm_note, *newer]))
    vllm = ServingCommand("vLLM", note=note or f"vLLM has no {method} decoding")
    if options.vllm is not None:
        theirs = {**speculative_config, **options.vllm}
        vllm = ServingCommand("vLLM", vllm_command(target, theirs), theirs, note)
    if options.sglang_algorithm is None:
        return [vllm, ServingCommand("SGLang", note=f"SGLang has no {method} decoding")]
    flags = {
        "speculative-algorithm": options.sglang_algorithm,
        "speculative-num-draft-tokens": speculative_config["num_speculative_tokens"] + 1,
    }
    return [vllm, _sglang_command(target, flags, options.sglang_note)]


def _vllm(
    speculative_config: Options,
    target: str,
    config: DrafterConfig,
    format_: str,
    version: str | None,
) -> ServingCommand:
    folder = speculative_config["model"]
    layout = layout_for(format_, config.family).layout
    if why := not_in_vllm(config, folder, target, format_, version):
        return ServingCommand("vLLM", note=why)
    options = {**speculative_config, **vllm_method(config.family)}
    if layout.vllm_samples and not getattr(config, "other_tokenizer", False):
        options["draft_sample_method"] = "probabilistic"  # as here; vLLM's default is greedy
    if holds_drafter(target, folder):  # vLLM finds it there
        del options["model"]
        return ServingCommand("vLLM", vllm_command(target, options), options, layout.vllm_note)
    on_hub = may_be_on_hub(target) and not Path(target).exists()
    if format_ == "speculators" and on_hub:  # since 0.33 vLLM takes no folder from config.json
        note = "config.json names the target; with other options: --speculative-config"
        return ServingCommand("vLLM", f"vllm serve {shlex.quote(folder)}", options, note)
    command = vllm_command(target, options) + layout.vllm_arguments
    return ServingCommand("vLLM", command, options, layout.vllm_note)


def _sglang(
    speculative_config: Options, target: str, config: DrafterConfig, format_: str
) -> ServingCommand:
    algorithm = LAYOUTS[NATIVE, config.family].layout.sglang_algorithm
    if algorithm is None:
        return ServingCommand("SGLang", note=f"SGLang has no {config.family} decoding")
    theirs = layout_for("sglang", config.family)
    try:
        theirs.check(config, "sglang")
    except ConfigError as error:
        return ServingCommand("SGLang", note=str(error).removeprefix("export format sglang: "))
    if why := layout_for(format_, config.family).no_sglang(config):
        if theirs.no_sglang(config) != why:
            why += f": {_again(speculative_config['model'], 'sglang')}"
        return ServingCommand("SGLang", note=why)
    tokens = speculative_config["num_speculative_tokens"]
    chain = {"speculative-num-steps": tokens, "speculative-eagle-topk": 1}
    flags = {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": speculative_config["model"],
        **(chain if theirs.layout.sglang_chain else {}),
        "speculative-num-draft-tokens": tokens + 1,
    }
    if theirs.layout.sglang_block and tokens != config.max_drafts:
        flags[theirs.layout.sglang_block] = tokens
    return _sglang_command(target, flags, theirs.layout.sglang_note(config))


def _sglang_command(target: str, flags: Options, note: str = "") -> ServingCommand:
    arguments = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
    command = f"python -m sglang.launch_server --model-path {shlex.quote(target)} {arguments}"
    return ServingCommand("SGLang", command, flags, note)


def _again(folder: str, format_: str) -> str:
    return f"draftsmith export {shlex.quote(folder)} OUT --format {format_}"


def not_in_vllm(
    config: DrafterConfig, folder: str, target: str, format_: str, version: str | None
) -> str:
    """Why vLLM `version` (None: any) does not serve the drafter of `folder`, and the remedy; empty:
    it does."""
    if holds_drafter(target, folder):
        return ""
    written_as = layout_for(format_, config.family)
    why = written_as.no_vllm(config) or written_as.layout.dropped(version)
    if why and format_ in ("sglang", "transformers"):
        return f"this folder is in the format {format_}: {why}; {_again(folder, NATIVE)}"
    return why


def holds_drafter(target: str, folder: str) -> bool:
    """True if a drafter's `folder` is its target's own, as that of an MTP module may be."""
    return Path(folder) == Path(target)


def other_table(config: DrafterConfig, folder: str, target: str, vocab_size: int) -> str:
    """Why vLLM refuses a draft model beside a target of `vocab_size` tokens, and the remedy; empty:
    it does not, or `config` is of another family."""
    if config.family != "draft_model" or getattr(config, "other_tokenizer", False):
        return ""
    if config.vocab_size == vocab_size:
        return ""
    plain = folder if config.quantization is None else "PLAIN"
    command = f"draftsmith export {shlex.quote(plain)} OUT --model {shlex.quote(target)}"
    if config.quantization is not None:
        command += f" --quantize {config.quantization}"
    return (
        f"its table has {config.vocab_size:,} rows and the target's {vocab_size:,}; write one of"
        f" that size: {command}"
    )


def vllm_method(method: str) -> dict[str, Any]:
    """The options of vLLM's speculative_config that name a family or another method."""
    family = LAYOUTS.get((NATIVE, method))
    return {"method": method, **(family.layout.vllm_method if family else {})}


def vllm_command(target: str, options: Options) -> str:
    """`options`: of this runtime or of vLLM."""
    speculative_config = json.dumps({**options, **vllm_method(options["method"])})
    return (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative_config)}"
    )


def draftsmith_snippet(target: str, options: Options) -> str:
    """Python that loads both and generates."""
    return (
        "from draftsmith.inference import LLM, SamplingParams\n\n"
        f"llm = LLM({target!r}, speculative_config={dict(options)!r})\n"
        'for output in llm.generate(["Hello"], SamplingParams(max_tokens=64)):\n'
        "    print(output.outputs[0].text)"
    )
