"""Mends of vLLM's CPU build, whose kernels stand in for those of GPUs and differ from them where
drafts are sampled (docs/serve.md). Without them a server that extracts hidden states, which vLLM
does as a kind of drafting, samples at wrong temperatures.

Imports nothing of this project: the environment that has vLLM need not have it."""

from __future__ import annotations

from typing import Any


def repair() -> None:
    """Mends vLLM in this process."""
    from vllm.model_executor.models import qwen3_dflash
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
    qwen3_dflash.DFlashQwen3Model._normalize_context_k = norm_keys


def expand(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: Any = 0, replace_to: Any = 0
) -> Any:
    """Repeats values x [B] for each token of their requests, given the running sum of tokens [B] ->
    [num_tokens].

    It stands in for vLLM's `expand_batch_to_tokens`, whose CPU kernel writes floats into a copy.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(
        counts, output_size=int(num_tokens)
    )


def norm_keys(model: Any, keys: Any) -> Any:
    """Context keys [layers, tokens, heads, head_dim] of a DFlash drafter, each layer normed by its
    own `k_norm`.

    It stands in for the model's `_normalize_context_k`, whose CPU kernel reads the first layer's
    weights for all."""
    scale = keys.float().square().mean(-1, keepdim=True).add(model._rms_norm_eps).rsqrt()
    return (keys * scale).to(keys.dtype) * model._k_norm_weights[:, None, None]
