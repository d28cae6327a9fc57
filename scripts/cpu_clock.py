"""`draftsmith` on one thread, whose timed passes are seconds of this process's CPU time.

    python scripts/cpu_clock.py try --model TARGET --drafter EXPORT ...

Other work on the machine, which wall-clock times contain, does not count. For engines that compute
in this process: of another one, as vLLM's is, nothing is seen."""

from __future__ import annotations

import os
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported: CPU time adds up over threads

from draftsmith.inference.evaluation import timing
from draftsmith.train.cli import app


def main() -> None:
    """The command line of `draftsmith`."""
    timing.perf_counter = time.process_time  # type: ignore[attr-defined]
    app(prog_name="draftsmith")


if __name__ == "__main__":
    main()
