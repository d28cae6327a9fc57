"""The recipes for real targets, with the config.json of each target beside them."""

from __future__ import annotations

import json
from pathlib import Path

from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

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
