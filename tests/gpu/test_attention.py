"""The kernels of attention on a GPU, forward and backward, against the walk over rows."""

from __future__ import annotations

import inspect
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from draftsmith.speculators.layers import flex_attention as flex
from draftsmith.speculators.layers.attention import attention
from draftsmith.speculators.target import packed_attention as texts
from tests.support.attention_cases import (
    KINDS,
    output_and_gradients,
    random_queries,
    random_tensors,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind, window", list(product(KINDS, (None, 3))))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_attention_of_the_device_is_the_walk_in_double_precision(
    device, report, kind, window, dtype, tolerance
):
    """Output and all gradients, by the norm of the error; on a CPU it is the walk's own error."""
    exact_queries = random_queries(kind, window, seed=4)
    queries = random_queries(kind, window, seed=4, device=device.type)
    error = 0.0
    for pairs in {1, KINDS[kind]}:
        tensors = random_tensors(queries, pairs, dtype, head_dim=64)
        exact = [x.cpu().double() for x in tensors]
        if device.type == "cuda":
            assert flex.why_not(tensors[0], tensors[2]) is None
        results = output_and_gradients(attention, tensors, queries)
        expected = output_and_gradients(attention, exact, exact_queries)
        for result, value in zip(results, expected, strict=True):
            difference = (result.cpu().double() - value).norm() / value.norm()
            error = max(error, difference.item())
    report(relative_error=error)
    assert error < tolerance


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_attention_of_packed_texts_is_the_walk_in_double_precision(
    device, report, window, dtype, tolerance
):
    """Of a target: varlen_attn in bfloat16 where torch has it with all of its arguments, else
    flex_attention. Output and gradients."""
    segments = random_queries("chains", None, seed=5).segment_ids
    tensors = random_tensors(
        random_queries("chains", None, seed=5, device=device.type), 0, dtype, 64
    )
    exact = [x.cpu().double() for x in tensors]
    if device.type == "cuda":
        by_varlen = texts.varlen_serves(tensors[0], tensors[2])
        whole = inspect.signature(texts.varlen_attn).parameters.keys() >= texts.VARLEN_ARGUMENTS
        assert by_varlen == (whole and dtype == torch.bfloat16)
        assert flex.why_not(tensors[0], tensors[2]) is None
    results = _of_texts(tensors, segments.to(device), window)
    expected = _of_texts(exact, segments, window)
    error = 0.0
    for result, value in zip(results, expected, strict=True):
        error = max(error, ((result.cpu().double() - value).norm() / value.norm()).item())
    report(relative_error=error)
    assert error < tolerance


def _of_texts(
    tensors: list[torch.Tensor], segments: torch.Tensor, window: int
) -> list[torch.Tensor]:
    """What a target's attention gives for query, key and value, and their gradients."""
    *inputs, gradient = (x.detach().requires_grad_() for x in tensors)
    mask = texts.placeholder(window, segments.device, inputs[0].dtype)
    config = SimpleNamespace(_attn_implementation="sdpa")
    with texts.packed(config, texts.TextLayout(segments)):
        out, _ = texts.packed_attention(None, *inputs, mask, scaling=0.3)
    out = out.transpose(1, 2)
    return [out, *torch.autograd.grad(out, inputs, gradient)]
