"""Python processes that begin with torch, transformers and the project imported, forked from one that did so once."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.forked",
        "tests.train.worlds",
        "tests.conftest",
        "train.pipeline.run",
        "inference.server.command",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ]
)


class Forked:
    """As subprocess.Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True, env=env).

    Variables that libraries read while they are imported are those of the tests.
    """

    def __init__(self, arguments: Sequence[object], env: Mapping[str, str] = os.environ) -> None:
        reads, self._stdin = CONTEXT.Pipe(duplex=False)
        self._stdout, writes = CONTEXT.Pipe(duplex=False)
        given = [str(each) for each in arguments]
        self._process = CONTEXT.Process(target=_run, args=(given, dict(env), reads, writes))
        self._process.start()
        reads.close()
        writes.close()
        self.stdin = os.fdopen(os.dup(self._stdin.fileno()), "w")
        self.stdout = os.fdopen(os.dup(self._stdout.fileno()))
        self._stdin.close()
        self._stdout.close()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, None]:
        try:
            self.stdin.write(text)
            self.stdin.close()
        except BrokenPipeError:  # it has ended
            pass
        said = self.stdout.read()
        self.wait(timeout)
        return said, None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], env: dict[str, str], stdin: Connection, stdout: Connection) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.dup2(stdin.fileno(), 0)
    for number in (1, 2):
        os.dup2(stdout.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2)
    )
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
