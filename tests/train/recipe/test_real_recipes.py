"""The recipes for real targets can be planned from the target's config.json alone, at its true
size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftsmith.train.planner.devices import find_device
from draftsmith.train.planner.plan import make_plan
from draftsmith.train.recipe.load import load_recipe
from tests.support.real_recipes import PUBLISHED, RECIPES, local_recipe

REAL = sorted(
    path
    for path in RECIPES.glob("*/*.yaml")
    if path.parent.name not in ("quickstart", "accelerate", "smollm2-135m-instruct")
)


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_real_recipe_fits_the_devices_that_it_names(path: Path, tmp_path: Path) -> None:
    """By the plan that its first lines name, as it is launched; from config.json alone."""
    text = path.read_text()
    gpu, count = re.search(
        rf"#   draftsmith plan {path.relative_to(RECIPES.parent)} --gpu (\S+) --count (\d+)\n", text
    ).groups()
    plan = make_plan(local_recipe(path, tmp_path), find_device(gpu), int(count))
    assert plan.fits
    first = plan.stages[0]
    billions = PUBLISHED[load_recipe(path).target.model]["billions"]
    assert first.target.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert 0 < first.trainable < first.target.num_parameters
