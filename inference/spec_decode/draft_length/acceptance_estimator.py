"""How likely the next drafts of a request are to be accepted, learnt from what became of those before.

Conditional acceptance a_k = P(draft k is accepted, given that the k-1 before it were) is one logistic model of

    how often draft k is accepted at all       every request of the proposer, decayed slowly
    how sure the proposer is of draft k-1, k   if it says so (`Proposal.confidence`)
    what these two leave unexplained lately    of every request together, since texts of a kind come one after the other
    what they leave unexplained of this one    the request's own outcomes, over a long and a short memory

in two forms: of a draft whose confidence is still unknown, to plan with, and of one whose confidence is known, to
decide with. Both are refitted by every outcome, so a confidence that means nothing gets no weight. What a draft turned
out to be is nowhere among the features: an estimate may be used to decide whether the draft is verified at all.
Knows no costs and no lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LONG, SHORT = 0.95, 0.6  # per outcome: what remains of a request's earlier outcomes
LATELY = 0.98  # the same of every request's
IDLE = 0.99  # per round without outcomes: what remains of the long memory
DOUBT = 1.0  # information that speaks for nothing being left unexplained; half of it for the short memory
SHARED = 0.998  # what remains of every request's outcomes per depth, in how often it is accepted
PRIOR, WEIGHT = 0.7, 4.0  # acceptance before any outcome, and how many outcomes it takes to halve its say
USUAL = 3000  # rounds, the latest, that what is usual of confidences is the mean of
EVERY = 24  # outcomes that make a refit worth its time
MEMORIES = 5  # features of a model before those of confidences: 1, how often, and three of memories
FADING = 0.7  # what a confidence says of the draft after next is this share of what it says of the next
SCENARIOS = (-1.5, -0.7, 0.0, 0.5, 1.0)  # a skewed distribution in five points: most drafts are sure ones


class OnlineLogistic:
    """Logistic regression that follows its data: a Newton step per batch of outcomes, on a precision that forgets.

    `start` [d]: the weights before any outcome; `precision` [d]: how much data it takes to move them.
    """

    def __init__(self, start: Sequence[float], precision: Sequence[float], memory: float = 0.9998) -> None:
        self._weights: Array = np.array(start, dtype=np.float64)
        self.numbers: list[float] = self._weights.tolist()  # the weights
        self._prior, self._memory = np.diag(np.array(precision, dtype=np.float64)), memory
        self._precision = self._prior.copy()

    def learn(self, features: Array, outcomes: Array) -> None:
        """features [n, d], outcomes [n] of 0 and 1."""
        p = 1 / (1 + np.exp(-np.maximum(features @ self._weights, -30)))
        kept = self._memory ** len(outcomes)
        curvature = (features * (p * (1 - p))[:, None]).T @ features
        self._precision = kept * self._precision + (1 - kept) * self._prior + curvature
        self._weights += np.linalg.solve(self._precision, features.T @ (outcomes - p))
        self.numbers = self._weights.tolist()


class Memory:
    """Outcomes that fade: the shift of their logits that would explain them, one Newton step from none.

    `keeps`: what remains of those before at every outcome. `doubt`: information that speaks for no shift.
    """

    def __init__(self, keeps: float, doubt: float = DOUBT) -> None:
        self._keeps, self._doubt = keeps, doubt
        self._surprise = self._information = 0.0

    def add(self, surprise: float, information: float) -> None:
        """An outcome less its estimate p, and p (1 - p)."""
        self._surprise = self._keeps * self._surprise + surprise
        self._information = self._keeps * self._information + information

    def fade(self, kept: float) -> None:
        self._surprise, self._information = kept * self._surprise, kept * self._information

    @property
    def shift(self) -> float:
        return self._surprise / (self._information + self._doubt)


class RequestHistory:
    """What a request's outcomes left unexplained, over two memories."""

    def __init__(self) -> None:
        self._long, self._short = Memory(LONG), Memory(SHORT, DOUBT / 2)

    def add(self, surprise: float, information: float) -> None:
        """See `Memory.add`."""
        self._long.add(surprise, information)
        self._short.add(surprise, information)

    def idle(self) -> None:
        """A round without outcomes: what is long ago says less."""
        self._long.fade(IDLE)
        self._short.fade(SHORT)

    @property
    def shifts(self) -> tuple[float, float]:
        """Over the long and the short memory, in logits."""
        return self._long.shift, self._short.shift


@dataclass
class Outlook:
    """What is known of B rows in one round, as it becomes known.

    shared     [K] logits of a_k over all requests
    lately     the shift of all requests
    rows       [B] the shifts of each request, over the long and the short memory
    before     [B][K] logits of a_k from these alone, by the model of drafts whose confidence is unknown
    after      the same by the one of drafts whose confidence is known: what confidences say comes on top
    centred    per depth seen: [B] confidences in logits, less the usual of that depth
    """

    shared: list[float]
    lately: float
    rows: list[tuple[float, float]]
    before: list[list[float]]
    after: list[list[float]]
    centred: list[list[float]] = field(default_factory=list)


class AcceptanceEstimator:
    """Shared by all requests of one proposer. `depth`: drafts per round at most. Plain numbers, not tensors: what is
    asked for within a round is a dozen of them."""

    def __init__(self, depth: int) -> None:
        self._accepted = [0.0] * depth
        self._tried = [0.0] * depth
        # Weights of 1, of how often, of lately, of the long and the short memory, and of two confidences, or of one.
        self._before = OnlineLogistic([0, 1, 0.5, 0.7, 0.2, 0.2], [2, 4, 4, 4, 4, 4])
        self._after = OnlineLogistic([0, 1, 0.5, 0.7, 0.2, 0, 0.5], [2, 4, 4, 4, 4, 4, 4])
        self._lately = Memory(LATELY)
        self._usual = [0.0] * depth  # mean confidence of each depth, in logits
        self._told = [0] * depth  # how many rounds it is the mean of
        self._spread = [0.0] * depth  # mean square departure from it
        self._waiting: list[tuple[list[list[float]], list[float], bool]] = []  # features, outcomes, confidence known
        self._learnt = 0

    def outlook(self, histories: Sequence[RequestHistory], depth: int) -> Outlook:
        """Of up to `depth` drafts, before anything is drafted."""
        shared, lately = [logit(rate) for rate in self._rates(depth)], self._lately.shift
        rows = [history.shifts for history in histories]
        known = []
        for one, of_depth, late, long, short, *_ in (self._before.numbers, self._after.numbers):
            weighed = [one + late * lately + of_depth * each for each in shared]
            known.append([[each + long * u + short * r for each in weighed] for u, r in rows])
        return Outlook(shared, lately, rows, *known)

    def see(self, outlook: Outlook, confidence: Sequence[float] | None) -> tuple[list[float], list[float]]:
        """The next draft's confidence [B], known before it is drawn -> a_k [B] of that draft, and a_{k+1} [B] of the
        one after it, as `ahead` has it; that is [] at the last depth.

        None: the proposer does not say, and the estimate is the one before.
        """
        k, rows = len(outlook.centred), len(outlook.rows)
        if confidence is None:
            ahead = self.ahead(outlook)
            outlook.centred.append([0.0] * rows)
            return [row[0] for row in ahead], [row[1] for row in ahead if len(row) > 1]
        if not self._told[k]:
            self._usual[k] = sum(map(logit, confidence)) / rows
        usual, last = self._usual[k], outlook.centred[-1] if k else [0.0] * rows
        of_before, of_this, fading = *self._after.numbers[-2:], self._before.numbers[-1]
        more = k + 1 < len(outlook.shared)
        centred, this, after = [], [], []
        for sure, before, seen, unseen in zip(confidence, last, outlook.after, outlook.before, strict=True):
            c = logit(sure) - usual
            centred.append(c)
            this.append(sigmoid(seen[k] + of_before * before + of_this * c))
            if more:
                after.append(sigmoid(unseen[k + 1] + fading * c))
        outlook.centred.append(centred)
        return this, after

    def ahead(self, outlook: Outlook, shift: float = 0.0, skip: int = 0) -> list[list[float]]:
        """a_i [B, K-k] of the drafts after the k whose confidence was seen, without the first `skip`.

        What the last confidence says fades with the distance. `shift` [B]: is it instead, of the draft that is skipped.
        """
        k, fading = len(outlook.centred), self._before.numbers[-1]
        last = outlook.centred[-1] if k and not skip else [shift] * len(outlook.rows)
        estimates = []
        for known, c in zip(outlook.before, last, strict=True):
            said, row = fading * c, []
            for each in known[k + skip :]:
                row.append(sigmoid(each + said))
                said *= FADING
            estimates.append(row)
        return estimates

    def scenarios(self, outlook: Outlook) -> Iterator[tuple[list[float], list[list[float]]]]:
        """What `see` and then `ahead` may come to say, for equally likely confidences of the next draft: [B] and
        [B, K-k-1]. The rows of a batch even each other out."""
        k, rows = len(outlook.centred), len(outlook.rows)
        before, this = self._after.numbers[-2:]
        last = outlook.centred[-1] if k else [0.0] * rows
        spread = (self._spread[k] / rows) ** 0.5
        for scenario in SCENARIOS if spread else (0.0,):
            c = scenario * spread
            seen = [sigmoid(known[k] + before * b + this * c) for known, b in zip(outlook.after, last, strict=True)]
            yield seen, self.ahead(outlook, shift=c, skip=1)

    # ------------------------------------------------------------------ learning

    def learn(
        self,
        outlook: Outlook,
        histories: Sequence[RequestHistory],
        verified: Sequence[int],
        accepted: Sequence[int],
        told: bool,
    ) -> None:
        """What became of a round: drafts verified and accepted per row. `told`: confidences were known."""
        if told:
            self._learn_confidences(outlook)
        features, outcomes, numbers = [], [], (self._after if told else self._before).numbers
        one, of_depth, of_before, of_this = *numbers[:2], numbers[MEMORIES], numbers[-1] if told else 0.0
        for b, (history, count, kept) in enumerate(zip(histories, verified, accepted, strict=True)):
            if not count:
                history.idle()
            before = this = 0.0
            for k in range(min(kept + 1, count)):
                outcome, shared = float(k < kept), outlook.shared[k]
                if told:
                    before, this = this, outlook.centred[k][b]
                features.append([1.0, shared, outlook.lately, *outlook.rows[b], before, this])
                outcomes.append(outcome)
                # What is explained without the memories themselves, which would else explain away what they hold.
                p = sigmoid(one + of_depth * shared + of_before * before + of_this * this)
                surprise, information = outcome - p, p * (1 - p)
                history.add(surprise, information)
                self._lately.add(surprise, information)
                self._tried[k] = SHARED * self._tried[k] + 1
                self._accepted[k] = SHARED * self._accepted[k] + outcome
        if outcomes:
            self._waiting.append((features, outcomes, told))
            self._fit()

    def _learn_confidences(self, outlook: Outlook) -> None:
        """What is usual at each depth that was seen."""
        rows = len(outlook.rows)
        for k, centred in enumerate(outlook.centred):
            self._told[k] = rounds = min(self._told[k] + 1, USUAL)
            self._usual[k] += sum(centred) / (rows * rounds)
            self._spread[k] += (sum([c * c for c in centred]) / rows - self._spread[k]) / rounds

    def _fit(self) -> None:
        """Fits the models to the outcomes that wait, once they are worth it: few in the beginning, more later on."""
        new = sum(len(outcomes) for _, outcomes, _ in self._waiting)
        if new < min(EVERY, self._learnt / 4):
            return
        self._learnt += new
        x = np.array([row for features, _, _ in self._waiting for row in features])
        y = np.array([outcome for _, outcomes, _ in self._waiting for outcome in outcomes])
        told = np.array([told for _, outcomes, told in self._waiting for _ in outcomes])
        self._waiting.clear()
        self._before.learn(x[:, :-1], y)
        if told.any():
            self._after.learn(x[told], y[told])

    def _rates(self, depth: int) -> list[float]:
        """a_k of each depth over all requests; of a depth little tried, much as that of the one before."""
        rates, before = [], PRIOR
        for accepted, tried in zip(self._accepted[:depth], self._tried, strict=False):
            before = (accepted + WEIGHT * before) / (tried + WEIGHT)
            rates.append(before)
        return rates


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -30 else 0.0


def logit(p: float) -> float:
    """Of a probability, kept to ±6."""
    p = min(max(p, 0.0025), 0.9975)
    return math.log(p / (1 - p))
