"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

import logging
from typing import Any

from draftsmith.inference.engine_options import EngineOptions
from draftsmith.speculators.errors import ConfigError

logger = logging.getLogger(__name__)

CompileOptions = dict[str, Any]  # arguments of torch.compile

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")  # vLLM's, by number


def read_compilation(options: EngineOptions, device: str) -> CompileOptions | None:
    """The options for rounds on a `device` of this kind; None: they run eager.
    They are compiled with `enforce_eager=False`, or with a config whose mode or cudagraph_mode is
    not NONE, unless `enforce_eager=True` or mode NONE is given; on a CPU with a backend alone."""
    given = options.compilation_config
    fields: dict[str, Any] = {"mode": given} if isinstance(given, int) else dict(given or {})
    mode, backend = fields.pop("mode", None), fields.pop("backend", "")
    graphs = str(fields.pop("cudagraph_mode", None) or "").upper()
    if fields:
        logger.warning("compilation_config: without effect here: %s", ", ".join(sorted(fields)))
    name = MODES[mode] if mode in range(len(MODES)) else str(mode or "").upper()
    if name not in ("", *MODES):
        raise ConfigError(f"mode={mode!r}; expected one of {MODES}", where="compilation_config")
    asked = options.enforce_eager is False or name or graphs not in ("", "NONE")
    if options.enforce_eager or name == "NONE" or not asked:
        return None
    if device == "cpu" and not backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    replays = device == "cuda" and graphs != "NONE" and backend != "eager"
    cuda_graphs = {"mode": "reduce-overhead"} if replays else {}
    return {"backend": backend or "inductor", **cuda_graphs}
