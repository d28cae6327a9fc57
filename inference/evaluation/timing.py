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
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.plain_decoder import TargetForward
from draftsmith.inference.report.measurement import num_output_tokens
from draftsmith.inference.report.schema import Costs, TimedPass
from draftsmith.inference.sampling.sampler import argmax, seeded
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.drafter import Drafter, DraftInput
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.draft_vocab import to_target_ids

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
    width, pad = max(map(len, prompts)), eos_token_ids[0] if eos_token_ids else 0
    ids = torch.tensor(
        [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device
    )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
    }
    config = GenerationConfig(
        do_sample=not params.greedy,
        max_new_tokens=params.max_tokens,
        use_cache=True,
        pad_token_id=pad,
        eos_token_id=list(eos_token_ids) or None,
        bos_token_id=getattr(model.config, "bos_token_id", None),
        **({} if params.greedy else sampling),
    )
    with seeded(seed, model.device):
        written = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, generation_config=config
        )
    return sum(_length(row, eos_token_ids) for row in written[:, width:].tolist())


def _length(row: Sequence[int], eos_token_ids: Sequence[int]) -> int:
    return next((i for i, token in enumerate(row, 1) if token in eos_token_ids), len(row))


class IsolatedCosts:
    """V(1), V(K+1) and D(K) at one context: the forwards of a round alone, without sampling or
    bookkeeping.

    token_ids: text whose features fill the caches; `rows` copies of it run at once. `kept`: slots a
    round appends to the head before it drafts (accepted drafts and the bonus token). Without a
    `drafter` D(K) is left out."""

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None,
        token_ids: Sequence[int],
        k: int,
        *,
        rows: int = 1,
        kept: int = 1,
    ) -> None:
        self.target, self.k, self.rows = target, k, rows
        self._target_forward = TargetForward(target)  # the engine's
        self.drafter: Any = drafter
        self.kept = min(kept, len(token_ids) - 1)
        self.context = len(token_ids)
        self.times: dict[str, list[float]] = {}
        self.cache = RaggedCache(rows, self.context + k + 1, device=target.device)
        ids = torch.tensor([list(token_ids)] * rows, device=target.device)  # [rows, context]
        self.next_ids = ids[:, :1].expand(rows, k + 1)
        with torch.inference_mode():
            taps, last_hidden = self._forward(ids)
            for row in range(rows):
                self.cache.advance(row, self.context)
            if drafter is not None:
                self._fill_head(ids, taps, last_hidden)

    def measure(self, trials: int) -> None:
        """Times `trials` more trials of each part, taken in turn, in milliseconds."""
        forward, logits = self._forward, self._target_forward.logits
        parts: dict[str, Callable[[], Any]] = {
            "target_step_ms": lambda: logits(forward(self.next_ids[:, :1])[1]),
            "verify_ms": lambda: logits(forward(self.next_ids)[1]),
        }
        if self.drafter is not None:
            parts["draft_ms"] = self._draft
        with torch.inference_mode():
            for trial in range(-1, trials):  # the first one warms up
                for name, part in parts.items():
                    _synchronize(self.target.device)
                    started = perf_counter()
                    part()
                    _synchronize(self.target.device)
                    if trial >= 0:
                        milliseconds = 1e3 * (perf_counter() - started)
                        self.times.setdefault(name, []).append(milliseconds)

    @property
    def costs(self) -> Costs:
        """The medians of all trials."""
        medians = {name: median_high(values) for name, values in self.times.items()}
        return Costs(**medians)

    def _forward(self, ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """ids [rows, T] after what the cache holds; the cache is left as it was."""
        T = ids.shape[1]
        positions, mask = self.cache.position_ids(0, self.rows, T), self.cache.mask(0, self.rows, T)
        return self._target_forward(ids, positions, mask, self.cache.view(0, self.rows, T))

    def _fill_head(self, ids: Tensor, taps: Tensor | None, last_hidden: Tensor) -> None:
        """All true slots of the context but the last `kept`, which every trial appends anew."""
        drafter, kept, rows = self.drafter, self.kept, self.rows
        longest = drafter.cache_length(self.context + 2 * self.k + 1)
        self.head_cache = RaggedCache(rows, longest, device=self.target.device)
        next_ids = ids.roll(-drafter.first_token, 1)  # slot p holds token p + first_token
        before, after = slice(None, self.context - kept), slice(self.context - kept, None)

        def part(which: slice, count: int) -> DraftInput:
            read = taps[:, which] if taps is not None and drafter.reads_taps else None
            last = last_hidden[:, which] if drafter.reads_last_hidden else None
            return DraftInput(
                self.head_cache, 0, rows, next_ids[:, which], read, last, [count] * rows
            )

        self.appended = part(after, kept)
        drafter.append(part(before, self.context - kept))
        self.filled = list(self.head_cache.lengths)

    def _draft(self) -> None:
        self.drafter.draft(self.appended, self.k, self._best)
        for row, length in enumerate(self.filled):
            self.head_cache.truncate(row, length)

    def _best(self, logits: Tensor) -> Tensor:
        return to_target_ids(argmax(logits), self.drafter.draft_to_target)


def typical_context(outputs: Sequence[RequestOutput]) -> list[int]:
    """A prompt and half of its response, of the median length."""
    written = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    return sorted((prompt + ids[: len(ids) // 2 + 1] for prompt, ids in written), key=len)[
        len(written) // 2
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
