"""README's way ends in real vLLM: its commands and the tutorial's evaluation run as they stand."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request

import pytest

from tests.support.docs_commands import commands
from tests.support.newcomer import (
    MODEL,
    README,
    TARGET,
    TUTORIAL,
    environment,
    make_folder,
    own_commands,
    run,
)
from tests.support.programs.serve_in_vllm import SETTINGS
from tests.support.vllm import wait_for

# vLLM's package for CPUs lacks what its command `vllm` reads of its own version.
VLLM = """#!/bin/sh
shift; model=$1; shift
exec {python} -m vllm.entrypoints.openai.api_server --model "$model" "$@"
"""
PORT = 8000  # of a server that names none


@pytest.fixture
def newcomer(tmp_path, monkeypatch, hub_cache, vllm_python):
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", PORT)):
            pytest.skip(f"port {PORT} is taken")
    hub_cache(MODEL, TARGET)
    make_folder(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(VLLM.format(python=vllm_python))
    (tmp_path / "bin" / "vllm").chmod(0o755)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(newcomer):
    """start(command): runs a server until the test ends; returns its address."""
    running = []

    def start(command: str) -> str:
        log = newcomer / "vllm.log"
        others = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "1"}
        with log.open("w") as written:
            process = subprocess.Popen(
                f"exec {command}",
                shell=True,
                cwd=newcomer,
                env=environment(newcomer, **others),
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
        wait_for(f"http://127.0.0.1:{PORT}/health", process, log)
        return f"http://127.0.0.1:{PORT}"

    yield start
    for process in running:
        process.terminate()
        process.wait(60)


def test_commands_of_readme_and_tutorial_run_in_vllm(newcomer, start):
    *_, serve = [c for c in commands(README) if c.startswith("vllm serve")]
    for command in own_commands(README):
        run(command, newcomer)
    url = start(serve)
    body = {"model": MODEL, "prompt": "Write", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        (drafts,) = re.findall(
            r"^vllm:spec_decode_num_drafts_total.* ([\d.]+)$", answer.read().decode(), re.M
        )
    assert float(drafts) > 0

    (line,) = [c for c in commands(TUTORIAL) if c.startswith("draftsmith evaluate my_head")]
    run(line, newcomer)
