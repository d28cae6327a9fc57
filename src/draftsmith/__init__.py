"""Draftsmith: train drafters for speculative decoding, and prove that they help.

    from draftsmith import LLM, SamplingParams

The packages `train`, `speculators` and `inference` are the folders of the same names at the top of
the repository."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftsmith.version import package_version

if TYPE_CHECKING:
    from draftsmith.inference.entrypoints.llm import LLM
    from draftsmith.inference.outputs import CompletionOutput, RequestOutput
    from draftsmith.inference.sampling_params import SamplingParams

__version__ = package_version()

__all__ = ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first read: the command line starts without torch."""
    if name in __all__:
        value = getattr(import_module("draftsmith.inference"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
