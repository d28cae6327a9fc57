"""ModelRunner: one language model over the rows of an engine. What "run T tokens of these rows"
means is decided here and in speculators/target/ragged_rows.py: weights in fast form, cache,
positions, masks, eager or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.model_runner.compile_options import CompileOptions
from draftsmith.inference.model_runner.plain_decoder import PlainDecoder, plain_or_none
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.ragged_rows import TreePlaces, run_rows

if TYPE_CHECKING:
    from draftsmith.inference.model_runner.compiled_step import CompiledForward


class ModelRunner:
    """`target` over `rows` rows of at most `max_len` tokens, and behind these the `drafts` tokens
    that a round may write and take back.

    forward   of the target, where it is at hand; None: the fastest that there is
    cache     keys and values, and the length of each row
    compiled  the forward at static shapes; None where all runs eager
    ran_compiled  how the last forward ran
    """

    def __init__(
        self,
        target: FrozenTarget,
        rows: int,
        max_len: int,
        *,
        drafts: int = 0,
        forward: PlainDecoder | FrozenTarget | None = None,
    ) -> None:
        self.target = target
        self.max_len = max_len
        self.cache = RaggedCache(rows, max_len + drafts, device=target.device)
        self.forward = forward or plain_or_none(target) or target
        self.compiled: CompiledForward | None = None
        self.ran_compiled = False
        self._width = 1 + drafts  # new tokens of a row in a round

    def compile(self, options: CompileOptions | None, *, trees: bool = False) -> None:
        """Rounds run at static shapes from now on, those of `trees` as well; None: all runs eager
        again. While no row holds anything."""
        if options is None:
            self.compiled = None
            return
        # torch's compiler takes seconds to import
        from draftsmith.inference.model_runner.compiled_step import CompiledForward

        self.compiled = CompiledForward(
            self.forward, self.cache, self._width, self.max_len, options, trees=trees
        )

    def __call__(
        self, start: int, token_ids: Tensor, tree: TreePlaces | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """token_ids [b, T], written behind the length of rows start, start + 1, … -> taps [b, T,
        n·H] (None without taps), last_hidden [b, T, H], the input of `logits`.

        Lengths stay what they are until `advance` or `keep`. `tree`: the new tokens are no chain.
        """
        if self.compiled is not None:
            features = self.compiled(start, token_ids, tree)
            if features is not None:
                self.ran_compiled = True
                return features
        self.ran_compiled = False
        return run_rows(
            self.forward, self.cache, start, token_ids, max_positions=self.max_len, tree=tree
        )

    def logits(self, last_hidden: Tensor) -> Tensor:
        """last_hidden [..., H] -> [..., V]."""
        return self.forward.logits(last_hidden)

    # ------------------------------------------------------------------ rows

    def advance(self, start: int, counts: Sequence[int]) -> None:
        """Row start + i keeps the first counts[i] of the tokens last run in it."""
        self.cache.advance_rows(start, counts)

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Rows 0, 1, … keep the tokens at nodes[row] (ascending) of those last run in them, closed
        up."""
        self.cache.keep(nodes)

    def move(self, src_row: int, dst_row: int) -> None:
        """The text of `src_row` goes on in `dst_row`."""
        self.cache.move(src_row, dst_row)

    def reset(self, row: int) -> None:
        """Empties `row` for another text."""
        self.cache.reset(row)

    @torch.inference_mode()
    def bytes_per_row(self) -> int:
        """Memory of keys and values of a row at its full length, found by running one token."""
        token_ids = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        probe = RaggedCache(1, 1, device=self.target.device)
        run_rows(self.forward, probe, 0, token_ids)
        return probe.bytes() * self.cache.max_len

    # ------------------------------------------------------------------ beside requests

    def scratch(self, rows: int, max_len: int) -> ModelRunner:
        """The same forward, eager, over empty rows of its own: to run what is no request."""
        return ModelRunner(self.target, rows, max_len, forward=self.forward)

    def rehearse(self, rows: int, T: int) -> None:
        """Runs T tokens of each of the first rows, forgets them and waits: to be timed."""
        token_ids = torch.zeros(rows, T, dtype=torch.long, device=self.target.device)
        _, last_hidden = self(0, token_ids)
        self.logits(last_hidden).argmax(-1).tolist()

    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        """Compiles every shape until then, once requests have run; nothing where all runs eager.
        `longest`: tokens of the longest text that is to come."""
        if self.compiled is not None:
            self.compiled.warm_up(deadline, longest)
