"""Features of any source train alike, and a source that waits is read while a step trains."""

from __future__ import annotations

import threading

import pytest
import torch

from draftsmith.speculators.errors import DataError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.cache import FeatureCache
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import Disk, InProcess
from tests.support.features import make_key, write
from tests.support.models import make_tiny_model
from tests.support.training import assert_equal, make_recipe, make_rows, make_trainer, weights

TAPS = (1, 2, 3)
ROWS = 96  # texts, whose packed rows are enough for one epoch


class Recorded(Disk):
    """Which rows were fetched, by which thread, and how many waited to be taken."""

    def __init__(self, cache: FeatureCache, device: torch.device) -> None:
        super().__init__(cache, device)
        self.fetched: list[tuple[str, int]] = []

    def fetch(self, row):
        self.fetched.append((threading.current_thread().name, id(row)))
        return super().fetch(row)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(make_tiny_model("llama", initializer_range=0.1), TAPS)


@pytest.fixture
def cache(target, tmp_path) -> FeatureCache:
    cache = FeatureCache(tmp_path / "features", make_key())
    write(cache, make_rows(ROWS), target)
    return cache.scan()


def trained(target, folder, features, **training):
    recipe = make_recipe(steps=7, gradient_accumulation_steps=2, **training)
    trainer = make_trainer(None, folder, recipe, target=target, features=features)
    logged = []
    trainer.accelerator.log = lambda values, step: logged.append(values)
    trainer.run()
    return trainer, logged


def test_a_training_from_disk_is_one_of_kept_features_to_the_bit(target, cache, tmp_path):
    rows = make_rows(ROWS)
    source = Recorded(cache, target.device)
    from_disk, logged = trained(target, tmp_path / "a", RowFeatures(source, rows))
    kept = RowFeatures(InProcess(target), rows, keep_bytes=1e9)
    in_process, others = trained(target, tmp_path / "b", kept)
    assert_equal(weights(from_disk), weights(in_process))
    assert len(logged) == 7 and all(0 < record["waits"] <= 1 for record in logged)
    assert [record["waits"] for record in others] == [0] * 7


def test_rows_are_read_by_a_thread_of_their_own_and_no_more_than_a_step_waits(
    target, cache, tmp_path
):
    rows = make_rows(ROWS)
    source = Recorded(cache, target.device)
    features = RowFeatures(source, rows)
    waiting = []
    begin = features.begin
    features.begin = lambda indices: (begin(indices), waiting.append(len(features.ahead)))
    trained(target, tmp_path, features)
    readers = {name for name, _ in source.fetched}
    assert all(name.startswith("features") for name in readers)
    assert len(source.fetched) == 7 * 4, "each row of each step once, and none of an eighth step"
    assert max(waiting) == 4


def test_kept_rows_are_not_read_again(target, cache, tmp_path):
    rows = make_rows(ROWS)
    source = Recorded(cache, target.device)
    trained(target, tmp_path, RowFeatures(source, rows, keep_bytes=1e9))
    assert len(source.fetched) == len({row for _, row in source.fetched})


def test_damage_that_is_read_ahead_is_an_error_of_the_training(target, cache, tmp_path):
    for path in cache.shards:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    fresh = FeatureCache(cache.folder.parent, cache.key).scan()
    with pytest.raises(DataError, match=r"\.safetensors"):
        trained(target, tmp_path, RowFeatures(Disk(fresh, target.device), make_rows(ROWS)))


def test_padded_texts_have_the_features_of_their_rows(target, cache):
    rows = make_rows(ROWS)[:3]
    in_batch = RowFeatures(Disk(cache, target.device), rows)
    batch = in_batch.batch([0, 1, 2])
    features = Disk(cache, target.device).features(**batch)
    assert torch.equal(features.taps, in_batch.of([0, 1, 2]).taps)
    assert torch.equal(features.loss_mask, batch["loss_mask"])
