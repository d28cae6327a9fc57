"""`draftsmith serve` in a process of its own, for the time of a measurement."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from speculators.errors import ConfigError, DraftsmithError

HOST = "127.0.0.1"
SHUTDOWN_S = 40.0  # before the process is killed
TAKEN = {"--host", "--port", "--model", "--speculative-config"}
PREFIX_CACHING = {"--enable-prefix-caching", "--no-enable-prefix-caching"}
KEYS = (
    "DRAFTSMITH_API_KEY",
    "VLLM_API_KEY",
)  # the server answers this machine alone, without a key


@contextmanager
def started(
    model: str,
    speculative_config: dict[str, Any] | None,
    flags: Sequence[str],
    log: Path,
    ready_s: float,
) -> Iterator[str]:
    """The base URL of a ready server of `model`; `speculative_config` None: it does not draft.
    `log` gets its output. Prefix caching is off unless the flags turn it on, because the same
    prompts are sent more than once. DraftsmithError if the server ends, or is not ready within
    `ready_s` seconds."""
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if wrong := sorted(names & TAKEN):
        raise ConfigError(
            f"--serve-args: {', '.join(wrong)} are set by bench itself; leave them out"
        )
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "inference.server",
        "--model",
        model,
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
    if not names & PREFIX_CACHING:
        command.append("--no-enable-prefix-caching")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        url = f"http://{HOST}:{port}"
        _wait(process, url, log, ready_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, ready_s: float) -> None:
    deadline, problem = time.monotonic() + ready_s, ""
    while not problem:
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            time.sleep(0.1)
        if process.poll() is not None:
            problem = f"the server ended with status {process.returncode} before it was ready"
        elif time.monotonic() > deadline:
            problem = f"the server was not ready after {ready_s:g} s (--ready-check-timeout-sec)"
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    raise DraftsmithError(f"{problem}: {' / '.join(lines[-3:])} (its whole output: {log})")
