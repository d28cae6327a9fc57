"""Rounds at static shapes by torch.compile: the target's forward over the last token and the
drafts, and the greedy chain of a drafter; on a GPU as CUDA graphs (mode "reduce-overhead").

A shape of static_shapes.py is compiled when it is first met. Prefill, trees of drafts, sampled
chains and what decides over tokens run eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.compilation.static_shapes import all_shapes, shape_for
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.kv_cache.static_rows import StaticRows
from draftsmith.inference.plain_decoder import TargetForward
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.head import BestChain, HeadProposer
from draftsmith.speculators.drafter import Drafter, DraftInput
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.autoregressive import ChainDrafter
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.vocab.draft_vocab import to_target_ids

MOST_GRAPHS = 512  # of one step; torch's own limit is 8

Outputs = tuple[Tensor | None, ...]
Step = Callable[..., Outputs]  # (rows, counts [R], *inputs [R, T, …])


class CachedStep(nn.Module):
    """A step over new tokens of the first rows of `cache`, compiled once per shape. The memory of
    the cache are its buffers, whose addresses are fixed. `ahead`: slots that it fills after those
    of its inputs. `how`: arguments of torch.compile."""

    def __init__(
        self, step: Step, cache: RaggedCache, width: int, ahead: int, how: dict[str, Any]
    ) -> None:
        super().__init__()
        cache.reserve_all()
        self.shapes = all_shapes(cache.max_rows, width, cache.max_len)
        self._step = step
        self._cache = cache
        self._width = width
        self._ahead = ahead
        self._layers = 0
        self._inputs: list[Tensor] = []  # one token of one row of each
        self._compiled = torch.compile(self, fullgraph=True, dynamic=False, **how)

    def forward(self, placed: Tensor, keys: int, *inputs: Tensor) -> Outputs:
        """placed [2, R]: each row's length, and how many of its new tokens are no padding."""
        memory = [getattr(self, f"memory_{i}") for i in range(2 * self._layers)]
        cached = memory[: self._layers], memory[self._layers :]
        static = StaticRows(placed[0], *cached, inputs[0].shape[1], keys)
        return self._step(static, placed[1], *inputs)

    def run(self, start: int, counts: Sequence[int], *inputs: Tensor) -> Outputs:
        """inputs [b, T, …] each, of whose tokens counts [b] are no padding -> outputs of these
        rows; () where the step has to run eager: prefill, or nothing was cached yet."""
        rows, width = inputs[0].shape[:2]
        keys, values = self._cache.memory()
        if start or width > self._width or not keys:
            return ()
        if not self._layers:
            self._layers = len(keys)
            for i, memory in enumerate((*keys, *values)):
                self.register_buffer(f"memory_{i}", memory, persistent=False)
            self._inputs = [x[:1, :1].clone() for x in inputs]
        lengths = self._cache.lengths[:rows]
        shape = shape_for(self.shapes, rows, width, max(lengths) + self._ahead)
        unused = shape.rows - rows  # they hold nothing
        placed = [[*lengths, *[0] * unused], [*counts, *[1] * unused]]
        padded = [x.new_zeros(shape.rows, shape.width, *x.shape[2:]) for x in inputs]
        for full, x in zip(padded, inputs, strict=True):
            full[:rows, :width] = x
        try:
            torch.compiler.cudagraph_mark_step_begin()  # it writes over the outputs of the last one
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
                outputs = self._compiled(on_device(placed, padded[0].device), shape.keys, *padded)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"enforce_eager=False: rounds cannot be compiled: {error}. Set enforce_eager=True",
                where="LLM",
            ) from error
        return tuple(None if x is None else x[:rows].clone() for x in outputs)

    def warm_up(self, deadline: float) -> None:
        """Compiles every shape until then. No row holds anything: keys and values are written over.
        Nothing if it was never run."""
        for shape in self.shapes if self._inputs else ():
            if perf_counter() < deadline:
                self._cache.lengths[0] = max(shape.keys - shape.width - self._ahead, 0)
                inputs = [x.expand(*shape[:2], *x.shape[2:]) for x in self._inputs]
                self.run(0, [1] * shape.rows, *inputs)
                self._cache.lengths[0] = 0


class CompiledRounds:
    """The compiled steps of an engine. Keys and values get all their memory at once."""

    def __init__(
        self,
        how: dict[str, Any],
        target_forward: TargetForward,
        cache: RaggedCache,
        proposer: Proposer | None,
        max_model_len: int,
    ) -> None:
        def forward(rows: StaticRows, counts: Tensor, ids: Tensor) -> Outputs:
            positions = rows.position_ids().clamp(max=max_model_len - 1)  # padding only
            return target_forward(ids, positions, rows.mask(), rows)

        width = 1 if proposer is None else 1 + proposer.num_speculative_tokens
        self.steps = [CachedStep(forward, cache, width, 0, how)]
        self._how = how
        if isinstance(proposer, HeadProposer):
            proposer.draft_chains_with(self._chain_of)

    def forward(self, start: int, token_ids: Tensor) -> Outputs:
        """token_ids [b, T] -> taps and last_hidden as the target gives them; () where it is to be
        asked itself."""
        rows, width = token_ids.shape
        outputs = self.steps[0].run(start, [1] * rows, token_ids)
        return tuple(None if x is None else x[:, :width] for x in outputs)

    def warm_up(self, limit_s: float) -> None:
        """Compiles every shape that a round can have, until so many seconds have passed. After a
        round with drafting and one without, which show what the steps are given."""
        deadline = perf_counter() + limit_s
        for step in self.steps:
            step.warm_up(deadline)

    def _chain_of(self, drafter: Drafter, cache: RaggedCache, depth: int) -> BestChain | None:
        """The greedy chains of `depth` tokens as one step, for a drafter whose keys and values are
        in `cache`: on a small one calling takes longer than computing."""
        reads_tokens = isinstance(drafter, DraftModel) and drafter.token_map is None
        if not (reads_tokens or isinstance(drafter, ChainDrafter)):
            return None
        step = greedy_chain(drafter, depth, reads_tokens=reads_tokens)
        chain = CachedStep(step, cache, depth + 1, depth - 1, self._how)
        self.steps.append(chain)

        def best_chain(inputs: DraftInput) -> Tensor | None:
            state = () if reads_tokens else (inputs.taps, inputs.last_hidden)
            given = [inputs.token_ids, *(tensor for tensor in state if tensor is not None)]
            outputs = chain.run(inputs.start, inputs.counts, *given)
            if not outputs:
                return None
            cache.advance_rows(0, inputs.counts)
            return outputs[0]

        return best_chain


def greedy_chain(drafter: Any, depth: int, *, reads_tokens: bool) -> Step:
    """(rows, counts [R], token_ids [R, T], taps, last_hidden as far as they are read) -> its
    `depth` best drafts [R, depth]."""

    def extend(rows: StaticRows, token_ids: Tensor, state: Tensor | None) -> Tensor:
        given = (drafter._known(token_ids),) if reads_tokens else (token_ids, state)
        return drafter._extend(rows, 0, rows.num_rows, *given)

    def step(rows: StaticRows, counts: Tensor, token_ids: Tensor, *features: Tensor) -> Outputs:
        state = None
        if not reads_tokens:
            taps = features[0] if drafter.reads_taps else None
            state = drafter.first_state(taps, features[-1] if drafter.reads_last_hidden else None)
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
