"""A checkpoint continues only the training that made it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from speculators.errors import CheckpointError
from tests.train.trainer.test_loop import make_recipe, make_rows, make_trainer
from train.data.packing import PackedRow
from train.pipeline.run import _train_stage
from train.recipe.recipe import Recipe
from train.trainer import checkpoint
from train.trainer.checkpoint import NOT_IN_FINGERPRINT, TrainState, fingerprint, hash_rows

OTHER = {  # another value of every key of a recipe that shapes the training
    "family": "eagle",
    "target": {"model": "another"},
    "drafter": {"unroll_steps": 2},
    "data": {"train": [{"path": "other.jsonl"}], "max_length": 48},
    "regenerate": {"max_new_tokens": 7},
    "loss": {"tv": 1.0},
    "position_weights": {"uniform": True},
    "training": {"steps": 9},
    "joint": {},
    "on_policy": {},
}


def of(recipe: Recipe) -> str:
    return fingerprint(recipe, "", "", "")


def test_fingerprint_every_section_is_in_it_or_an_exception_with_a_reason():
    assert set(OTHER) | set(NOT_IN_FINGERPRINT) == set(Recipe.model_fields)
    assert not set(OTHER) & set(NOT_IN_FINGERPRINT)


@pytest.mark.parametrize("key", sorted(set(OTHER) - {"family", "joint", "on_policy"}))
def test_fingerprint_changed_section_changes_it(key):
    tree = make_recipe().model_dump(mode="json")
    given = OTHER[key]
    if key in ("loss", "position_weights"):
        tree[key] = given
    else:
        tree[key] = tree[key] | given
    assert of(type(make_recipe()).model_validate(tree)) != of(make_recipe())


@pytest.mark.parametrize("key", ["family", "joint", "on_policy"])
def test_fingerprint_added_section_changes_it(key):
    other = SimpleNamespace(
        model_dump=lambda **options: make_recipe().model_dump(**options) | {key: OTHER[key]},
        regenerate=make_recipe().regenerate,
        features=make_recipe().features,
    )
    assert of(other) != of(make_recipe())


def test_fingerprint_exceptions_do_not_change_it():
    other = make_recipe(activation_checkpointing=True).model_copy(
        update={"name": "other", "output_dir": "elsewhere"}
    )
    assert of(other) == of(make_recipe())


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_hash_rows_sees_every_array(name):
    rows = make_rows()
    changed = np.array(getattr(rows[3], name))
    changed[5] = not changed[5] if name == "loss_mask" else changed[5] + 1
    fields = {field: getattr(rows[3], field) for field in PackedRow.__dataclass_fields__}
    others = [*rows[:3], PackedRow(**{**fields, name: changed}), *rows[4:]]
    assert hash_rows(rows) == hash_rows(make_rows()) != hash_rows(others)
    assert hash_rows(rows) != hash_rows(rows, [(1, 2)])


def test_train_stage_waits_for_the_process_that_writes_the_best(monkeypatch, tmp_path):
    """Otherwise processes that do not write look for `best/` before it is there."""
    order = []
    state = TrainState(best_value=2.0)
    trainer = SimpleNamespace(
        run=lambda advance: state,
        accelerator=SimpleNamespace(wait_for_everyone=lambda: order.append("wait")),
        folder=tmp_path,
        drafter=None,
        joint=None,
    )
    monkeypatch.setattr("train.pipeline.run.checkpoint.load_best", lambda *_: order.append("load"))

    class Stages:
        def say(self, text):
            pass

        def stage(self, *_):
            from contextlib import nullcontext

            return nullcontext(lambda *_: None)

    _train_stage(trainer, Stages(), "train")
    assert order == ["wait", "load"]


def test_records_are_appended_and_those_of_a_killed_run_dropped(tiny_model, tmp_path):
    def train(stop_after=None):
        trainer = make_trainer(tiny_model, tmp_path, make_recipe(steps=8))

        def die(share, note):
            if trainer.state.step == stop_after:
                raise RuntimeError("power cut")

        return trainer.run(die)

    with pytest.raises(RuntimeError):
        train(stop_after=5)
    path = tmp_path / checkpoint.HISTORY
    first = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"step": 5, "lo')
    state = train()
    assert path.read_bytes().startswith(first)
    assert [json.loads(line) for line in path.read_text().splitlines()] == state.history
    assert [record["step"] for record in state.history] == list(range(1, 9))
    kept = json.loads((checkpoint.latest(tmp_path) / "state.json").read_text())
    assert "history" not in kept and kept["history_records"] == 8
    path.write_bytes(first)
    with pytest.raises(CheckpointError, match=checkpoint.HISTORY):
        checkpoint.load(checkpoint.latest(tmp_path), "a")
