"""Recipes of a few words."""

from __future__ import annotations

from typing import Any

from draftsmith.train.recipe.recipe import recipe_class


def recipe_of(family: str, **sections: Any) -> Any:
    """The recipe of a family with these sections, and the least that every recipe says."""
    data = {"train": [{"path": "chats.jsonl"}]}
    least = {"name": "t", "family": family, "target": {"model": "x"}, "data": data}
    return recipe_class(family).model_validate(least | sections)
