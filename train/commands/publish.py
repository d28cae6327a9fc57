"""`draftsmith push`: the options of the command, and its output."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from speculators.errors import ConfigError


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
    commit_message: Annotated[str, typer.Option(help="Message of the commit.")] = "",
    base_model: Annotated[
        str, typer.Option(metavar="ORG/NAME", help="The target's id, for the card.")
    ] = "",
    license_: Annotated[
        str, typer.Option("--license", help="License for the card, such as apache-2.0.")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="acceptance.json; default: the one beside the drafter.")
    ] = None,
    target_layers: Annotated[
        int | None,
        typer.Option(help="Layers of the target, for heads that do not say which they tap."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write what would be sent, and contact nobody.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With --dry-run: the folder to write.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Send a drafter that does not load.")
    ] = False,
    token: Annotated[
        str,
        typer.Option(help="Better: HF_TOKEN, or `hf auth login`; others may read command lines."),
    ] = "",
) -> None:
    """Upload a drafter with a card written from its acceptance report; again, it sends only what is
    missing."""
    from speculators.export.upload import Destination
    from train.pipeline.publish import PushOptions, listing, stage
    from train.pipeline.publish import push as send

    if out is not None and not dry_run:
        raise ConfigError("push: --out belongs to --dry-run")
    options = PushOptions(base_model or None, license_ or None, report, target_layers, force)
    if dry_run:
        where = out or Path(tempfile.mkdtemp(prefix="draftsmith-push-"))
        files = listing(stage(folder, repository, where, options, say=_note))
        width = max(len(name) for name, _ in files)
        for name, size in files:
            typer.echo(f"{name:<{width}}  {size:>13,} bytes")
        visibility = "public" if public else "private"
        typer.echo(f"{where}: what would go to {repository} ({visibility}); nothing was sent")
        return
    to = Destination(repository, not public, token or None)
    typer.echo(send(folder, to, options, message=commit_message, say=_note).describe(repository))


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"note: {text}", style="yellow"))
