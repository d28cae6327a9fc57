"""The target's features of training texts on disk: content-addressed, memory-mapped, written by
several processes.

    DIR/<address>/key.json            everything the features depend on, whose hash is the address
    DIR/<address>/<any>.safetensors   a shard: payloads of its texts one after another, their names,
                                      lengths, checksums

Features are stored by text, one segment of a packed row, because a text's features do not depend on
the packing: other packings and other data find the texts they share. A shard appears whole or not
at all and never changes, so any number of processes may write and read at once; one that is killed
loses its last, unwritten shard."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.errors import DataError
from speculators.precision import as_dtype
from train.data.packing import PackedRow
from train.features.encodings import Encoding, make_encodings, relative_error

FORMAT = 1
KEY_FILE = "key.json"
OPEN_SHARDS = 128  # mapped at once; a process may have some thousand files open
SHARD_BYTES = 256e6  # of one file: what a killed process loses at most


@dataclass(frozen=True)
class CacheKey:
    """Everything that features on disk depend on; hashes are sha256."""

    target: str  # its name; the hashes tell targets of one name apart
    weights: str
    config: str
    tokenizer: str
    template: str
    hidden_size: int
    taps: tuple[int, ...]
    dtype: str  # the target runs in
    engine: str  # that computed them
    encoding: str
    format: int = FORMAT

    @property
    def address(self) -> str:
        """The hash of everything but the target's name."""
        content = {name: value for name, value in asdict(self).items() if name != "target"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Place:
    """Where a text's features lie."""

    shard: Path
    number: int  # of the text, in its shard
    start: int  # tokens
    stop: int


def text_key(input_ids: np.ndarray) -> bytes:
    """The name of a text: a hash of its tokens."""
    return hashlib.blake2b(
        np.ascontiguousarray(input_ids, dtype="<i4").tobytes(), digest_size=16
    ).digest()


def texts_of(row: PackedRow) -> Iterator[tuple[bytes, slice]]:
    """The texts of a packed row: names and places."""
    ends = [*(np.flatnonzero(np.diff(row.segment_ids)) + 1).tolist(), len(row)]
    start = 0
    for end in ends:
        if not np.array_equal(row.position_ids[start:end], np.arange(end - start)):
            raise DataError(
                "features: the positions of a text in a packed row do not count from 0; it cannot"
                " be kept"
            )
        yield text_key(row.input_ids[start:end]), slice(start, end)
        start = end


class FeatureCache:
    """The features below `root` that have this key. `scan` finds the shards that can be read."""

    def __init__(self, root: Path, key: CacheKey) -> None:
        self.key, self.folder = key, root / key.address
        self.taps, self.last_hidden = make_encodings(
            key.encoding, key.hidden_size, as_dtype(key.dtype)
        )
        self._places: dict[bytes, Place] = {}
        self._scanned: set[Path] = set()
        self._open = lru_cache(OPEN_SHARDS)(self._opened)

    @property
    def bytes_per_token(self) -> int:
        return len(self.key.taps) * self.taps.bytes_per_vector + self.last_hidden.bytes_per_vector

    def __contains__(self, text: bytes) -> bool:
        return text in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def shards(self) -> list[Path]:
        return sorted(self._scanned)

    # ---------------------------------------------------------------- reading

    def scan(self) -> FeatureCache:
        """Finds new shards. DataError names one that is not whole or not of this cache."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path in self._scanned:
                continue
            shard = self._open(path)
            ends = np.cumsum(shard.get_tensor("lengths").numpy()).tolist()
            names = shard.get_tensor("names").numpy()
            for number, (name, start, end) in enumerate(zip(names, [0, *ends], ends)):
                self._places.setdefault(name.tobytes(), Place(path, number, start, end))
            self._scanned.add(path)
        return self

    def read(self, text: bytes, device: torch.device | str = "cpu") -> tuple[Tensor | None, Tensor]:
        """Taps [L, n·H] (None without taps) and last hidden states [L, H] of a text, decoded on
        `device`."""
        payload = self._payload(self._places[text])
        taps = None
        if self.key.taps:
            vectors = (
                payload["taps"]
                .to(device)
                .unflatten(-1, (len(self.key.taps), self.taps.bytes_per_vector))
            )
            taps = self.taps.decode(vectors).flatten(-2)
        return taps, self.last_hidden.decode(payload["last_hidden"].to(device))

    def row(
        self, row: PackedRow, device: torch.device | str = "cpu"
    ) -> tuple[Tensor | None, Tensor]:
        """Taps and last hidden states of a packed row. DataError if one of its texts has none
        here."""
        names = [text for text, _ in texts_of(row)]
        if not all(text in self for text in names):
            raise DataError(
                f"{self.folder}: a training text has no features there; run the same command again"
            )
        texts = [self.read(text, device) for text in names]
        taps = torch.cat([taps for taps, _ in texts]) if self.key.taps else None
        return taps, torch.cat([last_hidden for _, last_hidden in texts])

    def _payload(self, place: Place) -> dict[str, Tensor]:
        shard = self._open(place.shard)
        parts = {name: shard.get_slice(name)[place.start : place.stop] for name in self._tensors}
        if _checksum(parts) != int(shard.get_slice("checksums")[place.number : place.number + 1]):
            raise DataError(
                f"{place.shard}: damaged: the bytes of text {place.number} are not those that were"
                " written; delete the file and run the same command again, which computes its"
                " texts anew"
            )
        return parts

    @property
    def _tensors(self) -> list[str]:
        return ["taps", "last_hidden"] if self.key.taps else ["last_hidden"]

    def _opened(self, path: Path) -> Any:
        """Maps a shard, whose header says if it is whole."""
        try:
            shard = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{path}: damaged or cut short ({error}); delete the file and run the same command"
                " again, which computes its texts anew"
            ) from None
        address = (shard.metadata() or {}).get("address")
        if address != self.key.address:
            raise DataError(
                f"{path}: belongs to the features {address}, and lies in those of"
                f" {self.key.address}; move it back or delete it"
            )
        return shard


class ShardWriter:
    """Collects texts of one process and writes a shard for every `shard_bytes`."""

    def __init__(self, cache: FeatureCache, shard_bytes: float) -> None:
        self.cache, self.shard_bytes = cache, shard_bytes
        self.bytes, self.tokens = 0, 0  # written
        self.error: dict[str, float] = {}  # largest mean relative squared error, by tensor
        self._texts: list[tuple[bytes, dict[str, Tensor]]] = []
        self._waiting = 0
        self._prepare()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Writes the complete texts, also after an error."""
        self.flush()

    def add(self, text: bytes, taps: Tensor | None, last_hidden: Tensor) -> None:
        """One text: taps [L, n·H], last_hidden [L, H]. DataError if a number is not finite, also
        once encoded."""
        parts, cache = {}, self.cache
        if taps is not None:
            parts["taps"] = self._encode(
                "taps", cache.taps, taps.unflatten(-1, (-1, cache.key.hidden_size))
            )
        parts["last_hidden"] = self._encode("last_hidden", cache.last_hidden, last_hidden)
        self._texts.append((text, parts))
        self._waiting += sum(part.numel() for part in parts.values())
        if self._waiting >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the collected texts as a shard, under a temporary name first."""
        if not self._texts:
            return
        lengths = [len(parts["last_hidden"]) for _, parts in self._texts]
        tensors = {
            name: torch.cat([parts[name] for _, parts in self._texts]).contiguous()
            for name in self.cache._tensors
        }
        names = np.frombuffer(b"".join(name for name, _ in self._texts), dtype=np.uint8).reshape(
            -1, 16
        )
        tensors["names"] = torch.from_numpy(names.copy())
        tensors["lengths"] = torch.tensor(lengths)
        tensors["checksums"] = torch.tensor([_checksum(parts) for _, parts in self._texts])
        path = self.cache.folder / f"{uuid.uuid4().hex}.safetensors"
        partial = path.with_name(f"{path.stem}.{socket.gethostname()}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, {"address": self.cache.key.address})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise DataError(
                f"{path.parent}: a shard of {self._waiting / 1e6:.0f} MB could not be written"
                f" ({error}); what was written before is kept, so make room and run the same"
                " command again"
            ) from None
        self.bytes, self.tokens = self.bytes + self._waiting, self.tokens + sum(lengths)
        self._texts, self._waiting = [], 0

    def _encode(self, name: str, encoding: Encoding, vectors: Tensor) -> Tensor:
        """[L, (n,) H] -> [L, bytes] on the host."""
        payload = encoding.encode(vectors)
        error = relative_error(vectors, encoding.decode(payload)).mean()
        if not torch.isfinite(error):
            raise DataError(
                f"features: {name} of a training text hold numbers that are not finite, or too"
                f" large for {encoding.name}; look at the target in a wider precision"
                " (target.dtype: float32)"
            )
        self.error[name] = max(self.error.get(name, 0.0), float(error))
        return payload.flatten(1).cpu()

    def _prepare(self) -> None:
        """Makes the folder and its key, and removes the files of killed writers of this machine."""
        folder, key = self.cache.folder, self.cache.key
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / KEY_FILE).exists():
            partial = folder / f"{uuid.uuid4().hex}.partial"
            partial.write_text(json.dumps(asdict(key), indent=2) + "\n", encoding="utf-8")
            partial.replace(folder / KEY_FILE)
        for path in folder.glob(f"*.{socket.gethostname()}.*.partial"):
            writer = path.name.split(".")[-2]
            if writer.isdigit() and not psutil.pid_exists(int(writer)):
                path.unlink(missing_ok=True)


def _checksum(parts: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(parts):
        value = zlib.crc32(parts[name].contiguous().numpy(), value)
    return value


def missing(cache: FeatureCache, rows: Sequence[PackedRow]) -> dict[bytes, int]:
    """The texts of `rows` that are not in the cache, and their lengths."""
    return {
        text: place.stop - place.start
        for row in rows
        for text, place in texts_of(row)
        if text not in cache
    }
