"""vLLM's options, read so that a snippet written for vLLM runs as it is.

Options of older versions are rewritten, with a warning that shows today's form; those that change
no output are accepted without effect; everything else is an error that names the option. Imports no
torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.sampling_params import Accepted, without_accepted
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.hub import with_revision

# Options of LLM that change no output: how memory is kept, how steps are launched, what is logged.
ANY_VALUE = (
    "async_scheduling block_size cpu_offload_gb data_parallel_size disable_custom_all_reduce"
    " disable_log_requests disable_log_stats distributed_executor_backend enable_chunked_prefill"
    " enable_prefix_caching gpu_memory_utilization kv_cache_memory_bytes max_seq_len_to_capture"
    " max_parallel_loading_workers num_gpu_blocks_override num_lookahead_slots num_scheduler_steps"
    " pipeline_parallel_size served_model_name swap_space use_v2_block_manager"
).split()
ENGINE_OPTIONS: Accepted = {
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
SPECULATIVE_OPTIONS: Accepted = {
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
METHOD_NAMES = {
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "mlp_speculator": "mlp",
    "ngram_gpu": "ngram",
}
RULE_NAMES = {"standard": "token"}  # and of rules
NGRAM = ("[ngram]", "ngram")  # a `model` that means a method


def read_options(arguments: Mapping[str, Any]) -> EngineOptions:
    """The arguments of `LLM` but its model, among them those of vLLM's that have no name here.

    Warnings for options of older versions and for several devices. ConfigError names every option
    that is wrong, or would change something and is not known."""
    options = without_accepted("LLM", arguments, ENGINE_OPTIONS)
    old = {name: options.pop(name) for name in DEPRECATED if name in options}
    old = {name: value for name, value in old.items() if value is not None}
    if old:
        if "speculative_model" not in old or options.get("speculative_config") is not None:
            raise ConfigError(
                f"{', '.join(sorted(old))}: of older versions of vLLM, where they come with"
                " speculative_model; give speculative_config alone",
                where="LLM",
            )
        config = {DEPRECATED[name]: value for name, value in old.items()}
        options["speculative_config"] = config
        warnings.warn(
            f"{', '.join(old)}: deprecated in vLLM; write LLM(...,"
            f" speculative_config={_renamed(config)})",
            DeprecationWarning,
            stacklevel=3,
        )
    try:
        read = EngineOptions.model_validate(options)
    except ValidationError as error:
        from draftsmith.inference.entrypoints.speculative_config import faults_of

        raise ConfigError(faults_of(error, EngineOptions), where="LLM") from error
    if (size := read.tensor_parallel_size) > 1:
        warnings.warn(
            f"tensor_parallel_size={size}: the whole target is on one device; outputs are the same",
            stacklevel=3,
        )
    return read


def read_speculative_config(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """`options` under this runtime's names, without those that have no effect. Which options there
    are is checked by `parse_speculative_config`."""
    if options is None:
        return None
    return _renamed(without_accepted("speculative_config", options, SPECULATIVE_OPTIONS))


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Methods under this runtime's names, and a revision beside its repository."""
    options = dict(options)
    if options.get("model") in NGRAM:
        options.pop("model")
        options.setdefault("method", "ngram")
    revision = options.pop("revision", None)
    if options.get("model") and revision:
        options["model"] = with_revision(options["model"], revision)
    for name, table in (("method", METHOD_NAMES), ("rejection_sample_method", RULE_NAMES)):
        if isinstance(options.get(name), str):  # anything else is refused by what checks the values
            options[name] = table.get(options[name], options[name])
    return options
