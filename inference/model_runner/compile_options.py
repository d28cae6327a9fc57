"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.kernels import why_not_triton

logger = logging.getLogger(__name__)

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")  # vLLM's, by number


MOST_ROWS = 8  # of a round that is compiled by default


@dataclass(frozen=True)
class CompileOptions:
    """How rounds are compiled.

    arguments  of torch.compile
    asked      by the options: from the start, every shape when it is first met, and an error where
               it cannot be. Otherwise by default: what `warm_up` has compiled, and eager else
    most_rows  of a round that is compiled; None: all
    """

    arguments: dict[str, Any]
    asked: bool = True
    most_rows: int | None = None


def read_compilation(options: EngineOptions, device: str) -> CompileOptions | None:
    """The options for rounds on a `device` of this kind; None: they run eager.
    On CUDA they are compiled by default, for batches of up to MOST_ROWS; for all batches with
    `enforce_eager=False`, or with a config whose mode or cudagraph_mode is not NONE. Never with
    `enforce_eager=True`, mode NONE or cudagraph_mode NONE alone; on a CPU with a backend alone."""
    config = options.compilation_config
    fields: dict[str, Any] = {"mode": config} if isinstance(config, int) else dict(config or {})
    mode = fields.pop("mode", None)
    backend = fields.pop("backend", "")
    graphs = str(fields.pop("cudagraph_mode", None) or "").upper()
    if fields:
        logger.warning("compilation_config: without effect here: %s", ", ".join(sorted(fields)))
    name = MODES[mode] if mode in range(len(MODES)) else str(mode or "").upper()
    if name not in ("", *MODES):
        raise ConfigError(f"mode={mode!r}; expected one of {MODES}", where="compilation_config")
    asked = options.enforce_eager is False or bool(name) or graphs not in ("", "NONE")
    by_default = device == "cuda" and graphs == ""
    if options.enforce_eager or name == "NONE" or not (asked or by_default):
        return None
    if device == "cpu" and not backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    replays = device == "cuda" and graphs != "NONE" and backend != "eager"
    cuda_graphs = {"mode": "reduce-overhead"} if replays else {}
    arguments = {"backend": backend or "inductor", **cuda_graphs}
    return CompileOptions(arguments, asked=asked, most_rows=None if asked else MOST_ROWS)


def compiler_fault(options: CompileOptions, device: str) -> str | None:
    """Why a `device` of this kind compiles no rounds on this machine; None if it does."""
    if device != "cuda" or options.arguments["backend"] != "inductor":
        return None
    return why_not_triton()
