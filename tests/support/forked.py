"""Python processes that begin with torch, transformers and the project imported: Python's fork
server imports them once, and every process is forked from it.

An import takes some five seconds of CPU time. The files of tests that start such processes take
296 s of CPU time with `sys.executable`, and 90 s so."""

from __future__ import annotations

import array
import fcntl
import gc
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

import psutil

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.support.forked",
        "tests.train.worlds",
        "tests.support.models",
        "draftsmith.train.cli",
        "draftsmith.train.pipeline.run",
        "draftsmith.inference.server.command",
        "accelerate.commands.launch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.run",
    ]
)


class PythonProcess:
    """As subprocess.Popen([sys.executable, *arguments], stdin=PIPE, stdout=PIPE, stderr=STDOUT,
    text=True).

    Variables that libraries read while they are imported are those of the tests.
    """

    def __init__(self, *arguments: object) -> None:
        reads, self._stdin = CONTEXT.Pipe(duplex=False)
        self._stdout, writes = CONTEXT.Pipe(duplex=False)
        words = [str(argument) for argument in arguments]
        self._process = CONTEXT.Process(
            target=_with_pipes, args=(words, dict(os.environ), reads, writes)
        )
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


def _with_pipes(arguments: list[str], env: dict[str, str], stdin, stdout) -> None:
    os.dup2(stdin.fileno(), 0)
    for number in (1, 2):
        os.dup2(stdout.fileno(), number)
    _run(arguments, env)


def _run(arguments: list[str], env: dict[str, str]) -> None:
    """`python *arguments` in this process, over the file descriptors 0, 1 and 2."""
    gc.freeze()  # what was imported before
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        for number in (1, 2)
    )
    kind, *rest = arguments[1:] if arguments[0] == "-u" else arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


STAND_IN = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
numbers = [int(n) for n in os.listdir("/proc/self/fd")]  # the listing's own is closed by now
numbers = [n for n in numbers if n != server.fileno() and os.path.exists(f"/proc/self/fd/{{n}}")]
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), numbers]).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
server.sendmsg([len(asked).to_bytes(8, "big")], rights)
server.sendall(asked)
answers = server.makefile("rb")
pid = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(answers.readline() or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Interpreter:
    """A program that does what sys.executable does, in a process forked with everything imported;
    its path is `path`.

    For code that starts processes itself: `monkeypatch.setattr(sys, "executable",
    interpreter.path)`. Open files, signals and the exit status are handed through. In such a
    process it is sys.executable too."""

    def __init__(self, folder: Path) -> None:
        program, address = folder / "python", str(folder / "socket")
        program.write_text(STAND_IN.format(python=sys.executable, address=address))
        program.chmod(0o755)
        self.path = str(program)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        self._process = CONTEXT.Process(target=_serve, args=(listening, self.path), daemon=True)
        self._process.start()
        listening.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(listening: socket.socket, path: str) -> None:
    """Forks a process for every program that connects."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        if select.select([listening], [], [], 0.2)[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                _mind(connection, path)
            connection.close()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _mind(connection: socket.socket, path: str) -> None:
    """Starts one process and tells its number and its exit status; ends it, and what it started, if
    nobody listens."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    size, passed, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 250))
    asked = connection.makefile("rb").read(int.from_bytes(size, "big"))
    arguments, env, folder, numbers = json.loads(asked)
    files = array.array("i")
    for _, _, data in passed:
        files.frombytes(data)
    multiprocessing.current_process()._config["daemon"] = False
    sys.executable = path
    process = multiprocessing.get_context("fork").Process(
        target=_with_files, args=(connection, arguments, env, folder, numbers, list(files))
    )
    process.start()
    for number in files:
        os.close(number)
    connection.sendall(f"{process.pid}\n".encode())
    while process.is_alive():
        if select.select([connection], [], [], 0.02)[0]:  # closed
            started = psutil.Process(process.pid).children(recursive=True)
            for child in (process, *started):
                child.kill()
            process.join()
            os._exit(0)
    connection.sendall(f"{process.exitcode}\n".encode())
    os._exit(0)


def _with_files(connection, arguments, env, folder, numbers, files) -> None:
    connection.close()
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for number, file in zip(numbers, above):
        os.dup2(file, number)
    for number in {*above, *files} - set(numbers):
        os.close(number)
    os.chdir(folder)
    _run(arguments, env)
