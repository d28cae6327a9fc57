"""The source files of the running interpreter's standard library as a code-completion workload.

Files are split by a hash of their relative path, so that no file is in two splits.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from speculators.errors import DataError

LARGEST_FILE = 400_000  # bytes
SPLITS = {"train": range(0, 94), "validation": range(94, 97), "test": range(97, 100)}
_SKIPPED = {
    "site-packages",
    "__pycache__",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
}


@cache
def files(split: str) -> tuple[Path, ...]:
    """The source files of one split (`train`, `validation`, `test`), sorted by path.

    Raises DataError for an unknown split or an interpreter that ships no readable sources.
    """
    if split not in SPLITS:
        raise DataError(
            f"stdlib source: unknown split {split!r}; expected one of {', '.join(SPLITS)}"
        )
    root = Path(sysconfig.get_paths()["stdlib"])

    def belongs(path: Path) -> bool:
        name = path.relative_to(root)
        bucket = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:4], "big") % 100
        return (
            not _SKIPPED & set(name.parts)
            and path.stat().st_size < LARGEST_FILE
            and bucket in SPLITS[split]
        )

    chosen = tuple(path for path in sorted(root.rglob("*.py")) if belongs(path))
    if not chosen:
        raise DataError(
            f"stdlib source: no .py files for split {split!r} below {root}; install Python's"
            " sources"
        )
    return chosen


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def snippets(split: str, count: int, seed: int = 0, max_chars: int = 2400) -> Iterator[str]:
    """Yield `count` excerpts that start at a line of code that opens a block and run to at most
    `max_chars`.

    Drawn with replacement over files, without repeating an excerpt; deterministic for one Python
    version."""
    rng = random.Random(f"stdlib/{split}/{seed}")
    pool, seen, misses = files(split), set(), 0
    while count > 0:
        path = rng.choice(pool)
        lines = _lines(path)
        starts = [
            i
            for i, line in enumerate(lines)
            if line.lstrip().startswith(("def ", "class ", "import ", "for "))
        ]
        start = rng.choice(starts) if starts else 0
        text = "".join(lines[start:])[:max_chars]
        if len(text) < 400 or (path, start) in seen:
            misses += 1
            if misses > 100_000:
                raise DataError(
                    f"stdlib source: split {split!r} has no {count} further excerpts; ask for fewer"
                )
            continue
        seen.add((path, start))
        count -= 1
        yield text


def completions(
    split: str, count: int, seed: int = 0, prompt_chars: int = 500
) -> Iterator[dict[str, str]]:
    """Excerpts cut in two at a line end near `prompt_chars`: rows with `prompt`, `completion` and
    `workload`."""
    for text in snippets(split, count, seed):
        cut = text.find("\n", min(prompt_chars, len(text) // 2)) + 1 or len(text) // 2
        yield {"prompt": text[:cut], "completion": text[cut:], "workload": "code"}
