"""The tests of a real model: SmolLM2-135M-Instruct, which scripts/get_smollm2.py fetches.

Skipped unless DRAFTSMITH_REAL is set; `make test-real` sets it. Those of real vLLM are skipped
unless DRAFTSMITH_VLLM_PYTHON names the Python of an environment that has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.get_smollm2 import FOLDER
from scripts.get_smollm2 import main as fetch
from tests.support.vllm import (  # noqa: F401 (fixtures)
    plain_in_vllm,
    same_as_ours,
    serve,
    vllm_python,
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's folder."""
    if not os.environ.get("DRAFTSMITH_REAL"):
        pytest.skip("DRAFTSMITH_REAL is not set: a real model is fetched and run (make test-real)")
    fetch(FOLDER)
    return FOLDER
