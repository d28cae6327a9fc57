"""Drafts of a trained head: feeds it the target's features of the committed text and samples its logits.

Slot p of the head's cache is (token x_{p+1}, features of position p), so features wait here until their next token is
known; a draft model reads no features, and its slots are tokens alone. The maths is the family's (`Drafter.draft`);
which draft is taken is decided here, as the request's sampling parameters say. Knows no verification rule and no file
format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inference.cache import RaggedCache
from inference.proposal import Proposal
from inference.proposers.base import GoOn, Proposer
from inference.request import Request
from inference.sampler import argmax, batch_probabilities, check_drawn, inverse_cdf, uniforms
from speculators.vocab import scatter_to_target, to_target_ids

if TYPE_CHECKING:
    from speculators.drafter import Drafter


SPARE = 16  # slots that may wait beyond a round's own while nothing is drafted, so that few forwards are run for them


class HeadProposer(Proposer):
    """`probabilistic=False` drafts the argmax at any temperature, which leaves q one-hot."""

    reads_features = True

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        num_speculative_tokens: int,
        max_rows: int,
        max_model_len: int,
        *,
        probabilistic: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_speculative_tokens)
        drafter.require_depth(num_speculative_tokens, "num_speculative_tokens")
        drafter.require_length(max_model_len, "max_model_len")
        self._drafter, self._vocab_size, self._probabilistic = drafter, vocab_size, probabilistic
        self._draft_to_target = drafter.draft_to_target
        self._device = torch.device(device)
        self.asks = self._device.type == "cpu"
        self._seen = [0] * max_rows  # slots of each row that the drafter holds
        self._held = [0] * max_rows  # features of each row that wait
        self._room = num_speculative_tokens + 1 + SPARE
        # a round writes at most `room` padded true slots and K speculative ones
        longest = drafter.cache_length(max_model_len + self._room + num_speculative_tokens)
        self._cache = RaggedCache(max_rows, longest, device=device)
        self._taps: Tensor | None = None  # [max_rows, room, n·H], the waiting ones
        self._last_hidden: Tensor | None = None  # [max_rows, room, H]

    # ------------------------------------------------------------------ features in

    def prefill(
        self,
        first_row: int,
        requests: Sequence[Request],
        counts: Sequence[int],
        taps: Tensor | None,
        last_hidden: Tensor,
    ) -> None:
        known = []
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            row = first_row + i
            done = self._seen[row]
            known.append(min(count, len(request.token_ids) - self._drafter.first_token - done))
            if known[i] < count:  # the prompt's last position: its next token is not sampled yet
                self._hold(row, [1], *(_slots(each, i, known[i]) for each in (taps, last_hidden)))
        if any(known):
            features = [None if f is None else f[:, : max(known)] for f in self._read(taps, last_hidden)]
            self._draft(first_row, requests, known, *features)

    def observe(
        self, requests: Sequence[Request], counts: Sequence[int], taps: Tensor | None, last_hidden: Tensor
    ) -> None:
        self._hold(0, counts, taps, last_hidden)

    def _hold(self, start: int, counts: Sequence[int], taps: Tensor | None, last_hidden: Tensor | None) -> None:
        """Keeps the first counts[i] of features [b, T, ·] of row start + i behind those that wait; T is K + 1 or less,
        and `propose` leaves room for it."""
        taps, last_hidden = self._read(taps, last_hidden)
        stop = start + len(counts)
        if self._taps is None and taps is not None:
            self._taps = self._buffer(taps)
        if self._last_hidden is None and last_hidden is not None:
            self._last_hidden = self._buffer(last_hidden)
        held = self._held[start:stop]
        for buffer, new in ((self._taps, taps), (self._last_hidden, last_hidden)):
            if new is None:
                continue
            if any(held):
                first = torch.tensor(held, device=new.device)[:, None]  # [b, 1]
                rows = torch.arange(start, stop, device=new.device)[:, None]
                buffer[rows, first + torch.arange(new.shape[1], device=new.device)] = new
            else:
                buffer[start:stop, : new.shape[1]] = new
        self._held[start:stop] = [before + count for before, count in zip(held, counts, strict=True)]

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._cache.max_rows, self._room, like.shape[-1])

    def _read(self, taps: Tensor | None, last_hidden: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What the family reads of the two."""
        return taps if self._drafter.reads_taps else None, last_hidden if self._drafter.reads_last_hidden else None

    # ------------------------------------------------------------------ drafts out

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Proposal:
        counts = [min(limit, self.num_speculative_tokens) for limit in limits]
        rows, depth = len(requests), max(counts)
        if not depth:
            if max(self._waiting(requests)) + self.num_speculative_tokens + 1 > self._room:
                self._append(requests)
            return Proposal.empty(rows, self._device)
        chain = None
        if self._probabilistic and not all(request.params.greedy for request in requests):
            chain = _SampledChain(requests, counts, depth, self._draft_to_target, self._device)
        sample = chain or self._best
        if self.go_on is None:
            token_ids, confidence = self._append(requests, depth, sample), None
        else:
            token_ids, confidence = self._append_asking(requests, depth, sample, self.go_on)
        width = token_ids.shape[1]
        if not width:
            return Proposal.empty(rows, self._device)
        q = None
        if chain is not None:
            q = scatter_to_target(chain.distributions(), self._draft_to_target, self._vocab_size)
        return Proposal(token_ids, [min(count, width) for count in counts], q, confidence=confidence)

    def rehearse(self, requests: Sequence[Request], depth: int) -> bool:
        rows, seen, held = len(requests), list(self._seen), list(self._held)
        lengths = self._cache.lengths[:rows]
        self._append(requests, depth).tolist()
        self._seen, self._held = seen, held
        self._roll_back(lengths)
        return True

    def _waiting(self, requests: Sequence[Request]) -> list[int]:
        """Slots of each row whose token is known and which the drafter does not hold yet."""
        first = self._drafter.first_token
        return [len(request.token_ids) - first - seen for request, seen in zip(requests, self._seen)]

    def _append(
        self, requests: Sequence[Request], depth: int = 0, sample: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Feeds all that waits and drafts `depth` tokens after it: [b, depth]."""
        rows, waiting = len(requests), self._waiting(requests)
        taps = None if self._taps is None else self._taps[:rows, : max(waiting)]
        last_hidden = None if self._last_hidden is None else self._last_hidden[:rows, : max(waiting)]
        self._held[:rows] = [0] * rows
        return self._draft(0, requests, waiting, taps, last_hidden, depth, sample)

    def _append_asking(
        self, requests: Sequence[Request], depth: int, sample: Callable[[Tensor], Tensor], go_on: GoOn
    ) -> tuple[Tensor, Tensor | None]:
        """The same with lengths chosen on the way: [b, up to depth], and the confidences [b, depth] if nobody was asked
        because the answer would have to wait for the device."""
        asking = _Asking(sample, go_on if self.asks else None, self._cache, len(requests))
        try:
            token_ids = self._append(requests, depth, asking)
        except _Enough:
            self._roll_back(asking.lengths)
            token_ids = torch.stack(asking.drawn, 1) if asking.drawn else torch.zeros(len(requests), 0).long()
        return token_ids, torch.stack(asking.confidences, 1) if asking.confidences else None

    def _roll_back(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self._cache.truncate(row, length)

    def _draft(
        self,
        first_row: int,
        requests: Sequence[Request],
        counts: list[int],
        taps: Tensor | None,
        last_hidden: Tensor | None,
        depth: int = 0,
        sample: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Appends counts[i] slots to row first_row + i and drafts `depth` tokens after them: [b, depth]."""
        width = max(counts)
        tokens = []
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            start = self._seen[first_row + i] + self._drafter.first_token
            tokens.append(request.token_ids[start : start + count] + [0] * (width - count))
            self._seen[first_row + i] += count
        token_ids = torch.tensor(tokens, dtype=torch.long, device=self._device)  # [b, M]
        stop = first_row + len(requests)
        return self._drafter.draft(
            self._cache, first_row, stop, token_ids, taps, last_hidden, counts, depth, sample or self._best
        )

    def _best(self, logits: Tensor) -> Tensor:
        """[b, V_draft] -> [b] target ids."""
        return to_target_ids(argmax(logits), self._draft_to_target)

    # ------------------------------------------------------------------ rows

    def reset(self, row: int) -> None:
        self._cache.reset(row)
        self._seen[row] = self._held[row] = 0

    def move(self, src_row: int, dst_row: int) -> None:
        self._cache.move(src_row, dst_row)
        for counts in (self._seen, self._held):
            counts[dst_row], counts[src_row] = counts[src_row], 0
        for buffer in (self._taps, self._last_hidden):
            if buffer is not None:
                buffer[dst_row] = buffer[src_row]


class _Enough(Exception):
    """No further draft is wanted: raised through `Drafter.draft`, whose speculative slots are then rolled back here."""


class _Asking:
    """Between the head and the dice: how sure the head is of each draft, and whether it is drawn at all.

    confidences  [b] per depth, the largest probability of the head's own distribution, if there is nobody to ask
    drawn        [b] per depth, the drafts so far, if there is
    lengths      of the cache's rows before the speculative slots
    """

    def __init__(self, sample: Callable[[Tensor], Tensor], go_on: GoOn | None, cache: RaggedCache, rows: int) -> None:
        self._sample, self._go_on, self._cache, self._rows = sample, go_on, cache, rows
        self.confidences: list[Tensor] = []
        self.drawn: list[Tensor] = []
        self.lengths: list[int] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """[b, V_draft] of the next depth -> [b] target ids."""
        logits = logits.float()
        confidence = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        if self._go_on is None:
            self.confidences.append(confidence)
            return self._sample(logits)
        if not self.drawn:
            self.lengths = self._cache.lengths[: self._rows]
        wanted = self._go_on(confidence.tolist())
        if wanted:
            self.drawn.append(self._sample(logits))
        if wanted <= 1:
            raise _Enough
        return self.drawn[-1]


class _SampledChain:
    """Draws drafts from q, each row with its own sampling parameters and its own generator.

    A row takes as many numbers as it may draft, in one call, whatever its neighbours draft. Rows at temperature 0 take
    none: their q is one-hot, and any number draws its argmax.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        depth: int,
        draft_to_target: Tensor | None,
        device: torch.device,
    ) -> None:
        self._params = [request.params for request in requests]
        self._draft_to_target = draft_to_target
        numbers = [
            ([] if request.params.greedy else uniforms(request.generator, count)) + [0.0] * depth
            for request, count in zip(requests, counts, strict=True)
        ]
        noise = torch.tensor([row[:depth] for row in numbers], dtype=torch.float64, device=device)  # [b, depth]
        self._noise = noise.unbind(1)
        self._q: list[Tensor] = []
        self._drawn: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """[b, V_draft] of the next depth -> [b] target ids."""
        q = batch_probabilities(logits.unsqueeze(1), self._params).squeeze(1)  # [b, V_draft] float32
        drawn = inverse_cdf(q, self._noise[len(self._q)])
        self._q.append(q)
        self._drawn.append(drawn)
        return to_target_ids(drawn.clamp(max=q.shape[-1] - 1), self._draft_to_target)

    def distributions(self) -> Tensor:
        """[b, depth, V_draft], having checked that every draft could be drawn."""
        check_drawn(torch.cat(self._drawn).tolist(), self._q[0].shape[-1])
        return torch.stack(self._q, dim=1)


def _slots(features: Tensor | None, row: int, position: int) -> Tensor | None:
    """[1, 1, ·] of [b, T, ·]."""
    return None if features is None else features[row : row + 1, position : position + 1]
