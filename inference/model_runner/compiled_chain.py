"""The greedy chain of a drafter as one compiled step: calling a small drafter takes longer than
computing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.kv_cache.static_rows import StaticRows
from draftsmith.inference.model_runner.compile_options import CompileOptions
from draftsmith.inference.model_runner.compiled_step import CachedStep, Outputs, Step
from draftsmith.speculators.drafter import Drafter, DraftInput
from draftsmith.speculators.families.autoregressive import ChainDrafter
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.vocab.draft_vocab import to_target_ids


class CompiledChain:
    """All drafts of a chain at temperature 0, `depth` per row, by a drafter whose keys and values
    are in `cache`. See `compiled_chain`."""

    def __init__(
        self,
        drafter: Drafter,
        cache: RaggedCache,
        depth: int,
        options: CompileOptions,
        *,
        reads_tokens: bool,
    ) -> None:
        step = greedy_chain(drafter, depth, reads_tokens=reads_tokens)
        self.step = CachedStep(step, cache, depth + 1, depth - 1, options)
        self._cache = cache
        self._reads_tokens = reads_tokens

    def __call__(self, inputs: DraftInput) -> Tensor | None:
        """Drafts [b, depth] after the slots of `inputs`, which the cache then holds; None, and
        nothing is done, where they have to be drafted one by one."""
        tensors = [inputs.token_ids]
        if not self._reads_tokens:
            states = (inputs.taps, inputs.last_hidden)
            tensors += [state for state in states if state is not None]
        outputs = self.step.run(inputs.start, inputs.counts, *tensors)
        if not outputs:
            return None
        self._cache.advance_rows(0, inputs.counts)
        return outputs[0]


def compiled_chain(
    drafter: Drafter, cache: RaggedCache, depth: int, options: CompileOptions
) -> CompiledChain | None:
    """None for a drafter that has no such step: one that drafts all depths at once, or in another
    tokenizer's tokens."""
    reads_tokens = isinstance(drafter, DraftModel) and drafter.token_map is None
    one_by_one = isinstance(drafter, ChainDrafter) and drafter.traits.reads_drafts
    if not (reads_tokens or one_by_one):
        return None
    return CompiledChain(drafter, cache, depth, options, reads_tokens=reads_tokens)


def greedy_chain(drafter: Any, depth: int, *, reads_tokens: bool) -> Step:
    """(rows, counts [R], token_ids [R, T], taps, last_hidden as far as they are read) -> its
    `depth` best drafts [R, depth]."""

    def extend(rows: StaticRows, token_ids: Tensor, state: Tensor | None) -> Tensor:
        inputs = (token_ids,) if reads_tokens else (token_ids, state)
        return drafter.extend(rows, 0, rows.num_rows, *inputs)

    def step(rows: StaticRows, counts: Tensor, token_ids: Tensor, *features: Tensor) -> Outputs:
        state = None
        if not reads_tokens:
            taps = features[0] if drafter.traits.reads_taps else None
            last_hidden = features[-1] if drafter.traits.reads_last_hidden else None
            state = drafter.first_state(taps, last_hidden)
        newest = torch.arange(rows.num_rows, device=counts.device)
        state = extend(rows, token_ids, state)[newest, counts - 1][:, None]  # [R, 1, H]
        drafted: list[Tensor] = []
        while True:
            best = drafter.head(state[:, 0]).argmax(-1)
            drafted.append(to_target_ids(best, drafter.draft_to_target))
            if len(drafted) == depth:
                return (torch.stack(drafted, dim=1),)
            lengths = rows.lengths + counts + len(drafted) - 1
            after = StaticRows(lengths, rows.keys, rows.values, 1, rows.S)
            state = extend(after, drafted[-1][:, None], state)

    return step
