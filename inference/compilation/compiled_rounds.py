"""Rounds at static shapes by torch.compile: the target's forward over the last token and the
drafts, and the greedy chain of a drafter; on a GPU as CUDA graphs (mode "reduce-overhead").

What is compiled is what runs anyway, when a shape of static_shapes.py is first met. Prefill, trees
of drafts, sampled chains and what decides over tokens run eager. What torch cannot compile as one
graph is an error that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.inference.compilation.config import Compilation
from draftsmith.inference.compilation.static_shapes import Buckets, Shape, StaticRows
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.plain_decoder import TargetForward
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.head import BestChain, HeadProposer
from draftsmith.speculators.drafter import DraftInput
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.families.autoregressive import ChainDrafter
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.vocab.draft_vocab import to_target_ids

if TYPE_CHECKING:
    from draftsmith.speculators.drafter import Drafter

MOST_GRAPHS = 512  # of one step; torch's own limit is 8

Outputs = tuple[Tensor | None, ...]
Step = Callable[..., Outputs]  # (rows, counts [R], *inputs [R, T, …])


class CachedStep(nn.Module):
    """A step over new tokens of the first rows of `cache`, compiled once per shape. The memory of
    the cache are its buffers, whose addresses are fixed. `ahead`: slots that it fills after those
    of its inputs."""

    def __init__(
        self, step: Step, cache: RaggedCache, width: int, how: Compilation, ahead: int = 0
    ) -> None:
        super().__init__()
        cache.reserve_all()
        self.buckets = Buckets(cache.max_rows, width, cache.max_len)
        self.shapes: set[Shape] = set()  # compiled
        self._step, self._cache, self._ahead, self._layers = step, cache, ahead, 0
        self._example: list[Tensor] = []  # one token of one row of each input
        self._replays = how.cudagraphs and cache.device.type == "cuda" and how.backend != "eager"
        mode = {"mode": "reduce-overhead"} if self._replays else {}
        options: dict[str, Any] = {"backend": how.backend, **mode}
        self._compiled = torch.compile(self, fullgraph=True, dynamic=False, **options)

    def forward(self, placed: Tensor, keys: int, *inputs: Tensor) -> Outputs:
        """placed [2, R]: each row's length, and how many of its new tokens are no padding."""
        memory = [getattr(self, f"memory_{i}") for i in range(2 * self._layers)]
        rows, tokens = inputs[0].shape[:2]
        shape = Shape(rows, tokens, keys)
        static = StaticRows(placed[0], memory[: self._layers], memory[self._layers :], shape)
        return self._step(static, placed[1], *inputs)

    def run(self, start: int, rows: int, *inputs: Tensor, counts: Sequence[int] = ()) -> Outputs:
        """inputs [b, T, …] each -> outputs of these rows; (), and nothing was done, where the step
        is to run eager: not from row 0 on or wider than a round, as prefill is, or the keys and
        values have no memory yet."""
        if start or inputs[0].shape[1] > self.buckets.widths[-1]:
            return ()
        if not self._layers:
            keys, values = self._cache.memory()
            self._layers = len(keys)
            for i, memory in enumerate((*keys, *values)):
                self.register_buffer(f"memory_{i}", memory, persistent=False)
            if not keys:
                return ()
        lengths = self._cache.lengths[:rows]
        shape = self.buckets.shape(rows, inputs[0].shape[1], max(lengths) + self._ahead)
        self._example = self._example or [tensor[:1, :1].clone() for tensor in inputs]
        outputs = self._at(shape, lengths, inputs, counts or [1] * rows)
        return tuple(None if x is None else x[:rows] for x in outputs)

    def warm_up(self, go_on: Callable[[], bool]) -> None:
        """Compiles every shape while `go_on()`. No row holds anything: keys and values are written
        over. Nothing if it was never run."""
        for shape in self.buckets if self._example else ():
            if not go_on():
                return
            length = max(shape.keys - shape.width - self._ahead, 0)
            self._at(shape, [length], self._example, [1])

    def _at(
        self, shape: Shape, lengths: Sequence[int], inputs: Sequence[Tensor], counts: Sequence[int]
    ) -> Outputs:
        """`lengths`, `counts`: of rows in use; the others of the shape hold nothing."""
        rest = shape.rows - len(lengths)
        placed = on_device([[*lengths, *[0] * rest], [*counts, *[1] * rest]], self._cache.device)
        padded = [x.new_zeros(shape.rows, shape.width, *x.shape[2:]) for x in inputs]
        for full, x in zip(padded, inputs, strict=True):
            full[: x.shape[0], : x.shape[1]] = x
        try:
            if self._replays:  # which writes over the outputs of the last one
                torch.compiler.cudagraph_mark_step_begin()
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
                outputs = self._compiled(placed, shape.keys, *padded)
        except RuntimeError as error:
            if shape in self.shapes:
                raise
            raise ConfigError(
                f"enforce_eager=False: rounds cannot be compiled: {error}. Set enforce_eager=True",
                where="LLM",
            ) from error
        self.shapes.add(shape)
        return tuple(None if x is None else x.clone() for x in outputs)


class CompiledRounds:
    """The compiled steps of an engine. Keys and values get all their memory at once."""

    def __init__(
        self,
        how: Compilation,
        target_forward: TargetForward,
        cache: RaggedCache,
        proposer: Proposer | None,
        max_model_len: int,
    ) -> None:
        def forward(rows: StaticRows, counts: Tensor, ids: Tensor) -> Outputs:
            positions = rows.position_ids().clamp(max=max_model_len - 1)  # padding only
            return target_forward(ids, positions, rows.mask(), rows)

        width = 1 if proposer is None else 1 + proposer.num_speculative_tokens
        self.steps, self._how = [CachedStep(forward, cache, width, how)], how
        if isinstance(proposer, HeadProposer):
            proposer.draft_chains_with(self._chain_of)

    def _chain_of(self, drafter: Drafter, cache: RaggedCache, depth: int) -> BestChain | None:
        """The greedy chains of `depth` tokens as one step, for a drafter whose keys and values are
        in `cache`. Depth by depth a chain is two calls each, and on a small drafter calling takes
        longer than computing."""
        reads_tokens = isinstance(drafter, DraftModel) and drafter.token_map is None
        if not (reads_tokens or isinstance(drafter, ChainDrafter)):
            return None
        step = greedy_chain(drafter, depth, reads_tokens=reads_tokens)
        chain = CachedStep(step, cache, depth + 1, self._how, ahead=depth - 1)
        self.steps.append(chain)

        def best_chain(inputs: DraftInput) -> Tensor | None:
            state = () if reads_tokens else (inputs.taps, inputs.last_hidden)
            given = [inputs.token_ids, *(tensor for tensor in state if tensor is not None)]
            drafted = chain.run(inputs.start, inputs.stop, *given, counts=inputs.counts)
            for row, count in enumerate(inputs.counts if drafted else ()):
                cache.advance(row, count)
            return drafted[0] if drafted else None

        return best_chain

    def warm_up(
        self, report: Callable[[int, int], None] = lambda *_: None, limit_s: float = math.inf
    ) -> int:
        """Compiles every shape that a round can have; returns how many are compiled. Before any
        request, and after one round with drafting and one without, which show what each step is
        given.

        report: called with the graphs there are and the most there can be. limit_s: seconds after
        which no further shape is begun; those left are compiled when they are first met."""
        began, most = perf_counter(), sum(len([*step.buckets]) for step in self.steps)

        def go_on() -> bool:
            report(self.num_graphs, most)
            return perf_counter() - began < limit_s

        for step in self.steps:
            step.warm_up(go_on)
        return self.num_graphs

    @property
    def num_graphs(self) -> int:
        """Shapes compiled so far, of all steps."""
        return sum(len(step.shapes) for step in self.steps)

    def forward(
        self, start: int, rows: int, token_ids: Tensor, proposal: Proposal | None
    ) -> Outputs | None:
        """token_ids [b, T] -> taps and last_hidden as the target gives them; None where it is to be
        asked itself: for prefill and for trees."""
        if proposal is not None and proposal.parents is not None:
            return None
        outputs = self.steps[0].run(start, rows, token_ids)
        return tuple(None if x is None else x[:, : token_ids.shape[1]] for x in outputs) or None


def greedy_chain(drafter: Any, depth: int, *, reads_tokens: bool) -> Step:
    """(rows, counts [R], token_ids [R, T], taps, last_hidden as far as they are read) -> its
    `depth` best drafts [R, depth]."""

    def extend(rows: StaticRows, token_ids: Tensor, state: Tensor | None) -> Tensor:
        if reads_tokens:
            return drafter._extend(rows, 0, rows.shape.rows, drafter._known(token_ids))
        return drafter._extend(rows, 0, rows.shape.rows, token_ids, state)

    def step(rows: StaticRows, counts: Tensor, token_ids: Tensor, *features: Tensor) -> Outputs:
        state = None
        if not reads_tokens:
            taps = features[0] if drafter.reads_taps else None
            state = drafter.first_state(taps, features[-1] if drafter.reads_last_hidden else None)
        newest = torch.arange(rows.shape.rows, device=counts.device)
        state = extend(rows, token_ids, state)[newest, counts - 1][:, None]
        drafted: list[Tensor] = []
        one = Shape(rows.shape.rows, 1, rows.shape.keys)
        for k in range(depth):
            if k:
                after = StaticRows(rows.lengths + counts + k - 1, *rows.memory, one)
                state = extend(after, drafted[-1][:, None], state)  # [R, 1, H]
            best = drafter.head(state[:, 0]).argmax(-1)
            drafted.append(to_target_ids(best, drafter.draft_to_target))
        return (torch.stack(drafted, dim=1),)

    return step
