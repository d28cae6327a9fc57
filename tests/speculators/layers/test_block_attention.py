"""Attention of draft blocks by the fused kernel and its gradients are those by scores."""

from __future__ import annotations

import pytest
import torch

from speculators.layers import block_attention as module
from speculators.layers.block_attention import Blocks, block_attention, explicit_block_attention

B, A, Q, T, D, HEADS, GROUPS = 2, 9, 5, 50, 16, 4, 2
SEGMENTS = torch.tensor(
    [[0] * 20 + [1] * 30, [0] * 10 + [1] * 25 + [-1] * 15]
)  # the second ends with padding
POSITIONS = torch.tensor([[*range(20), *range(30)], [*range(10), *range(25), *[0] * 15]])
# The second row has fewer blocks, and one that comes first again.
LAST = torch.tensor([[0, 3, 4, 18, 21, 30, 31, 40, 48], [5, 1, 12, 20, 30, 33, -1, -1, -1]])


def blocks(causal: bool = False, window: int | None = None) -> Blocks:
    places = POSITIONS.gather(1, LAST.clamp_min(0))[..., None] + 1 + torch.arange(Q)
    return Blocks(LAST, places, POSITIONS, SEGMENTS, causal, window)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, own keys and values, keys and values of the context."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(HEADS, A * Q), *[(GROUPS, A * Q)] * 2, *[(GROUPS, T)] * 2]
    return [
        torch.randn(B, n, t, D, generator=generator).to(dtype).requires_grad_() for n, t in sizes
    ]


def with_gradients(attend, given: list[torch.Tensor], where: Blocks) -> list[torch.Tensor]:
    out = attend(given[0], tuple(given[1:3]), tuple(given[3:]), where, 0.3)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


@pytest.mark.parametrize("run_queries", [4, 20, 256])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_gives_what_scores_give(monkeypatch, causal, window, run_queries):
    """Windows of 1 and 3 leave slots of a block without a context, as rows with fewer blocks leave
    whole ones."""
    monkeypatch.setattr(module, "RUN_QUERIES", run_queries)
    found, wanted = (
        with_gradients(attend, tensors(torch.float32), blocks(causal, window))
        for attend in (block_attention, explicit_block_attention)
    )
    for each, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-5, atol=5e-6)


def test_half_precision_under_autocast_is_near_the_exact_value():
    exact = with_gradients(block_attention, tensors(torch.float64), blocks())
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(block_attention, tensors(torch.bfloat16), blocks())
    for each, right in zip(found, exact, strict=True):
        assert each.dtype == torch.bfloat16
        assert (each.double() - right).norm() < 0.02 * right.norm()


def test_no_scores_wait_for_the_backward_pass():
    """What is kept is as large as what was given, not as query times key."""
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    given = tensors(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block_attention(given[0], (given[1], given[2]), (given[3], given[4]), blocks(), 0.3)
    output = given[0].numel() * (D + 1) // D  # with a log-sum-exp of each query
    assert 0 < sum(kept) <= sum(each.numel() for each in given) + output
