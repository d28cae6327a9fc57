"""Other people's load generators against `draftsmith serve`: aiperf and guidellm, unchanged, beside `draftsmith bench`.

    python scripts/bench_clients.py TARGET DRAFTER --suite spec_bench --suite-path FILE

Each client has an environment of its own (.venv-clients, made by this script). One server is measured by all of them
with the same conversations, greedily, one request at a time. The pooled acceptance length of each run is read from the
server's /metrics around it: by `draftsmith bench` itself, by aiperf itself where its export has the counters, and here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import setup_vllm

CLIENTS = {"aiperf": "aiperf==0.13.0", "guidellm": "guidellm==0.8.1"}
VENV = Path(os.environ.get("CLIENTS_VENV", setup_vllm.ROOT / ".venv-clients"))


class ClientEnvironment(setup_vllm.Environment):
    """One client and what it requires, from the package index."""

    inputs = (Path(__file__), Path(setup_vllm.__file__))
    size = "a minute and 1 GB"

    def fill(self, *options: object) -> str:
        (name,) = map(str, options)
        if name == "guidellm":  # requires torch, of which the CPU build is enough
            self._install_torch()
        self._install(CLIENTS[name], step=f"install {CLIENTS[name]}")
        return self._run("ask its version", [self.folder / "bin" / name, "--version"])


def environment(name: str) -> ClientEnvironment:
    """The client's environment, made if it is missing."""
    made = ClientEnvironment(VENV / name, "pip")
    made.make(name)
    return made


if __name__ == "__main__":
    for each in CLIENTS:
        environment(each)
