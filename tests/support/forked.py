"""Python processes that begin with torch, transformers and the project imported: Python's fork
server imports them once, and every process is forked from it.

An import takes some eight seconds of CPU time. The files of tests that start such processes take
296 s of CPU time with `sys.executable`, and 90 s so."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import psutil

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.support.forked",
        "tests.support.worlds",
        "tests.support.models",
        "draftsmith.train.cli",
        "draftsmith.train.pipeline.run",
        "draftsmith.inference.server.serve_command",
        "accelerate.commands.launch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.run",
    ]
)

STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"*"], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
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


@functools.cache
def interpreter() -> str:
    """The path of a program that does what sys.executable does, in a process forked with everything
    imported.

    For code that starts processes itself: `monkeypatch.setattr(sys, "executable", interpreter())`.
    Input, output, signals and the exit status are handed through. In such a process it is
    sys.executable too. Variables that libraries read while they are imported are those of the
    tests."""
    folder = Path(tempfile.mkdtemp())  # short: the path of a socket is limited
    atexit.register(shutil.rmtree, folder)
    program = folder / "python"
    address = str(folder / "socket")
    program.write_text(STAND_IN.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        CONTEXT.Process(target=_serve, args=(listening, str(program)), daemon=True).start()
    return str(program)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PythonProcess(subprocess.Popen):
    """`python *arguments`, with pipes."""

    def __init__(self, *arguments: object) -> None:
        pipe = subprocess.PIPE
        command = [interpreter(), *map(str, arguments)]
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def send_signal(self, sig: int) -> None:
        """Returns after SIGKILL when the forked process has ended, which holds the other end of the
        output: it is killed some time after the program that stands for it."""
        super().send_signal(sig)
        if sig == signal.SIGKILL and not self.stdout.closed:
            self.stdout.read()


def _serve(listening: socket.socket, path: str) -> None:
    """Forks a process for every program that connects, and returns its exit status to it; ends the
    process, and what it started, if the program was killed."""
    multiprocessing.current_process()._config["daemon"] = False  # it may start others
    sys.executable = path
    running: dict[socket.socket, multiprocessing.Process] = {}
    while True:
        ready = wait([listening, *running, *(process.sentinel for process in running.values())])
        for connection, process in list(running.items()):
            if process.sentinel in ready:
                process.join()
                with suppress(OSError):
                    connection.sendall(f"{process.exitcode}\n".encode())
            elif connection in ready:  # closed
                for child in (process, *psutil.Process(process.pid).children(recursive=True)):
                    child.kill()
                process.join()
            else:
                continue
            connection.close()
            del running[connection]
        if listening in ready:
            connection, _ = listening.accept()
            running[connection] = _begin(connection)


def _begin(connection: socket.socket) -> multiprocessing.Process:
    """The process that a program asks for, whose number it is given."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    arguments, environment, folder = json.loads(connection.makefile("rb").readline())
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(arguments, environment, folder, files)
    )
    process.start()
    for file in files:
        os.close(file)
    connection.sendall(f"{process.pid}\n".encode())
    return process


def _run(arguments: list[str], environment: dict[str, str], folder: str, files: list[int]) -> None:
    """`python *arguments` in this process, whose file descriptors 0, 1 and 2 are `files`."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    gc.freeze()  # what was imported before
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        for number in (1, 2)
    )
    faulthandler.enable(sys.stderr)  # a crash says where it was
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
