"""`draftsmith push`: the options of the command, and its output."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text


def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="An exported drafter, or the folder of a run.")
    ],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hub.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public; private otherwise.")
    ] = False,
    base_model: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="The target's id, for the card.")
    ] = "",
    license_: Annotated[
        str, typer.Option("--license", help="License for the card, such as apache-2.0.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="acceptance.json; default: the one beside the drafter.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be sent and print the card.")
    ] = False,
) -> None:
    """Upload a drafter with a card written from its acceptance report; again, it sends only what is
    missing."""
    from draftsmith.speculators.export.upload import Destination
    from draftsmith.train.pipeline.publish import CARD, PushOptions, stage
    from draftsmith.train.pipeline.publish import push as upload

    options = PushOptions(base_model or None, license_ or None, report)
    to = Destination(repository, not public)
    if not dry_run:
        url = upload(folder, to, options, say=_note)
        typer.echo(f"{to}: {url}")
        return
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as scratch:
        staged = stage(folder, repository, Path(scratch), options, say=_note)
        typer.echo((staged / CARD).read_text(encoding="utf-8"))
        for path in sorted(path for path in staged.rglob("*") if path.is_file()):
            size = path.stat().st_size
            typer.echo(f"{size:>15,} bytes  {path.relative_to(staged).as_posix()}")
    typer.echo(f"This would go to {to}; nothing was sent")


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"note: {text}", style="yellow"))
