"""LLM: the front door, in vLLM's shape. Text in, text out, and what drafting gained.

Here are its options, and the loading of what they name. What it does with prompts is in
text_generator.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.loading import (
    default_device,
    load_drafter_for,
    load_target,
    load_tokenizer,
    loaded,
    make_draft_length,
    make_engine,
    make_proposer,
    model_limit,
    require_as_loaded,
)
from draftsmith.inference.entrypoints.speculative_config import complete, parse_speculative_config
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.entrypoints.vllm_options import read_options, read_speculative_config
from draftsmith.inference.spec_decode.proposers.options import MethodOptions
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget


class LLM(TextGenerator):
    """A language model that writes text, optionally drafted for: what it writes is the model's own.

        from draftsmith import LLM, SamplingParams

        llm = LLM(
            "Qwen/Qwen3-8B",
            speculative_config={"model": "path/to/drafter", "num_speculative_tokens": 4},
        )
        outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=64))
        print(outputs[0].outputs[0].text)
        print(llm.get_metrics().acceptance_length)

    model       the target: a folder, a repository id ("org/name", "org/name@revision"), or a model
                in memory (PreTrainedModel, FrozenTarget), which keeps its dtype and device
    tokenizer   a folder, a repository id or a tokenizer; None: the model's own. Without one, as
                with a model in memory, prompts are token ids and texts are empty
    dtype       precision of the target: "float32", "bfloat16", "float16"; "auto": the checkpoint's,
                or float32 in place of bfloat16 on a CPU without instructions for it
    device      "cpu", "cuda", "cuda:1", …; None: the accelerator of this machine, else cpu
    revision    branch, tag or commit of the model's repository; None: main
    trust_remote_code       run Python code that comes with the model's repository
    speculative_config      how to draft, by vLLM's names; None: no drafting. Its keys, of which
                            one of the first two is needed:
        "model"                     the exported drafter: a folder or a repository id
        "method"                    its family, which is read from its config.json if left out; or
                                    "ngram", "suffix", "lookahead", which need no model
        "num_speculative_tokens"    K, tokens drafted per round; by default what the drafter was
                                    made for
        others                      docs/runtime.md, "Drafting"
    seed                    what the seeds of requests without one are made from
    max_model_len           most tokens of a prompt and its response together; None: the model's own
                            limit, or its drafter's if that is less
    max_num_seqs            responses written at the same time; the others wait
    max_num_batched_tokens  prompt tokens that one forward of the target reads
    enforce_eager           False: rounds on CUDA run compiled, with CUDA graphs. True: never. None:
                            as `compilation_config` says; without one, rounds of up to 8 responses
                            run compiled on CUDA, in the shapes that `warm_up` has compiled
    compilation_config      how rounds are compiled, as in vLLM: a mode from 0 (not at all) to 3, or
                            a dict with "mode", "backend", "cudagraph_mode"
    tensor_parallel_size    without effect: the target is on one device. Above 1 it is a warning
    vllm_options            other options of vLLM's LLM, of today and of older versions, so that a
                            snippet written for vLLM runs as it is. Those that change no output
                            (gpu_memory_utilization, block_size, …) are without effect

    ConfigError, whose `where` names the place: an unknown option, or one that would change outputs
    and is not implemented; a wrong value; a drafter that does not fit the target; rows of the
    `max_model_len` that was passed do not fit the device. CheckpointError: files that cannot be
    loaded, or are not what their config.json says.
    """

    def __init__(
        self,
        model: str | FrozenTarget | PreTrainedModel,
        tokenizer: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        enforce_eager: bool | None = None,
        compilation_config: Mapping[str, Any] | int | None = None,
        tensor_parallel_size: int = 1,
        **vllm_options: Any,
    ) -> None:
        options = read_options(
            {
                **vllm_options,
                "tokenizer": tokenizer,
                "dtype": dtype,
                "device": device,
                "revision": revision,
                "trust_remote_code": trust_remote_code,
                "speculative_config": speculative_config,
                "seed": seed,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enforce_eager": enforce_eager,
                "compilation_config": compilation_config,
                "tensor_parallel_size": tensor_parallel_size,
            }
        )
        engine, loaded_tokenizer = _load(model, options)
        super().__init__(engine, loaded_tokenizer)


def _load(
    model: str | FrozenTarget | PreTrainedModel, options: EngineOptions
) -> tuple[Engine, Any]:
    """The engine, and the tokenizer, which is None where a model in memory came without one."""
    source: dict[str, Any] = {
        "trust_remote_code": options.trust_remote_code,
        "revision": options.revision,
    }
    drafting = read_speculative_config(options.speculative_config)
    config = parse_speculative_config(complete(drafting, model, **source))
    device = default_device(options.device)
    target = load_target(model, dtype=options.dtype, device=device, **source)
    if loaded(model):
        require_as_loaded(target, options.dtype, options.device)
    tokenizer = load_tokenizer(model, options.tokenizer, **source)
    return _engine_of(target, tokenizer, options, config), tokenizer


def _engine_of(
    target: FrozenTarget, tokenizer: Any, options: EngineOptions, config: MethodOptions
) -> Engine:
    target, drafter = load_drafter_for(target, config, tokenizer)
    limit = model_limit(target, options.max_model_len, drafter)
    proposer = make_proposer(config, target, drafter, options.max_num_seqs, limit)
    rule = config.rejection_sample_method
    return make_engine(target, options, limit, proposer, make_draft_length(config), rule)


def engine_with_drafter(llm: TextGenerator, folder: Path) -> Engine:
    """A second engine over the target of `llm`, with its options and its context, that drafts with
    the exported drafter in `folder`: `model` of the speculative_config, whose other keys stay. It
    is warmed up, and has keys and values of its own. From the thread that runs rounds.

    ConfigError, CheckpointError: a folder that holds no drafter, or one that does not fit; an LLM
    that was loaded without a drafter; rows of two engines do not fit the device."""
    options = llm.engine.options
    drafting = read_speculative_config(options.speculative_config)
    if drafting is None:
        raise ConfigError(
            "is not set, so there is no drafter to replace; load the model with one",
            where="speculative_config",
        )
    with unmoved(folder):
        config = complete({**drafting, "model": str(folder)}, llm.engine.target)
        method = parse_speculative_config(config)
        engine = _engine_of(llm.engine.target, llm.get_tokenizer(), options, method)
    TextGenerator(engine, llm.get_tokenizer()).warm_up()
    if llm.engine.compiles and not engine.compiles:
        raise ConfigError(
            "rounds with it cannot be compiled beside those that run; lower max_num_seqs or"
            " max_model_len, so that two engines have room",
            where=f"drafter {folder}",
        )
    return engine


@contextmanager
def unmoved(folder: Path) -> Iterator[None]:
    """CheckpointError if another folder comes in place of this one while it is read."""
    before = folder.stat().st_ino
    yield
    if not folder.exists() or folder.stat().st_ino != before:
        raise CheckpointError(
            "was replaced while it was read; try again", where=f"drafter {folder}"
        )
