"""Whether two servers sample from one distribution: permutation tests of two samples.

If they do, the 2n texts of a prompt are exchangeable: each way of dividing them into two samples of
n is as likely as any other. The tests draw such divisions at random. With b of B divisions at least
as extreme as the real one, p = (1 + b) / (1 + B) is at most α with probability at most α, whatever
the statistic, for every n (Phipson & Smyth 2010, arXiv 1603.05766). Three statistics look for
three kinds of difference, and their p-values are combined by Bonferroni, p = 3 · the smallest:

largest            the smallest p-value of all χ² tests: one event is far too frequent or too rare
sum                the sum of all χ²: small shifts in many places
log_probability    |sum of scores of one sample - that of the other|: all tokens too likely or too
                   unlikely, as after another temperature, a cut-off, or drafts accepted too easily

The χ² tests are of the joint categories of `_categories`. The score of a text is the sum over its
tokens x, after the text h before them, of log p(x | h) - E[log p(X | h)], p being the baseline's.
That is the derivative by β, at β = 1, of the log-likelihood of p^β / Σ p^β with β = 1 / T, which
orders texts as their likelihood ratio does: by Neyman and Pearson no other score of a text finds
a temperature near 1 as often. If s is the standard deviation of log p(X | h), the temperature T
moves the mean score of a token by (1/T - 1) s², and the difference of the sums over N tokens of
each sample by (1/T - 1) s √(N / 2) of its standard deviations. SIGNIFICANCE asks for 3.6 of them:
with s = 0.5, 200 texts of 8 tokens after 4 prompts find T ≤ 0.88 in half of the cases, and with
s = 1, which is nearer to a trained model's, T ≤ 0.94."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

SIGNIFICANCE = 1e-3  # of all tests together: the share of lossless servers that is called lossy
RESAMPLES = 9999  # B
CHUNK = 500  # divisions at a time
LEAST_EXPECTED = 5  # texts of a sample in a category; rarer categories are one together
LEAST_LOGPROB = -20.0  # of a score: servers write -9999 for a probability of 0
END = -1  # in place of tokens behind the end of a text


def token_score(leading: Mapping[int, float], token: int) -> float:
    """log p of a token less its expectation, from the log-probabilities of the leading tokens.
    Those behind count as the last of the leading ones: any function of the text keeps the test
    exact."""
    logprobs = {other: max(value, LEAST_LOGPROB) for other, value in leading.items()}
    last = min(logprobs.values())
    rest = 1.0 - sum(np.exp(value) for value in logprobs.values())
    mean = sum(np.exp(value) * value for value in logprobs.values()) + max(rest, 0.0) * last
    return float(logprobs.get(token, last) - mean)


@dataclass(frozen=True)
class SampledPrompt:
    """The texts of one prompt: `tokens` [2, n, T] of the server and the baseline, END behind the
    end of a text, and `scores` [2, n]."""

    tokens: NDArray[np.int64]
    scores: NDArray[np.float64]


def compare_samples(prompts: Sequence[SampledPrompt], resamples: int = RESAMPLES) -> dict[str, Any]:
    """The combined `p_value`, the `p_values` of the three statistics, and the χ² `tests` with their
    own p-values, which are those of large samples and not combined. All prompts have n texts of
    each server. `tested`: false where no difference could have become significant, since the texts
    are too few or all the same."""
    tables = [_Tables(prompt) for prompt in prompts]
    real = np.repeat(np.array([1, 0], dtype=np.float32), prompts[0].tokens.shape[1])
    observed = _statistics(tables, [real[None]] * len(tables))
    slack = 1e-9 * np.abs(observed)  # sums of the same numbers in another order
    rng = np.random.default_rng(0)
    extreme = np.zeros(3)
    for start in range(0, resamples, CHUNK):
        rows = np.tile(real, (min(CHUNK, resamples - start), 1))
        divisions = [rng.permuted(rows, axis=1) for _ in tables]
        extreme += (_statistics(tables, divisions) >= observed - slack).sum(1)
    p_values = (1 + extreme) / (1 + resamples)
    names = ("largest", "sum", "log_probability")
    least = 2 / math.comb(len(real), len(real) // 2) ** len(tables)  # two: of exchanged samples
    varied = any(table.places or np.ptp(table.scores) > 0 for table in tables)
    return {
        "tested": varied and len(names) * least <= SIGNIFICANCE,
        "p_value": min(1.0, len(names) * float(p_values.min())),
        "p_values": dict(zip(names, p_values.tolist(), strict=True)),
        "tests": [
            {"prompt": number, **test}
            for number, table in enumerate(tables)
            for test in table.tests(real)
        ],
    }


class _Tables:
    """The χ² tests of one prompt. `member` [2n, C]: 1 where a text is in a category; the columns of
    one test stand side by side, `first` [tests] and `sizes` [tests] say where."""

    def __init__(self, prompt: SampledPrompt) -> None:
        texts = prompt.tokens.reshape(-1, prompt.tokens.shape[-1])
        tests = [test for test in _categories(texts) if test[2].shape[1] > 1]
        self.places = [(position, width) for position, width, _ in tests]
        self.scores = prompt.scores.ravel()
        self.sizes = np.array([member.shape[1] for *_, member in tests], dtype=int)
        self.first = np.cumsum(self.sizes) - self.sizes
        empty = np.zeros((len(texts), 0), dtype=np.float32)
        self.member = np.concatenate([empty, *(member for *_, member in tests)], axis=1)

    def chi2(self, divisions: NDArray[np.float32]) -> NDArray[np.float64]:
        """[D, 2n], 1 for texts of the first sample -> [D, tests]. With a and b texts of a category
        in samples of one size, the expectation of both is (a + b) / 2, and Pearson's χ² is the sum
        of (a - b)² / (a + b)."""
        drawn = (divisions @ self.member).astype(np.float64)
        both = self.member.sum(0, dtype=np.float64)
        if not self.places:
            return np.zeros((len(divisions), 0))
        return np.add.reduceat((2 * drawn - both) ** 2 / both, self.first, axis=1)

    def tests(self, real: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
        """The tests of the real samples. `tokens`: the first and last token, from 1, whose values
        are the categories."""
        statistics = self.chi2(real[None])[0]
        p_values = chi2.sf(statistics, self.sizes - 1)
        for place, size, statistic, p in zip(
            self.places, self.sizes, statistics, p_values, strict=True
        ):
            position, width = place
            yield {
                "tokens": [position - width + 2, position + 1],
                "chi2": float(statistic),
                "degrees": int(size) - 1,
                "p_value": float(p),
            }


def _categories(
    texts: NDArray[np.int64],
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """(position, width, [2n, categories]): the `width` tokens up to a position. These are the token
    alone, with the one before it, and with the whole text before it. A category with less than
    LEAST_EXPECTED texts of a sample to be expected is pooled with the others of its kind."""
    for position in range(texts.shape[1]):
        for width in sorted({1, min(2, position + 1), position + 1}):
            part = texts[:, position + 1 - width : position + 1]
            _, category, counts = np.unique(part, axis=0, return_inverse=True, return_counts=True)
            common = counts >= 2 * LEAST_EXPECTED
            pooled = np.where(common, np.arange(len(counts)), len(counts))
            of_text = pooled[category.ravel()]
            yield position, width, (of_text[:, None] == np.unique(of_text)).astype(np.float32)


def _statistics(
    tables: Sequence[_Tables], divisions: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """[3, D] largest, sum and log_probability of D divisions [D, 2n] of every prompt's texts; more
    is more extreme."""
    count = len(divisions[0])
    smallest = np.ones(count)
    total = np.zeros(count)
    difference = np.zeros(count)
    for table, division in zip(tables, divisions, strict=True):
        statistics = table.chi2(division)
        p_values = chi2.sf(statistics, table.sizes - 1)
        smallest = np.minimum(smallest, p_values.min(axis=1, initial=1.0))
        total += statistics.sum(axis=1)
        difference += (2 * division.astype(np.float64) - 1) @ table.scores
    return np.stack([-smallest, total, np.abs(difference)])
