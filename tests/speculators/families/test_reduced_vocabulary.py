"""A drafter whose vocabulary is reduced scores its tokens as it did before."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.layers.head_rows import head_rows
from tests.support.cases import CASES, world_of


def scores(drafter, hidden):
    """Logits of its first depth; of a selector those that it selects from."""
    return getattr(drafter, "unary_logits", drafter.head)(hidden)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_reduced_drafter_scores_what_it_keeps_as_before(name):
    target, drafter = world_of(name)
    known = drafter.draft_to_target
    known = torch.arange(target.vocab_size) if known is None else known
    places = torch.randperm(len(known), generator=torch.Generator().manual_seed(3))[:20]
    width = drafter.config.hidden_size + getattr(drafter.config, "markov_rank", 0)
    hidden = torch.randn(5, width, generator=torch.Generator().manual_seed(4))
    before = scores(drafter, hidden)
    drafter.reduce_vocabulary(known[places])
    kept = places.sort().values
    assert torch.equal(drafter.draft_to_target, known[kept])
    torch.testing.assert_close(scores(drafter, hidden), before[:, kept])
    torch.testing.assert_close(scores(drafter.freeze(), hidden), before[:, kept])
    # once more, and after what a move does
    again = kept[::2]
    drafter.reduce_vocabulary(known[again]).to(torch.float32)
    torch.testing.assert_close(scores(drafter, hidden), before[:, again])


def test_head_that_is_not_linear_is_refused():
    with pytest.raises(ConfigError, match="Embedding"):
        head_rows(torch.nn.Embedding(4, 2), torch.arange(2))
