"""Online logistic regression of the conditional acceptance a_k = P(draft k is accepted | drafts 1
.. k-1 are).

Features of draft k:

    base rate          how often draft k is accepted, over all requests of the proposer
    confidence         of the drafter in draft k-1 and in draft k, where it reports one
                       (`Proposal.confidence`)
    global residual    what these leave unexplained, exponentially decayed over all requests: texts
                       of a kind come one after the other
    request residuals  the same over the outcomes of this request, with a slow and a fast decay

There are two models: one for drafts whose confidence is not known yet, to plan with, and one for
drafts whose confidence is known, to decide with. Both are refitted from every outcome, so a
confidence without meaning gets no weight. The drafted token is not among the features: an estimate
may decide whether the draft is verified at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REQUEST_DECAY_SLOW, REQUEST_DECAY_FAST = 0.95, 0.6  # per outcome of the request
GLOBAL_DECAY = 0.98  # per outcome of any request
IDLE_DECAY = 0.99  # of the slow residual, per round of the request without outcomes
PRIOR_INFORMATION = (
    1.0  # Fisher information of the prior for a residual of 0; half of it for the fast decay
)
BASE_RATE_DECAY = 0.998  # per outcome at a depth
PRIOR_ACCEPTANCE, PRIOR_OUTCOMES = (
    0.7,
    4.0,
)  # base rate before any outcome, and how many outcomes it counts for
MAX_MEAN_ROUNDS = 3000  # rounds that the mean confidence of a depth averages over, at most
REFIT_OUTCOMES = 24  # new outcomes per refit
NUM_BASE_FEATURES = 5  # intercept, base rate and three residuals; confidences follow
CONFIDENCE_DECAY = (
    0.7  # per depth: effect of the last known confidence on the estimates of later drafts
)
SCENARIO_DEVIATIONS = (
    -1.5,
    -0.7,
    0.0,
    0.5,
    1.0,
)  # in standard deviations: a skewed five-point distribution


class OnlineLogistic:
    """Logistic regression by one Newton step per batch of outcomes, on a precision matrix that
    decays to its prior.

    `weights` [d] before any outcome; `precision` [d]: the diagonal of the prior's precision;
    `decay` per outcome."""

    def __init__(
        self, weights: Sequence[float], precision: Sequence[float], decay: float = 0.9998
    ) -> None:
        self._weights: Array = np.array(weights, dtype=np.float64)
        self.weights: list[float] = self._weights.tolist()
        self._prior, self._decay = np.diag(np.array(precision, dtype=np.float64)), decay
        self._precision = self._prior.copy()

    def learn(self, features: Array, outcomes: Array) -> None:
        """features [n, d], outcomes [n] of 0 and 1."""
        p = 1 / (1 + np.exp(-np.maximum(features @ self._weights, -30)))
        kept = self._decay ** len(outcomes)
        curvature = (features * (p * (1 - p))[:, None]).T @ features
        self._precision = kept * self._precision + (1 - kept) * self._prior + curvature
        self._weights += np.linalg.solve(self._precision, features.T @ (outcomes - p))
        self.weights = self._weights.tolist()


class DecayedResidual:
    """Exponentially decayed residuals, as the logit shift that would explain them: one Newton step
    from 0.

    `decay` per outcome; `prior_information` of a shift of 0.
    """

    def __init__(self, decay: float, prior_information: float = PRIOR_INFORMATION) -> None:
        self._decay, self._prior_information = decay, prior_information
        self._residual = self._information = 0.0

    def add(self, residual: float, information: float) -> None:
        """An outcome less its estimate p, and p (1 - p)."""
        self._residual = self._decay * self._residual + residual
        self._information = self._decay * self._information + information

    def fade(self, kept: float) -> None:
        self._residual, self._information = kept * self._residual, kept * self._information

    @property
    def shift(self) -> float:
        return self._residual / (self._information + self._prior_information)


class RequestHistory:
    """The residuals of one request, with a slow and a fast decay."""

    def __init__(self) -> None:
        self._slow = DecayedResidual(REQUEST_DECAY_SLOW)
        self._fast = DecayedResidual(REQUEST_DECAY_FAST, PRIOR_INFORMATION / 2)

    def add(self, residual: float, information: float) -> None:
        """See `DecayedResidual.add`."""
        self._slow.add(residual, information)
        self._fast.add(residual, information)

    def idle(self) -> None:
        """Decays the residuals after a round without outcomes."""
        self._slow.fade(IDLE_DECAY)
        self._fast.fade(REQUEST_DECAY_FAST)

    @property
    def shifts(self) -> tuple[float, float]:
        """The shifts of the slow and the fast decay, in logits."""
        return self._slow.shift, self._fast.shift


@dataclass
class RoundState:
    """The features of B rows in one round, as they become known.

    base_logits       [K] logits of the base rates
    global_shift      the shift of all requests
    request_shifts    [B] the shifts of each request
    unknown_logits    [B][K] logits of a_k without confidences, by the model for unknown confidences
    known_logits      [B][K] the same by the model for known confidences, to which their terms are
                      added
    confidences       [B] per depth seen: confidences in logits, less the mean of that depth
    """

    base_logits: list[float]
    global_shift: float
    request_shifts: list[tuple[float, float]]
    unknown_logits: list[list[float]]
    known_logits: list[list[float]]
    confidences: list[list[float]] = field(default_factory=list)


class AcceptanceEstimator:
    """Estimates a_k for all requests of one proposer, which drafts at most `depth` tokens per
    round.

    Works on plain numbers, as a round asks for a dozen of them.
    """

    def __init__(self, depth: int) -> None:
        self._accepted = [0.0] * depth
        self._tried = [0.0] * depth
        # Weights: intercept, base rate, global, slow and fast residual; then the last confidence,
        # or the last two.
        self._unknown = OnlineLogistic([0, 1, 0.5, 0.7, 0.2, 0.2], [2, 4, 4, 4, 4, 4])
        self._known = OnlineLogistic([0, 1, 0.5, 0.7, 0.2, 0, 0.5], [2, 4, 4, 4, 4, 4, 4])
        self._global = DecayedResidual(GLOBAL_DECAY)
        self._mean = [0.0] * depth  # of the confidence at each depth, in logits
        self._variance = [0.0] * depth
        self._num_rounds = [0] * depth  # in the mean and the variance
        self._pending: list[
            tuple[list[list[float]], list[float], bool]
        ] = []  # features, outcomes, confidence known
        self._num_fitted = 0

    def start_round(self, histories: Sequence[RequestHistory], depth: int) -> RoundState:
        """The state of up to `depth` drafts, before anything is drafted."""
        base, global_shift = [logit(rate) for rate in self._base_rates(depth)], self._global.shift
        shifts = [history.shifts for history in histories]
        logits = []
        for intercept, of_base, of_global, of_slow, of_fast, *_ in (
            self._unknown.weights,
            self._known.weights,
        ):
            common = [intercept + of_global * global_shift + of_base * x for x in base]
            logits.append(
                [[x + of_slow * slow + of_fast * fast for x in common] for slow, fast in shifts]
            )
        return RoundState(base, global_shift, shifts, *logits)

    def estimate_next(
        self, state: RoundState, confidence: Sequence[float] | None
    ) -> tuple[list[float], list[float]]:
        """Adds the confidence [B] of the next draft, which is known before the draft is drawn, to
        the state.

        Returns a_k [B] of that draft, and a_{k+1} [B] of the one after it, [] at the last depth.
        `confidence` None: the proposer reports none."""
        k, rows = len(state.confidences), len(state.request_shifts)
        if confidence is None:
            remaining = self.estimate_remaining(state)
            state.confidences.append([0.0] * rows)
            return [row[0] for row in remaining], [row[1] for row in remaining if len(row) > 1]
        if not self._num_rounds[k]:
            self._mean[k] = sum(map(logit, confidence)) / rows
        mean, previous = self._mean[k], state.confidences[-1] if k else [0.0] * rows
        of_previous, of_this, of_last = *self._known.weights[-2:], self._unknown.weights[-1]
        more = k + 1 < len(state.base_logits)
        centred, this, after = [], [], []
        for p, before, known, unknown in zip(
            confidence, previous, state.known_logits, state.unknown_logits, strict=True
        ):
            c = logit(p) - mean
            centred.append(c)
            this.append(sigmoid(known[k] + of_previous * before + of_this * c))
            if more:
                after.append(sigmoid(unknown[k + 1] + of_last * c))
        state.confidences.append(centred)
        return this, after

    def estimate_remaining(
        self, state: RoundState, confidence: float = 0.0, skip: int = 0
    ) -> list[list[float]]:
        """a_i [B, K-k] of the drafts after the k whose confidence is known, without the first
        `skip`.

        The effect of the last confidence decays with the distance. `confidence`: that of the draft
        that is skipped."""
        k, of_last = len(state.confidences), self._unknown.weights[-1]
        last = state.confidences[-1] if k and not skip else [confidence] * len(state.request_shifts)
        estimates = []
        for logits, c in zip(state.unknown_logits, last, strict=True):
            effect, row = of_last * c, []
            for x in logits[k + skip :]:
                row.append(sigmoid(x + effect))
                effect *= CONFIDENCE_DECAY
            estimates.append(row)
        return estimates

    def confidence_scenarios(
        self, state: RoundState
    ) -> Iterator[tuple[list[float], list[list[float]]]]:
        """`estimate_next` and `estimate_remaining`, [B] and [B, K-k-1], for equally likely
        confidences of the next draft, whose spread shrinks with the number of rows."""
        k, rows = len(state.confidences), len(state.request_shifts)
        of_previous, of_this = self._known.weights[-2:]
        previous = state.confidences[-1] if k else [0.0] * rows
        deviation = (self._variance[k] / rows) ** 0.5
        for scenario in SCENARIO_DEVIATIONS if deviation else (0.0,):
            c = scenario * deviation
            this = [
                sigmoid(known[k] + of_previous * before + of_this * c)
                for known, before in zip(state.known_logits, previous, strict=True)
            ]
            yield this, self.estimate_remaining(state, confidence=c, skip=1)

    def learn(
        self,
        state: RoundState,
        histories: Sequence[RequestHistory],
        verified: Sequence[int],
        accepted: Sequence[int],
        confidence_available: bool,
    ) -> None:
        """Learns from the drafts verified and accepted per row of a round."""
        if confidence_available:
            self._learn_confidences(state)
        features, outcomes, weights = (
            [],
            [],
            (self._known if confidence_available else self._unknown).weights,
        )
        intercept, of_base, of_previous = *weights[:2], weights[NUM_BASE_FEATURES]
        of_this = weights[-1] if confidence_available else 0.0
        for b, (history, count, kept) in enumerate(zip(histories, verified, accepted, strict=True)):
            if not count:
                history.idle()
            before = this = 0.0
            for k in range(min(kept + 1, count)):
                outcome, base = float(k < kept), state.base_logits[k]
                if confidence_available:
                    before, this = this, state.confidences[k][b]
                features.append(
                    [1.0, base, state.global_shift, *state.request_shifts[b], before, this]
                )
                outcomes.append(outcome)
                # The estimate without the residuals' terms, which would explain away what the
                # residuals hold.
                p = sigmoid(intercept + of_base * base + of_previous * before + of_this * this)
                residual, information = outcome - p, p * (1 - p)
                history.add(residual, information)
                self._global.add(residual, information)
                self._tried[k] = BASE_RATE_DECAY * self._tried[k] + 1
                self._accepted[k] = BASE_RATE_DECAY * self._accepted[k] + outcome
        if outcomes:
            self._pending.append((features, outcomes, confidence_available))
            self._fit()

    def _learn_confidences(self, state: RoundState) -> None:
        rows = len(state.request_shifts)
        for k, centred in enumerate(state.confidences):
            self._num_rounds[k] = rounds = min(self._num_rounds[k] + 1, MAX_MEAN_ROUNDS)
            self._mean[k] += sum(centred) / (rows * rounds)
            self._variance[k] += (sum([c * c for c in centred]) / rows - self._variance[k]) / rounds

    def _fit(self) -> None:
        """Fits the models to the pending outcomes once there are enough: few in the beginning, more
        later on."""
        new = sum(len(outcomes) for _, outcomes, _ in self._pending)
        if new < min(REFIT_OUTCOMES, self._num_fitted / 4):
            return
        self._num_fitted += new
        x = np.array([row for features, _, _ in self._pending for row in features])
        y = np.array([outcome for _, outcomes, _ in self._pending for outcome in outcomes])
        known = np.array([known for _, outcomes, known in self._pending for _ in outcomes])
        self._pending.clear()
        self._unknown.learn(x[:, :-1], y)
        if known.any():
            self._known.learn(x[known], y[known])

    def _base_rates(self, depth: int) -> list[float]:
        """a_k of each depth over all requests; the prior of a depth is the rate of the one
        before."""
        rates, before = [], PRIOR_ACCEPTANCE
        for accepted, tried in zip(self._accepted[:depth], self._tried, strict=False):
            before = (accepted + PRIOR_OUTCOMES * before) / (tried + PRIOR_OUTCOMES)
            rates.append(before)
        return rates


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -30 else 0.0


def logit(p: float) -> float:
    """The log-odds of a probability, kept to ±6."""
    p = min(max(p, 0.0025), 0.9975)
    return math.log(p / (1 - p))
