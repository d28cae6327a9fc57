"""enforce_eager and compilation_config: whether rounds run compiled, under vLLM's option names.
Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from speculators.errors import ConfigError

MOST_ROWS = 8  # a round of so few takes its time by launches, which CUDA graphs save
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
    """How rounds are compiled.

    backend     of torch.compile
    cudagraphs  on a GPU, steps are recorded as CUDA graphs and replayed
    row_sizes   numbers of rows that batches are padded to; None: powers of two
    drafter     whether the drafter's chain is compiled too
    when_warm   only from `LLM.warm_up` on, and if the device has room for all keys and values:
                nobody asked for it
    """

    backend: str = "inductor"
    cudagraphs: bool = True
    row_sizes: tuple[int, ...] | None = None
    drafter: bool = True
    when_warm: bool = False


class CompilationConfig(BaseModel):
    """Options of `LLM(compilation_config={...})`; a number alone is the mode."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE"] | None = (
        Field(
            None,
            description=(
                "NONE or 0: not by torch.compile; the others, or 1 to 3, are one here:"
                " torch.compile"
            ),
        )
    )
    # empty: inductor. The others gain nothing, but are quick to say what fails
    backend: Literal["", "inductor", "aot_eager", "eager"] = Field(
        "", description="of torch.compile"
    )
    cudagraph_mode: (
        Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None
    ) = Field(
        None,
        description=(
            "NONE: no CUDA graphs; the others are one here: of every decoding step as a whole"
        ),
    )
    cudagraph_capture_sizes: list[int] | None = Field(
        None, min_length=1, description="what batches are padded to"
    )
    max_cudagraph_capture_size: int | None = Field(None, ge=1, description="the largest of them")

    @field_validator("mode", mode="before")
    @classmethod
    def _by_number(cls, mode: Any) -> Any:
        if isinstance(mode, int) and not isinstance(mode, bool) and 0 <= mode < len(MODES):
            return MODES[mode]
        return mode.upper() if isinstance(mode, str) else mode

    @field_validator("cudagraph_mode", mode="before")
    @classmethod
    def _by_name(cls, mode: Any) -> Any:
        return mode.upper() if isinstance(mode, str) else mode

    @field_validator("cudagraph_capture_sizes")
    @classmethod
    def _sizes(cls, sizes: list[int] | None) -> list[int] | None:
        if sizes is not None and min(sizes) < 1:
            raise ValueError(f"expected numbers of 1 or more, got {sizes}")
        return sizes

    @property
    def asks(self) -> bool:
        """True if this option alone turns compilation on."""
        return (self.mode or "NONE") != "NONE" or (self.cudagraph_mode or "NONE") != "NONE"

    @property
    def row_sizes(self) -> tuple[int, ...] | None:
        """The sizes asked for."""
        sizes, most = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes is None:
            return (
                None
                if most is None
                else tuple(size for size in (1 << n for n in range(31)) if size <= most)
            )
        return tuple(sorted({size for size in sizes if most is None or size <= most}))


def read_compilation(
    enforce_eager: bool | None,
    config: dict[str, Any] | int | None,
    device: torch.device,
    *,
    eager_drafter: bool = False,
    max_num_seqs: int = 1,
) -> Compilation | None:
    """How rounds are compiled; None: they are not.

    Asking is `enforce_eager=False`, or a config with a mode or a cudagraph_mode that is not NONE;
    `enforce_eager=True` has the last word. Unasked, rounds of at most MOST_ROWS rows are recorded
    as CUDA graphs by `LLM.warm_up` on CUDA, unless the config says NONE. `eager_drafter`: what the
    speculative_config says of the drafter. ConfigError names options that are not known, and what
    this device cannot do."""
    if enforce_eager not in (None, True, False):
        raise ConfigError(
            f"LLM: enforce_eager={enforce_eager!r}; expected True, False or None (by the device)"
        )
    asked = _parse(config)
    if enforce_eager or not (asked.asks or enforce_eager is False):
        refused = enforce_eager or asked.mode is not None or asked.cudagraph_mode is not None
        if refused or device.type != "cuda" or max_num_seqs > MOST_ROWS:
            return None
        return Compilation(
            "cudagraphs", row_sizes=asked.row_sizes, drafter=not eager_drafter, when_warm=True
        )
    cudagraphs, backend = asked.cudagraph_mode != "NONE", asked.backend or "inductor"
    if asked.mode == "NONE":
        if not cudagraphs or (asked.cudagraph_mode is None and device.type != "cuda"):
            return None
        if device.type != "cuda":
            raise ConfigError(
                f"LLM: compilation_config: cudagraph_mode={asked.cudagraph_mode} with mode=NONE"
                f" asks for CUDA graphs alone, and the device is {device}; set mode to 3, or"
                " enforce_eager=True"
            )
        backend = "cudagraphs"
    return Compilation(backend, cudagraphs, asked.row_sizes, not eager_drafter)


def _parse(config: dict[str, Any] | int | None) -> CompilationConfig:
    if isinstance(config, int) and not isinstance(config, bool):
        config = {"mode": config}
    if not isinstance(config, (dict, type(None))):
        raise ConfigError(
            f"LLM: compilation_config={config!r}; expected a dictionary, or a mode from 0 to 3"
        )
    given = {name: value for name, value in (config or {}).items() if name not in OWN_WAY}
    if "level" in given:  # its older name
        given["mode"] = given.pop("level")
    try:
        return CompilationConfig.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"LLM: compilation_config: {faults} (known:"
            f" {', '.join(CompilationConfig.model_fields)}; of vLLM's, without effect:"
            f" {', '.join(sorted(OWN_WAY))})"
        ) from error
