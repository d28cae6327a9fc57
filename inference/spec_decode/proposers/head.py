"""Drafts of a trained head: feeds it the target's features of the committed text and samples its
logits.

Slot p of the head's cache is (token x_{p+1}, features of position p), so features wait here until
their next token is known; a draft model reads no features, and its slots are tokens alone. The
maths is the family's (`Drafter.draft_steps`); the tokens are sampled here, as each request's
sampling parameters say."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.metrics import DRAFT_HEAD, SAMPLING
from draftsmith.inference.model_runner.plain_decoder import plain_or_none
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import (
    argmax,
    batch_probabilities,
    check_drawn,
    inverse_cdf,
    uniforms,
)
from draftsmith.inference.spec_decode.logits import active_rows, process_chain_logits
from draftsmith.inference.spec_decode.proposal import Proposal, padded
from draftsmith.inference.spec_decode.proposers.base import Proposer, TimedMethod
from draftsmith.inference.spec_decode.round_plan import RoundPlan
from draftsmith.inference.spec_decode.tree_drafting import GROWTHS, TreeGrowth
from draftsmith.inference.spec_decode.tree_shape import TreeShape
from draftsmith.speculators.drafter import DraftInput, TreeLevel
from draftsmith.speculators.precision import on_device
from draftsmith.speculators.vocab.draft_vocab import scatter_to_target, to_target_ids

if TYPE_CHECKING:
    from draftsmith.inference.model_runner.compile_options import CompileOptions
    from draftsmith.inference.model_runner.compiled_chain import CompiledChain
    from draftsmith.speculators.drafter import Drafter
    from draftsmith.speculators.target.frozen_target import FrozenTarget

# logits [b, V_draft] of a depth -> its drafts [b], target ids
Draw = Callable[[Tensor], Tensor]

MAX_LOGIT = 6.0  # of a confidence
# features that may wait beyond those of a round while nothing is drafted: the head reads them in
# few forwards
SPARE = 16


class HeadProposer(Proposer):
    """Drafts for at most `max_rows` rows of `max_model_len` tokens with a drafter that is attached
    to `target`.

    num_speculative_tokens  K, tokens of a chain
    draft_sample_method     "probabilistic": sampled from q; "greedy": its argmax at any
                            temperature, a one-hot q
    tree                    the shape of a tree in place of a chain
    """

    reads_features = True
    cache: RaggedCache

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        max_rows: int,
        max_model_len: int,
        *,
        num_speculative_tokens: int = 4,
        draft_sample_method: str = "probabilistic",
        tree: TreeShape | None = None,
    ) -> None:
        super().__init__(num_speculative_tokens if tree is None else tree.budget)
        depth = num_speculative_tokens if tree is None else tree.depth
        drafter.require_depth(
            depth, "num_speculative_tokens" if tree is None else "the depth of the tree of drafts"
        )
        drafter.require_length(max_model_len, "max_model_len")
        drafter.decode_with(plain_or_none)
        self._drafter = drafter
        self._vocab_size = target.vocab_size
        self._device = target.device
        self._probabilistic = draft_sample_method == "probabilistic"
        self._draft_to_target = drafter.draft_to_target
        self._tree = tree
        self._depth = depth
        self.drafts_trees = tree is not None
        at_once = drafter.traits.whole_blocks and tree is None and not drafter.traits.reads_drafts
        self.stops_early = self._device.type == "cpu" and not at_once
        self._seen = [0] * max_rows  # slots of each row that the drafter holds
        self._room = depth + 1 + SPARE
        self._waiting = _WaitingFeatures(max_rows, self._room)
        # a round writes up to `room` padded slots of text, and those of its drafts behind them
        speculative = depth if tree is None else tree.speculative_slots
        longest = max_model_len + self._room + max(speculative, self.max_width)
        self.cache = RaggedCache(max_rows, drafter.cache_length(longest), device=self._device)
        self._best_chain: CompiledChain | None = None

    @override
    def compile(self, options: CompileOptions | None) -> None:
        """Chains of the best drafts; trees and sampled chains stay eager."""
        self._best_chain = None
        if self._tree is None and options is not None:
            # torch's compiler takes seconds to import
            from draftsmith.inference.model_runner.compiled_chain import compiled_chain

            self._best_chain = compiled_chain(self._drafter, self.cache, self._depth, options)

    @override
    def timed_methods(self) -> list[TimedMethod]:
        methods = super().timed_methods()
        methods += [
            TimedMethod(self, name, SAMPLING) for name in ("_choose", "_distributions", "_grow")
        ]
        if self._best_chain is None:  # else one step has the head, and its maths stays as compiled
            methods.append(TimedMethod(self._drafter, "head", DRAFT_HEAD))
        return methods

    @override
    def warm_up(self, deadline: float, longest: int | None = None) -> None:
        if self._best_chain is not None:
            self._best_chain.step.warm_up(deadline, longest)

    @override
    @torch.inference_mode()
    def bytes_per_row(self) -> int:
        probe = RaggedCache(1, self._drafter.cache_length(1), device=self._device)
        target = self._drafter.target
        dtype = target.dtype
        taps = last_hidden = None
        if self._drafter.traits.reads_taps:
            width = len(self._drafter.config.tap_layers) * target.hidden_size
            taps = torch.zeros(1, 1, width, dtype=dtype, device=self._device)
        if self._drafter.traits.reads_last_hidden:
            last_hidden = torch.zeros(1, 1, target.hidden_size, dtype=dtype, device=self._device)
        token_ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._drafter.append(DraftInput(probe, 0, 1, token_ids, taps, last_hidden, [1]))
        return probe.bytes() // probe.capacity * self.cache.max_len

    @override
    def prefill(
        self,
        start: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        """The last position of a prompt waits until its next token is sampled."""
        features = self._read(taps, last_hidden)
        known: list[int] = []
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            prompt_slots = request.num_prompt_tokens - self._drafter.traits.first_token
            slots = prompt_slots - self._seen[start + i]
            known.append(min(count, slots))
            if known[i] < count:  # the last position: its next token is not sampled yet
                place = slice(i, i + 1), slice(known[i], known[i] + 1)
                self._waiting.add(start + i, [1], {kind: f[place] for kind, f in features.items()})
        if width := max(known):
            features = {kind: f[:, :width] for kind, f in features.items()}
            self._drafter.append(self._inputs(start, requests, known, features))

    @override
    def observe(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        """They wait until drafts are asked for, or there is no room for more."""
        self._waiting.add(0, counts, self._read(taps, last_hidden))

    def _read(self, taps: Tensor | None, last_hidden: Tensor) -> dict[str, Tensor]:
        """The features of a round that the drafter reads."""
        features = {"last_hidden": last_hidden} if self._drafter.traits.reads_last_hidden else {}
        if self._drafter.traits.reads_taps and taps is not None:
            features["taps"] = taps
        return features

    @override
    def propose(self, requests: Sequence[Request], plan: RoundPlan) -> Proposal:
        asks = plan.reads_confidence and self.stops_early
        limits = plan.limits_asking if asks else plan.limits
        # of a chain its length, of a tree its nodes
        counts = [min(limit, self.num_speculative_tokens) for limit in limits]
        if not any(counts):
            if max(self._unread(requests)) + self._depth + 1 > self._room:
                self._drafter.append(self._take_waiting(requests))
            return Proposal.empty(len(requests), self._device)
        if self._tree is not None:
            return self._draft_tree(requests, counts, self._probabilistic)
        return self._draft_chain(requests, counts, plan)

    @override
    def rehearse(self, requests: Sequence[Request], depth: int) -> bool:
        """Of a tree always all of it, whatever `depth`. Always True."""
        rows = len(requests)
        seen = list(self._seen)
        waiting = list(self._waiting.counts)
        lengths = self.cache.lengths[:rows]
        if self._tree is not None:  # the whole tree
            self._draft_tree(requests, [self._tree.budget] * rows, probabilistic=False)
        else:
            inputs = self._take_waiting(requests)
            best = partial(self._choose, None)
            drafted, _ = self._draft_all(inputs, requests, depth, best, confident=True)
            for token_ids in drafted:
                token_ids.tolist()  # waits for the device
        self._seen = seen
        self._waiting.counts = waiting
        for row, length in enumerate(lengths):
            self.cache.truncate(row, length)
        return True

    # ------------------------------------------------------------------ chains

    def _draft_chain(
        self, requests: Sequence[Request], counts: Sequence[int], plan: RoundPlan
    ) -> Proposal:
        """Chains of at most counts[b] tokens, not all 0; shorter where the plan ends them."""
        inputs = self._take_waiting(requests)
        depth = max(counts)
        sampled = None
        if self._probabilistic and not all(request.params.greedy for request in requests):
            sampled = _SampledChain(requests, counts, self._draft_to_target, self._device)
        plain = sampled is None and not plan.reads_confidence and not active_rows(requests)
        if plain and self._best_chain is not None:
            token_ids = self._best_chain(inputs)
            if token_ids is not None:
                return Proposal(token_ids[:, :depth], list(counts))
        draw = partial(self._choose, sampled)
        confidence = None
        if plan.reads_confidence and self.stops_early:
            drafted = self._draft_asking(inputs, requests, depth, draw, plan)
        else:
            drafted, confidences = self._draft_all(
                inputs, requests, depth, draw, confident=plan.reads_confidence
            )
            if confidences:
                confidence = torch.stack(confidences, 1)
        if not drafted:
            return Proposal.empty(len(requests), self._device)
        q = None
        if sampled is not None:
            q = self._distributions(sampled)
        counts = [min(count, len(drafted)) for count in counts]
        return Proposal(torch.stack(drafted, 1), counts, q, confidence=confidence)

    def _draft_asking(
        self,
        inputs: DraftInput,
        requests: Sequence[Request],
        depth: int,
        draw: Draw,
        plan: RoundPlan,
    ) -> list[Tensor]:
        """Drafts [b] of one depth after the other, until the plan wants no more: it is asked before
        each draw, and its answer waits for the confidence."""
        drafted: list[Tensor] = []
        with closing(self._depths(inputs, requests, drafted, depth)) as depths:
            for logits, predicted in depths:
                further = plan.go_on(_confidence(logits, predicted).tolist())
                if further:
                    drafted.append(draw(logits))
                if further <= 1:
                    break
        return drafted

    def _draft_all(
        self,
        inputs: DraftInput,
        requests: Sequence[Request],
        depth: int,
        draw: Draw,
        *,
        confident: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Drafts [b] of `depth` depths, and their confidences [b] if `confident`, else none. Waits
        for no device."""
        drafted: list[Tensor] = []
        confidences: list[Tensor] = []
        with closing(self._depths(inputs, requests, drafted, depth)) as depths:
            for logits, predicted in depths:
                if confident:
                    confidences.append(_confidence(logits, predicted))
                drafted.append(draw(logits))
        return drafted, confidences

    def _depths(
        self, inputs: DraftInput, requests: Sequence[Request], drafted: list[Tensor], depth: int
    ) -> Generator[tuple[Tensor, Tensor | None]]:
        """Processed logits [b, V_draft] of one depth after the other, and the acceptance [b] that
        the drafter predicts, a logit, if it predicts any. `drafted`: the tokens [b] of each depth
        so far; the caller adds those of a depth before it asks for the next."""
        # a row's drafts must not depend on how many its neighbours may have
        num_steps = self._depth if self._drafter.traits.whole_blocks else depth
        with closing(self._drafter.draft_steps(inputs, num_steps)) as steps:
            for _ in range(depth):
                step = steps.send(drafted[-1] if drafted else None)
                logits = process_chain_logits(
                    step.logits, requests, drafted, self._draft_to_target, self._vocab_size
                )
                yield logits, step.confidence

    def _choose(self, sampled: _SampledChain | None, logits: Tensor) -> Tensor:
        """Logits [b, V_draft] of the next depth -> its drafts [b], target ids: drawn, or without
        `sampled` the best."""
        if sampled is not None:
            return sampled(logits)
        return to_target_ids(argmax(logits), self._draft_to_target)

    def _distributions(self, sampled: _SampledChain) -> Tensor:
        """What the drafts were drawn from, [b, depth, V]."""
        return scatter_to_target(sampled.distributions(), self._draft_to_target, self._vocab_size)

    # ------------------------------------------------------------------ trees

    def _draft_tree(
        self, requests: Sequence[Request], counts: Sequence[int], probabilistic: bool
    ) -> Proposal:
        """Trees of at most counts[b] nodes."""
        assert self._tree is not None
        vocabularies = self._draft_to_target, self._vocab_size
        growth = GROWTHS[type(self._tree)](
            self._tree, requests, counts, *vocabularies, probabilistic=probabilistic
        )
        grow = partial(self._grow, growth)
        self._drafter.draft_tree(self._take_waiting(requests), self._depth, grow)
        return growth.proposal()

    def _grow(self, growth: TreeGrowth, logits: Tensor) -> TreeLevel | None:
        """The next level of a tree, by the logits [b, nodes, V_draft] of the last one."""
        return growth(logits)

    # ------------------------------------------------------------------ rows

    def _unread(self, requests: Sequence[Request]) -> list[int]:
        """Slots of each row whose token is known and which the drafter does not hold yet."""
        first = self._drafter.traits.first_token
        return [
            len(request.token_ids) - first - seen for request, seen in zip(requests, self._seen)
        ]

    def _take_waiting(self, requests: Sequence[Request]) -> DraftInput:
        """All waiting features, which the drafter has read from now on."""
        counts = self._unread(requests)
        return self._inputs(0, requests, counts, self._waiting.take(len(requests), max(counts)))

    def _inputs(
        self,
        first_row: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        features: dict[str, Tensor],
    ) -> DraftInput:
        """The next counts[i] slots of row first_row + i, which the drafter holds from now on."""
        tokens = []
        for row, (request, count) in enumerate(zip(requests, counts, strict=True), first_row):
            start = self._seen[row] + self._drafter.traits.first_token
            tokens.append(request.token_ids[start : start + count])
            self._seen[row] += count
        return DraftInput(
            self.cache,
            first_row,
            first_row + len(requests),
            on_device(padded(tokens), self._device),
            features.get("taps"),
            features.get("last_hidden"),
            counts,
        )

    @override
    def reset(self, row: int) -> None:
        self.cache.reset(row)
        self._seen[row] = self._waiting.counts[row] = 0

    @override
    def move(self, src_row: int, dst_row: int) -> None:
        self.cache.move(src_row, dst_row)
        self._waiting.move(src_row, dst_row)
        self._seen[dst_row] = self._seen[src_row]


class _WaitingFeatures:
    """Features of committed positions that the drafter has not read yet, by their kind: [rows,
    room, ·]. `counts`: positions of each row."""

    def __init__(self, rows: int, room: int) -> None:
        self._rows = rows
        self._room = room
        self._buffers: dict[str, Tensor] = {}
        self.counts = [0] * rows

    def add(self, start: int, counts: Sequence[int], features: dict[str, Tensor]) -> None:
        """Keeps the first counts[i] of features [b, T, ·] of row start + i behind those that wait;
        there must be room for T."""
        stop = start + len(counts)
        waiting = self.counts[start:stop]
        for kind, new in features.items():
            if kind not in self._buffers:
                self._buffers[kind] = new.new_zeros(self._rows, self._room, new.shape[-1])
            rows = torch.arange(start, stop, device=new.device)[:, None]
            first = on_device(waiting, new.device)[:, None]  # [b, 1]
            places = first + torch.arange(new.shape[1], device=new.device)
            self._buffers[kind][rows, places] = new
        self.counts[start:stop] = [n + more for n, more in zip(waiting, counts, strict=True)]

    def take(self, rows: int, width: int) -> dict[str, Tensor]:
        """The first `width` positions of the first rows, which wait no longer."""
        self.counts[:rows] = [0] * rows
        return {kind: buffer[:rows, :width] for kind, buffer in self._buffers.items()}

    def move(self, src_row: int, dst_row: int) -> None:
        for buffer in self._buffers.values():
            buffer[dst_row] = buffer[src_row]
        self.counts[dst_row] = self.counts[src_row]


class _SampledChain:
    """Draws drafts from q, each row with its own sampling parameters and its own generator.

    A row takes as many numbers as it may draft, in one call, whatever its neighbours draft. Rows at
    temperature 0 take none: their q is one-hot, and any number draws its argmax."""

    def __init__(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        draft_to_target: Tensor | None,
        device: torch.device,
    ) -> None:
        self._params = [request.params for request in requests]
        self._draft_to_target = draft_to_target
        numbers = [
            [] if request.params.greedy else uniforms(request.generator, count)
            for request, count in zip(requests, counts, strict=True)
        ]
        noise = on_device(padded(numbers, max(counts)), device, torch.float64)  # [b, depth]
        self._noise = noise.unbind(1)
        self._q: list[Tensor] = []
        self._drawn: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """[b, V_draft] of the next depth -> [b] target ids."""
        q = batch_probabilities(logits.unsqueeze(1), self._params).squeeze(1)  # float32
        drawn = inverse_cdf(q, self._noise[len(self._q)])
        self._q.append(q)
        self._drawn.append(drawn)
        return to_target_ids(drawn.clamp(max=q.shape[-1] - 1), self._draft_to_target)

    def distributions(self) -> Tensor:
        """[b, depth, V_draft], having checked that every draft could be drawn."""
        check_drawn(torch.cat(self._drawn).tolist(), self._q[0].shape[-1])
        return torch.stack(self._q, dim=1)


def _confidence(logits: Tensor, predicted: Tensor | None) -> Tensor:
    """The drafter's largest probability [b]; not that of the draft, which was drawn by it. With an
    acceptance [b] that the drafter predicts, a logit, the mean log-odds of both as a probability,
    which predicts acceptance better than either (docs/families/dflash.md)."""
    largest = logits.float().softmax(-1).amax(-1)
    if predicted is None:
        return largest
    both = torch.stack([predicted, largest.logit()])
    return both.clamp(-MAX_LOGIT, MAX_LOGIT).mean(0).sigmoid()
