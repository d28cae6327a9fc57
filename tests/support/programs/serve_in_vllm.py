"""Real vLLM on a CPU, in a process and an environment of its own: a job per line in, an answer per
line out, as JSON. It lies apart: a program imports files beside it in place of packages.

A job is a dict: `model`, `prompts` (lists of token ids), `max_tokens`, and perhaps
`speculative_config`, `options` of the LLM and `sampling`, further SamplingParams. Its answer:
`token_ids` of every prompt, vLLM's `counters`, and `drafts`: of every prompt the list of its
proposals. A job that is `repaired` is done without the faults that the worker of `evaluate`
repairs. What fails is answered with `error`.

The imports take longer than an engine, so one process builds one engine after another; the counters
of each are its own. Imports nothing of the project: the environment that has vLLM need not have it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

BRIDGE = Path(__file__).resolve().parents[3] / "inference" / "vllm_bridge"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine here, where its drafts can be seen
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "",
    "OMP_NUM_THREADS": "1",  # more of them wait for one another on a busy machine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def make_llm(job: dict):
    """The engine that a job asks for: small, and every draft of it visible."""
    from vllm import LLM

    drafting = job.get("speculative_config")
    options = dict(
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        **({"speculative_config": drafting} if drafting else {}),
    )
    return LLM(job["model"], **(options | job.get("options", {})))


def runner_of(llm):
    """The model runner of an engine, which holds its target and its drafter."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def watch_drafts(llm) -> dict[str, list[list[int]]]:
    """Fills up with what the engine's proposer returns, by request."""
    runner = runner_of(llm)
    seen: dict[str, list[list[int]]] = {}
    propose = runner.propose_draft_token_ids

    def watched(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        rows = drafts.tolist() if hasattr(drafts, "tolist") else drafts
        for request, row in zip(list(runner.input_batch.req_ids), rows):
            seen.setdefault(request, []).append([int(token) for token in row])
        return drafts

    runner.propose_draft_token_ids = watched
    return seen


def serve(job: dict) -> dict:
    """One engine, all prompts at once."""
    from vllm import SamplingParams

    llm = make_llm(job)
    seen = watch_drafts(llm) if job.get("speculative_config") else {}
    sampling = dict(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    sampling |= job.get("sampling", {})
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            values = getattr(metric, "values", None)
            counters[metric.name] = metric.value if values is None else list(values)
    in_order = sorted(seen, key=lambda name: int(name.split("-")[0]))
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": [seen[request] for request in in_order],
        "counters": counters,
    }


@contextmanager
def repaired() -> Iterator[None]:
    """vLLM without the faults that the worker of `evaluate` repairs."""
    from vllm import _custom_ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler

    places = (
        (rejection_sampler, "expand_batch_to_tokens"),
        (DFlashQwen3Model, "_normalize_context_k"),
        (_custom_ops, "create_onednn_scaled_mm"),
        (_custom_ops, "onednn_scaled_mm"),
    )
    broken = [getattr(where, name) for where, name in places]
    runpy.run_path(str(BRIDGE / "connectors" / "cpu_repairs.py"))["repair"]()
    try:
        yield
    finally:
        for (where, name), function in zip(places, broken):
            setattr(where, name, function)


def answer(job: dict) -> dict:
    """Of one job. Its engine is gone when this returns."""
    try:
        with repaired() if job.pop("repaired", False) else nullcontext():
            return serve(job)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # the engines' own threads are of no use any more
