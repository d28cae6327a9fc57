"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.speculators.errors import ConfigError

logger = logging.getLogger(__name__)

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")  # vLLM's, by number


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
    a backend must be named too. vLLM's other fields have no effect, and the log names them."""
    given = options.compilation_config
    fields: dict[str, Any] = {"mode": given} if isinstance(given, int) else dict(given or {})
    mode = _mode(fields.pop("mode", fields.pop("level", None)))  # `level`: its older name
    graphs = str(fields.pop("cudagraph_mode", None) or "").upper()
    backend = fields.pop("backend", "")
    sizes = fields.pop("cudagraph_capture_sizes", ())
    if fields:
        logger.warning("compilation_config: without effect here: %s", ", ".join(sorted(fields)))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"compilation_config: cudagraph_capture_sizes={sizes}; expected >= 1", where="LLM"
        )
    asked = mode or (MODES[-1] if options.enforce_eager is False else graphs) or "NONE"
    if options.enforce_eager or asked == "NONE":
        return None
    if device == "cpu" and not backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    of_drafter = (options.speculative_config or {}).get("enforce_eager") is not True
    return Compilation(backend or "inductor", graphs != "NONE", tuple(sorted(sizes)), of_drafter)


def _mode(given: Any) -> str | None:
    """A mode by its name or number; ConfigError for another."""
    if isinstance(given, str) and given.upper() in MODES:
        return given.upper()
    if isinstance(given, int) and 0 <= given < len(MODES):
        return MODES[given]
    if given is not None:
        raise ConfigError(
            f"compilation_config: mode={given!r}; expected one of {MODES}", where="LLM"
        )
    return None
