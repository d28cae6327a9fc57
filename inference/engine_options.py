"""EngineOptions: the settings of an engine, under vLLM's names.

`LLM` takes them as keyword arguments, `serve` as flags; evaluations pass them on. Imports no
torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftsmith.inference.flags import JsonObject, Mode


def option(default: Any, description: str = "", **limits: Any) -> Any:
    return Field(default, description=description, **limits)


def _text(given: Any) -> Any:
    """torch.float32 -> "float32", torch.device("cpu") -> "cpu"."""
    return given if given is None else str(given).removeprefix("torch.")


class EngineOptions(BaseModel):
    """`max_model_len` None: the model's own limit, or its draft model's if less. `seed`: each
    request without one gets its own from this and its number."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # a folder, a repository id or a tokenizer object
    tokenizer: Any = option(None, "folder or repository id; default: the model's")
    dtype: Annotated[str, BeforeValidator(_text)] = option("auto", "precision of the target")
    device: Annotated[str | None, BeforeValidator(_text)] = option(
        None, "cpu, cuda, cuda:1, …; cuda if there is one"
    )
    revision: str | None = option(None, "of the repository")
    trust_remote_code: bool = option(False, "run the repository's code")
    speculative_config: JsonObject | None = option(None, "JSON: how to draft, as in vLLM")
    seed: int = option(0, "for requests without a seed")
    max_model_len: int | None = option(None, "longest prompt and response", ge=2)
    max_num_seqs: int = option(8, "responses generated at the same time", ge=1)
    max_num_batched_tokens: int = option(512, "prompt tokens per prefill forward", ge=1)
    enforce_eager: bool | None = option(None, "no: compile rounds (docs/runtime.md)")
    compilation_config: Mode | None = option(None, "JSON, or a mode: how, as in vLLM")
    tensor_parallel_size: int = option(1, "accepted; one device changes no output", ge=1)
