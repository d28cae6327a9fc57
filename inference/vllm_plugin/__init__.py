"""What Draftsmith adds to vLLM: families it does not serve, and repairs of its CPU build (docs/vllm-plugin.md).

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`) and `announce` while it finds out
which machine it runs on (`vllm.platform_plugins`), the one moment before its command reads its own version. Neither
imports more than vLLM has imported already, and neither ever raises: what does not fit another version of vLLM is left
out with a warning. Knows vLLM by its names alone; nothing else in `inference` knows of it.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of `vllm.general_plugins`. May be called any number of times."""
    from inference.vllm_plugin import cpu_repairs, mlp_speculator

    mlp_speculator.register()
    cpu_repairs.register()


def announce() -> None:
    """Entry point of `vllm.platform_plugins`: never a platform, hence None; repairs what `register` is too late for."""
    from inference.vllm_plugin import cpu_repairs

    cpu_repairs.register_early()
