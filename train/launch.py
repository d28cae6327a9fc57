"""The command line of the launchers for `accelerate launch` (train/eagle.py and its siblings)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.speculators.errors import DraftsmithError
from draftsmith.train.pipeline.run import run
from draftsmith.train.trainer.trainer import Interrupted


def launch(families: Sequence[str]) -> None:
    """Entry point of the launchers: `RECIPE [dotted.key=value ...] [--dry-run]`; exits with the
    run's status."""
    arguments = sys.argv[1:]
    options = [a for a in arguments if a.startswith("-")]
    rest = [a for a in arguments if not a.startswith("-")]
    if not rest or options not in ([], ["--dry-run"]):
        print(
            f"usage: {Path(sys.argv[0]).name} RECIPE.yaml [dotted.key=value ...] [--dry-run]",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        sys.exit(run(rest[0], rest[1:], dry_run="--dry-run" in options, families=families))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(143)
    except DraftsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
