"""The plugin that vLLM loads: MLP speculators, and two repairs of its CPU build (docs/vllm-plugin.md).

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`) and `announce` while it looks for
its device (`vllm.platform_plugins`). Neither raises: what does not fit another version of vLLM is left out with a
warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("vllm.draftsmith")  # below vLLM's own, whose handlers and level it shares


@functools.cache
def register() -> None:
    """Entry point of `vllm.general_plugins`. May be called any number of times."""
    from inference.vllm_plugin import mlp_speculator

    with attempt(mlp_speculator.WHAT):
        mlp_speculator.register()
    with attempt("what a worker needs before it loads a drafter"):
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        init_device: Any = WorkerWrapperBase.init_device

        @functools.wraps(init_device)
        def prepared(self: Any) -> None:
            if self.vllm_config.speculative_config is not None:
                _prepare_worker(self.vllm_config.speculative_config.method)
            init_device(self)

        WorkerWrapperBase.init_device = prepared


def announce() -> None:
    """Entry point of `vllm.platform_plugins`: no platform, hence None.

    It runs before the `vllm` command reads its version; `register` runs too late for that.
    """
    from inference.vllm_plugin import cpu_repairs

    with attempt("the repair of the vllm command"):
        cpu_repairs.repair_version()


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Any error inside becomes a warning that names `what` was left out and why."""
    try:
        yield
    except Exception as error:
        logger.warning("Draftsmith: %s left out: %s: %s", what, type(error).__name__, error)


def _prepare_worker(method: str) -> None:
    """Runs in each process that drafts, after its modules are loaded and before its model runner is made."""
    from inference.vllm_plugin import cpu_repairs, mlp_speculator

    if method == mlp_speculator.METHOD:
        with attempt(mlp_speculator.WHAT):
            mlp_speculator.extend_runner()
    with attempt("the repair of sampled drafts"):
        cpu_repairs.repair_expansion()
