"""Real vLLM in a process and perhaps an environment of its own: one JSON object a line in, one out.

    python worker.py < QUESTIONS > ANSWERS

First question: {"model": …, "options": {…}, "speculative_config": {…} or null}; its answer says
which vLLM this is. Any other: {"prompts": [[token ids]], "params": [{…}]}; its answer has, per
prompt, the tokens in the steps they came in and, with drafting, the drafts accepted and proposed in
every round that had some. With {"hidden_states": {"folder": …}} in the first question, the file
with the prompt's hidden states. Imports nothing of this project: the environment that has vLLM need
not have it. vLLM's own lines go to standard error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONNECTORS = HERE / "connectors"
SETTINGS = {  # defaults of environment variables
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less to start and to stop
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines take turns on the same cores
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; there are two engines
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def start(question: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine, and the versions that it runs."""
    import torch
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        sys.path.append(str(CONNECTORS))
        from cpu_repairs import repair

        repair()
    options = dict(
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # every pass computes its prompts, as the first one does
        disable_log_stats=True,
        enforce_eager=on_cpu,  # compiling takes minutes there
    )
    if drafting := question["speculative_config"]:
        options |= {"speculative_config": drafting, "per_request_spec_decode_metrics": "detailed"}
    if extraction := question.get("hidden_states"):
        options |= {"kv_transfer_config": connector(extraction, on_cpu)}
        del options["per_request_spec_decode_metrics"]
    options |= question["options"]
    llm = LLM(question["model"], **options)
    return llm, {
        "version": vllm.__version__,
        "torch_version": torch.__version__,
        "rounds": "eager" if options["enforce_eager"] else "compiled",
    }


def connector(extraction: dict[str, str], on_cpu: bool) -> dict[str, Any]:
    """The configuration of the connector that writes hidden states: vLLM's own, on a CPU this
    project's."""
    chosen = {"kv_connector": "ExampleHiddenStatesConnector"}
    if on_cpu:
        inherited = os.environ.get("PYTHONPATH")  # by processes that vLLM may start
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited, str(CONNECTORS))))
        chosen = {
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "cpu_hidden_states",
        }
    where = {"shared_storage_path": extraction["folder"]}
    return {**chosen, "kv_role": "kv_producer", "kv_connector_extra_config": where}


def write(
    llm: Any, prompts: list[list[int]], params: list[dict[str, Any]], names: Any
) -> list[dict[str, Any]]:
    """The responses, all prompts given at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    written: dict[str, dict[str, Any]] = {}
    for prompt, fields in zip(prompts, params):
        name = str(next(names))
        sampling = SamplingParams(**fields, detokenize=False, output_kind=RequestOutputKind.DELTA)
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        written[name] = {"steps": [], "finish_reason": None, "accepted": None, "drafted": None}
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = output.outputs[0]
            answer = written[output.request_id]
            if new.token_ids:
                answer["steps"].append(list(new.token_ids))
            if output.finished:
                answer["finish_reason"] = new.finish_reason
                if metrics := getattr(new, "spec_decode_metrics", None):
                    answer |= {
                        "accepted": metrics.per_step_accepted,
                        "drafted": metrics.per_step_drafted,
                    }
                if path := (getattr(output, "kv_transfer_params", None) or {}).get(
                    "hidden_states_path"
                ):
                    answer["hidden_states"] = path
    if any("hidden_states" in answer for answer in written.values()):
        for _ in range(3):  # the connector writes in steps that follow; nobody else makes them
            engine.engine_core.get_output()
    return list(written.values())


def main() -> None:
    """Answers requests, a line of JSON each on standard input, with lines on standard output."""
    from itertools import count

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to standard error

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        llm, facts = start(json.loads(sys.stdin.readline()))
        answer(facts)
        names = count()
        for line in sys.stdin:
            question = json.loads(line)
            answer({"responses": write(llm, question["prompts"], question["params"], names)})
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        code = 1
    else:
        code = 0
    sys.stderr.flush()
    os._exit(code)  # the engine's own threads are of no use any more


if __name__ == "__main__":
    # modules of this folder must not shadow others
    sys.path = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE]
    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    main()
