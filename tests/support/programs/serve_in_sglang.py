"""Real SGLang on a CPU, in a process and an environment of its own: a job per line in, an answer
per line out, as JSON.

A job is a dict: `model`, `prompts` (lists of token ids), `max_tokens` and `flags` of
`sglang.launch_server`. Its answer: `token_ids`, `rounds` and `accepted` of every prompt. What fails
is answered with `error`.

SGLang runs block drafters on accelerators alone, and its attention with drafts on a CPU with AMX.
Here both are let through: what follows is SGLang's own, over the kernels of sglang_kernels.py.
Imports nothing of the project: the environment that has SGLang need not have it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import sglang_kernels

ATTENTION = "intel_amx"  # the one that drafts on a CPU
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": ATTENTION,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.8,
    "log_level": "error",
}

os.environ.update(SETTINGS)
sglang_kernels.install()  # in the processes that SGLang starts, too: they read this file


class Device(str):
    """ "cpu", which passes for any accelerator where the kind of device is asked for."""

    def startswith(self, *_: Any) -> bool:
        return True


def let_through() -> None:
    """Options are accepted that SGLang accepts with accelerators."""
    from sglang.srt.arg_groups import overrides, speculative_hook
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    DRAFT_ATTENTION_BACKEND_CHOICES.append(ATTENTION)
    platform, view = overrides.get_platform, speculative_hook.resolving_view

    class Platform:
        has_amx = True

        def __getattr__(self, name: str) -> Any:
            return getattr(platform(), name)

    class View:
        def __init__(self, options: Any) -> None:
            self._view = view(options)

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._view, name)
            return Device(value) if name == "device" else value

    overrides.get_platform = Platform
    speculative_hook.resolving_view = View


def run_scheduler(*arguments: Any, **options: Any) -> Any:
    """The process that computes."""
    import torch
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    DRAFT_ATTENTION_BACKEND_CHOICES.append(ATTENTION)
    DFlashVerifyInput.tree_topk = 1  # a chain, which attention on a CPU asks for
    torch.Tensor.record_stream = lambda tensor, stream: None  # there are no streams
    torch.Tensor.bfloat16 = lambda tensor: tensor  # of a block's embeddings; all is float32 here
    return run_scheduler_process(*arguments, **options)


def serve(job: dict) -> dict:
    """One engine, one prompt after the other."""
    from sglang.srt.entrypoints.engine import Engine

    class HereEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    flags = {name.replace("-", "_"): value for name, value in job["flags"].items()}
    if flags["speculative_algorithm"] in ("DFLASH", "DSPARK"):
        flags["speculative_draft_attention_backend"] = ATTENTION
    engine = HereEngine(model_path=job["model"], **OPTIONS, **flags)
    sampling = {"temperature": 0, "max_new_tokens": job["max_tokens"], "ignore_eos": True}
    try:
        answers = [
            engine.generate(input_ids=ids, sampling_params=sampling) for ids in job["prompts"]
        ]
    finally:
        engine.shutdown()
    facts = [answer["meta_info"] for answer in answers]
    return {
        "token_ids": [answer["output_ids"] for answer in answers],
        "rounds": [fact["spec_verify_ct"] for fact in facts],
        "accepted": [fact["spec_num_correct_drafts"] for fact in facts],
    }


def answer(job: dict) -> dict:
    """Of one job."""
    try:
        return serve(job)
    except BaseException as error:  # SGLang ends itself where a process of its ends
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    let_through()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    os._exit(0)
