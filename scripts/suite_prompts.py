"""The first turns of a suite as a file of prompts.

    python scripts/suite_prompts.py mt_bench 10 > prompts.jsonl

The suite lies in `suites/` (docs/evaluate.md fetches it); the conversations are spread over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.minutes import spread_over, suite_questions


def rows(name: str, count: int) -> Iterator[str]:
    """JSON of `count` conversations of a question each."""
    for question in spread_over(suite_questions(name), count):
        yield json.dumps({"messages": [{"role": "user", "content": question}]})


if __name__ == "__main__":
    print(*rows(sys.argv[1], int(sys.argv[2])), sep="\n")
