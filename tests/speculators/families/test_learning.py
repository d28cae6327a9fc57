"""The defect test: every family learns eight short rows by heart. One that cannot has a wrong mask,
a wrong position or a lost gradient, whatever its loss says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.export.formats import FAMILIES
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow, pack
from draftsmith.train.trainer.trainer import Trainer
from tests.support.cases import Case, make
from tests.support.recipes import recipe_of

DRAFTS, ROWS, PROMPT, RESPONSE, STEPS = 3, 8, 4, 16, 150
MASK = {"mask_token_id": 100}
TWO = {"num_layers": 2}
CASES = {
    "dflash": Case("dflash", {**MASK, **TWO, "block_size": 4}, {"block_size": 4}, taps=(1, 2)),
    "dspark": Case(
        "dspark", {**MASK, **TWO, "block_size": 3, "markov_rank": 8}, {"block_size": 3}, taps=(1, 2)
    ),
    "dflash2": Case(
        "dflash2",
        {**MASK, **TWO, "block_size": 4, "conv_group_size": 8, "selector_rank": 8},
        {"block_size": 4},
        taps=(1, 2),
    ),
    "draft_model": Case("draft_model", {}, {"from_target": {"last": 2}}),
    # its noise is for longer rows: 0.1 x 512 / 20 would be the size of the states
    "eagle": Case("eagle", {}, {"init": "pass_through", "feature_noise": 0.0}),
    "eagle3": Case("eagle3", taps=(1, 2, 3)),
    "medusa": Case("medusa", {"num_heads": 3, "num_layers": 3}),
    "mlp": Case("mlp"),
    "mtp": Case("mtp"),
    "peagle": Case("peagle", {"num_depths": 3, **MASK}, {"num_depths": 3}, taps=(1, 2, 3)),
}


@torch.no_grad()
def rows_of(target: FrozenTarget) -> list[PackedRow]:
    """Eight prompts with the target's own greedy responses, a row each."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (ROWS, PROMPT), generator=source)
    for _ in range(RESPONSE):
        ids = torch.cat([ids, target.logits(target(ids)[1][:, -1:]).argmax(-1)], dim=1)
    supervised = np.arange(PROMPT + RESPONSE) >= PROMPT
    return pack([TokenRow(row.numpy(), supervised) for row in ids], PROMPT + RESPONSE)


@torch.no_grad()
def acceptance_lengths(drafter: Drafter, features: Any) -> list[float]:
    """Tokens of a greedy round of DRAFTS drafts at every slot where drafting begins: behind a token
    of the response, as the first one is the target's."""
    rounds: dict[int, list[bool]] = {}  # anchor -> whether each draft is right
    for step in drafter.eval().unroll(features, DRAFTS):
        drafts = drafter.head(step.hidden, step.depth).argmax(-1)
        right = drafts == features.input_ids.flatten()[step.target_index + 1]
        for anchor, same in zip(step.anchor_index.tolist(), right.tolist()):
            rounds.setdefault(anchor, []).append(same)
    begins = features.loss_mask.flatten().roll(-1)
    whole = [right for anchor, right in rounds.items() if begins[anchor] and len(right) == DRAFTS]
    assert len(whole) == ROWS * (RESPONSE - DRAFTS)
    return [1.0 + [*right, False].index(False) for right in whole]


def train(case: Case, model: Any, folder: Path, steps: int = STEPS) -> list[float]:
    """Acceptance lengths after some steps of the trainer, with the family's settings for short
    runs."""
    target, drafter = make(case, model, noise=0.0)
    training = {"steps": steps, "batch_size": ROWS, "save_every": steps, "mixed_precision": "no"}
    if case.family == "draft_model":  # whose settings are for a model that is trained already
        training["learning_rate"] = 3e-3
    recipe = recipe_of(
        case.family,
        data={"train": [{"path": "chats.jsonl"}], "max_length": PROMPT + RESPONSE},
        drafter={"unroll_steps": DRAFTS, **case.options},
        training=training,
        loss={"cross_entropy": 1.0},
    )
    torch.manual_seed(0)
    drafter.initialise_from(target, recipe.drafter)
    own = {"accelerator": Accelerator(cpu=True), "folder": folder, "fingerprint": "a"}
    trainer = Trainer(recipe, target, drafter, rows_of(target), **own)
    trainer.run()
    features = target.features(**trainer.features.batch(list(range(ROWS))))
    return acceptance_lengths(drafter, features)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learning_eight_rows_by_heart_accepts_nearly_every_draft(
    case, tiny_model, tmp_path
) -> None:
    lengths = train(case, tiny_model("llama"), tmp_path)
    assert sum(lengths) / len(lengths) >= 0.97 * (DRAFTS + 1)


@pytest.mark.slow
def test_peagle_at_its_published_depth_accepts_the_first_position_as_eagle3(
    tiny_model, tmp_path
) -> None:
    """Half-way, where both still have something to learn."""
    shape = {"num_depths": 3, "num_layers": 4, "own_embeddings": True, **MASK}
    cases = {"peagle": Case("peagle", shape, {"num_depths": 3}, taps=(1, 2, 3))}
    cases["eagle3"] = CASES["eagle3"]
    first = {}
    for family, case in cases.items():
        lengths = train(case, tiny_model("llama"), tmp_path / family, steps=40)
        first[family] = sum(length > 1 for length in lengths) / len(lengths)
    assert 0.5 < first["eagle3"] < 0.95
    assert first["peagle"] >= 0.98 * first["eagle3"]


def test_every_family_is_learnt() -> None:
    assert set(CASES) == set(FAMILIES)
