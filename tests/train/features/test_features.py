"""Kept features: the same for a row whatever batch it is in and whether it was known already."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features import prefetch as features_ahead
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.trainer.trainer import Interrupted
from tests.train.trainer.test_loop import (
    assert_equal,
    make_recipe,
    make_rows,
    make_trainer,
    weights,
)


@pytest.fixture
def target(tiny_model):
    return FrozenTarget(tiny_model("llama"), [1, 2])


def test_kept_features_are_those_of_a_forward(target):
    rows = make_rows()
    fresh, kept = RowFeatures(target, rows), RowFeatures(target, rows, keep_bytes=1e9)
    indices = [3, 0, 5]
    expected, found = fresh.of(indices), kept.of(indices)
    text = expected.segment_ids >= 0
    for name in ("taps", "last_hidden"):
        torch.testing.assert_close(
            getattr(found, name)[text], getattr(expected, name)[text], atol=1e-5, rtol=1e-4
        )
    for name in ("input_ids", "position_ids", "segment_ids", "loss_mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_a_row_is_the_same_to_the_bit_in_any_batch_known_or_not(target):
    rows = make_rows()
    kept, forgetful = (
        RowFeatures(target, rows, keep_bytes=1e9),
        RowFeatures(target, rows, keep_bytes=1),
    )
    once, again, never_kept = kept.of([2, 4]), kept.of([4, 1, 2]), forgetful.of([2])
    length = len(rows[2])
    assert torch.equal(once.taps[0, :length], again.taps[2, :length])
    assert torch.equal(once.taps[0, :length], never_kept.taps[0, :length])


def test_the_target_is_asked_once_per_row_and_no_more_is_kept_than_allowed(target, monkeypatch):
    rows, asked = make_rows(), []
    plain = target.features
    monkeypatch.setattr(target, "features", lambda **batch: asked.append(1) or plain(**batch))
    size = len(rows[0]) * (2 + 1) * 32 * 4
    features = RowFeatures(target, rows, keep_bytes=size)
    for _ in range(3):
        features.of([0])
    assert len(asked) == 1 and features.kept_bytes == size
    for _ in range(2):
        features.of([1])  # no room left
    assert len(asked) == 3 and features.kept_bytes == size


def changed(recipe, section: str, **values):
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def watched(trainer, log: list[str]):
    """Writes down the order of the target's forwards and the drafter's steps."""
    asked, worked = trainer.target.features, trainer._micro_step
    trainer.target.features = lambda **batch: log.append("target") or asked(**batch)
    trainer._micro_step = lambda *given, **named: log.append("drafter") or worked(*given, **named)
    return trainer


@pytest.mark.parametrize("keep", [0, 1.0])
def test_a_forward_begun_early_changes_the_order_and_nothing_else(
    tiny_model, tmp_path, monkeypatch, keep
):
    recipe = make_recipe(steps=3, gradient_accumulation_steps=2, keep_features_gb=keep, epochs=None)
    logs, trained = {}, {}
    for streams in (
        ("cuda",),
        ("cpu",),
    ):  # a CPU's streams are one, and whatever is put in them is done in turn
        monkeypatch.setattr(features_ahead, "STREAMS", streams)
        trainer = watched(
            make_trainer(tiny_model, tmp_path / streams[0], recipe), logs.setdefault(streams[0], [])
        )
        state = trainer.run()
        trained[streams[0]] = (weights(trainer), [record["loss"] for record in state.history])
    assert_equal(trained["cuda"][0], trained["cpu"][0])
    assert trained["cuda"][1] == trained["cpu"][1]
    plain, early = logs["cuda"], logs["cpu"]
    assert plain == ["target", "drafter"] * 6  # no forward too many, after the last step neither
    assert early == ["target", *["target", "drafter"] * 5, "drafter"]


def test_a_run_goes_on_after_its_forward_was_begun(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(features_ahead, "STREAMS", ("cpu",))
    straight = make_trainer(tiny_model, tmp_path / "a", make_recipe())
    straight.run()
    stopped = make_trainer(tiny_model, tmp_path / "b", make_recipe())
    with pytest.raises(Interrupted):
        stopped.run(
            lambda share, note: stopped._on_signal(15, None) if stopped.state.step == 3 else None
        )
    resumed = make_trainer(tiny_model, tmp_path / "b", make_recipe())
    resumed.run()
    assert_equal(weights(straight), weights(resumed))


@pytest.mark.parametrize("change", ["sharded", "device"])
def test_no_forward_is_begun_early_where_it_cannot_be(tiny_model, tmp_path, monkeypatch, change):
    monkeypatch.setattr(features_ahead, "STREAMS", ("cuda",) if change == "device" else ("cpu",))
    recipe = make_recipe()
    if change == "sharded":
        recipe = changed(recipe, "target", sharding="fsdp")
    assert make_trainer(tiny_model, tmp_path, recipe).ahead is None
