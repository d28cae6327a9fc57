"""Where the target's hidden states of training texts come from: this process, or a cache on disk.

A source gives the states of a packed row in two steps. `fetch` is what can be done beside the
training: reading, checking, copying to pinned memory. `states` is the rest, on the device that
trains. Sources whose `fetch` waits for somebody else are read a step ahead, by a thread that
`ReadAhead` has; the target in this process is not, since it computes with what trains the head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.speculators.precision import on_host, to_device
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.speculators.target.sharding import is_sharded
from draftsmith.train.data.packing import PackedRow, collate
from draftsmith.train.features.cache import FeatureCache, Payload, texts_of

RowStates = tuple[Tensor | None, Tensor]  # taps [L, n·H], None without any; last_hidden [L, H]


class FeatureSource(ABC):
    """The target's hidden states of packed rows; those of a text do not depend on its row.

    A source of another kind, such as running servers, derives from this class: it says if it
    `waits`, and has `fetch` and `states`. Errors of `fetch` are raised where the row is used."""

    waits: ClassVar[bool]  # `fetch` waits for a disk or a network, and is worth beginning early
    overlaps: bool = False  # `of` and `states` may run on a stream of their own
    readers: int = 1  # rows that `fetch` is called for at once, at most, ahead of their step

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the features are."""

    @abstractmethod
    def fetch(self, row: PackedRow) -> Any:
        """What `states` needs of a row, in the host's memory. Called from `readers` threads and
        from the training's at once, for different rows."""

    @abstractmethod
    def states(self, row: PackedRow, fetched: Any) -> RowStates:
        """Taps and last hidden states of a row, on the device."""

    def close(self) -> None:
        """Frees what the source has open."""
        return

    def of(self, rows: Sequence[PackedRow], batch: dict[str, Any]) -> TargetFeatures:
        """The features of rows; `batch`: these rows, collated."""
        return joined([self.states(row, self.fetch(row)) for row in rows], batch)

    def features(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, loss_mask: Tensor
    ) -> TargetFeatures:
        """As `FrozenTarget.features`: the states of these texts, whose padding is on the right."""
        batch = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "segment_ids": segment_ids,
            "loss_mask": loss_mask,
        }
        fields = [on_host(tensor).numpy() for tensor in batch.values()]
        rows = []
        for row in zip(*fields, strict=True):
            length = int((row[2] >= 0).sum())
            ids, positions, segments, mask = (field[:length] for field in row)
            rows.append(PackedRow(ids, positions, segments, mask, workloads=()))
        return self.of(rows, batch)


class InProcess(FeatureSource):
    """The target computes them here, when they are asked for."""

    waits = False

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        # collectives of shards have streams of their own, which follow the one in use
        self.overlaps = not is_sharded(target)

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.target.device

    def fetch(self, row: PackedRow) -> None:
        """Nothing: `states` computes."""

    def states(self, row: PackedRow, fetched: None = None) -> RowStates:
        """One forward of the target: taps [L, n·H], or None, and last hidden states [L, H]."""
        moved: dict[str, Any] = {
            name: to_device(part, self.device) for name, part in collate([row]).items()
        }
        features = self.target.features(**moved)
        return None if features.taps is None else features.taps[0], features.last_hidden[0]

    def of(self, rows: Sequence[PackedRow], batch: dict[str, Any]) -> TargetFeatures:
        """All rows in one forward."""
        return self.target.features(**batch)


class Disk(FeatureSource):
    """A cache that has the texts of all rows."""

    waits = True

    def __init__(self, cache: FeatureCache, device: torch.device) -> None:
        self.cache = cache
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the states are decoded."""
        return self._device

    def fetch(self, row: PackedRow) -> list[Payload]:
        """DataError: a text is missing, or damaged."""
        payloads = [self.cache.fetch(text) for text, _ in texts_of(row)]
        if self.device.type == "cuda":
            payloads = [{name: x.pin_memory() for name, x in p.items()} for p in payloads]
        return payloads

    def states(self, row: PackedRow, fetched: list[Payload]) -> RowStates:
        """Decodes what was fetched: taps [L, n·H], or None, and last hidden states [L, H]."""
        return states_of_row([self.cache.decode(payload, self.device) for payload in fetched])


class ReadAhead:
    """Fetches rows of a source in threads of its own, beginning in the order in which they were
    begun. What was begun and not taken is all it holds: a caller who begins one row for each that
    it takes sets the bound."""

    def __init__(self, source: FeatureSource) -> None:
        self.source = source
        self._coming: dict[int, Future[Any]] = {}
        self._readers = ThreadPoolExecutor(self.source.readers, "features")

    def __len__(self) -> int:
        """Rows that were begun and not taken."""
        return len(self._coming)

    def begin(self, index: int, row: PackedRow) -> None:
        """Fetches row `index` as soon as those before it are there, unless it was begun."""
        if index not in self._coming:
            self._coming[index] = self._readers.submit(self.source.fetch, row)

    def take(self, index: int, row: PackedRow) -> Any:
        """What `fetch` gives of row `index`; waits for it, or for all of it if it was not begun."""
        coming = self._coming.pop(index, None)
        return self.source.fetch(row) if coming is None else coming.result()

    def close(self) -> None:
        """Forgets what was begun; the row that is being read is read to its end."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._readers = ThreadPoolExecutor(self.source.readers, "features")
        self._coming.clear()


def states_of_row(texts: Sequence[RowStates]) -> RowStates:
    """The states of a row from those of its texts, one after the other."""
    taps = [taps for taps, _ in texts if taps is not None]
    return torch.cat(taps) if taps else None, torch.cat([last for _, last in texts])


def joined(rows: Sequence[RowStates], batch: dict[str, Any]) -> TargetFeatures:
    """The features of a batch from the states of its rows, padded with zeros."""
    length = batch["input_ids"].shape[1]
    taps = [taps for taps, _ in rows if taps is not None]
    return TargetFeatures(
        **batch,
        taps=_padded(taps, length) if taps else None,
        last_hidden=_padded([last for _, last in rows], length),
    )


def _padded(rows: list[Tensor], length: int) -> Tensor:
    """[L_i, D] -> [B, length, D], padded with zeros."""
    out = rows[0].new_zeros(len(rows), length, rows[0].shape[1])
    for padded, row in zip(out, rows):
        padded[: len(row)] = row
    return out
