"""Shared by the command lines of this project: an error the user can mend is one red paragraph and
exit code 2, a signal stops a command in order, and none is silent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.progress import HEARTBEAT, Activity
from draftsmith.inference.whole_file import DISK, cause
from draftsmith.speculators.errors import ConfigError, DraftsmithError

# The extra of this project that installs a module which some commands need. What needs matplotlib
# needs `train` too, which has `report`.
_TRAIN = "accelerate datasets hs_connectors matplotlib peft psutil pyarrow ruamel"
_SERVE = "anyio httpx2 openai prometheus_client scipy starlette uvicorn"
EXTRAS = {
    **dict.fromkeys(_TRAIN.split(), "train"),
    **dict.fromkeys(_SERVE.split(), "serve"),
}


@contextmanager
def user_errors() -> Iterator[None]:
    """A DraftsmithError, a missing module of an extra, or a file that cannot be read or written is
    printed and becomes exit code 2; any other error is a bug and shows its traceback."""
    try:
        yield
    except DraftsmithError as error:
        _exit_with(error)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        install = f"pip install 'draftsmith[{extra}]'"
        _exit_with(ConfigError(f"this needs the package {error.name}: {install}"))
    except OSError as error:
        if error.filename is not None:
            path = Path(str(error.filename))
            _exit_with(ConfigError(cause(error, path), where=f"{path}"))
        if error.errno not in DISK:  # as those of a network
            raise
        _exit_with(ConfigError(f"{error.strerror}; make room, or write to another disk"))


def _exit_with(error: DraftsmithError) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
    sys.exit(2)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a command as Ctrl-C does."""


@contextmanager
def supervised(name: str) -> Iterator[Activity]:
    """Runs a command: what works without a word is named now and then, and a command that is
    stopped by SIGINT or SIGTERM ends with 130 or 143. What it has measured or saved by then, it
    says itself."""

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    errors = Console(stderr=True, soft_wrap=True)
    if not errors.is_terminal:  # bars of transformers would fill a log; it has lines of ours
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, terminate)
    try:
        with HEARTBEAT.activity(name, errors) as activity, HEARTBEAT.running():
            yield activity
    except KeyboardInterrupt as stop:
        errors.print(Text("stopped", style="yellow"))
        sys.exit(143 if isinstance(stop, Terminated) else 130)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def announce(activity: Activity, name: str) -> None:
    """The first line of a command that imports PyTorch, which may take half a minute."""
    activity.name = name
    if "torch" not in sys.modules:
        HEARTBEAT.print(activity.console, f"{name}: importing PyTorch", style="dim")


def run_alone(name: str, register: Callable[[typer.Typer], object]) -> None:
    """Runs one command, which `register` adds to a command line, with the arguments of this
    process. `name`: what the user calls it by."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    register(app)
    with user_errors(), supervised(name):
        app(prog_name=name)
