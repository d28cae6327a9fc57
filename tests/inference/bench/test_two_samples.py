"""The tests of two samples keep their level, and find each way of sampling something else."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.inference.bench.two_samples import (
    END,
    SIGNIFICANCE,
    SampledPrompt,
    compare_samples,
    token_score,
)

LENGTH = 8
# p(token | the token before it): flat, which is where other temperatures are hardest to see
CHAIN = np.array([[(1 + (7 * i + 3 * j) % 8) / 36 for j in range(8)] for i in range(8)])
LEADING = [dict(enumerate(np.log(row))) for row in CHAIN]


def texts(rng: np.random.Generator, prompt: int, count: int, lie: str = "") -> np.ndarray:
    """[count, LENGTH] tokens after a prompt that is one token; `lie`: how they are not the
    chain's."""
    before = np.full(count, prompt)
    alone = np.eye(8)[prompt]  # distribution of a token without the one before it
    columns = []
    for position in range(LENGTH):
        p = CHAIN[before]
        alone = alone @ CHAIN
        if lie == "temperature 0.8":
            p = p**1.25 / (p**1.25).sum(1, keepdims=True)
        elif lie == "greedy from token 5" and position >= 4:
            p = np.eye(8)[p.argmax(1)]
        elif lie == "not given the token before" and position:
            p = np.tile(alone, (count, 1))
        elif lie == "one token after one prompt" and position == 2 and prompt == 0:
            p = 0.75 * p + 0.25 * np.eye(8)[5]
        before = (rng.random((count, 1)) > p.cumsum(1)[:, :-1]).sum(1)
        columns.append(before)
    return np.stack(columns, axis=1)


def sampled(rng: np.random.Generator, prompt: int, count: int, lie: str = "") -> SampledPrompt:
    tokens = np.stack([texts(rng, prompt, count, lie), texts(rng, prompt, count)])
    before = np.concatenate([np.full((2, count, 1), prompt), tokens[:, :, :-1]], axis=2)
    table = np.array([[token_score(row, token) for token in range(8)] for row in LEADING])
    return SampledPrompt(tokens, table[before, tokens].sum(2))


def test_compare_samples_of_one_distribution_keeps_its_level():
    """Of 150 pairs of equal samples, no more than the level says are called different, by each
    statistic and by all together: at 0.1, 15 + 3 · 3.7."""
    rng = np.random.default_rng(0)
    results = [compare_samples([sampled(rng, 0, 20)], resamples=49) for _ in range(150)]
    for name in ("largest", "sum", "log_probability"):
        assert sum(result["p_values"][name] <= 0.1 for result in results) <= 26
    assert sum(result["p_value"] <= 0.1 for result in results) <= 26
    assert all(result["tested"] for result in results)


@pytest.mark.parametrize(
    "lie",
    [
        "temperature 0.8",
        "greedy from token 5",
        "not given the token before",
        "one token after one prompt",
    ],
)
def test_compare_samples_of_the_default_size_finds(lie):
    rng = np.random.default_rng(1)
    prompts = [sampled(rng, prompt, 200, lie) for prompt in range(4)]
    assert compare_samples(prompts, resamples=2999)["p_value"] <= SIGNIFICANCE


def test_compare_samples_that_cannot_show_a_difference_are_not_tested():
    """Too few texts, all of them the same, or a text that is empty after every prompt."""
    rng = np.random.default_rng(2)
    assert not compare_samples([sampled(rng, 0, 4)], resamples=9)["tested"]
    assert not compare_samples([sampled(rng, 0, 6)], resamples=9)["tested"]
    same = SampledPrompt(np.full((2, 50, LENGTH), END), np.zeros((2, 50)))
    result = compare_samples([same], resamples=9)
    assert not result["tested"] and result["p_value"] == 1 and not result["tests"]


def test_rare_texts_are_one_category():
    rng = np.random.default_rng(3)
    tests = compare_samples([sampled(rng, 0, 400)], resamples=9)["tests"]
    assert {tuple(test["tokens"]) for test in tests} >= {(1, 1), (1, 2), (2, 3), (8, 8)}
    for test in tests:
        assert 1 <= test["degrees"] < 800 / 10
        assert test["tokens"][1] <= LENGTH


def test_token_score_has_no_mean_under_the_baseline():
    """Nor if only some tokens are known: the others count as the last of these."""
    p = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    for known in (5, 3):
        leading = {token: float(np.log(p[token])) for token in range(known)}
        scores = [token_score(leading, token) for token in range(5)]
        assert p @ scores == pytest.approx(0, abs=1e-12)
        assert scores == sorted(scores, reverse=True)
