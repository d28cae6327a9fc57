"""The server and client of vLLM's guides, module and model names changed: flags of today and of
older versions, each server in a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support.forked import PythonProcess

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
SERVER = """-m draftsmith.inference.serve \
    --model=MODEL \
    --dtype float16 \
    --tensor-parallel-size 1 \
    --trust-remote-code \
    --device gcu \
    --block-size 64 \
    --speculative-model DRAFTER \
    --use-v2-block-manager \
    --num-speculative-tokens 5"""
CLIENT = """-m draftsmith.inference.bench \
    --backend vllm \
    --dataset-name random \
    --model=MODEL \
    --num-prompts 10 \
    --random-input-len 2048 \
    --random-output-len 300 \
    --request-rate 0.1 \
    --trust-remote-code"""
TODAY = (
    "-m draftsmith.inference.serve --host 127.0.0.1 --model MODEL --seed 42 -tp 1"
    " --gpu_memory_utilization 0.8 "
    """--speculative_config '{"model": "DRAFTER", "num_speculative_tokens": 5}'"""
)


def words(line: str, drafter: str = "") -> list[str]:
    return shlex.split(line.replace("MODEL", str(TARGET)).replace("DRAFTER", drafter))


@contextmanager
def server(command: list[str]):
    """A server by `command` on a port of its own, which ends well after SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = PythonProcess(*command, "--host", "127.0.0.1", "--port", port)
    try:
        end = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < end
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_server_and_client_of_a_guide_measure_drafts(tmp_path):
    """As the guide has them; the client's lengths are beyond this model's context, which is said at
    once, and shorter ones are measured."""
    with server(words(f"{SERVER} --ngram-prompt-lookup-max 3", "[ngram]")) as port:
        client = [*words(CLIENT), "--port", str(port)]
        refused = PythonProcess(*client)
        output, _ = refused.communicate()
        assert refused.returncode == 2 and "max_model_len is 2048" in output
        shorter = ["--random-input-len", "96", "--random-output-len", "24", "--request-rate", "10"]
        saved = ["--save-result", "--result-dir", str(tmp_path)]
        answered = PythonProcess(*client, *shorter, *saved)
        output, _ = answered.communicate()
        assert answered.returncode == 0, output
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (10, 0, 240)
    assert result["spec_decode_num_drafts"] > 0 and "acceptance length" in output


@pytest.mark.slow
@pytest.mark.parametrize("line", [SERVER, TODAY], ids=["older flags", "today's"])
def test_server_of_a_guide_with_a_draft_model_answers(line):
    with server(words(line, str(TARGET))) as port:
        request = {"prompt": "The future of AI is", "max_tokens": 8}
        answer = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=request, timeout=120)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
