"""The defect test: every family learns eight short rows by heart. One that cannot has a wrong mask,
a wrong position or a lost gradient, whatever its loss says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow, pack
from tests.support import cases
from tests.support.cases import MASK, Case
from tests.support.contract import DEPTHS as DRAFTS
from tests.support.contract import trainer_of

ROWS, PROMPT, RESPONSE = 8, 4, 16
STEPS = {
    family: 150 if family in ("eagle", "medusa", "mlp", "mtp") else 100 for family in cases.BASE
}
DEEP = {"num_depths": 3}
# The base cases, but for those that could not learn them: their vocabulary lacks tokens of the
# rows, they are too small, or their noise, 0.1 x 512 / 20, would be the size of the states.
CASES = {family: cases.CASES[name] for family, name in cases.BASE.items()} | {
    "eagle": Case("eagle", {}, {"init": "pass_through", "feature_noise": 0.0}),
    "eagle3": Case("eagle3", taps=(1, 2, 3)),
    "medusa": Case("medusa", {"num_heads": 3, "num_layers": 3}),
    "peagle": Case("peagle", {**DEEP, **MASK}, DEEP, taps=(1, 2, 3)),
}


@torch.no_grad()
def rows_of(target: FrozenTarget) -> list[PackedRow]:
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


def train(case: Case, model: Any, folder: Path, steps: int) -> list[float]:
    """Acceptance lengths after some steps of the trainer, which move every parameter, with the
    family's settings for short runs."""
    training = {"steps": steps, "batch_size": ROWS, "save_every": steps}
    if case.family == "draft_model":  # whose settings are for a model that is trained already
        training["learning_rate"] = 3e-3
    rows = rows_of(FrozenTarget(model))
    trainer = trainer_of(case, model, folder, rows, training=training, loss={"cross_entropy": 1.0})
    started = trainer.drafter.deep_copy()
    trainer.run()
    for name, parameter in started.named_parameters():
        assert not torch.equal(trainer.drafter.get_parameter(name), parameter), name
    features = trainer.target.features(**trainer.features.batch(list(range(ROWS))))
    return acceptance_lengths(trainer.drafter, features)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_learning_eight_rows_by_heart_accepts_nearly_every_draft(
    case, tiny_model, tmp_path
) -> None:
    lengths = train(case, tiny_model("llama"), tmp_path, STEPS[case.family])
    assert sum(lengths) / len(lengths) >= 0.97 * (DRAFTS + 1)


@pytest.mark.slow
def test_peagle_at_its_published_depth_accepts_the_first_position_as_eagle3(
    tiny_model, tmp_path
) -> None:
    shape = {"num_layers": 4, "own_embeddings": True, **DEEP, **MASK}

    def first(case: Case) -> float:
        lengths = train(case, tiny_model("llama"), tmp_path / case.family, steps=40)
        return sum(length > 1 for length in lengths) / len(lengths)

    eagle3 = first(CASES["eagle3"])
    assert 0.5 < eagle3 < 0.95
    assert first(Case("peagle", shape, DEEP, taps=(1, 2, 3))) >= 0.98 * eagle3
