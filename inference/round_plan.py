"""One round's length, decided depth by depth: which number of further drafts gains most, at the price of its time.

With B rows whose drafts share one forward, a round that drafts to depth d and verifies w tokens per row

    commits   B + Σ_b Σ_{k≤w} S_bk        S_bk: probability that the first k drafts of row b are all accepted
    costs     V(w + 1) + D(d)

and the best long-run ratio of the two is reached by weighing every round's tokens against its time at one price, the
rate ρ (Dinkelbach 1967): go on while some number of further drafts gains more tokens than ρ times what it costs. That
number is looked for as a whole, since the first draft may be the dear one, as it is when a second token per row turns
a matrix-vector product into a matrix product. ρ is the best ratio that a length fixed now would have.

**Never anticipating.** Verification is only lossless if whether draft k is verified is decided without looking at the
token x_k; it may depend on x_1 .. x_{k-1} and on what x_k is about to be drawn from. A plan is shown no tokens. It is
shown confidences, one depth at a time, each known before the draw at its depth, and every answer is final.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference.acceptance_estimator import AcceptanceEstimator, Array, RequestHistory


class RoundPlan:
    """room [B]: drafts that each row may have, not all 0; verify, draft: V(w + 1) and D(w) for w = 0 … K."""

    def __init__(
        self,
        estimator: AcceptanceEstimator,
        histories: Sequence[RequestHistory],
        room: Sequence[int],
        verify: Array,
        draft: Array,
    ) -> None:
        most = max(room)
        self._estimator, self.histories, self.room = estimator, histories, list(room)
        self._verify, self._draft = verify[: most + 1], draft[: most + 1]
        self.outlook = estimator.outlook(histories, most)
        self._may = (np.arange(most) < np.array(room)[:, None]).astype(np.float64)  # [B, K]
        self._alive = np.ones(len(room))  # [B] probability that the drafts settled so far are all accepted
        self.settled = 0  # drafts per row that will be verified
        self.seen = 0  # depths that the proposer has drafted or is about to draw
        self.told = False  # whether it said how sure it was
        self._forced = 0
        self._pending = self._alive  # what _alive is if the depth seen last is settled
        cost = self._cost = self._verify + self._draft
        gains = (np.cumprod(estimator.ahead(self.outlook), 1) * self._may).sum(0)
        tokens = len(room) + np.concatenate([[0.0], gains.cumsum()])
        self._rate = (tokens / cost).max()  # ρ
        net = tokens - self._rate * cost
        self.planned = int(net.argmax())  # drafts worth having if nothing more were learnt on the way
        self.least_bad = 1 + int(net[1:].argmax())  # the same, if there must be some

    @property
    def free(self) -> bool:
        """Whether drafting takes next to no time, so that deciding can wait until the drafts are there."""
        return bool(self._draft[-1] < 0.01 * self._verify[0])

    def time(self, depth: int, width: int) -> float:
        """Of a round that drafts to `depth` and verifies `width`, in rounds without drafts."""
        return float((self._verify[width] + self._draft[depth]) / self._verify[0])

    def worth_looking(self) -> bool:
        """Whether the next draft is worth its drafting, as it may be dropped once its confidence is known."""
        k = self.settled
        if k == len(self._draft) - 1:
            return False
        this, rest = self._estimator.scenarios(self.outlook)  # [Q, B], [Q, B, K-k-1]
        net = self._net(self._alive * this * self._may[:, k], rest, drafted=False)  # [Q, K-k]
        return bool(np.maximum(net.max(-1), 0).mean() > self._rate * (self._draft[k + 1] - self._draft[k]))

    def worth_drafting(self) -> int:
        """Drafts worth their drafting at the start, as those that are not sure enough may be dropped afterwards."""
        this, rest = self._estimator.scenarios(self.outlook)
        verified = np.maximum.accumulate(self._net(self._alive * this * self._may[:, 0], rest, drafted=True), -1)
        net = np.maximum(verified, 0).mean(0) - self._rate * self._draft[1:]  # [K]
        return 1 + int(net.argmax()) if net.max() > 0 else 0

    def force(self, drafts: int) -> int:
        """That many drafts in all, whatever they are worth, though the first was not wanted; returns it."""
        self._forced = drafts
        if self.seen > self.settled:
            self._alive, self.settled = self._pending, self.seen
        return drafts

    def show(self, confidence: Sequence[float] | None, *, drafted: bool) -> int:
        """The next depth's confidence [B] -> how many drafts are wanted from it on, this one included; 0 is final
        unless `force` follows.

        None: the proposer does not say. `drafted`: the rest of the chain is drafted already, and costs nothing more.
        """
        k = self.settled
        this = self._pending = self._alive * self._estimator.see(self.outlook, confidence) * self._may[:, k]
        self.seen, self.told = k + 1, confidence is not None
        net = self._net(this, np.cumprod(self._estimator.ahead(self.outlook), 1), drafted)
        self.least_bad = 1 + int(net.argmax())
        wanted = max(self.least_bad if net.max() > 0 else 0, self._forced - k)
        if wanted:
            self._alive, self.settled = this, k + 1
        if wanted == 1 and not drafted and self.worth_looking():
            return 2
        return wanted

    def limit(self, counts: Sequence[int]) -> None:
        """Drafts that the rows turned out to have."""
        self._may = self._may * (np.arange(self._may.shape[1]) < np.array(counts)[:, None])

    def _net(self, this: Array, rest: Array, drafted: bool) -> Array:
        """Tokens gained less ρ times the time, of verifying 1 … K-k drafts more: [..., K-k].

        this [..., B]: survival of the next draft; rest [..., B, K-k-1]: of those after it, given that.
        """
        k = self.settled
        later = (this[..., None] * rest * self._may[:, k + 1 :]).sum(-2)
        gains = np.empty((*later.shape[:-1], later.shape[-1] + 1))
        gains[..., 0] = this.sum(-1)
        gains[..., 1:] = later
        cost = self._verify if drafted else self._cost
        start = self._verify[k] if drafted else self._verify[k] + self._draft[k + 1]
        return gains.cumsum(-1) - self._rate * (cost[k + 1 :] - start)
