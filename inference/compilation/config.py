"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveInt, ValidationError

from inference.engine_options import EngineOptions
from speculators.errors import ConfigError

logger = logging.getLogger(__name__)

MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")  # vLLM's, by number
# Fields of vLLM's that say how it compiles, with its passes, caches and pieces: no effect here.
OWN_WAY = frozenset(
    "cache_dir compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes"
    " cudagraph_copy_inputs cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops"
    " debug_dump_path dynamic_shapes_config fast_moe_cold_start full_cuda_graph"
    " inductor_compile_config inductor_passes ir_enable_torch_wrap pass_config splitting_ops"
    " use_cudagraph use_inductor use_inductor_graph_partition".split()
)


@dataclass(frozen=True)
class Compilation:
    """How rounds are compiled: torch.compile's backend, on a GPU with CUDA graphs or without, the
    numbers of rows that batches are padded to (None: powers of two), the drafter's chain too or
    not."""

    backend: str = "inductor"
    cudagraphs: bool = True
    row_sizes: tuple[int, ...] | None = None
    drafter: bool = True


def _name(given: Any) -> Any:
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(MODES):
        return MODES[given]
    return given.upper() if isinstance(given, str) else given


class CompilationConfig(BaseModel):
    """`LLM(compilation_config={...})`. NONE or 0 is eager; the other modes are one here, and so are
    those of CUDA graphs but NONE. Backend: "" is inductor; eager only says what fails."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Annotated[Literal[MODES] | None, BeforeValidator(_name)] = None
    backend: Literal["", "inductor", "eager"] = ""
    cudagraph_mode: Annotated[
        Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None,
        BeforeValidator(_name),
    ] = None
    cudagraph_capture_sizes: list[PositiveInt] | None = None
    max_cudagraph_capture_size: PositiveInt | None = None

    @property
    def row_sizes(self) -> tuple[int, ...] | None:
        """The sizes asked for."""
        sizes, most = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes is None and most is None:
            return None
        sizes = [1 << n for n in range(31)] if sizes is None else sizes
        return tuple(sorted({size for size in sizes if most is None or size <= most}))


def read_compilation(options: EngineOptions, device: str) -> Compilation | None:
    """How rounds are compiled on a `device` of this kind; None: they are not. Asking is
    `enforce_eager=False`, or a config with a mode or a cudagraph_mode that is not NONE;
    `enforce_eager=True` and mode NONE have the last word. On a CPU, where it gains next to nothing,
    a backend must be named too. ConfigError names options that are not known."""
    given = options.compilation_config
    given = {"mode": given} if isinstance(given, int) else dict(given or {})
    given = {name: value for name, value in given.items() if name not in OWN_WAY}
    if "level" in given:  # its older name
        given["mode"] = given.pop("level")
    try:
        config = CompilationConfig.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"LLM: compilation_config: {faults} (known:"
            f" {', '.join(CompilationConfig.model_fields)})"
        ) from error
    asked = config.mode or config.cudagraph_mode or "NONE"
    if options.enforce_eager is False:
        asked = config.mode or MODES[-1]
    if options.enforce_eager or asked == "NONE":
        return None
    if device == "cpu" and not config.backend:
        logger.warning("on a CPU rounds run eager: compiling them gains next to nothing")
        return None
    return Compilation(
        config.backend or "inductor",
        config.cudagraph_mode != "NONE",
        config.row_sizes,
        (options.speculative_config or {}).get("enforce_eager") is not True,
    )
