"""Where real vLLM is: usually in an environment of its own, named by its interpreter. Imports no
vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

from draftsmith.speculators.errors import ConfigError

PYTHON = "DRAFTSMITH_VLLM_PYTHON"  # names the interpreter of an environment that has vLLM


def vllm_python(name: str | None = None) -> str:
    """The interpreter to run vLLM with: `name`, else the one of DRAFTSMITH_VLLM_PYTHON, else the
    interpreter that runs here. ConfigError if it has no vLLM."""
    python = name or os.environ.get(PYTHON) or sys.executable
    vllm_version(python)
    return python


def vllm_version(python: str) -> str:
    """The version of vLLM that `python` has, such as 0.33.0. ConfigError if it has none."""
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    hint = f"name an environment that has vLLM by its python: --vllm-python, or {PYTHON}"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot be run ({error}); {hint}", where=python) from None
    if done.returncode != 0:
        raise ConfigError(f"has no package vllm; {hint}", where=python)
    return done.stdout.strip()
