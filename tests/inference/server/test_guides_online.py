"""The server and client of vLLM's guides, module and model names changed: flags of today and of
older versions, each server in a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import httpx2
import pytest

from tests.support.forked import PythonProcess, free_port

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


@pytest.fixture
def server():
    """`server(command)`: the process of a server, and its address."""
    processes = []

    def start(command: list[str]) -> tuple[PythonProcess, str]:
        port = free_port()
        process = PythonProcess(*command, "--host", "127.0.0.1", "--port", port)
        processes.append(process)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < end
            try:
                httpx2.get(f"{url}/health", timeout=10).raise_for_status()
                return process, url
            except httpx2.TransportError:
                time.sleep(0.2)

    yield start
    for process in processes:
        process.kill()


@pytest.mark.slow
def test_server_and_client_of_a_guide_measure_drafts(server, tmp_path):
    """As the guide has them; the client's lengths are beyond this model's context, which is said at
    once, and shorter ones are measured."""
    _, url = server(words(f"{SERVER} --ngram-prompt-lookup-max 3", "[ngram]"))
    client = [*words(CLIENT), "--port", url.rpartition(":")[2]]
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
def test_server_of_a_guide_finishes_what_runs_when_it_is_terminated(server):
    """With today's flags and a draft model."""
    process, url = server(words(TODAY, str(TARGET)))
    request = {"prompt": "The future of AI is", "max_tokens": 64, "n": 2, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=request, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and "finish_reason" in rest[-2] and "error" not in rest[-2]
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, output  # as uvicorn ends
    assert "The future of AI" not in output and "Traceback" not in output
