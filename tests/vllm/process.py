"""A process of real vLLM that is handed jobs (serve.py), and asked for their answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

SECONDS = 300  # for one job, on a busy machine; it takes about four


class VLLMError(Exception):
    """What vLLM said instead of an answer: a traceback."""


class VLLMProcess:
    """Starts with its first job, and anew after a job that failed: who knows what that one left
    behind."""

    def __init__(self, python: str, log: Path) -> None:
        self._python = python
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to `job`. VLLMError: the job failed; AssertionError: the process ended, or
        took too long."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            status = self.close()
            raise AssertionError(
                f"vLLM's process ended with status {status}:\n{self._log.read_text()[-4000:]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise VLLMError(answer["error"])
        return answer

    def close(self) -> int | None:
        """Ends the process and returns its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [self._python, str(Path(__file__).with_name("serve.py"))],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""},
                    cwd=self._log.parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._process
