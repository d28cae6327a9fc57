"""Features on disk: the key of a tiny target, and what its forward writes under it."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.features.cache import CacheKey, FeatureCache, ShardWriter, texts_of
from draftsmith.train.features.source import InProcess

SHARD = 6000  # bytes: some texts


def make_key(encoding: str = "exact", **changes) -> CacheKey:
    names = dict(target="t", weights="w", config="c", tokenizer="v", template="m")
    how = dict(dtype="float32", engine="draftsmith", encoding=encoding)
    return CacheKey(**names | how | {"hidden_size": 32, "taps": (1, 2, 3)} | changes)


def write(
    cache: FeatureCache,
    rows: Sequence[PackedRow],
    target: FrozenTarget,
    shard_bytes: float = SHARD,
) -> ShardWriter:
    """Writes the texts of the rows that the cache lacks."""
    source = InProcess(target)
    with ShardWriter(cache, shard_bytes) as writer:
        for row in rows:
            taps, last_hidden = source.states(row)
            for text, place in texts_of(row):
                if text not in cache:
                    writer.add(text, None if taps is None else taps[place], last_hidden[place])
    return writer
