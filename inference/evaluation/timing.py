"""Timing: interleaved passes of one workload through several engines, and the parts of a round
measured alone.

Wall-clock comparisons are only made between runs that were next to each other, and in alternating
order, so that a machine that slows down slows both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_high
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.inference.entrypoints.llm import LLM
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.measurement import num_output_tokens
from draftsmith.inference.report.schema import Costs, TimedPass
from draftsmith.inference.sampling.sampler import seeded
from draftsmith.inference.sampling_params import SamplingParams

Run = Callable[[], list[RequestOutput] | int]  # does one pass: its responses, or output tokens


def interleaved(
    runs: Mapping[str, Run],
    workload: str,
    repeats: int,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[TimedPass]]:
    """`repeats` timed passes of each run, one right after the other, every other repeat in reverse
    order. `between`: called after every repeat."""
    timed: dict[str, list[TimedPass]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            _synchronize(device)
            started = perf_counter()
            written = runs[name]()
            _synchronize(device)
            seconds = perf_counter() - started
            outputs = [] if isinstance(written, int) else written
            timed[name].append(
                TimedPass(
                    workload=workload,
                    repeat=repeat,
                    tokens=written if isinstance(written, int) else num_output_tokens(outputs),
                    seconds=seconds,
                    num_drafts=sum(output.metrics.num_drafts for output in outputs),
                    num_accepted_tokens=sum(o.metrics.num_accepted_tokens for o in outputs),
                )
            )
        between()
    return timed


def transformers_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    seed: int,
) -> int:
    """`model.generate` with a key-value cache and the same sampling, on all prompts as one batch
    (left-padded). Returns the output tokens written, up to and with the end of each response."""
    pad = eos_token_ids[0] if eos_token_ids else 0
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    config = GenerationConfig(
        do_sample=not params.greedy,
        max_new_tokens=params.max_tokens,
        pad_token_id=pad,
        eos_token_id=list(eos_token_ids) or None,
        bos_token_id=getattr(model.config, "bos_token_id", None),
    )
    if not params.greedy:
        config.update(
            temperature=params.temperature, top_p=params.top_p, top_k=max(params.top_k, 0)
        )
    generate: Any = model.generate
    with seeded(seed, model.device):
        written = generate(ids, attention_mask=mask, generation_config=config)
    ends = set(eos_token_ids)
    return sum(
        next((i for i, token in enumerate(row, 1) if token in ends), len(row))
        for row in written[:, ids.shape[1] :].tolist()
    )


class IsolatedCosts:
    """V(1), V(K+1) and D(K) of an engine that drafts, for `rows` rows of the text `token_ids`: the
    forwards of a round alone, without sampling or bookkeeping."""

    def __init__(self, llm: LLM, token_ids: Sequence[int], k: int, rows: int) -> None:
        self.llm, self.token_ids, self.k, self.rows = llm, list(token_ids), k, rows
        self.times: dict[str, list[float]] = {}

    @torch.inference_mode()
    def measure(self, trials: int) -> None:
        """Times `trials` more trials of each part, taken in turn, in milliseconds, of rows that
        have been prefilled and had one round."""
        engine, proposer = self.llm.engine, self.llm.engine.proposer
        assert proposer is not None
        engine.set_speculation(True)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        prompt = Prompt(None, self.token_ids)
        responses = [self.llm.submit(prompt, params) for _ in range(self.rows)]
        engine.step()
        requests = list(engine.scheduler.running)
        parts: dict[str, Callable[[], object]] = {
            "target_step_ms": lambda: engine.rehearse(self.rows, 1),
            "verify_ms": lambda: engine.rehearse(self.rows, self.k + 1),
            "draft_ms": lambda: proposer.rehearse(requests, self.k),
        }
        for trial in range(-1, trials if requests else -1):  # the first one warms up
            for name, part in parts.items():
                started = perf_counter()
                part()  # waits for the device
                if trial >= 0:
                    milliseconds = 1e3 * (perf_counter() - started)
                    self.times.setdefault(name, []).append(milliseconds)
        for response in responses:
            self.llm.abort(response.request_id)

    @property
    def costs(self) -> Costs | None:
        """The medians of all trials; None if there was no room for a round."""
        medians = {name: median_high(values) for name, values in self.times.items()}
        return Costs(**medians) if medians else None


def typical_context(outputs: Sequence[RequestOutput]) -> list[int]:
    """A prompt and half of its response, of the median length."""
    written = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    return sorted((prompt + ids[: len(ids) // 2 + 1] for prompt, ids in written), key=len)[
        len(written) // 2
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
