"""The middle package: what a drafter does. `from draftsmith import LLM, SamplingParams`."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "LLM": "draftsmith.inference.entrypoints.llm",
    "SamplingParams": "draftsmith.inference.sampling_params",
    "RequestOutput": "draftsmith.inference.outputs",
    "CompletionOutput": "draftsmith.inference.outputs",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something is used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'inference' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
