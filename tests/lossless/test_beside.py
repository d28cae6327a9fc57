"""Rows of one round that a head and a proposer beside it draft are each judged as if alone. Who
drafts is chosen before the head draws; texts are held to the target's in test_matrix.py."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.beside import merged
from draftsmith.inference.spec_decode.verification.chain_rules import RULES, verify
from tests.support.enumeration import LOSSLESS, VOCAB, residuals

ROWS = 4


def distributions(*shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, VOCAB, generator=source, dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("longest", [1, 2, 3])  # drafts of the head, beside three of the other
def test_rows_of_a_round_are_judged_as_alone(longest, rule):
    p = distributions(ROWS, 4)
    drawn = torch.tensor([[0, 2, 1], [1, 1, 1], [2, 0, 0], [0, 0, 0]])[:, :longest]
    head = Proposal(drawn, [longest, 0, 1, 0], distributions(ROWS, longest))
    drafts = [[0], [1, 2, 2], [], [2]]
    beside = Proposal.deterministic(drafts)
    both = merged(head, beside, [0, 3, 0, 1])
    assert both.counts == [longest, 3, 1, 1]
    assert both.q is not None
    verdict = verify(p, both, rule)
    for row, count in enumerate(both.counts):
        if drafts[row] and row:
            alone = Proposal.deterministic([drafts[row]])  # its q is one-hot
        else:
            alone = Proposal(head.token_ids[row : row + 1], [count], head.q[row : row + 1])
        expected = verify(p[row : row + 1, : 1 + alone.width], alone, rule)
        accept_probs = verdict.accept_probs[row, :count]
        assert (accept_probs - expected.accept_probs[0, :count]).abs().max() <= LOSSLESS
        left = residuals(verdict)[row, : 1 + count] - residuals(expected)[0, : 1 + count]
        assert left.abs().max() <= LOSSLESS


def test_deterministic_drafts_of_both_have_no_q():
    head = Proposal.deterministic([[1, 2], []])
    both = merged(head, Proposal.deterministic([[], [2]]), [0, 1])
    assert both.q is None
    assert [row[:n] for row, n in zip(both.drafted, both.counts, strict=True)] == [[1, 2], [2]]
