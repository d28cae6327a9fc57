"""The target's features of training texts on disk: content-addressed, memory-mapped, written by
several processes.

    DIR/<address>/key.json            everything the features depend on, whose hash is the address
    DIR/<address>/<any>.safetensors   a shard: `<hash of a text>.taps` and `.last_hidden`, uint8
                                      [tokens, bytes]; a checksum of each text in its header

Features are stored by text, one segment of a packed row, because a text's features do not depend on
the packing: other packings and other data find the texts they share. A shard appears whole or not
at all and never changes, so any number of processes may write and read at once; one that is killed
loses its last, unwritten shard."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.precision import as_dtype
from draftsmith.train.data.packing import PackedRow
from draftsmith.train.features.encodings import Encoding, make_encodings, relative_error

Payload = dict[str, Tensor]  # taps, if there are any, and last_hidden of a text: uint8 [L, bytes]
FORMAT = 2
KEY_FILE = "key.json"
OPEN_SHARDS = 128  # mapped at once; a process may have some thousand files open
SHARD_BYTES = 256e6  # of one file: what a killed process loses at most
ABANDONED_S = 3600  # after which a file that is not whole is removed
DAMAGED = "damaged; delete the file and run the same command again, which computes its texts anew"


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
        yield text_key(row.input_ids[start:end]), slice(start, end)
        start = end


class FeatureCache:
    """The features below `root` that have this key. `scan` finds the shards that can be read."""

    def __init__(self, root: Path, key: CacheKey) -> None:
        self.key = key
        self.folder = root / key.address
        self.taps, self.last_hidden = make_encodings(
            key.encoding, key.hidden_size, as_dtype(key.dtype)
        )
        self._shards: dict[bytes, Path] = {}  # by text
        self._scanned: set[Path] = set()
        self._open = lru_cache(OPEN_SHARDS)(_opened)

    @property
    def bytes_per_token(self) -> int:
        """Of taps and last hidden state, as they are written."""
        return len(self.key.taps) * self.taps.bytes_per_vector + self.last_hidden.bytes_per_vector

    def __contains__(self, text: bytes) -> bool:
        return text in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def shards(self) -> list[Path]:
        """The files that were scanned, by name."""
        return sorted(self._scanned)

    def scan(self) -> FeatureCache:
        """Finds new shards. DataError names one that is not whole."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._scanned:
                for name in self._open(path)[1]:
                    self._shards.setdefault(bytes.fromhex(name), path)
                self._scanned.add(path)
        return self

    def fetch(self, text: bytes) -> Payload:
        """The bytes of a text as they were written, mapped and checked. DataError: it is missing,
        or damaged."""
        if text not in self:
            raise DataError("a training text has no features there", where=f"{self.folder}")
        shard, checksums = self._open(self._shards[text])
        names = ("taps", "last_hidden") if self.key.taps else ("last_hidden",)
        payload = {name: shard.get_tensor(f"{text.hex()}.{name}") for name in names}
        if _checksum(payload) != checksums[text.hex()]:
            raise DataError(DAMAGED, where=f"{self._shards[text]}")
        return payload

    def decode(self, payload: Payload, device: torch.device | str) -> tuple[Tensor | None, Tensor]:
        """Taps [L, n·H] (None: no taps) and last hidden states [L, H] of a text, on `device`."""
        moved = {name: part.to(device, non_blocking=True) for name, part in payload.items()}
        taps = None
        if self.key.taps:
            vectors = moved["taps"].unflatten(-1, (len(self.key.taps), -1))
            taps = self.taps.decode(vectors).flatten(-2)
        return taps, self.last_hidden.decode(moved["last_hidden"])


def _opened(path: Path) -> tuple[Any, dict[str, int]]:
    """A mapped shard, and the checksums of its texts. Its header says if it is whole."""
    try:
        shard = safe_open(path, framework="pt")
    except (SafetensorError, OSError):
        raise DataError(DAMAGED, where=f"{path}") from None
    return shard, {text: int(value) for text, value in (shard.metadata() or {}).items()}


class ShardWriter:
    """Collects texts of one process and writes a shard for every `shard_bytes`."""

    def __init__(self, cache: FeatureCache, shard_bytes: float) -> None:
        self.cache = cache
        self.shard_bytes = shard_bytes
        self.bytes = 0  # written
        self.tokens = 0  # written
        self.error: dict[str, float] = {}  # largest mean relative squared error, by tensor
        self._texts: dict[str, dict[str, Tensor]] = {}  # by the hash of a text in hex
        self._waiting = 0
        cache.folder.mkdir(parents=True, exist_ok=True)
        key = json.dumps(asdict(cache.key), indent=2) + "\n"
        write_whole(cache.folder / KEY_FILE, key)
        for path in cache.folder.glob("*.partial"):  # of a process that was killed
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink(missing_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Writes the complete texts, also after an error."""
        self.flush()

    def add(self, text: bytes, taps: Tensor | None, last_hidden: Tensor) -> None:
        """One text: taps [L, n·H], last_hidden [L, H]. DataError: not finite."""
        parts = {}
        cache = self.cache
        if taps is not None:
            vectors = taps.unflatten(-1, (-1, cache.key.hidden_size))
            parts["taps"] = self._encode("taps", cache.taps, vectors)
        parts["last_hidden"] = self._encode("last_hidden", cache.last_hidden, last_hidden)
        self._texts[text.hex()] = parts
        self._waiting += sum(part.numel() for part in parts.values())
        if self._waiting >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the collected texts as a shard, under a temporary name first."""
        if not self._texts:
            return
        tensors = {
            f"{text}.{name}": part
            for text, parts in self._texts.items()
            for name, part in parts.items()
        }
        checksums = {text: str(_checksum(parts)) for text, parts in self._texts.items()}
        path = self.cache.folder / f"{uuid.uuid4().hex}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial, checksums)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise DataError(
                f"a shard of {self._waiting / 1e6:.0f} MB could not be written ({error}); what was"
                " written before is kept",
                where=f"{path.parent}",
            ) from None
        self.bytes += self._waiting
        self.tokens += sum(len(parts["last_hidden"]) for parts in self._texts.values())
        self._texts = {}
        self._waiting = 0

    def _encode(self, name: str, encoding: Encoding, vectors: Tensor) -> Tensor:
        """[L, (n,) H] -> [L, bytes] on the host."""
        payload = encoding.encode(vectors)
        error = relative_error(vectors, encoding.decode(payload)).mean()
        if not torch.isfinite(error):
            raise DataError(
                f"{name} of a training text hold numbers that are not finite; try target.dtype:"
                " float32",
                where="features",
            )
        self.error[name] = max(self.error.get(name, 0.0), float(error))
        return payload.flatten(1).cpu().contiguous()


def _checksum(parts: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(parts):
        value = zlib.crc32(parts[name].contiguous().numpy().data, value)
    return value


def missing(cache: FeatureCache, rows: Sequence[PackedRow]) -> dict[bytes, int]:
    """The texts of `rows` that are not in the cache, and their lengths."""
    lengths: dict[bytes, int] = {}
    for row in rows:
        for text, place in texts_of(row):
            if text not in cache:
                lengths[text] = place.stop - place.start
    return lengths
