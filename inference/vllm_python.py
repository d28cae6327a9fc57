"""Where real vLLM is: usually in an environment of its own, named by its interpreter. Imports no
vLLM."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from draftsmith.speculators.errors import ConfigError

PYTHON = "DRAFTSMITH_VLLM_PYTHON"  # names the interpreter of an environment that has vLLM


def vllm_python(given: str | None = None) -> str:
    """The interpreter to run vLLM with: `given`, the one of DRAFTSMITH_VLLM_PYTHON, or this one.

    ConfigError if there is none, or if it has no vLLM.
    """
    python = given or os.environ.get(PYTHON)
    if python is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # the latter: a folder of that name
            raise ConfigError(
                f"not installed here; set {PYTHON} (or --vllm-python) to the python of an"
                " environment that has it, such as /opt/vllm/bin/python",
                where="vLLM",
            )
        return sys.executable
    where = f"{'--vllm-python' if given else PYTHON}={python}"
    code = "import importlib.util as i; assert getattr(i.find_spec('vllm'), 'origin', None)"
    try:
        probe = subprocess.run([python, "-c", code], capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"cannot be run ({error}); name the python of an environment", where=where
        ) from None
    if probe.returncode != 0:
        raise ConfigError("has no package vllm; install it there, or name another", where=where)
    return python


def vllm_version(python: str) -> str:
    """The version of vLLM that `python` has, such as 0.33.0. ConfigError if it cannot be read."""
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"vLLM's version cannot be read: {error.stderr}", where=python) from None
    return done.stdout.strip()
