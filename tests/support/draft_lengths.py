"""Lengths that are chosen by costs, and the drafters of blocks that they are chosen for."""

from __future__ import annotations

from draftsmith.inference.spec_decode.draft_length import (
    AdaptiveDraftLength,
)
from draftsmith.inference.spec_decode.proposers import head
from tests.support.cases import Case

K = 3
CHEAP = {"verify": [10, 10.5, 11, 11.5], "draft": [0.3, 0.6, 0.9]}
DEAR = {"verify": [10, 13, 16, 19], "draft": [1, 2, 3]}


def adaptive(costs) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(K, costs)


BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 2}  # three drafts of a block
MARKOV = {**BLOCK, "markov_rank": 8, "sample_from_anchor": False}
SELECTOR = {**BLOCK, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
BLOCKS = {
    "dspark": Case("dspark", MARKOV, taps=(1, 2)),
    "dflash": Case("dflash", BLOCK, taps=(1, 2)),
    "dflash2": Case("dflash2", SELECTOR, taps=(1, 2)),
}


def stop_early(monkeypatch, early: bool) -> None:
    """Whether lengths are chosen before each draw, as on a CPU, or after drafting, as on a GPU."""
    early_or_not = property(lambda self: early, lambda self, _: None)
    monkeypatch.setattr(head.HeadProposer, "stops_early", early_or_not, raising=False)
