"""A server started for a measurement and stopped after it: `draftsmith serve` in a process of its own."""

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
STOP_S = 40.0  # what a server gets to end by itself
PREFIXES = "enable-prefix-caching"
KEYS = ("DRAFTSMITH_API_KEY", "VLLM_API_KEY")  # would close a server that only this machine reaches


@contextmanager
def started(
    model: str, speculative_config: dict[str, Any] | None, flags: Sequence[str], log: Path, ready_s: float
) -> Iterator[str]:
    """The base URL of a server of `model` that drafts as `speculative_config` says (None: not at all), once it is
    ready. Its output goes to `log`. Prefixes are not kept unless the flags say so: the same prompts are asked more
    than once. DraftsmithError if it ends, or is not ready within `ready_s` seconds."""
    taken = ("host", "port", "model", "speculative-config")
    if wrong := [f"--{name}" for name in taken if any(_names(flag, name) for flag in flags)]:
        raise ConfigError(f"--serve-args: {', '.join(wrong)} are given by bench itself; leave them out")
    port = _free_port()
    command = [sys.executable, "-m", "inference.server", "--model", model, "--host", HOST, "--port", str(port)]
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
    if not any(_names(flag, PREFIXES) or _names(flag, f"no-{PREFIXES}") for flag in flags):
        command.append(f"--no-{PREFIXES}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        open_to_us = {name: value for name, value in os.environ.items() if name not in KEYS}
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT, env=open_to_us)
    try:
        url = f"http://{HOST}:{port}"
        _wait(process, url, log, ready_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _names(flag: str, name: str) -> bool:
    return flag.partition("=")[0].replace("_", "-") == f"--{name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, ready_s: float) -> None:
    end = time.monotonic() + ready_s
    while True:
        if process.poll() is not None:
            code = process.returncode
            raise DraftsmithError(f"the server ended with status {code} before it was ready: {_tail(log)}")
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        if time.monotonic() > end:
            raise DraftsmithError(
                f"the server was not ready after {ready_s:g} s (--ready-check-timeout-sec); its output: {_tail(log)}"
            )
        time.sleep(0.1)


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) + f" (all of it in {log})" if lines else f"it wrote nothing to {log}"
