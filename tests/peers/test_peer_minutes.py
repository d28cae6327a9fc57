"""scripts/peer_minutes.py: the library is given the same texts and states, and its table is of the
runs it was given."""

from __future__ import annotations

import torch
from torch import nn

from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow
from scripts import peer_minutes


def test_a_sample_of_the_library_is_a_text_whose_state_its_norm_makes_the_last_hidden_state():
    generator = torch.Generator().manual_seed(0)
    sizes, H = (5, 3), 8
    texts = [
        TokenRow(range(10 * i, 10 * i + n), [t > 1 for t in range(n)]) for i, n in enumerate(sizes)
    ]
    scale = torch.rand(H, generator=generator) + 0.5
    taps = torch.randn(sum(sizes), 3 * H, generator=generator).bfloat16()
    residual = 7 * torch.randn(sum(sizes), H, generator=generator)
    last_hidden = nn.functional.rms_norm(residual, (H,), scale)
    samples = list(peer_minutes.samples(PackedRow.of(*texts), taps, last_hidden, scale))
    assert [s["token_ids"].tolist() for s in samples] == [t.input_ids.tolist() for t in texts]
    assert [s["loss_mask"].tolist() for s in samples] == [t.loss_mask.tolist() for t in texts]
    states = torch.cat([sample["hidden_states"] for sample in samples])
    assert torch.equal(states[:, :-1].flatten(1), taps)
    normed = nn.functional.rms_norm(states[:, -1].float(), (H,), scale)
    assert torch.allclose(normed, last_hidden, rtol=0.02, atol=0.02)  # of bfloat16


def test_a_row_of_ours_says_how_many_times_the_librarys_gain_it_has():
    def run(steps, *lengths):
        judged = {name: {"tau": tau} for name, tau in zip(("chat", "code"), lengths)}
        return {"steps": steps, "tokens": 1000 * steps, "judged": judged}

    named = {"speculators": run(90, 1.4, 1.5), "disk": run(200, 1.6, 1.4)}
    head, *rows = peer_minutes.rows({"runs": {"20": named}})
    assert head == ["minutes", "training", "steps", "tokens", "τ, chat", "τ, code"]
    assert rows == [
        ["20", "`speculators`", "90", "90,000", "1.400", "1.500"],
        ["20", "`disk`", "200", "200,000", "1.600 (1.50)", "1.400 (0.80)"],
    ]
