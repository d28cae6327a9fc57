"""The plugin that vLLM loads: it serves MLP speculators (docs/vllm-plugin.md).

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It never
raises: a change that does not fit the installed version of vLLM is left out with a warning."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(
    "vllm.draftsmith"
)  # below vLLM's own, whose handlers and level it shares


@functools.cache
def register() -> None:
    """Entry point of `vllm.general_plugins`. May be called any number of times."""
    from inference.vllm_plugin import mlp_speculator

    attempt(mlp_speculator.register)
    attempt(_prepare_workers)


def attempt(change: Callable[[], None]) -> None:
    """Makes a change to vLLM; any error becomes a warning with its reason."""
    try:
        change()
    except Exception as error:
        logger.warning(
            "Draftsmith: method 'mlp_speculator' left out: %s: %s", type(error).__name__, error
        )


def _prepare_workers() -> None:
    """Extends the model runner in each process that drafts, after its modules are loaded and before
    it is made."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from inference.vllm_plugin import mlp_speculator

    init_device: Any = WorkerWrapperBase.init_device

    @functools.wraps(init_device)
    def prepared(self: Any) -> None:
        drafting = self.vllm_config.speculative_config
        if drafting is not None and drafting.method == mlp_speculator.METHOD:
            attempt(mlp_speculator.extend_runner)
        init_device(self)

    WorkerWrapperBase.init_device = prepared
