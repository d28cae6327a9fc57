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
    """torch.compile's backend, and whether a GPU replays rounds as CUDA graphs."""

    backend: str = "inductor"
    cudagraphs: bool = True


def read_compilation(options: EngineOptions, device: str) -> Compilation | None:
    """How rounds are compiled on a `device` of this kind; None: they are not. They are with
    `enforce_eager=False`, or with a config whose mode or cudagraph_mode is not NONE, unless
    `enforce_eager=True` or mode NONE is given. On a CPU, where compiling gains next to nothing, a
    backend must be named too. vLLM's other fields have no effect, and the log names them."""
    given = options.compilation_config
    fields: dict[str, Any] = {"mode": given} if isinstance(given, int) else dict(given or {})
    mode, backend = fields.pop("mode", None), fields.pop("backend", "")
    graphs = str(fields.pop("cudagraph_mode", None) or "").upper()
    if fields:
        logger.warning("compilation_config: without effect here: %s", ", ".join(sorted(fields)))
    names = {name: name for name in MODES} | dict(enumerate(MODES)) | {None: None}
    key = mode.upper() if isinstance(mode, str) else mode
    if key not in names:
        raise ConfigError(f"mode={mode!r}; expected one of {MODES}", where="compilation_config")
    asked = names[key] or (MODES[-1] if options.enforce_eager is False else graphs) or "NONE"
    if options.enforce_eager or asked == "NONE":
        return None
    if device == "cpu" and not backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    return Compilation(backend or "inductor", graphs != "NONE")
