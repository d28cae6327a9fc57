"""The quickstart's target: growing changes nothing, the start copies, batches can be repeated."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from scripts.demo_target.data import CODE_WEIGHT, Batches
from scripts.demo_target.model import LAYERS, VOCAB, build_model, grow, start_with_copying

PAD = 3


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_a_grown_model_computes_what_the_small_one_did(layers):
    torch.manual_seed(0)
    small = build_model(layers).eval()
    with (
        torch.no_grad()
    ):  # far from the initial values: every layer, its norms and their order must count
        for name, p in small.named_parameters():
            if ".layers." in name:
                p.add_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.05))
    x = torch.randint(VOCAB, (2, 24))
    with torch.no_grad():
        expected = small(x).logits
        grown = grow(small).eval()
        assert len(grown.model.layers) == LAYERS > layers
        torch.testing.assert_close(grown(x).logits, expected, atol=1e-5, rtol=0)
        reordered = small.model.layers[::-1]
        small.model.layers = reordered
        assert (small(x).logits - expected).abs().max() > 0.01


def test_the_start_copies_what_followed_earlier():
    """Rows of 64 different tokens, then 16 of them again: only looking back predicts those.

    Without the start they get the 1/4096 that every token gets. With it, over seeds 0 to 5 and 2, 3
    and 6 layers, their mean log-probability was 2.2 to 2.8 higher and their mean probability 17 to
    33 times that (6 layers: 29 to 33)."""
    fresh, again = 64, 16
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(16):
        row = torch.randperm(VOCAB - 5, generator=generator)[:fresh] + 5
        at = int(torch.randint(fresh - again + 1, (), generator=generator))
        rows.append(torch.cat([row, row[at : at + again]]))
    x = torch.stack(rows)

    @torch.no_grad()
    def log_probabilities(model):
        """Of the tokens that come again, but for the first, which cannot be known; of those seen
        once."""
        told = model(x).logits.log_softmax(-1)[:, :-1].gather(-1, x[:, 1:, None])[..., 0]
        return told[:, fresh:], told[:, : fresh - 1]

    torch.manual_seed(0)
    model = build_model(6).eval()
    repeated_without, _ = log_probabilities(model)
    start_with_copying(model)
    repeated, once = log_probabilities(model)
    assert (repeated.mean() - repeated_without.mean()).item() > 1.5
    assert (repeated.exp().mean() / repeated_without.exp().mean()).item() > 10
    assert (repeated.mean() - once.mean()).item() > 1.5  # not a model that is surer of everything


@pytest.fixture
def token_file(tmp_path):
    """30 conversations, of which the first half of each is asked, and 10 excerpts, with the fields
    of `data`."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(6, 30, 40)]
    weights = [[i < 30 and place < n // 2 for place in range(n)] for i, n in enumerate(lengths)]
    np.savez(
        tmp_path / "train.npz",
        ids=rng.integers(5, 200, sum(lengths)).astype(np.uint16),
        weights=1 - np.concatenate(weights).astype(np.uint8),
        ends=np.cumsum(lengths).astype(np.int64),
        talks=30,
    )
    return tmp_path / "train.npz"


def batches_of(path, code_share, drill_share):
    batches = Batches(path, 512, code_share, drill_share)
    # A token per word, past the special ones: the drills need no trained tokenizer here.
    batches.tokenizer = lambda text: {
        "input_ids": [5 + sum(map(ord, word)) for word in text.split()]
    }
    return batches


@pytest.mark.parametrize(
    "code_share, drill_share", [(0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 1.0)]
)
def test_a_batch_depends_on_step_and_rank_alone(token_file, code_share, drill_share):
    one, other = (batches_of(token_file, code_share, drill_share) for _ in range(2))
    steps = range(12)
    seen = {(step, rank): one.at(step, rank, 2) for step in steps for rank in (0, 1)}
    for (step, rank), (x, w) in reversed(seen.items()):  # asked in another order, of another object
        again_x, again_w = other.at(step, rank, 2)
        assert torch.equal(x, again_x) and torch.equal(w, again_w)
        assert x.shape == w.shape and x.dtype == torch.int64 and w.dtype == torch.float32
    assert sum(torch.equal(seen[step, 0][0], seen[step, 1][0]) for step in steps) == 0
    assert sum(torch.equal(seen[step, 0][0], seen[step + 1, 0][0]) for step in steps[:-1]) == 0


@pytest.mark.parametrize(
    "code_share, drill_share, most", [(0.0, 0.0, 1.0), (1.0, 0.0, CODE_WEIGHT), (0.0, 1.0, 1.0)]
)
def test_padding_weighs_nothing_and_answers_do(token_file, code_share, drill_share, most):
    batches, padded = batches_of(token_file, code_share, drill_share), 0
    for step in range(12):
        x, w = batches.at(step, 0, 1)
        padding = x == PAD
        padded += int(padding.sum())
        assert (w[padding] == 0).all() and ((w > 0).any(1)).all()
        assert torch.isin(w, torch.tensor([0.0, most])).all()
        assert not (padding[:, :-1] & ~padding[:, 1:]).any()  # on the right only
    assert padded  # or nothing was tested


def test_rows_are_documents(token_file):
    file = np.load(token_file)
    documents = {tuple(d.tolist()) for d in np.split(file["ids"], file["ends"][:-1])}
    for step in range(12):
        x, _ = batches_of(token_file, 0.5, 0.0).at(step, 0, 1)
        rows = [tuple(row[row != PAD].tolist()) for row in x]
        assert set(rows) <= documents and len(set(rows)) == len(rows)


def test_copying_is_drilled_on_what_can_be_known(token_file):
    """Every token that counts has stood in the first half, after the token that it follows now."""
    x, w = batches_of(token_file, 0.0, 1.0).at(0, 0, 1)  # every third step copies
    half = x.shape[1] // 2
    assert (w[:, :half] == 0).all() and (w[:, half:] > 0).any()
    for row, weight in zip(x.tolist(), w.tolist()):
        pairs = set(pairwise(row[:half]))
        assert all((row[i - 1], row[i]) in pairs for i in range(half, 2 * half) if weight[i])
