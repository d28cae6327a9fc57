"""RoundPlan: the draft length of one round, chosen depth by depth to maximise accepted tokens per
time.

With B rows whose drafts share one forward, a round that drafts to depth d and verifies w tokens per
row

    commits   B + Σ_b Σ_{k≤w} S_bk        S_bk: probability that the first k drafts of row b are all
              accepted
    costs     V(w + 1) + D(d)

The best long-run ratio of the two is reached by weighing every round's tokens against its time at
one price, the rate ρ (Dinkelbach 1967): draft on while some number of further drafts gains more
tokens than ρ times its time. All numbers of further drafts are compared, since the first one may be
the expensive one, as it is when a second token per row turns a matrix-vector product into a matrix
product. ρ is the best ratio of a length that is fixed now, plus EARLY_STOP_GAIN of what that ratio
gains over plain decoding, as rounds that stop early save time.

**No look-ahead.** Verification is lossless only if the decision to verify draft k does not depend
on the token x_k. It may depend on x_1 .. x_{k-1} and on the distribution that x_k is drawn from. A
plan is given no tokens. It is given confidences, one depth at a time, each before the draw at its
depth, and every answer is final."""

from __future__ import annotations

from collections.abc import Sequence

from inference.spec_decode.draft_length.acceptance_estimator import (
    AcceptanceEstimator,
    RequestHistory,
)

EARLY_STOP_GAIN = (
    0.3  # share of the gain of the best fixed length; decisions are alike from 0.2 to 0.7
)
FREE_DRAFTING = (
    0.01  # share of a plain decoding step that drafting the rest of the K tokens takes at most
)


class RoundPlan:
    """room [B]: drafts that each row may have, not all 0; verify, draft: V(w + 1) and D(w) for w =
    0 … K.

    best_length           drafts that pay if no confidence were known on the way; may be 0
    best_nonzero_length   the same, of at least 1
    committed_length      drafts that will be verified, in every row that has as many
    num_depths_seen       depths whose confidence was given
    confidence_available  the proposer reports confidences
    """

    def __init__(
        self,
        estimator: AcceptanceEstimator,
        histories: Sequence[RequestHistory],
        room: Sequence[int],
        verify: Sequence[float],
        draft: Sequence[float],
    ) -> None:
        most = max(room)
        self._estimator, self.histories, self._room = estimator, histories, list(room)
        self._verify, self._draft = list(verify[: most + 1]), list(draft[: most + 1])
        self._cost = [v + d for v, d in zip(self._verify, self._draft, strict=True)]
        self.state = estimator.start_round(histories, most)
        self._survival = [1.0] * len(
            room
        )  # [B] probability that the committed drafts are all accepted
        self._next_survival = self._survival  # the same once the depth seen last is committed
        self.committed_length = self.num_depths_seen = self._forced_length = 0
        self.confidence_available = False
        remaining = estimator.estimate_remaining(self.state)
        first = [row[0] if limit else 0.0 for row, limit in zip(remaining, room, strict=True)]
        tokens = [float(len(room)), *self._gains(first, [row[1:] for row in remaining])]
        for w in range(1, most + 1):
            tokens[w] += tokens[w - 1]
        best, plain = (
            max(t / cost for t, cost in zip(tokens, self._cost, strict=True)),
            tokens[0] / self._cost[0],
        )
        self._rate = best + EARLY_STOP_GAIN * (best - plain)  # ρ
        net = [t - self._rate * cost for t, cost in zip(tokens, self._cost, strict=True)]
        self.best_length = _argmax(net)
        self.best_nonzero_length = 1 + _argmax(net[1:])

    def drafting_is_free(self, depth: int = 0) -> bool:
        """Drafting on from `depth` takes so little time that the length can be chosen after all K
        are drafted."""
        return self._draft[-1] - self._draft[depth] < FREE_DRAFTING * self._verify[0]

    def relative_time(self, depth: int, width: int) -> float:
        """The time of a round that drafts to `depth` and verifies `width`, in plain decoding
        steps."""
        return (self._verify[width] + self._draft[depth]) / self._verify[0]

    def next_draft_pays(self) -> bool:
        """The next draft is worth its drafting, though it may be dropped once its confidence is
        known."""
        k = self.committed_length
        if k == len(self._draft) - 1:
            return False
        gains = [max(0.0, *net) for net in self._scenarios(drafted=False)]
        return sum(gains) > len(gains) * self._rate * (self._draft[k + 1] - self._draft[k])

    def best_depth(self) -> int:
        """The number of drafts to draft at the start, if those with low confidence may be dropped
        afterwards."""
        scenarios = list(self._scenarios(drafted=True))
        net = [0.0]
        for depth in range(1, len(self._draft)):
            gain = sum(max(0.0, *scenario[:depth]) for scenario in scenarios) / len(scenarios)
            net.append(gain - self._rate * self._draft[depth])
        return _argmax(net)

    def limit_rows(self, counts: Sequence[int]) -> None:
        """Limits each row to the number of drafts [B] that it got."""
        self._room = [min(limit, count) for limit, count in zip(self._room, counts, strict=True)]

    def decide_next(self, confidence: Sequence[float] | None, *, drafted: bool) -> int:
        """The number of drafts wanted from the next depth on, the next one included, given its
        confidence [B].

        0 is final unless `force` follows. `confidence` None: the proposer reports none. `drafted`:
        the rest of the chain is drafted already and costs nothing more."""
        k = self.committed_length
        first, second = self._estimator.estimate_next(self.state, confidence)
        this = self._next_survival = self._survival_after(first)
        self.num_depths_seen, self.confidence_available = k + 1, confidence is not None
        if not drafted and second and self._both_pay(this, second):
            self._survival, self.committed_length = this, k + 1
            return 2
        net = self._net(this, self._estimator.estimate_remaining(self.state), drafted)
        best = _argmax(net)
        self.best_nonzero_length = 1 + best
        wanted = max(self.best_nonzero_length if net[best] > 0 else 0, self._forced_length - k)
        if wanted:
            self._survival, self.committed_length = this, k + 1
        if wanted == 1 and not drafted and self.next_draft_pays():
            return 2
        return wanted

    def decide_all(self, confidences: Sequence[Sequence[float]]) -> int:
        """The number of drafts to verify of a chain that is drafted already, given the confidences
        [d][B] of all of its depths. Only where none of them depends on a draft. 0 is final unless
        `force` follows."""
        first, *others = (
            self._estimator.estimate_next(self.state, confidence)[0] for confidence in confidences
        )
        remaining = list(zip(*others, strict=True)) or [()] * len(first)  # [B, d-1]
        net = self._net(self._survival_after(first), remaining, drafted=True)
        self.num_depths_seen, self.confidence_available = len(confidences), True
        best = _argmax(net)
        self.best_nonzero_length = 1 + best
        self.committed_length = max(
            self.best_nonzero_length if net[best] > 0 else 0, self._forced_length
        )
        return self.committed_length

    def force(self, drafts: int) -> int:
        """Commits to `drafts` drafts in all, though the first was not wanted; returns their
        number."""
        self._forced_length = drafts
        if self.num_depths_seen > self.committed_length:
            self._survival = self._next_survival
            self.committed_length = min(drafts, self.num_depths_seen)
        return drafts

    def _both_pay(self, this: Sequence[float], after: Sequence[float]) -> bool:
        """The next draft, of survival `this` [B], and the one after it, with a [B], both gain what
        they cost, so that no other length needs to be compared."""
        k = self.committed_length
        if sum(this) <= self._rate * (self._verify[k + 1] - self._verify[k]):
            return False
        gain = sum(
            [s * a for s, a, limit in zip(this, after, self._room, strict=True) if k + 1 < limit]
        )
        return gain > self._rate * (self._cost[k + 2] - self._cost[k + 1])

    def _survival_after(self, estimates: Sequence[float]) -> list[float]:
        """a_k [B] of the next draft -> its survival [B], 0 in rows that have no such draft."""
        k = self.committed_length
        return [
            s * a if k < limit else 0.0
            for s, a, limit in zip(self._survival, estimates, self._room, strict=True)
        ]

    def _gains(self, this: Sequence[float], remaining: Sequence[Sequence[float]]) -> list[float]:
        """Expected accepted tokens of each of the K-k next depths, over all rows.

        this [B]: survival of the next draft; remaining [B, K-k-1]: a of those after it, given that.
        """
        k = self.committed_length
        gains = [0.0] * (len(self._draft) - 1 - k)
        for survival, row, limit in zip(this, remaining, self._room, strict=True):
            if not survival:
                continue
            gains[0] += survival
            for place, a in enumerate(row[: limit - k - 1], 1):
                survival *= a
                gains[place] += survival
        return gains

    def _net(
        self, this: Sequence[float], remaining: Sequence[Sequence[float]], drafted: bool
    ) -> list[float]:
        """Tokens gained less ρ times the time, for verifying 1 … K-k drafts more."""
        k, net, gained = self.committed_length, [], 0.0
        cost = self._verify if drafted else self._cost
        start = self._verify[k] if drafted else self._verify[k] + self._draft[k + 1]
        for place, gain in enumerate(self._gains(this, remaining), k + 1):
            gained += gain
            net.append(gained - self._rate * (cost[place] - start))
        return net

    def _scenarios(self, drafted: bool) -> list[list[float]]:
        scenarios = self._estimator.confidence_scenarios(self.state)
        return [
            self._net(self._survival_after(this), remaining, drafted)
            for this, remaining in scenarios
        ]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
