"""vLLM's options, read as this runtime means them, so that a snippet written for vLLM runs as it
is.

Options of older versions are rewritten, with a warning that shows today's form; options that say
where or how a model runs change no output and are accepted without effect; everything else is an
error that names the option. Knows no drafter and runs no model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.speculative_config import known_options
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import with_revision

logger = logging.getLogger(__name__)

Accepted = tuple[Any, ...] | None  # the values that mean what is done here anyway; None: any value

# Options of LLM that change no output: how memory is kept, how steps are launched, what is logged.
ANY_VALUE = (
    "async_scheduling block_size cpu_offload_gb disable_custom_all_reduce disable_log_requests"
    " disable_log_stats distributed_executor_backend enable_chunked_prefill enable_prefix_caching"
    " gpu_memory_utilization kv_cache_memory_bytes max_parallel_loading_workers"
    " max_seq_len_to_capture num_gpu_blocks_override num_lookahead_slots num_scheduler_steps"
    " served_model_name swap_space use_v2_block_manager"
).split()
ENGINE_OPTIONS: dict[str, Accepted] = {
    **dict.fromkeys(ANY_VALUE),
    # these would change outputs, or what is loaded, at any other value
    "code_revision": (None,),
    "convert": ("auto", "none"),
    "enable_lora": (False,),
    "generation_config": ("vllm",),
    "hf_overrides": (None, {}),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "logits_processors": (None,),
    "quantization": (None,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
}

# Options of speculative_config that change no output. Which texts are drafted for changes none
# either: it is lossless.
ANY_SPECULATIVE_VALUE = (
    "attention_backend disable_by_batch_size disable_logprobs disable_mqa_scorer"
    " disable_padded_drafter_batch draft_tensor_parallel_size enforce_eager max_model_len"
    " moe_backend tensor_parallel_size use_local_argmax_reduction"
).split()
SPECULATIVE_OPTIONS: dict[str, Accepted] = {
    **dict.fromkeys(ANY_SPECULATIVE_VALUE),
    "acceptance_method": (None, "rejection_sampler"),
    "code_revision": (None,),
    "kv_cache_dtype": (None, "auto"),
    "parallel_drafting": (False,),
    "quantization": (None,),
}

# Options of LLM that older versions had -> where they are now, in speculative_config.
DEPRECATED = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "spec_decoding_acceptance_method": "acceptance_method",
    "disable_logprobs_during_spec_decoding": "disable_logprobs",
}

# vLLM's names of methods that are called otherwise here.
METHODS = dict(
    deepseek_mtp="mtp",
    mimo_mtp="mtp",
    qwen3_next_mtp="mtp",
    mlp_speculator="mlp",
    ngram_gpu="ngram",
)
RULES = {"standard": "token"}  # and of rules
NGRAM = ("[ngram]", "ngram")  # a `model` that means a method

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def read_options(given: Mapping[str, Any], *, stacklevel: int = 3) -> EngineOptions:
    """The keyword arguments of `LLM`, among them those of vLLM's that have no name here.

    Warnings, at `stacklevel` calls up, for options of older versions, for a device that torch does
    not know and for several devices. ConfigError names every option that is wrong, or would change
    something and is not known."""
    options = {name: value for name, value in given.items() if name not in DEPRECATED}
    old = {n: v for n, v in given.items() if n in DEPRECATED and v is not None}
    ignored = _without_effect("LLM", options, ENGINE_OPTIONS)
    for name in ignored:
        del options[name]
    if ignored:
        logger.info("accepted without effect here: %s", ", ".join(sorted(ignored)))
    if unknown := sorted(set(options) - set(EngineOptions.model_fields)):
        raise ConfigError(
            f"unknown options {', '.join(unknown)}; they would change nothing. Remove them "
            f"(accepted for vLLM's sake, without effect: {', '.join(sorted(ENGINE_OPTIONS))})",
            where="LLM",
        )
    if old and options.get("speculative_config") is not None:
        raise ConfigError(
            f"speculative_config and also {', '.join(sorted(old))}; give the former alone",
            where="LLM",
        )
    if old:
        config = options["speculative_config"] = from_old_options(old)
        warnings.warn(
            f"{', '.join(old)}: deprecated in vLLM; write LLM(..., speculative_config={config})",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
    try:
        read = EngineOptions.model_validate(options)
    except ValidationError as error:
        faults = [
            f"{fault['loc'][0]}={given.get(str(fault['loc'][0]))!r}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise ConfigError(f"{'; '.join(faults)}", where="LLM") from error
    if not known_device(read.device):
        warnings.warn(
            f"device={read.device!r}: torch knows no such device here; the default one is used",
            stacklevel=stacklevel,
        )
        read = read.model_copy(update={"device": None})
    sizes = {name: getattr(read, name) for name in PARALLEL_SIZES}
    if asked := ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1):
        warnings.warn(
            f"LLM: {asked}: this runtime keeps the whole target on one device; outputs are the"
            " same",
            UserWarning,
            stacklevel=stacklevel,
        )
    return read


def known_device(device: str | None) -> bool:
    """False for the kind of another build of vLLM, which torch does not know: where a model runs
    changes no output beyond rounding, so the default device does what was asked for."""
    try:
        return device is None or torch.device(device) is not None
    except RuntimeError:
        return False


def read_speculative_config(options: Any) -> Any:
    """`options` under this runtime's names, without those that have no effect; what is no dict
    comes back as it is. Which options there are is checked by `parse_speculative_config`."""
    if not isinstance(options, dict):
        return options
    known = known_options()
    foreign = {name: value for name, value in options.items() if name not in known}
    dropped = _without_effect("speculative_config", foreign, SPECULATIVE_OPTIONS)
    if dropped:
        names = ", ".join(sorted(dropped))
        logger.info("speculative_config: accepted without effect here: %s", names)
    return _renamed({name: value for name, value in options.items() if name not in dropped})


def from_old_options(old: dict[str, Any]) -> dict[str, Any] | None:
    """The speculative_config that options of older versions stand for; None without any."""
    if old and "speculative_model" not in old:
        raise ConfigError(
            f"{', '.join(sorted(old))} without speculative_model; use speculative_config",
            where="LLM",
        )
    return _renamed({DEPRECATED[name]: value for name, value in old.items()}) if old else None


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Methods under this runtime's names, and a revision beside its repository."""
    if options.get("model") in NGRAM:
        options = {"method": "ngram"} | {n: v for n, v in options.items() if n != "model"}
    if options.get("model") and options.get("revision"):
        options = options | {"model": with_revision(options["model"], options["revision"])}
    options = {name: value for name, value in options.items() if name != "revision"}
    for name, table in (("method", METHODS), ("rejection_sample_method", RULES)):
        if isinstance(options.get(name), str):  # anything else is refused by what checks the values
            options = options | {name: table.get(options[name], options[name])}
    return options


def _without_effect(where: str, given: dict[str, Any], table: dict[str, Accepted]) -> list[str]:
    """The options given that the table accepts. ConfigError for a value that it does not."""
    accepted = [name for name in given if name in table]
    for name in accepted:
        values = table[name]
        if values is not None and given[name] not in values:
            raise ConfigError(
                f"{name}={given[name]!r} would change what is loaded or written, and this"
                f" runtime does not do it; leave it out (accepted: {', '.join(map(repr, values))})",
                where=where,
            )
    return accepted
