"""One run of real vLLM on a CPU, in a process and an environment of its own: JSON in, JSON out.

    python serve.py JOB.json RESULT.json

JOB: `model`, `prompts` (lists of token ids), `max_tokens`, and perhaps `speculative_config` and `options` of the LLM,
and `sampling`: further SamplingParams.
RESULT: `token_ids` of every prompt, all its `samples`, vLLM's `counters`, and `drafts`: of every prompt the list of its
proposals.
Imports nothing of the project: the environment that has vLLM need not have it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its drafts can be seen
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # more of them wait for one another on a busy machine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def watch_drafts(llm) -> dict[str, list[list[int]]]:
    """Fills up with what the engine's proposer returns, by request."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
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


def main(job: dict) -> dict:
    from vllm import LLM, SamplingParams

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
    llm = LLM(job["model"], **(options | job.get("options", {})))
    seen = watch_drafts(llm) if drafting else {}
    sampling = dict(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    params = SamplingParams(**(sampling | job.get("sampling", {})))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counters[metric.name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "samples": [list(each.token_ids) for output in outputs for each in output.outputs],
        "drafts": [seen[request] for request in sorted(seen, key=lambda name: int(name.split("-")[0]))],
        "counters": counters,
    }


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads are of no use any more
