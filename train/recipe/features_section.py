"""The `features:` section of a recipe: whether the target's features are made as they are needed, or kept on disk."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from speculators.options import PositiveInt, Section, Text

EncodingName = Literal[
    "exact", "bf16", "fp8", "int4",
    "rotated2", "rotated3", "rotated4", "rotated5", "rotated6", "rotated7", "rotated8",
]  # fmt: skip


class FeaturesSection(Section):
    """The target's features of training rows. Only `mode: cache` reads the keys below `overlap`."""

    mode: Literal["online", "cache"] = Field(
        "online", description="online: made when a step needs them, nothing on disk; cache: written once, then read"
    )
    overlap: bool = Field(
        True,
        description="on a GPU the target's forward of the coming micro-step runs beside the drafter's work on this "
        "one, for the memory of one more batch of features; not with a target that is sharded or trained along "
        "(joint), nor with on_policy",
    )
    encoding: EncodingName = Field(
        "bf16", description="how taps are written, exact: in the target's dtype; docs/features.md has sizes and losses"
    )
    last_hidden_encoding: EncodingName | None = Field(
        None, description="how the last hidden state is written, from which p is computed; null: as the taps"
    )
    dir: Text | None = Field(
        None, description="folder of the cache, which recipes may share; null: `features` in the run's folder"
    )
    shard_mb: PositiveInt = Field(256, description="size of one file; what a killed process loses at most")
    on_change: Literal["error", "rebuild", "keep"] = Field(
        "error",
        description="if the folder has features of a target, tokenizer or template of the same name that has changed: "
        "stop, delete them, or leave them there unused",
    )
    engine: Literal["draftsmith", "vllm"] = Field(
        "draftsmith",
        description="who computes them; vllm: its hidden-state extraction, run by the interpreter that the environment "
        "variable DRAFTSMITH_VLLM_PYTHON names, for targets that need tensor parallelism",
    )
    vllm_options: dict[str, Any] = Field(
        default_factory=dict, description="options of vLLM's LLM, such as tensor_parallel_size"
    )

    @property
    def encodings(self) -> tuple[str, str]:
        """Of taps and of the last hidden state."""
        return self.encoding, self.last_hidden_encoding or self.encoding

    def described(self) -> str:
        taps, last_hidden = self.encodings
        return taps if taps == last_hidden else f"taps {taps}, last hidden state {last_hidden}"
