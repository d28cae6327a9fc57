"""The recipes for real targets can be planned from the target's config.json alone, at its true
size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftsmith.train.planner.devices import find_device
from draftsmith.train.planner.plan import make_plan
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
REAL = sorted(
    path
    for path in RECIPES.glob("*/*.yaml")
    if path.parent.name not in ("quickstart", "accelerate", "smollm2-135m-instruct")
)

# Of published models: parameters in billions, config.json.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def local_recipe(path: Path, folder: Path, *overrides: str) -> Recipe:
    recipe = load_recipe(path)
    names = {"target.model": recipe.target.model, "drafter.init_from": recipe.drafter.init_from}
    local = []
    for key, name in names.items():
        if name in PUBLISHED:
            (folder / key).mkdir()
            (folder / key / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
            local.append(f"{key}={folder / key}")
    return load_recipe(path, [*local, *overrides])


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
