"""The training step of vLLM's library `speculators` beside ours: the same loss and gradients.

Without the library, our side computes the loss that it defines, on its terms. With it, both compute
the same numbers: `DRAFTSMITH_PEERS_PYTHON=.venv-peers/bin/python pytest tests/peers`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftsmith.speculators.drafter import valid_terms
from scripts import bench_peers
from scripts.bench_peers import SETTINGS, TOLERANCE, Setting, make_batch
from tests.peers.worker import Ours

LIBRARY = os.environ.get("DRAFTSMITH_PEERS_PYTHON", "")
TINY = Setting(
    tokens=48, documents=2, vocab=40, draft_vocab=24, hidden=32, depths=3, dtype="float32"
)


@pytest.mark.parametrize(
    "setting", [TINY, replace(TINY, family="dflash", anchors=8)], ids=lambda s: s.family
)
def test_our_step_is_the_loss_that_the_library_defines(setting, tmp_path):
    """decay^k KL(p || q), p renormalised over the draft vocabulary: EAGLE-3's depths are means,
    which are summed; DFlash's terms are summed, over their number."""
    batch = make_batch(setting)
    ours = Ours(setting, batch, tmp_path)
    features, sums, counts = ours.features(setting.tokens), [], []
    with torch.no_grad():
        logits = ours.trainer.target.logits(features.last_hidden[0])
        rows = logits[:, batch["draft_ids"]].log_softmax(-1)
        for term in ours.module.unroll(features, setting.depths):
            log_p, log_q = rows[term.target_index], ours.module.head(term.hidden).log_softmax(-1)
            sums.append(float(setting.decay**term.depth * (log_p.exp() * (log_p - log_q)).sum()))
            counts.append(len(term.hidden))
    depth_means = sum(total / count for total, count in zip(sums, counts))
    expected = sum(sums) / (sum(counts) + 1e-5) if setting.family == "dflash" else depth_means
    assert ours.whole() == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is not None for p in ours.module.parameters())


@pytest.mark.integration
@pytest.mark.skipif(not LIBRARY, reason="DRAFTSMITH_PEERS_PYTHON names no interpreter")
@pytest.mark.parametrize("name", SETTINGS)
def test_step_of_the_library_has_the_same_loss_and_gradients(name):
    small = replace(SETTINGS[name], tokens=256, vocab=512, draft_vocab=256, hidden=128, anchors=16)
    equality = bench_peers.measure(replace(small, dtype="float32"), (sys.executable, LIBRARY), 0)[
        "equality"
    ]
    assert all(a <= b for a, b in zip(equality["float32"]["differences"], TOLERANCE["float32"]))


@pytest.mark.parametrize("name", SETTINGS)
def test_both_sides_have_the_same_terms(name):
    """The library's: each document loses its first token, its mask is shifted, and depth k looks k
    slots ahead in the row, into the next document too."""
    s = replace(SETTINGS[name], vocab=8, draft_vocab=8, hidden=1)
    batch, length = make_batch(s), s.tokens // s.documents
    features = SimpleNamespace(**{name: x[None] for name, x in batch.items()})
    mask = batch["loss_mask"].view(s.documents, length)
    # a slot per token but a document's last
    row = torch.cat([mask[:, 2:], mask[:, :1] & False], 1).flatten()
    assert mask.any()
    for depth in range(s.depths):
        theirs = torch.zeros_like(row)
        theirs[: len(row) - depth] = row[depth:]
        valid = valid_terms(features, depth + 2).view(s.documents, length)
        assert torch.equal(theirs.view(s.documents, -1), valid[:, :-1]) and not valid[:, -1].any()


def test_other_numbers_are_refused():
    gradients = {"fc.weight": torch.ones(3), "norm.weight": torch.ones(2)}
    other = gradients | {"norm.weight": torch.tensor([1.0, 1.01])}
    assert bench_peers.differences((1.0, 1.0), (gradients, gradients), "float32") == (0.0, 0.0)
    with pytest.raises(bench_peers.DifferentNumbers, match="the gradient of norm.weight differs"):
        bench_peers.differences((1.0, 1.0), (gradients, other), "float32")
