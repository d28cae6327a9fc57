"""`python -m inference.bench …`: `draftsmith bench`, where guides call a client of their own."""

from __future__ import annotations

import sys

from inference.bench.command import run
from inference.console import print_error
from speculators.errors import DraftsmithError

if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except DraftsmithError as error:
        print_error(error)
        sys.exit(2)
