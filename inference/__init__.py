"""The middle floor: what a drafter does. `from inference import LLM, SamplingParams`, as in
vLLM."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "LLM": "inference.entrypoints.llm",
    "SamplingParams": "inference.sampling_params",
    "RequestOutput": "inference.outputs",
    "CompletionOutput": "inference.outputs",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something is used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'inference' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
