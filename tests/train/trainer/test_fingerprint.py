"""A checkpoint continues only the training that made it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from draftsmith.train.data.packing import PackedRow
from draftsmith.train.pipeline.data_stage import config_sha256
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.sections import FeaturesSection, JointSection, OnPolicySection
from draftsmith.train.trainer.checkpoint import (
    NOT_IN_FINGERPRINT,
    fingerprint,
    hash_rows,
)
from draftsmith.train.trainer.seeding import seeded
from tests.support.training import make_recipe, make_rows

# Fields of the sections in the fingerprint that shape no training.
EXCEPTIONS = {"regenerate.endpoints", "target.sharding"}
EXCEPTIONS |= {"training.activation_checkpointing", "training.save_minutes"}
EXCEPTIONS |= {"training.keep_features_on"}
EXCEPTIONS |= {"data.max_bad_row_share", "data.num_proc"}


def of(recipe: Recipe) -> str:
    return fingerprint(recipe, "", "", "")


def full_recipe() -> Recipe:
    """Every section is there."""
    recipe = make_recipe()
    return recipe.model_copy(update={"joint": JointSection(), "on_policy": OnPolicySection()})


def fields_of(section: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from fields_of(value, (*path, name))
        else:
            yield (*path, name)


def changed(section: BaseModel, path: tuple[str, ...]) -> BaseModel:
    """Another value of one field; what it says does not matter."""
    name, *rest = path
    value = changed(getattr(section, name), tuple(rest)) if rest else f"not {section}"
    return section.model_copy(update={name: value})


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_fingerprint_every_field_is_in_it_or_an_exception_with_a_reason():
    recipe = full_recipe()
    same = {path for path in fields_of(recipe) if of(changed(recipe, path)) == of(recipe)}
    expected = {path for path in fields_of(recipe) if path[0] in NOT_IN_FINGERPRINT}
    expected |= {tuple(name.split(".")) for name in EXCEPTIONS}
    assert same == expected - {("evaluation", "num_speculative_tokens")}, "drafts on policy"
    without = make_recipe()
    assert of(changed(without, ("evaluation", "num_speculative_tokens"))) == of(without)


def test_fingerprint_of_features_is_that_of_what_was_written():
    recipe = make_recipe()
    cached = recipe.model_copy(update={"features": FeaturesSection(mode="cache")})
    rounded = FeaturesSection(mode="cache", encoding="rotated")
    assert (
        len({of(r) for r in (recipe, cached, cached.model_copy(update={"features": rounded}))}) == 3
    )
    elsewhere = recipe.model_copy(update={"features": FeaturesSection(dir="elsewhere")})
    assert of(elsewhere) == of(recipe)


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_hash_rows_sees_every_array(name):
    rows = make_rows()
    changed = np.array(getattr(rows[3], name))
    changed[5] = not changed[5] if name == "loss_mask" else changed[5] + 1
    fields = {field: getattr(rows[3], field) for field in PackedRow.__dataclass_fields__}
    others = [*rows[:3], PackedRow(**{**fields, name: changed}), *rows[4:]]
    assert hash_rows(rows) == hash_rows(make_rows()) != hash_rows(others)
    assert hash_rows(rows) != hash_rows(rows, [(1, 2)])


def test_a_target_is_known_by_what_its_config_says(tmp_path):
    def written(text: str) -> str:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        return config_sha256(tmp_path)

    first = written('{"rope_theta": 10000.0, "transformers_version": "4.57.0"}')
    same = '{"transformers_version": "5.1.0",\n "_name_or_path": "x", "rope_theta": 10000.0}'
    assert written(same) == first
    assert written('{"rope_theta": 20000.0, "transformers_version": "4.57.0"}') != first


def test_seeded_draws_leave_no_trace():
    state, drawn = torch.get_rng_state(), []
    for _ in range(2):
        with seeded(3, torch.device("cpu")):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn) and torch.equal(state, torch.get_rng_state())
