"""`python -m inference.bench …`: `draftsmith bench`, where guides call a client of their own."""

from __future__ import annotations

import sys

from inference import console
from inference.bench.command import run

if __name__ == "__main__":
    console.run(lambda: sys.exit(run(sys.argv[1:])))
