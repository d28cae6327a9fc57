"""vLLM as a measured engine, started for the evaluation: one process that drafts, and one that does
not.

vLLM usually lives in an environment of its own, so it is run by that environment's interpreter
(worker.py). It gets the same inputs as this runtime: tokens, sampling parameters, tokens that end a
response, precision."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from draftsmith.inference.entrypoints.loading import (
    default_device,
    end_of_sequence_ids,
    target_config,
)
from draftsmith.inference.evaluation.engines import Drafting, MeasuredEngine, Prompts
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.schema import EngineFacts
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.methods import method_options
from draftsmith.inference.vllm_bridge.counters import metrics_of, response_of
from draftsmith.inference.vllm_python import vllm_python, vllm_version
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.speculators.export import read_drafter_config, read_fields, resolve
from draftsmith.speculators.export.formats import LAYOUTS, NATIVE, format_of
from draftsmith.speculators.export.serving_commands import (
    holds_drafter,
    not_in_vllm,
    other_table,
    vllm_method,
)
from draftsmith.speculators.precision import running_dtype

VLLM = "vllm"
WORKER = Path(__file__).with_name("worker.py")
GPU_MEMORY_UTILIZATION = 0.45  # for each of two engines; vLLM's own 0.9 is for one
SENT = (  # fields of SamplingParams that vLLM gets
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
)
LOG_LINES = 15  # of vLLM's log in an error
MESSAGE = 500  # most characters of such a line, and of what vLLM says is wrong

# set by torchrun, accelerate and the like for each process; vLLM would take them for its own
LAUNCHER = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK"
    "|MASTER_(ADDR|PORT)|(TORCHELASTIC|ACCELERATE|FSDP|PET)_.*)"
)


class VllmError(DraftsmithError):
    """vLLM refused, or its process ended."""


@dataclass
class VllmOptions:
    """The interpreter and options of vLLM; called with a Drafting it makes the engine.

    python      the interpreter that has vLLM; None: see `vllm_python`
    engine      further options of its LLM (tensor_parallel_size, gpu_memory_utilization,
                hf_overrides, …)
    drafting    further options of its speculative_config (draft_tensor_parallel_size, …)
    """

    python: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, drafting: Drafting) -> VllmEngine:
        """The engine of one way of drafting. Nothing is loaded yet."""
        return VllmEngine(drafting, self)


def child_environment() -> dict[str, str]:
    """This process's environment without the variables of a launcher."""
    return {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)}


class Worker:
    """A process of `script`, worker.py, which answers one question at a time."""

    def __init__(self, python: str, question: Mapping[str, Any], script: Path = WORKER) -> None:
        # (closed by `stop`)
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=child_environment(),
        )
        try:
            self.facts = self.ask(question)
        except BaseException:
            self.stop()
            raise

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question; VllmError with the end of vLLM's log if there is none."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended; its last answer is read below
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            line = json.dumps({"error": f"its process ended with code {self.process.wait()}"})
        answer = json.loads(line)
        if "error" in answer:
            raise VllmError(f"{answer['error'][:MESSAGE]}\n{self._last_words()}", where="vLLM")
        return answer

    def stop(self) -> None:
        """Ends the process, if it runs."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.rstrip() for line in self.log if line.strip()]
        return "\n".join(f"  {line[:MESSAGE]}" for line in lines[-LOG_LINES:])


class VllmEngine(MeasuredEngine):
    """Two processes of vLLM around one target, with drafting and without."""

    name = VLLM

    def __init__(self, drafting: Drafting, options: VllmOptions) -> None:
        super().__init__(drafting)
        self.options = options
        self.python = vllm_python(options.python)
        self.config, self.needs = speculative_config(drafting, vllm_version(self.python))
        self.end = ending_token_ids(drafting, self.tokenizer)
        self.workers: dict[bool, Worker] = {}  # by whether they draft

    @override
    def prepare(self, prompts: Prompts, max_tokens: int) -> None:
        """Starts two processes of vLLM: one drafts, one does not. VllmError if vLLM refuses."""
        # vLLM drafts for no row of a batch once one row comes within K tokens of the limit.
        room = max(map(len, prompts)) + max_tokens + 2 * (self.drafting.num_speculative_tokens + 1)
        room = max(room, self.drafting.options.get("max_model_len") or 0)
        limit = getattr(self._target, "max_position_embeddings", None)
        options = {
            "dtype": self._dtype,
            "max_model_len": room if limit is None else min(room, limit),
            "max_num_seqs": self.drafting.rows,
            "seed": self.drafting.seed,
            "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
            **self.drafting.source,
            **self.needs,
            **self.options.engine,
        }
        for speculate in (True, False):
            config = {**self.config, **self.options.drafting} if speculate else None
            question: dict[str, Any] = {"model": self.drafting.model, "options": options}
            question["speculative_config"] = config
            self.workers[speculate] = Worker(self.python, question)

    @cached_property
    def _target(self) -> Any:
        return target_config(self.drafting.model, **self.drafting.source)

    @property
    def _dtype(self) -> str:
        """The dtype of this runtime, for the same results; vLLM's `auto` may be another."""
        options = self.drafting.options
        dtype = running_dtype(
            options.get("dtype", "auto"), self._target.dtype, default_device(options.get("device"))
        )
        return str(dtype).removeprefix("torch.")

    @override
    def facts(self) -> EngineFacts:
        """Versions and platform as vLLM's process says them."""
        default = None if self.drafting.drafter is None else "greedy"
        method = self.config.get("draft_sample_method", default)
        versions = self.workers[False].facts  # of both; a worker that has stopped still has them
        return EngineFacts(name=self.name, draft_sample_method=method, **versions)

    @override
    def in_float32(self, rows: int) -> VllmEngine | None:
        """None if `dtype` is float32 already."""
        if self._dtype == "float32":
            return None
        return VllmEngine(self.drafting.in_float32(rows), self.options)

    def _write(
        self, prompts: Prompts, params: Sequence[SamplingParams], speculate: bool
    ) -> list[RequestOutput]:
        question = {
            "prompts": [list(prompt) for prompt in prompts],
            "params": [sampling_fields(one, self.end) for one in params],
        }
        outputs = []
        answers = self.workers[speculate].ask(question)["responses"]
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = [token for step in answer["steps"] for token in step]
            metrics = None
            if speculate:
                sizes = [len(step) for step in answer["steps"]]
                metrics = metrics_of(sizes, answer["accepted"] or [], answer["drafted"] or [])
            outputs.append(response_of(prompt, tokens, answer["finish_reason"], metrics))
        return outputs

    @override
    def stop(self) -> None:
        """Ends both processes."""
        for worker in self.workers.values():
            worker.stop()


def ending_token_ids(drafting: Drafting, tokenizer: Any) -> list[int]:
    """Tokens that end a response in this runtime."""
    return sorted(end_of_sequence_ids(drafting.model, tokenizer, **drafting.source))


def sampling_fields(params: SamplingParams, end: Sequence[int]) -> dict[str, Any]:
    """The request under vLLM's names. Every field is spelled out, since a server fills missing ones
    from the model's generation_config.json."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in SENT}
    fields["top_k"] = max(params.top_k, 0)
    # vLLM's own end-of-sequence tokens are ignored; stop_token_ids has those of this runtime
    fields |= {"ignore_eos": True, "stop_token_ids": list(end)}
    return fields if params.greedy else fields | {"seed": params.seed}


def speculative_config(
    drafting: Drafting, version: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `speculative_config` of vLLM `version`, and the options that its LLM needs for it.

    The method is always named, or vLLM would guess it from the path. ConfigError for an export that
    is no model, and for lengths and trees of this runtime."""
    if drafting.further:
        raise ConfigError(
            f"{', '.join(drafting.further)}: options of this runtime's drafting; leave them out, or"
            " measure with --engine draftsmith alone",
            where="--engine vllm",
        )
    config = dict(drafting.speculative_config)
    needs: dict[str, Any] = {}
    if drafting.drafter is None:
        if (method := method_options(drafting.method)).vllm is None:
            raise ConfigError(f"{method.vllm_note}", where="--engine vllm")
        return config, needs
    target = target_config(drafting.model, **drafting.source)
    head: Any = read_drafter_config(drafting.drafter, target.num_hidden_layers)
    layout = LAYOUTS[NATIVE, head.family].layout
    format_ = format_of(read_fields(drafting.drafter))
    if why := not_in_vllm(head, drafting.drafter, drafting.model, format_, version):
        raise ConfigError(f"{why}; use --engine draftsmith", where=f"{drafting.drafter}")
    if why := other_table(head, drafting.drafter, drafting.model, target.vocab_size):
        raise ConfigError(f"vLLM refuses it: {why}", where=f"{drafting.drafter}")
    config |= vllm_method(head.family) | {"model": str(resolve(drafting.drafter))}
    if holds_drafter(drafting.model, drafting.drafter):
        del config["model"]  # vLLM finds it there
    if getattr(head, "other_tokenizer", False):
        config["use_heterogeneous_vocab"] = True
        needs["skip_tokenizer_init"] = False
    elif layout.vllm_samples:
        config["draft_sample_method"] = "probabilistic"  # as here; vLLM's default is greedy
    if getattr(head, "layout", None) == "mimo" and not getattr(
        target, "num_nextn_predict_layers", None
    ):
        needs["hf_overrides"] = {"num_nextn_predict_layers": 1}  # vLLM asks the target for it
    return config, needs
