"""Heads in plain transformers: the text is the target's, the drafts are the runtime's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from draftsmith.speculators.export import export_drafter
from tests.support.cases import Case, make
from tests.support.contract import draft_logits

BLOCK = {"num_layers": 2, "block_size": 5, "mask_token_id": 100}
WINDOW = {"is_causal": True, "sliding_window": 6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
NEW_TOKENS = 24


@pytest.fixture
def recorded(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """(text, drafts) of every round of transformers' generator."""
    rounds: list[tuple[list[int], list[int]]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        candidates = original(self, input_ids, *args, **kwargs)
        text = input_ids[0].tolist()
        if drafts := candidates[0][0, len(text) :].tolist():
            rounds.append((text, drafts))
        return candidates

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    return rounds


@pytest.mark.parametrize(
    ("family", "shape", "taps", "model_fields", "drafts"),
    [
        ("dflash", BLOCK, (1, 2), {}, 4),
        ("dflash", BLOCK | WINDOW, (2,), {"rope_parameters": YARN}, 4),
        ("mtp", {}, (), {}, 1),
        ("mtp", {}, (), {"num_key_value_heads": 4}, 3),
    ],
)
def test_an_export_in_transformers_drafts_as_the_runtime(
    tiny_model, tmp_path, recorded, family, shape, taps, model_fields, drafts
) -> None:
    model = tiny_model("llama", **model_fields)
    world = make(Case(family, shape, taps=taps), model)
    folder = export_drafter(world[1], tmp_path / "head", dtype=torch.float32, format="transformers")
    head: Any = AutoModel.from_pretrained(folder, trust_remote_code=True)
    if family == "mtp":
        head.attach(model, drafts)
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **arguments)
    text = model.generate(ids, assistant_model=head, speculation_type="dflash", **arguments)
    assert torch.equal(text, plain)
    assert len(recorded) > 3 and len(recorded[0][1]) == drafts
    for prefix, drafted in recorded:  # some versions draft no further than the text may go
        forced = torch.tensor([*drafted, *[0] * drafts][:drafts])
        logits = draft_logits(world, torch.tensor(prefix), len(prefix) - 2, drafts, forced)
        assert logits.argmax(-1)[: len(drafted)].tolist() == drafted
