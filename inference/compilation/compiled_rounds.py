"""Rounds at static shapes by torch.compile: the target's forward over the last token and the
drafts, and the greedy chain of a drafter; on a GPU as CUDA graphs.

What is compiled is what runs anyway, at the shapes of static_shapes.py, when a shape is first met.
Prefill, trees of drafts, sampled chains and what decides over tokens stay as they are. What torch
cannot compile as one graph is named in a warning and runs eager from then on, with the same
outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from inference.compilation.cached_step import CachedStep
from inference.compilation.config import Compilation
from inference.compilation.static_shapes import Buckets, Shape, StaticRows
from inference.compilation.whole_chain import WholeChain, has_chain
from inference.kv_cache.ragged_cache import RaggedCache
from inference.plain_decoder import TargetForward
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers.base import Proposer
from inference.spec_decode.proposers.drafter import HeadProposer
from speculators.target.frozen_target import FrozenTarget

if TYPE_CHECKING:
    from speculators.drafter import Drafter

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]  # of graphs: how many there are, and how many there can be


class CompiledRounds:
    """The compiled steps of an engine. Keys and values get all their memory at once, so that their
    addresses are fixed."""

    def __init__(
        self,
        compilation: Compilation,
        target: FrozenTarget,
        target_forward: TargetForward,
        cache: RaggedCache,
        proposer: Proposer | None,
        max_model_len: int,
    ) -> None:
        cache.reserve_all()
        width = 1 if proposer is None else 1 + proposer.num_speculative_tokens
        buckets = Buckets(cache.max_rows, width, cache.max_len, compilation.row_sizes)

        def forward(
            shape: Shape, placed: Tensor, keys: list[Tensor], values: list[Tensor], ids: Tensor
        ) -> Any:
            rows = StaticRows(placed[0], keys, values, shape)
            positions = rows.position_ids().clamp(max=max_model_len - 1)  # padding only
            return target_forward(ids, positions, rows.mask(), rows.view())

        name = f"the target {target.name_or_path}"
        make = partial(partial, forward)
        self.target = CachedStep(name, make, cache, buckets, compilation)
        self.chain: CachedStep | None = None
        self._compilation = compilation
        if isinstance(proposer, HeadProposer) and compilation.drafter:
            proposer.run_drafter(self._chain_of)
        self._warned = False

    def _chain_of(
        self, drafter: Drafter, cache: RaggedCache, depth: int
    ) -> tuple[Drafter, WholeChain | None]:
        """The drafter as it is, and its greedy chains as one step, where it has them. `cache`: its
        keys and values; `depth`: tokens of the longest chain."""
        if not has_chain(drafter):
            return drafter, None
        cache.reserve_all()
        buckets = Buckets(cache.max_rows, depth + 1, cache.max_len, self._compilation.row_sizes)
        chain = WholeChain(drafter, cache, depth)
        name = f"the chain of the drafter ({type(drafter).__name__})"
        chain.step = self.chain = CachedStep(
            name, chain.at, cache, buckets, self._compilation, ahead=depth - 1
        )
        return drafter, chain

    @property
    def steps(self) -> list[CachedStep]:
        return [self.target] if self.chain is None else [self.target, self.chain]

    def warm_up(self, report: Report | None = None, limit_s: float = math.inf) -> None:
        """Compiles every shape that a round can have. Before any request, and after one round with
        drafting and one without, which show what each step is given.

        report: called with the graphs there are and the most there can be. limit_s: seconds after
        which no further shape is begun; those left are compiled when they are first met."""
        began = perf_counter()

        def go_on() -> bool:
            if report is not None:
                report(self.num_graphs, self.most_graphs)
            return perf_counter() - began < limit_s

        for step in self.steps:
            step.warm_up(go_on)
        if not go_on():
            logger.warning(
                "%d of at most %d graphs were compiled in %.0f s; the others are when they are"
                " first met",
                self.num_graphs,
                self.most_graphs,
                perf_counter() - began,
            )

    def forget_target(self) -> None:
        """The target is made of other modules or memory: its steps are compiled anew."""
        self.target.forget()

    @property
    def num_graphs(self) -> int:
        """Shapes compiled so far, of all steps."""
        return sum(len(step) for step in self.steps)

    @property
    def most_graphs(self) -> int:
        """More are never compiled: one per shape."""
        return sum(step.buckets.most for step in self.steps)

    def forward(
        self, start: int, rows: int, token_ids: Tensor, proposal: Proposal | None
    ) -> tuple | None:
        """token_ids [b, T] -> taps and last_hidden as the target gives them; None where it is to be
        asked itself: for prefill, whose shapes are its own, and for trees."""
        if start or token_ids.shape[1] > self.target.buckets.widths[-1]:
            return None
        if proposal is not None and proposal.parents is not None:
            if not self._warned:
                logger.warning("trees of drafts are not compiled: rounds that verify one run eager")
            self._warned = True
            return None
        outputs = self.target(rows, token_ids)
        if outputs is None:
            return None
        return tuple(None if x is None else x[:rows, : token_ids.shape[1]] for x in outputs)
