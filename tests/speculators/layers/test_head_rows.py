"""Some rows of an output head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.speculators.layers.head_rows import frozen_rows, mean_elsewhere, row_product
from draftsmith.speculators.layers.int8_linear import Int8Linear

IDS = torch.tensor([3, 4, 17, 30])
STATES = 3 + torch.randn(50, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["plain", "bias", "int8", "int8, bias"])
def head(request) -> nn.Module:
    """Its logits are far below 0, as some models have them."""
    torch.manual_seed(1)
    linear = nn.Linear(12, 40, bias="bias" in request.param)
    linear.weight.data = 4 * linear.weight.data - 2
    return Int8Linear.of(linear) if "int8" in request.param else linear


@torch.no_grad()
def test_rows_have_the_logits_that_they_have_in_the_head(head) -> None:
    expected = head(STATES)[:, IDS]
    torch.testing.assert_close(row_product(head, IDS, STATES), expected)
    torch.testing.assert_close(frozen_rows(head, IDS)(STATES), expected)


@torch.no_grad()
def test_mean_elsewhere_leaves_the_best_of_these_rows_the_best_of_all(head) -> None:
    expected = head(STATES)[:, IDS]
    head.load_state_dict(mean_elsewhere(head, IDS))
    logits = head(STATES)
    assert logits.max() < 0
    assert torch.equal(logits[:, IDS], expected)
    assert torch.equal(logits.argmax(-1), IDS[expected.argmax(-1)])
    tolerance = 0.01 if isinstance(head, Int8Linear) else 1e-4
    mean = expected.mean(-1, keepdim=True).expand(-1, 36)
    others = logits[:, [token for token in range(40) if token not in IDS]]
    torch.testing.assert_close(others, mean, atol=tolerance, rtol=tolerance)
