"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from inference.engine_options import EngineOptions
from speculators.errors import ConfigError

logger = logging.getLogger(__name__)

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")  # vLLM's, by number
GRAPHS = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
BACKENDS = ("", "inductor", "eager")  # the last only says what fails
# Fields of vLLM's that say how it compiles, with its passes, caches and pieces: no effect here.
OWN_WAY = frozenset(
    "cache_dir compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes"
    " cudagraph_copy_inputs cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops"
    " debug_dump_path dynamic_shapes_config fast_moe_cold_start full_cuda_graph"
    " inductor_compile_config inductor_passes ir_enable_torch_wrap max_cudagraph_capture_size"
    " pass_config splitting_ops use_cudagraph use_inductor use_inductor_graph_partition".split()
)


@dataclass(frozen=True)
class Compilation:
    """How rounds are compiled: torch.compile's backend, on a GPU with CUDA graphs or without, the
    numbers of rows that batches are padded to (none: powers of two), the drafter's chain too or
    not."""

    backend: str = "inductor"
    cudagraphs: bool = True
    row_sizes: tuple[int, ...] = ()
    drafter: bool = True


def read_compilation(options: EngineOptions, device: str) -> Compilation | None:
    """How rounds are compiled on a `device` of this kind; None: they are not. Asking is
    `enforce_eager=False`, or a config with a mode or a cudagraph_mode that is not NONE;
    `enforce_eager=True` and mode NONE have the last word. On a CPU, where it gains next to nothing,
    a backend must be named too. ConfigError names options that are not known."""
    given = options.compilation_config
    fields = {"mode": given} if isinstance(given, int) else dict(given or {})
    if "level" in fields:  # its older name
        fields["mode"] = fields.pop("level")
    mode = _one_of("mode", fields.pop("mode", None), MODES)
    graphs = _one_of("cudagraph_mode", fields.pop("cudagraph_mode", None), GRAPHS)
    backend = _one_of("backend", fields.pop("backend", ""), BACKENDS)
    sizes = fields.pop("cudagraph_capture_sizes", ())
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"LLM: compilation_config: cudagraph_capture_sizes={sizes}; expected >= 1"
        )
    if unknown := sorted(set(fields) - OWN_WAY):
        raise ConfigError(f"LLM: compilation_config: unknown options {', '.join(unknown)}")
    asked = mode or (MODES[-1] if options.enforce_eager is False else graphs) or "NONE"
    if options.enforce_eager or asked == "NONE":
        return None
    if device == "cpu" and not backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    of_drafter = (options.speculative_config or {}).get("enforce_eager")
    return Compilation(
        backend or "inductor", graphs != "NONE", tuple(sorted(sizes)), of_drafter is not True
    )


def _one_of(name: str, given: Any, known: tuple[str, ...]) -> Any:
    """`given`, a name or its number, as its name; None as it is."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(known):
        return known[given]
    for each in known:
        if isinstance(given, str) and given.casefold() == each.casefold():
            return each
    if given is None:
        return None
    raise ConfigError(
        f"LLM: compilation_config: {name}={given!r}; expected one of {', '.join(known)}"
    )
