"""`drafter.draft_vocab_size`: the tokens that a training's drafter scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.inspection import inspect_folder
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.recipe.drafter_config import drafter_config
from tests.support.cases import student
from tests.support.errors import raises_at
from tests.support.training import SHAPES, make_recipe, make_rows, make_trainer, recipe_of

SIZE = 40
FAMILIES = ["draft_model", "eagle", "medusa", "mlp", "mtp"]
ROWS = make_rows()


@pytest.fixture
def target(tiny_model) -> FrozenTarget:
    return FrozenTarget(tiny_model("llama"))


def reduced(family: str, **drafter: Any) -> Any:
    return recipe_of(family, drafter={"draft_vocab_size": SIZE, **(drafter or SHAPES[family])})


def drafter_of(recipe: Any, target: FrozenTarget, folder: Any) -> Any:
    config = drafter_config(recipe, target)
    features: Any = SimpleNamespace(rows=ROWS)
    return make_drafter(recipe, config, target, features, Stages(enabled=False))


def most_supervised() -> list[int]:
    ids = np.concatenate([row.input_ids[row.loss_mask] for row in ROWS])
    counts = np.bincount(ids)
    return sorted(np.argsort(-counts, kind="stable")[:SIZE].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_drafter_scores_the_tokens_that_are_supervised_most(family, target, tmp_path):
    drafter = drafter_of(reduced(family), target, tmp_path)
    assert drafter.draft_to_target.tolist() == most_supervised()


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_the_whole_vocabulary(family, target):
    config = drafter_config(recipe_of(family, drafter=SHAPES[family]), target)
    assert config.draft_vocab_size == target.vocab_size


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_of_a_reduced_vocabulary_falls(family, tiny_model, tmp_path):
    recipe = make_recipe(family, drafter={"draft_vocab_size": SIZE, **SHAPES[family]})
    trainer = make_trainer(tiny_model, tmp_path, recipe, ROWS)
    assert trainer.drafter.config.draft_vocab_size == SIZE
    history = trainer.run().history
    assert history[-1]["loss"] < history[0]["loss"]


def test_projections_of_medusa_start_as_the_rows_of_these_tokens(target, tmp_path):
    drafter = drafter_of(reduced("medusa"), target, tmp_path)
    rows = target.head_weight[drafter.draft_to_target]
    assert all(torch.equal(head.weight, rows) for head in drafter.lm_heads)


def test_training_that_goes_on_takes_rows_of_a_whole_head(target, tmp_path):
    whole = student(target, noise=0.1, from_target={"last": 2})
    folder = export_drafter(whole, tmp_path / "whole", dtype=torch.float32)
    drafter = drafter_of(reduced("draft_model", init_from=str(folder)), target, tmp_path)
    ids = drafter.draft_to_target
    assert ids.tolist() == most_supervised()
    hidden = torch.randn(3, drafter.config.hidden_size)
    torch.testing.assert_close(drafter.head(hidden), whole.head(hidden)[:, ids])
    # and one that is reduced already keeps its own
    again = export_drafter(drafter, tmp_path / "reduced", dtype=torch.float32)
    kept = drafter_of(recipe_of("draft_model", drafter={"init_from": str(again)}), target, tmp_path)
    assert torch.equal(kept.draft_to_target, ids)
    (fault,) = inspect_folder(again).faults
    assert (fault.where, fault.warning) == ("draft_vocab_size", True)
    assert "vLLM and SGLang score all" in fault.engines


def test_more_tokens_than_the_target_has_are_refused(target):
    recipe = recipe_of("mlp", drafter={"draft_vocab_size": target.vocab_size + 1})
    with raises_at(ConfigError, "drafter.draft_vocab_size"):
        drafter_config(recipe, target)


def test_shared_tokens_of_two_tokenizers_are_not_reduced_in_training():
    with pytest.raises(ValidationError, match="draft_vocab_size"):
        reduced("draft_model", init_from="student", vocab="intersection")
