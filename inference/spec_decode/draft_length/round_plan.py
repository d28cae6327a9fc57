"""One round's length, decided depth by depth: which number of further drafts gains most, at the price of its time.

With B rows whose drafts share one forward, a round that drafts to depth d and verifies w tokens per row

    commits   B + Σ_b Σ_{k≤w} S_bk        S_bk: probability that the first k drafts of row b are all accepted
    costs     V(w + 1) + D(d)

and the best long-run ratio of the two is reached by weighing every round's tokens against its time at one price, the
rate ρ (Dinkelbach 1967): go on while some number of further drafts gains more tokens than ρ times what it costs. That
number is looked for as a whole, since the first draft may be the dear one, as it is when a second token per row turns
a matrix-vector product into a matrix product. ρ is the best ratio that a length fixed now would have, and STOPPING of
what that gains over plain steps, as time saved is spent on rounds that stop in time too.

**Never anticipating.** Verification is only lossless if whether draft k is verified is decided without looking at the
token x_k; it may depend on x_1 .. x_{k-1} and on what x_k is about to be drawn from. A plan is shown no tokens. It is
shown confidences, one depth at a time, each known before the draw at its depth, and every answer is final.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.spec_decode.draft_length.acceptance_estimator import AcceptanceEstimator, RequestHistory

STOPPING = 0.3  # what stopping in time adds to the gain of the best fixed length; 0.2 to 0.7 make no difference


class RoundPlan:
    """room [B]: drafts that each row may have, not all 0; verify, draft: V(w + 1) and D(w) for w = 0 … K.

    planned      drafts worth having if nothing more were learnt on the way
    least_bad    the same, if there must be some
    settled      drafts that will be verified, of every row that has as many
    seen         depths whose confidence was shown
    told         whether the proposer says how sure it is
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
        self.outlook = estimator.outlook(histories, most)
        self._alive = [1.0] * len(room)  # [B] probability that the drafts settled so far are all accepted
        self._pending = self._alive  # what _alive is once the depth seen last is settled
        self.settled = self.seen = self._forced = 0
        self.told = False
        ahead = estimator.ahead(self.outlook)
        first = [row[0] if limit else 0.0 for row, limit in zip(ahead, room, strict=True)]
        tokens = [float(len(room)), *self._gains(first, [row[1:] for row in ahead])]
        for w in range(1, most + 1):
            tokens[w] += tokens[w - 1]
        best, plain = max(t / cost for t, cost in zip(tokens, self._cost, strict=True)), tokens[0] / self._cost[0]
        self._rate = best + STOPPING * (best - plain)  # ρ
        net = [t - self._rate * cost for t, cost in zip(tokens, self._cost, strict=True)]
        self.planned = _best(net)
        self.least_bad = 1 + _best(net[1:])

    @property
    def free(self) -> bool:
        """Whether drafting takes next to no time, so that deciding can wait until the drafts are there."""
        return self._draft[-1] < 0.01 * self._verify[0]

    def time(self, depth: int, width: int) -> float:
        """Of a round that drafts to `depth` and verifies `width`, in rounds without drafts."""
        return (self._verify[width] + self._draft[depth]) / self._verify[0]

    def worth_looking(self) -> bool:
        """Whether the next draft is worth its drafting, as it may be dropped once its confidence is known."""
        k = self.settled
        if k == len(self._draft) - 1:
            return False
        found = [max(0.0, *net) for net in self._scenarios(drafted=False)]
        return sum(found) > len(found) * self._rate * (self._draft[k + 1] - self._draft[k])

    def worth_drafting(self) -> int:
        """Drafts worth their drafting at the start, as those that are not sure enough may be dropped afterwards."""
        found = list(self._scenarios(drafted=True))
        net = [0.0]
        for depth in range(1, len(self._draft)):
            gain = sum(max(0.0, *each[:depth]) for each in found) / len(found)
            net.append(gain - self._rate * self._draft[depth])
        return _best(net)

    def limit(self, counts: Sequence[int]) -> None:
        """Drafts that the rows turned out to have."""
        self._room = [min(limit, count) for limit, count in zip(self._room, counts, strict=True)]

    def show(self, confidence: Sequence[float] | None, *, drafted: bool) -> int:
        """The next depth's confidence [B] -> how many drafts are wanted from it on, this one included; 0 is final
        unless `force` follows.

        None: the proposer does not say. `drafted`: the rest of the chain is drafted already, and costs nothing more.
        """
        k = self.settled
        first, second = self._estimator.see(self.outlook, confidence)
        this = self._pending = self._next(first)
        self.seen, self.told = k + 1, confidence is not None
        if not drafted and second and self._both_pay(this, second):
            self._alive, self.settled = this, k + 1
            return 2
        net = self._net(this, self._estimator.ahead(self.outlook), drafted)
        best = _best(net)
        self.least_bad = 1 + best
        wanted = max(self.least_bad if net[best] > 0 else 0, self._forced - k)
        if wanted:
            self._alive, self.settled = this, k + 1
        if wanted == 1 and not drafted and self.worth_looking():
            return 2
        return wanted

    def _both_pay(self, this: Sequence[float], after: Sequence[float]) -> bool:
        """Whether the next draft, of survival `this` [B], and the one after it, with a [B], gain what each of them
        costs: then there is no need to look further."""
        k = self.settled
        if sum(this) <= self._rate * (self._verify[k + 1] - self._verify[k]):
            return False
        gain = sum([s * a for s, a, limit in zip(this, after, self._room, strict=True) if k + 1 < limit])
        return gain > self._rate * (self._cost[k + 2] - self._cost[k + 1])

    def force(self, drafts: int) -> int:
        """That many drafts in all, whatever they are worth, though the first was not wanted; returns it."""
        self._forced = drafts
        if self.seen > self.settled:
            self._alive, self.settled = self._pending, self.seen
        return drafts

    # ------------------------------------------------------------------ sums

    def _next(self, estimates: Sequence[float]) -> list[float]:
        """a_k [B] of the next draft -> its survival, 0 in rows that have no such draft."""
        k = self.settled
        return [s * a if k < limit else 0.0 for s, a, limit in zip(self._alive, estimates, self._room, strict=True)]

    def _gains(self, this: Sequence[float], ahead: Sequence[Sequence[float]]) -> list[float]:
        """Expected accepted tokens of each of the K-k next depths, all rows together.

        this [B]: survival of the next draft; ahead [B, K-k-1]: a of those after it, given that.
        """
        k = self.settled
        gains = [0.0] * (len(self._draft) - 1 - k)
        for survival, row, limit in zip(this, ahead, self._room, strict=True):
            if not survival:
                continue
            gains[0] += survival
            for place, a in enumerate(row[: limit - k - 1], 1):
                survival *= a
                gains[place] += survival
        return gains

    def _net(self, this: Sequence[float], ahead: Sequence[Sequence[float]], drafted: bool) -> list[float]:
        """Tokens gained less ρ times the time, of verifying 1 … K-k drafts more."""
        k, net, gained = self.settled, [], 0.0
        cost = self._verify if drafted else self._cost
        start = self._verify[k] if drafted else self._verify[k] + self._draft[k + 1]
        for place, gain in enumerate(self._gains(this, ahead), k + 1):
            gained += gain
            net.append(gained - self._rate * (cost[place] - start))
        return net

    def _scenarios(self, drafted: bool) -> list[list[float]]:
        """`_net` for each of the estimator's scenarios of the next confidence."""
        scenarios = self._estimator.scenarios(self.outlook)
        return [self._net(self._next(this), ahead, drafted) for this, ahead in scenarios]


def _best(values: Sequence[float]) -> int:
    """The place of the largest, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)
