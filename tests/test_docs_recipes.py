"""What README and the pages show as part of a recipe is one: alone, or over the recipe that it
extends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from draftsmith.train.recipe.load import load_recipe, merged
from draftsmith.train.recipe.recipe import family_of, recipe_class

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BASE = {
    "name": "run",
    "target": {"model": "org/model"},
    "data": {"train": [{"path": "train.jsonl"}]},
}
RECIPES = {
    f"{page.relative_to(ROOT)}, {number}": text
    for page in PAGES
    for number, text in enumerate(
        re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
}


@pytest.mark.parametrize("place", RECIPES)
def test_recipe_in_a_page_is_valid(place, tmp_path):
    if RECIPES[place].startswith("extends: recipes/"):
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPES[place].replace("extends: ", f"extends: {ROOT}/", 1))
        assert load_recipe(path).name
        return
    tree = merged(BASE, YAML(typ="safe", pure=True).load(RECIPES[place]))
    assert recipe_class(family_of(tree)).model_validate(tree).name
