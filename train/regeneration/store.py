"""Responses on disk, by content: a line per response, written when it has ended.

The name of a store is a hash of everything that its responses depend on beside their prompts. Its
files are `<name>.*.jsonl`: every process writes its own and reads all, without a line that a kill
has torn."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.export import disk_errors


@dataclass(frozen=True)
class TokenIds:
    """Token ids at rest, in four bytes each; as Python's numbers they take nine times as much."""

    packed: bytes  # int32

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """Packs token ids."""
        return cls(np.asarray(ids, dtype=np.int32).tobytes())

    def unpacked(self) -> tuple[int, ...]:
        """The token ids."""
        return tuple(np.frombuffer(self.packed, dtype=np.int32).tolist())


@dataclass(frozen=True)
class Response:
    """One prompt and its response, as tokens. `example`: the number of its conversation.

    All responses of a data set are in memory until they are rows, so they are held packed."""

    workload: str
    prompt: TokenIds
    output: TokenIds
    temperature: float
    example: int = 0

    @classmethod
    def of(
        cls,
        workload: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        temperature: float,
        example: int = 0,
    ) -> Response:
        """A response of tokens that are not packed yet."""
        return cls(workload, TokenIds.of(prompt_ids), TokenIds.of(output_ids), temperature, example)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt, unpacked for the caller."""
        return self.prompt.unpacked()

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens of the response, unpacked for the caller."""
        return self.output.unpacked()


class ResponseStore:
    """Stored responses. `known`: their token ids by key; `written_by`: their number by engine."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.known: dict[str, TokenIds] = {}
        self.written_by: Counter[str] = Counter()
        self._file: IO[bytes] | None = None
        for path in sorted(folder.glob(f"{name}.*.jsonl")):
            *lines, _ = path.read_bytes().split(b"\n")  # the last one is empty, or torn
            for number, line in enumerate(lines, 1):
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    raise DataError("no response; remove it", where=f"{path}:{number}") from None

    def _take(self, entry: Mapping[str, Any]) -> None:
        self.known[entry["key"]] = TokenIds.of(entry["token_ids"])
        self.written_by[entry["engine"]] += 1

    def add(self, key: str, token_ids: Sequence[int], engine: str) -> None:
        """Stores one response; a kill does not lose it any more. OSError names the file."""
        entry = {"key": key, "engine": engine, "token_ids": list(token_ids)}
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / f"{self.name}.{uuid.uuid4().hex[:8]}.jsonl").open("ab")
        with disk_errors(Path(self._file.name)):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
        self._take(entry)

    def close(self) -> None:
        """Writes what is in memory to the disk."""
        if self._file is not None:
            with disk_errors(Path(self._file.name)):
                os.fsync(self._file.fileno())
                self._file.close()
            self._file = None


@dataclass(frozen=True)
class Record:
    """regeneration.json in a run's folder: of which target its responses are, how they were
    sampled, who wrote them, and what became of all that were requested."""

    folder: Path
    target: Mapping[str, Any]

    def add(self, name: str, facts: Mapping[str, Any]) -> None:
        """Adds the facts of the store `name`."""
        tree = summary(self.folder).get("responses", {})
        write_json(self.folder / "regeneration.json", {**tree, name: {**self.target, **facts}})


def summary(folder: Path) -> dict[str, Any]:
    """{"responses": …} of a run whose responses were written by the target; {} of others."""
    path = folder / "regeneration.json"
    return {"responses": json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}


def digest(tree: Any, length: int) -> str:
    """The first `length` hex digits of the sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:length]


def write_json(path: Path, tree: Any) -> None:
    """The file is complete, or as it was."""
    write_whole(path, json.dumps(tree, indent=2, ensure_ascii=False) + "\n")
