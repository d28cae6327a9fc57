"""Features on disk: those that were written, whoever wrote them and whoever was killed; anything
else is named."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import DataError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import PackedRow, pack
from draftsmith.train.features import cache as feature_cache
from draftsmith.train.features.cache import (
    KEY_FILE,
    CacheKey,
    FeatureCache,
    ShardWriter,
    missing,
    texts_of,
)
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import Disk, InProcess
from tests.support.features import SHARD, make_key, write
from tests.support.models import make_tiny_model
from tests.support.training import make_rows

TAPS = (1, 2, 3)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(make_tiny_model("llama"), TAPS)


@pytest.fixture
def rows():
    return make_rows()


def test_exact_features_are_those_of_a_run_without_a_cache(target, rows, tmp_path):
    writer = write(FeatureCache(tmp_path, make_key()), rows, target)
    cache = FeatureCache(tmp_path, make_key()).scan()
    assert len(cache) == 24 and len(cache.shards) > 2 and not missing(cache, rows)
    kept = RowFeatures(InProcess(target), rows, keep_bytes=1e9)
    cached = RowFeatures(Disk(cache, target.device), rows)
    for indices in ([0, 1], [5, 2, 3]):
        expected, features = kept.of(indices), cached.of(indices)
        assert torch.equal(features.taps, expected.taps) and torch.equal(
            features.last_hidden, expected.last_hidden
        )
    tokens = sum(map(len, rows))
    assert (
        writer.tokens == tokens
        and writer.bytes == tokens * cache.bytes_per_token == tokens * 4 * 32 * 4
    )
    assert writer.error == {"taps": 0, "last_hidden": 0}


@pytest.mark.parametrize(("encoding", "dtype"), [("rotated", "float32"), ("bf16", "bfloat16")])
def test_features_come_back_as_their_encoding_says(rows, tmp_path, encoding, dtype):
    target = FrozenTarget(make_tiny_model("qwen3").to(getattr(torch, dtype)), TAPS)
    cache = FeatureCache(tmp_path, make_key(encoding, dtype=dtype))
    write(cache, rows, target)
    features = RowFeatures(Disk(cache.scan(), target.device), rows).of([1])
    expected = RowFeatures(InProcess(target), rows).of([1])
    for name, bound in (("taps", 0.3), ("last_hidden", 0.05)):
        expected_states = getattr(expected, name)
        error = (getattr(features, name) - expected_states).norm() / expected_states.norm()
        assert 0 < error < bound if encoding == "rotated" else error == 0


def test_a_target_without_taps(rows, tmp_path):
    target = FrozenTarget(make_tiny_model("llama"))
    cache = FeatureCache(tmp_path, make_key(taps=()))
    write(cache, rows, target)
    features = RowFeatures(Disk(cache.scan(), target.device), rows).of([0, 1])
    assert features.taps is None and cache.bytes_per_token == 32 * 4
    assert torch.equal(
        features.last_hidden,
        RowFeatures(InProcess(target), rows, keep_bytes=1e9).of([0, 1]).last_hidden,
    )


def test_other_packings_find_the_texts_they_share(target, tmp_path):
    rng = np.random.default_rng(1)
    texts = [TokenRow(rng.integers(3, 100, n), np.arange(n) >= 2) for n in (9, 14, 20, 11, 16)]
    cache = FeatureCache(tmp_path, make_key())
    write(cache, pack(texts, 48), target)
    cache.scan()
    alone = [PackedRow.of(text) for text in texts]
    assert not missing(cache, alone)
    features, expected = (
        RowFeatures(Disk(cache, target.device), alone).of([2]),
        RowFeatures(InProcess(target), alone).of([2]),
    )
    torch.testing.assert_close(features.taps, expected.taps, atol=1e-5, rtol=1e-4)
    more = pack([*texts, TokenRow(rng.integers(3, 100, 7), np.arange(7) >= 2)], 48)
    assert list(missing(cache, more).values()) == [7]


@pytest.mark.parametrize(
    ("encoding", "value"), [("exact", float("inf")), ("rotated", float("nan"))]
)
def test_numbers_that_are_not_finite_are_refused_and_nothing_else_is_lost(
    target, rows, tmp_path, value, encoding
):
    cache, states = FeatureCache(tmp_path, make_key(encoding)), InProcess(target).states(rows[0])
    (first, place), *_ = texts_of(rows[0])
    taps, last_hidden = states[0][place], states[1][place].clone()
    with pytest.raises(DataError, match="last_hidden"), ShardWriter(cache, 1e9) as writer:
        writer.add(first, taps, last_hidden)
        last_hidden[1, 2] = value
        writer.add(b"x" * 16, taps, last_hidden)
    assert first in cache.scan() and len(cache) == 1


# ------------------------------------------------------------------ addresses


def test_whatever_features_depend_on_is_in_the_address(tmp_path, target, rows):
    """Of every field of the key but the target's name; the key is there to be read."""
    cache = FeatureCache(tmp_path, make_key())
    write(cache, rows[:2], target)
    tree = json.loads((cache.folder / KEY_FILE).read_text())
    for field in fields(CacheKey):
        value = {str: "x", int: 99}.get(type(tree[field.name]), (1, 2))
        key = replace(make_key(), **{field.name: value})
        count = len(list((tmp_path / key.address).glob("*.safetensors")))
        assert bool(count) == (field.name == "target"), field.name


# ------------------------------------------------------------------ damage


@pytest.fixture
def written(target, rows, tmp_path) -> FeatureCache:
    cache = FeatureCache(tmp_path, make_key())
    write(cache, rows, target)
    return cache.scan()


def test_a_shard_that_was_cut_is_named_and_can_be_written_again(written, target, rows, tmp_path):
    path = written.shards[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=path.name):
        FeatureCache(tmp_path, make_key()).scan()
    path.unlink()
    again = FeatureCache(tmp_path, make_key()).scan()
    assert 0 < len(missing(again, rows)) < 24
    write(again, rows, target)
    assert not missing(FeatureCache(tmp_path, make_key()).scan(), rows)


def test_a_flipped_bit_is_noticed(written, rows):
    path = written.shards[1]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    cache = FeatureCache(path.parents[1], make_key()).scan()
    with pytest.raises(DataError, match=path.name):
        for row in rows:
            Disk(cache, torch.device("cpu")).fetch(row)


def test_a_full_disk_is_said_and_what_was_written_stays(target, rows, tmp_path, monkeypatch):
    cache, written = FeatureCache(tmp_path, make_key()), []

    def full(tensors, path, metadata):
        if written:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(save_file(tensors, path, metadata))

    monkeypatch.setattr(feature_cache, "save_file", full)
    with pytest.raises(DataError, match="No space left"):
        write(cache, rows, target)
    assert len(cache.scan()) > 0 and not list(cache.folder.glob("*.partial"))


def test_what_a_killed_writer_left_is_ignored_and_removed(written, tmp_path):
    torn, alive = written.folder / "a.partial", written.folder / "b.partial"
    torn.write_bytes(b"half a shard")
    os.utime(torn, (0, 0))
    alive.write_bytes(b"of somebody who is writing")
    cache = FeatureCache(tmp_path, make_key()).scan()
    assert len(cache) == len(written)
    ShardWriter(cache, SHARD)
    assert not torn.exists() and alive.exists()


def test_a_writer_that_was_killed_beside_another_and_runs_again(target, rows, tmp_path):
    """Between them every text is there once, and the target is asked for the rest alone."""
    killed = ShardWriter(FeatureCache(tmp_path, make_key()), 7 * SHARD)
    source = InProcess(target)
    for row in rows[::2]:  # and it never comes to its last shard
        taps, last_hidden = source.states(row)
        for text, place in texts_of(row):
            killed.add(text, taps[place], last_hidden[place])
    write(FeatureCache(tmp_path, make_key()), rows[1::2], target)
    cache = FeatureCache(tmp_path, make_key()).scan()
    whole = {text for row in rows for text, _ in texts_of(row)}
    assert 0 < len(missing(cache, rows)) < len(whole) / 2
    write(cache, rows[::2], target)
    cache = FeatureCache(tmp_path, make_key()).scan()
    stored = [name for path in cache.shards for name in load_file(path) if name.endswith("taps")]
    assert sorted(stored) == sorted(f"{text.hex()}.taps" for text in whole)
    kept = RowFeatures(InProcess(target), rows, keep_bytes=1e9)
    from_disk = RowFeatures(Disk(cache, target.device), rows)
    for index in range(len(rows)):
        assert torch.equal(from_disk.of([index]).taps, kept.of([index]).taps)
