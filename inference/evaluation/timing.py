"""Timing: interleaved passes of one workload through several engines.

Wall-clock comparisons are only made between runs that were next to each other, and in alternating
order, so that a machine that slows down slows both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.report.measurement import num_output_tokens
from draftsmith.inference.report.schema import TimedPass
from draftsmith.inference.sampling.sampler import seeded
from draftsmith.inference.sampling_params import SamplingParams

Run = Callable[[], list[RequestOutput] | int]  # does one pass: its responses, or output tokens


def interleaved(
    runs: Mapping[str, Run], workload: str, repeats: int, device: torch.device
) -> dict[str, list[TimedPass]]:
    """`repeats` timed passes of each run, one right after the other, every other repeat in reverse
    order."""
    timed: dict[str, list[TimedPass]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            _synchronize(device)
            started = perf_counter()
            written = runs[name]()
            _synchronize(device)
            seconds = perf_counter() - started
            tokens = written if isinstance(written, int) else num_output_tokens(written)
            timed[name].append(
                TimedPass(workload=workload, repeat=repeat, tokens=tokens, seconds=seconds)
            )
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
