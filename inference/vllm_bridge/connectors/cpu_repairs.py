"""Mends of vLLM's CPU build, whose kernels stand in for those of GPUs and differ from them where
drafts are sampled and where int8 numbers are multiplied (docs/serve.md). Without them a server that
extracts hidden states, which vLLM does as a kind of drafting, samples at wrong temperatures.

Imports nothing of this project: the environment that has vLLM need not have it."""

from __future__ import annotations

from typing import Any


def repair() -> None:
    """Mends vLLM in this process."""
    from vllm import _custom_ops
    from vllm.model_executor.models import qwen3_dflash
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
    qwen3_dflash.DFlashQwen3Model._normalize_context_k = norm_keys
    if _custom_ops._supports_onednn and not multiplies_int8(_custom_ops):
        _custom_ops.create_onednn_scaled_mm = Int8Weight
        _custom_ops.onednn_scaled_mm = multiply_int8


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


def multiplies_int8(ops: Any) -> bool:
    """Whether the int8 kernel of `ops`, vLLM's `_custom_ops`, multiplies exactly here.

    oneDNN shifts inputs to 0 … 255 and, on a CPU without VNNI, adds two products in 16 bits, which
    hold 32,767 at most: 2 · 255 · 127 is cut."""
    import torch

    number = 127
    inputs = 32
    ones = torch.ones(inputs, inputs, dtype=torch.int8)
    scales = torch.ones(inputs, 1)
    columns = (number * ones).t()  # the layout that the kernel asks for
    weight = ops.create_onednn_scaled_mm(columns, scales, torch.float32, True, False, 1)
    product = torch.empty(1, inputs)
    ops.onednn_scaled_mm(weight, number * ones[:1], product, scales[:1], None, None, None)
    return bool((product == inputs * number**2).all())


class Int8Weight:
    """Weights [inputs, outputs] of int8 with scales [outputs, 1] or [1]; the arguments are those of
    vLLM's `create_onednn_scaled_mm`, for which it stands in."""

    def __init__(self, weight: Any, scales: Any, *_: Any) -> None:
        self.k, self.n = weight.shape
        # whole numbers, whose products are exact in float32 up to sums of 2^24
        self.weight = weight.float()
        self.scales = scales.float().flatten()


def multiply_int8(
    weight: Int8Weight,
    x: Any,
    output: Any,
    input_scale: Any,
    input_zp: Any,
    input_zp_adj: Any,
    bias: Any,
) -> Any:
    """Fills output [tokens, outputs] with the product of x [tokens, inputs], int8, and the weights,
    and returns it.

    It stands in for vLLM's `onednn_scaled_mm`. input_scale [tokens, 1] or [1] and input_zp, their
    like, are of x, or None; input_zp_adj [1, outputs] is what one unit of input_zp adds."""
    product = (x.float() @ weight.weight) * weight.scales
    if input_zp is not None:
        product -= input_zp.float() * input_zp_adj
    product *= input_scale
    if bias is not None:
        product += bias
    return output.copy_(product)
