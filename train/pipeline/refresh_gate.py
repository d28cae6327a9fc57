"""The gate of a refresh: the old head and the new one on the same texts, and which of them serves.

Two judges. The newest texts of the log say what is gained, the recipe's validation texts what is
forgotten. Both are exact replay of the exported folders, paired by text. A third question comes
before: whether the newest texts are the target's own, since replay says nothing on others."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.inference.evaluation.paired_replay import PairedResult, paired_replay
from draftsmith.inference.metrics import influences, sum_of_squares
from draftsmith.inference.progress import Advance, unwatched
from draftsmith.inference.spec_decode.replay import ReplayResult, error_of_difference
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.traffic import LoggedText, Sampling

LEAST_CONVERSATIONS = 30  # below which a standard error is not to be relied on
ERRORS = 2.0  # standard errors by which the new head has to be better
# Of (τ - 1), which the new head may lose on the old suite. Not of τ: its 1 is the token that the
# target writes in every round with any head, so that 2 % of τ = 1.5 would be 6 % of what drafts
# give.
MOST_FORGOTTEN = 0.02
# Nats a token that texts may surprise the target by more than its own do. Rounding and quantisation
# of a server's weights give some hundredths, another model's answers some tenths and more.
MOST_EXCESS = 0.1

Sample = dict[Hashable, ReplayResult]


@dataclass(frozen=True)
class Judgement:
    """Two heads on one suite.

    texts, conversations   that it has; the conversation is the unit of all errors
    before, after          expected acceptance length of the old head and of the new one
    error                  standard error of their difference, paired
    excess, excess_error   surprise of the target beyond that of its own texts, in nats a token
    """

    texts: int
    conversations: int
    before: float
    after: float
    error: float
    excess: float
    excess_error: float

    @property
    def gain(self) -> float:
        """After less before."""
        return self.after - self.before

    @property
    def relative_gain(self) -> float:
        """Of the tokens that drafts give in a round, τ - 1."""
        return self.gain / (self.before - 1) if self.before > 1 else math.nan

    def tree(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self) | {"gain": self.gain, "relative_gain": self.relative_gain}


def judge(
    target: FrozenTarget,
    drafters: tuple[Drafter, Drafter],
    samples: Sequence[Sequence[LoggedText]],
    k: int,
    advance: Advance = unwatched,
) -> Judgement:
    """Both `drafters`, old and new, on a suite at `k` drafts per round. `samples`: texts whose
    acceptance length is of all their rounds; over samples it is averaged."""
    before: list[Sample] = []
    after: list[Sample] = []
    surprise: dict[str, tuple[float, float]] = {}  # tokens and excess, by conversation
    done = 0
    for texts in samples:
        results = _replayed(target, drafters, texts, k)
        done += len(texts)
        advance(done)
        before.append(_sample(texts, [result.before for result in results]))
        after.append(_sample(texts, [result.after for result in results]))
        for text, result in zip(texts, results, strict=True):
            tokens, excess = surprise.get(text.conversation, (0.0, 0.0))
            surprise[text.conversation] = tokens + result.tokens, excess + result.excess
    totals = list(surprise.values())
    return Judgement(
        texts=done,
        conversations=len(totals),
        before=_mean_length(before),
        after=_mean_length(after),
        error=error_of_difference(before, after),
        excess=sum(excess for _, excess in totals) / sum(tokens for tokens, _ in totals),
        excess_error=math.sqrt(sum_of_squares(influences(totals))),
    )


def refusals(newest: Judgement, old: Judgement) -> list[str]:
    """Why the new head is not exported; none: it is."""
    reasons = []
    foreign = newest.excess - ERRORS * newest.excess_error
    if not foreign <= MOST_EXCESS:
        reasons.append(
            "the newest texts are not the target's own: they surprise it by"
            f" {newest.excess:.2f} ± {newest.excess_error:.2f} nats a token more than those would,"
            f" {MOST_EXCESS} may be; replay says nothing on them"
        )
    if not newest.gain > ERRORS * newest.error:
        reasons.append(
            f"on the newest texts the gain is {newest.gain:+.4f} ± {newest.error:.4f}, and more"
            f" than {ERRORS:g} standard errors are asked for"
        )
    lost = -old.gain
    if not lost <= MOST_FORGOTTEN * (old.before - 1):
        reasons.append(
            f"on the old suite {lost:.4f} is lost, {100 * -old.relative_gain:.1f} % of τ - 1;"
            f" {100 * MOST_FORGOTTEN:g} % may be"
        )
    return reasons


def _replayed(
    target: FrozenTarget,
    drafters: tuple[Drafter, Drafter],
    texts: Sequence[LoggedText],
    k: int,
) -> list[PairedResult]:
    """Results of the texts in their order; those that were sampled alike go together."""
    places: dict[Sampling, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(text.sampling, []).append(place)
    results: dict[int, PairedResult] = {}
    for sampling, members in places.items():
        tokens = [texts[place].tokens for place in members]
        paired = paired_replay(target, drafters, tokens, sampling.params(), k)
        results |= zip(members, paired, strict=True)
    return [results[place] for place in range(len(texts))]


def _sample(texts: Sequence[LoggedText], results: Sequence[ReplayResult]) -> Sample:
    """The results by conversation, added up."""
    sample: Sample = {}
    for text, result in zip(texts, results, strict=True):
        sample[text.conversation] = sample.get(text.conversation, ReplayResult()) + result
    return sample


def _mean_length(samples: Sequence[Sample]) -> float:
    lengths = [
        sum(sample.values(), ReplayResult()).expected_acceptance_length for sample in samples
    ]
    return sum(lengths) / len(lengths)
