"""Fixtures shared by the three layers: tiny random targets of many architectures."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.models import ARCHITECTURES, make_tiny_model

# no pool of processes that import torch each
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model():
    """The function `make_tiny_model(name, **config)`."""
    return make_tiny_model


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_architecture(request) -> str:
    """Every architecture in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _accelerate_afresh():
    """accelerate keeps its state, the precision too, for the life of a process; a test shall not
    inherit another's."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def pytest_collection_finish():
    """What is imported stays: evaluation, which collects garbage between engines, need not look
    through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """hub_cache(name, folder, revision): puts a folder into the Hub's cache, empty before, which is
    all there is: the client is offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def hold(name: str, folder: Path, revision: str = "main") -> None:
        repository = tmp_path / "hub-cache" / f"models--{name.replace('/', '--')}"
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)

    return hold


@pytest.fixture
def serving():
    """serving(llm, port, recorder, **options): the base URL of a server of that LLM, in a thread of
    its own; port 0: one of its own. Its Server is `serving.server(url)`. It is shut down by
    `serving.stop(url)`, at the latest when the test ends."""
    import uvicorn

    from draftsmith.inference.server.app import make_app
    from draftsmith.inference.server.serve_options import ServerOptions

    running = {}

    def start(llm, port: int = 0, recorder=None, **options) -> str:
        app = make_app(
            llm,
            ServerOptions(**{"served_model_name": ("tiny",), "shutdown_timeout_s": 0, **options}),
            recorder,
        )
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running[url] = (app.state.server, server, thread)
        return url

    def stop(url: str) -> None:
        _, server, thread = running[url]
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    start.server = lambda url: running[url][0]
    start.stop = stop
    yield start
    for url in running:
        stop(url)


@pytest.fixture
def claimed_gpu(monkeypatch):
    """A device that is not there (tests/support/device_emulation.py)."""
    from tests.support import device_emulation

    with device_emulation.claimed_gpu(monkeypatch) as emulation:
        yield emulation
