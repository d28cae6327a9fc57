"""`python -m inference.bench …`, where guides call a client of their own; `draftsmith bench` has one dataset more."""

from __future__ import annotations

import sys

from inference.bench.command import run
from inference.console import print_error
from speculators.errors import DraftsmithError

if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:], {}))
    except DraftsmithError as error:
        print_error(error)
        sys.exit(2)
