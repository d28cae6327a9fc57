"""The recipe of a refresh."""

from __future__ import annotations

import pytest

from draftsmith.train.pipeline.refresh import at_rate
from draftsmith.train.recipe.load import load_recipe


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_rates_of_a_refresh_are_a_part_of_the_recipes(optimizer):
    recipe = load_recipe("recipes/quickstart/eagle3.yaml", [f"training.optimizer={optimizer}"])
    scaled = at_rate(recipe, 0.25)
    before = recipe.training.model_dump()
    after = scaled.training.model_dump()
    for key in ("learning_rate", "muon_learning_rate"):
        assert after.pop(key) == pytest.approx(before.pop(key) / 4)
    assert after == before
