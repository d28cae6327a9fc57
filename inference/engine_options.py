"""EngineOptions: the settings of an engine, under vLLM's names.

`LLM` takes them as keyword arguments, `serve` as flags; evaluations pass them on. Imports no
torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftsmith.inference.flags import JsonObject, Mode


def option(default: Any, description: str = "", **limits: Any) -> Any:
    """A field of an options class: its default, its help text, and pydantic's limits of its value
    (ge, le, min_length)."""
    return Field(default, description=description, **limits)


def _text(value: Any) -> Any:
    """torch.float32 -> "float32", torch.device("cpu") -> "cpu"."""
    return value if value is None else str(value).removeprefix("torch.")


class EngineOptions(BaseModel):
    """The options of an engine. `LLM` has them as keyword arguments, and tells of each at length;
    the descriptions here are the help of flags.

    ValidationError for an unknown option or a wrong value."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # a folder, a repository id or a tokenizer object
    tokenizer: Any = option(None, "folder or repository id of the tokenizer; default: the model's")
    dtype: Annotated[str, BeforeValidator(_text)] = option(
        "auto", "precision of the target: float32, bfloat16 or float16; auto: the checkpoint's"
    )
    device: Annotated[str | None, BeforeValidator(_text)] = option(
        None, "cpu, cuda, cuda:1, …; default: the accelerator, else cpu"
    )
    revision: str | None = option(
        None, "branch, tag or commit of the model's repository; default: main"
    )
    trust_remote_code: bool = option(False, "run Python code of the model's repository")
    speculative_config: JsonObject | None = option(
        None,
        "how to draft, by vLLM's names, such as"
        ' \'{"model": "DRAFTER", "num_speculative_tokens": 4}\'; default: no drafting',
    )
    seed: int = option(0, "what the seeds of requests without one are made from")
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its response together; default: the model's own limit, or its"
        " drafter's if that is less",
        ge=2,
    )
    max_num_seqs: int = option(8, "responses written at the same time; the others wait", ge=1)
    max_num_batched_tokens: int = option(
        512, "prompt tokens that one forward of the target reads", ge=1
    )
    enforce_eager: bool | None = option(
        None,
        "--enforce-eager never compiles rounds, --no-enforce-eager does on CUDA, with CUDA graphs;"
        " default: on CUDA those of up to 8 rows, at start",
    )
    compilation_config: Mode | None = option(
        None,
        "how rounds are compiled, as in vLLM: a mode from 0 (not at all) to 3, or an object with"
        " mode, backend, cudagraph_mode",
    )
    tensor_parallel_size: int = option(
        1, "taken from vLLM's commands without effect: the target is on one device", ge=1
    )
