"""How likely the next drafts of a request are to be accepted, learnt from what became of those before.

Conditional acceptance a_k = P(draft k is accepted, given that the k-1 before it were) is one logistic model of

    how often draft k is accepted at all       every request of the proposer, decayed slowly
    how this request departs from that         its own outcomes, over a long and a short memory
    how sure the proposer is of draft k-1, k   if it says so (`Proposal.confidence`)

in two forms: of a draft whose confidence is still unknown, to plan with, and of one whose confidence is known, to
decide with. Both are refitted by every outcome, so a confidence that means nothing gets no weight. What a draft turned
out to be is nowhere among the features: an estimate may be used to decide whether the draft is verified at all.
Knows no costs and no lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LONG, SHORT = 0.95, 0.6  # per outcome: what remains of a request's earlier outcomes
IDLE = 0.99  # per round without outcomes: what remains of the long memory
SHARED = 0.998  # the same of every request's, per depth
PRIOR, WEIGHT = 0.7, 4.0  # acceptance before any outcome, and how many outcomes it takes to halve its say
EVERY = 24  # outcomes that make a refit worth its time
FADING = 0.7 ** np.arange(256)  # what a confidence says of the drafts 1, 2, … after it
SCENARIOS = np.array([-1.5, -0.7, 0.0, 0.5, 1.0])  # a skewed distribution in five points: most drafts are sure ones
FEATURES = 5  # one, the depth's own rate, departure over the long and the short memory, confidence one draft before


class OnlineLogistic:
    """Logistic regression that follows its data: a Newton step per batch of outcomes, on a precision that forgets.

    `start` [d]: the weights before any outcome; `precision` [d]: how much data it takes to move them.
    """

    def __init__(self, start: Sequence[float], precision: Sequence[float], memory: float = 0.9995) -> None:
        self.weights: Array = np.array(start, dtype=np.float64)
        self._prior, self._memory = np.diag(np.array(precision, dtype=np.float64)), memory
        self._precision = self._prior.copy()

    def learn(self, features: Array, outcomes: Array) -> None:
        """features [n, d], outcomes [n] of 0 and 1."""
        p = sigmoid(features @ self.weights)
        kept = self._memory ** len(outcomes)
        curvature = (features * (p * (1 - p))[:, None]).T @ features
        self._precision = kept * self._precision + (1 - kept) * self._prior + curvature
        self.weights = self.weights + np.linalg.solve(self._precision, features.T @ (outcomes - p))


@dataclass
class RequestHistory:
    """How a request's outcomes departed from what was usual at their depth: decayed sums over two memories."""

    long: float = 0.0
    long_weight: float = 0.0
    short: float = 0.0
    short_weight: float = 0.0

    def add(self, surprise: float) -> None:
        self.long, self.long_weight = LONG * self.long + surprise, LONG * self.long_weight + 1
        self.short, self.short_weight = SHORT * self.short + surprise, SHORT * self.short_weight + 1

    def idle(self) -> None:
        """A round without outcomes: what is long ago says less."""
        self.long, self.long_weight = IDLE * self.long, IDLE * self.long_weight
        self.short, self.short_weight = SHORT * self.short, SHORT * self.short_weight

    @property
    def departures(self) -> tuple[float, float]:
        """Mean surprise over the long and the short memory, as if four and one outcomes had brought none."""
        return 4 * self.long / (self.long_weight + 4), 2 * self.short / (self.short_weight + 1)


@dataclass
class Outlook:
    """What the estimator says of B rows in one round: logits [B, K] of their drafts, confidences apart.

    before, after    of a draft whose confidence is unknown, and known
    features         [B, K, 4]: those that do not depend on confidence
    """

    before: Array
    after: Array
    features: Array
    centred: list[Array] = field(default_factory=list)  # [B] per depth seen: confidence in logits, less the usual


class AcceptanceEstimator:
    """Shared by all requests of one proposer. `depth`: drafts per round at most."""

    def __init__(self, depth: int) -> None:
        self._accepted = [0.0] * depth
        self._tried = [0.0] * depth
        self._before = OnlineLogistic([0, 1, 1, 0.3, 0.2], [2, 4, 4, 4, 4])
        self._after = OnlineLogistic([0, 1, 1, 0.3, 0, 0.5], [2, 4, 4, 4, 4, 4])
        self._usual = [0.0] * depth  # mean confidence of each depth, in logits
        self._told = [0] * depth  # how many rounds it is the mean of
        self._spread = [0.0] * depth  # mean square departure from it
        self._waiting: list[tuple[Array, Array, bool]] = []  # features, outcomes, whether confidences were known
        self._learnt = 0

    def outlook(self, histories: Sequence[RequestHistory], depth: int) -> Outlook:
        """Of up to `depth` drafts, before anything is drafted."""
        features = np.ones((len(histories), depth, FEATURES - 1))
        features[:, :, 1] = self._rates_in_logits()[:depth]
        features[:, :, 2:] = np.array([history.departures for history in histories])[:, None]
        common = FEATURES - 1
        return Outlook(features @ self._before.weights[:common], features @ self._after.weights[:common], features)

    def see(self, outlook: Outlook, confidence: Sequence[float] | None) -> Array:
        """The next draft's confidence [B], known before it is drawn -> a_k [B] of that draft.

        None: the proposer does not say, and the estimate is the one before.
        """
        k = len(outlook.centred)
        if confidence is None:
            outlook.centred.append(np.zeros(outlook.before.shape[0]))
            return sigmoid(outlook.before[:, k])
        told = np.array([logit(each) for each in confidence])
        if not self._told[k]:
            self._usual[k] = float(told.sum()) / len(told)
        centred = told - self._usual[k]
        outlook.centred.append(centred)
        self._told[k] = min(self._told[k] + 1, 300)
        share = 1 / (self._told[k] * len(told))
        self._usual[k] += float(centred.sum()) * share
        self._spread[k] += float(centred @ centred) * share - self._spread[k] / self._told[k]
        *_, of_last, of_this = self._after.weights.tolist()
        logits = outlook.after[:, k] + of_this * centred
        return sigmoid(logits + of_last * outlook.centred[k - 1] if k else logits)

    def ahead(self, outlook: Outlook) -> Array:
        """a_i [B, K-k] of the drafts after the k whose confidence was seen; `before`'s weight on the last one's fades
        with the distance."""
        k = len(outlook.centred)
        logits = outlook.before[:, k:]
        if k:
            fading = self._before.weights[-1] * FADING[: logits.shape[1]]
            logits = logits + outlook.centred[-1][:, None] * fading
        return sigmoid(logits)

    def scenarios(self, outlook: Outlook) -> tuple[Array, Array]:
        """What `see` and then `ahead` may come to say: a_k [Q, B] of the next draft for Q equally likely confidences,
        and the products of those after it [Q, B, K-k-1]. The rows of a batch even each other out."""
        k = len(outlook.centred)
        rows = outlook.before.shape[0]
        centred = SCENARIOS[:, None] * (self._spread[k] / rows) ** 0.5  # [Q, 1]
        logits = outlook.after[:, k] + self._after.weights[-1] * centred
        if k:
            logits = logits + self._after.weights[-2] * outlook.centred[k - 1]
        later = outlook.before[:, k + 1 :]
        fading = self._before.weights[-1] * FADING[: later.shape[1]]
        return sigmoid(logits), np.cumprod(sigmoid(later + centred[..., None] * fading), -1)

    def learn(
        self,
        outlook: Outlook,
        histories: Sequence[RequestHistory],
        verified: Sequence[int],
        accepted: Sequence[int],
        told: bool,
    ) -> None:
        """What became of a round: drafts verified and accepted per row. `told`: confidences were known."""
        rows, depths, outcomes = [], [], []
        for b, (count, kept) in enumerate(zip(verified, accepted, strict=True)):
            for k in range(min(kept + 1, count)):
                rows.append(b)
                depths.append(k)
                outcomes.append(float(k < kept))
        for history, count in zip(histories, verified, strict=True):
            if not count:
                history.idle()
        if not rows:
            return
        usual = self._rates()
        x = np.zeros((len(rows), FEATURES + 1))
        x[:, : FEATURES - 1] = outlook.features[rows, depths]
        if told:
            for i, (b, k) in enumerate(zip(rows, depths, strict=True)):
                x[i, -1] = outlook.centred[k][b]
                x[i, -2] = outlook.centred[k - 1][b] if k else 0.0
        self._waiting.append((x, np.array(outcomes), told))
        for b, k, outcome in zip(rows, depths, outcomes, strict=True):
            histories[b].add(outcome - usual[k])
            self._tried[k] = SHARED * self._tried[k] + 1
            self._accepted[k] = SHARED * self._accepted[k] + outcome
        self._fit()

    def _fit(self) -> None:
        """Fits the models to the outcomes that wait, once they are worth it: few in the beginning, more later on."""
        new = sum(len(y) for _, y, _ in self._waiting)
        if new < min(EVERY, self._learnt / 4):
            return
        self._learnt += new
        x, y = (np.concatenate([each[i] for each in self._waiting]) for i in (0, 1))
        told = np.repeat([each[2] for each in self._waiting], [len(each[1]) for each in self._waiting])
        self._waiting.clear()
        self._before.learn(x[:, :FEATURES], y)
        if told.any():
            self._after.learn(x[told], y[told])

    def _rates(self) -> list[float]:
        """a_k of each depth over all requests; of a depth little tried, much as that of the one before."""
        rates, before = [], PRIOR
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            before = (accepted + WEIGHT * before) / (tried + WEIGHT)
            rates.append(before)
        return rates

    def _rates_in_logits(self) -> list[float]:
        return [logit(rate) for rate in self._rates()]


def sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-np.maximum(logits, -30)))


def logit(p: float) -> float:
    """Of a probability, kept to ±6."""
    p = min(max(p, 0.0025), 0.9975)
    return math.log(p / (1 - p))
