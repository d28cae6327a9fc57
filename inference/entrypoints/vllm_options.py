"""vLLM's options, read as this runtime means them, so that a snippet written for vLLM runs as it
is.

Three kinds: options of older versions, rewritten with a warning that shows today's form; options
that say where or how a model runs and so cannot change what it says, accepted without effect; and
the sizes of a group of devices, of which there is one here. Everything else is an error that names
the option. Knows no drafter and runs no model."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from inference.entrypoints.loading import default_device
from inference.entrypoints.speculative_config import known_options
from inference.spec_decode.proposers.options import MethodOptions
from speculators.errors import ConfigError
from speculators.hub import with_revision

logger = logging.getLogger(__name__)

Accepted = tuple[Any, ...] | None  # the values that mean what is done here anyway; None: any value

# Options of LLM that change no output: how memory is kept, how steps are launched, what is logged.
ANY_VALUE = (
    "async_scheduling",
    "block_size",
    "cpu_offload_gb",
    "disable_custom_all_reduce",
    "disable_log_requests",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "num_gpu_blocks_override",
    "num_lookahead_slots",
    "num_scheduler_steps",
    "served_model_name",
    "swap_space",
    "use_v2_block_manager",
)
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
    "attention_backend",
    "disable_by_batch_size",
    "disable_logprobs",
    "disable_mqa_scorer",
    "disable_padded_drafter_batch",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "max_model_len",
    "moe_backend",
    "tensor_parallel_size",
    "use_local_argmax_reduction",
)
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


def read_options(
    others: dict[str, Any],
    speculative_config: dict[str, Any] | MethodOptions | None,
    *,
    stacklevel: int = 3,
) -> dict[str, Any] | MethodOptions | None:
    """The speculative_config that is meant, in this runtime's names. `others`: options of LLM that
    it has no name for.

    DeprecationWarning, at `stacklevel` calls up, for options of older versions. ConfigError names
    every option that would change something and is not known."""
    old = {
        name: value for name, value in others.items() if name in DEPRECATED and value is not None
    }
    rest = {
        name: value for name, value in others.items() if name not in (*DEPRECATED, *PARALLEL_SIZES)
    }
    ignored = _without_effect("LLM", rest, ENGINE_OPTIONS)
    if unknown := sorted(set(rest) - set(ignored)):
        raise ConfigError(
            f"LLM: unknown options {', '.join(unknown)}; they would change nothing. Remove them "
            f"(accepted for vLLM's sake, without effect: {', '.join(sorted(ENGINE_OPTIONS))})"
        )
    if old:
        if speculative_config is not None:
            raise ConfigError(
                f"LLM: speculative_config and also {', '.join(sorted(old))}; give the former alone"
            )
        speculative_config = from_old_options(old)
        warnings.warn(
            f"{', '.join(old)}: deprecated in vLLM; write LLM(...,"
            f" speculative_config={speculative_config})",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
    if not isinstance(speculative_config, dict):
        return speculative_config
    known = known_options()
    foreign = {name: value for name, value in speculative_config.items() if name not in known}
    dropped = _without_effect("speculative_config", foreign, SPECULATIVE_OPTIONS)
    if ignored or dropped:
        names = sorted([*ignored, *(f"speculative_config.{name}" for name in dropped)])
        logger.info("accepted without effect here: %s", ", ".join(names))
    return _renamed(
        {name: value for name, value in speculative_config.items() if name not in dropped}
    )


def drafts_eagerly(speculative_config: Any) -> bool:
    """True if the drafter alone runs eager and the target is compiled."""
    return isinstance(speculative_config, dict) and speculative_config.get("enforce_eager") is True


def from_old_options(old: dict[str, Any]) -> dict[str, Any] | None:
    """The speculative_config that options of older versions stand for; None without any."""
    if old and "speculative_model" not in old:
        raise ConfigError(
            f"LLM: {', '.join(sorted(old))} without speculative_model; use speculative_config"
        )
    return _renamed({DEPRECATED[name]: value for name, value in old.items()}) if old else None


def known_device(
    device: str | torch.device | None, *, stacklevel: int = 3
) -> str | torch.device | None:
    """The device, or None with a warning, at `stacklevel` calls up, for the kind of another build
    of vLLM that torch does not know: where a model runs changes no output beyond rounding, so the
    snippet's result is as asked for."""
    try:
        return device if device is None else torch.device(device)
    except RuntimeError:
        here = default_device(None)
        message = f"device={device!r}: torch knows no such device here; the target runs on {here}"
        warnings.warn(message, stacklevel=stacklevel)
        return None


def warn_of_one_device(sizes: dict[str, Any], device: torch.device, *, stacklevel: int = 3) -> None:
    """Warns, at `stacklevel` calls up, that a model asked for on several devices is kept on one:
    how a model is split changes no output. `sizes`: those of PARALLEL_SIZES that were given."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"LLM: {name}={size!r}; expected a whole number, 1 or more (one is used)"
            )
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if asked:
        warnings.warn(
            f"LLM: {asked}: this runtime keeps the whole target on one device ({device}); outputs"
            " are the same",
            UserWarning,
            stacklevel=stacklevel,
        )


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Methods under this runtime's names, and a revision beside its repository."""
    if options.get("model") in NGRAM:
        options = {"method": "ngram"} | {
            name: value for name, value in options.items() if name != "model"
        }
    if options.get("model") and options.get("revision"):
        options = options | {"model": with_revision(options["model"], options["revision"])}
    options = {name: value for name, value in options.items() if name != "revision"}
    for name, table in (("method", METHODS), ("rejection_sample_method", RULES)):
        if isinstance(options.get(name), str):  # anything else is refused by what checks the values
            options = options | {name: table.get(options[name], options[name])}
    return options


def _without_effect(where: str, given: dict[str, Any], table: dict[str, Accepted]) -> list[str]:
    """The options given that the table accepts. ConfigError for a value that it does not."""
    found = [name for name in given if name in table]
    for name in found:
        accepted = table[name]
        if accepted is not None and given[name] not in accepted:
            raise ConfigError(
                f"{where}: {name}={given[name]!r} would change what is loaded or written, and this"
                " runtime does not do it; leave it out (accepted:"
                f" {', '.join(map(repr, accepted))})"
            )
    return found
