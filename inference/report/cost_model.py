"""The cost model: how fast speculative decoding could be, given what its parts cost alone.

Three times are measured in isolation, at the batch size and a typical context length of the run:

    V(n)  one target forward over n new tokens per row, lm_head included
    D(K)  one draft phase: the whole proposal of K tokens per row, not one token of it
    τ     acceptance length: tokens committed per round (inference.metrics.acceptance_length)

One round of speculative decoding costs V(K+1) + D(K) and commits τ tokens; without drafting those
tokens cost τ · V(1). So the speedup is at most

    limit = τ · V(1) / (V(K+1) + D(K))            efficiency = measured speedup / limit

The limit counts nothing but forwards. Left out are sampling and accept decisions, scheduling,
committing and rolling back, detokenising, prefill (which drafting does not speed up, so it dilutes
the measured speedup), rounds cut short by the end of a text, and rows that wait for others in a
batch: the efficiency is what they cost. It is no strict bound: the same overheads also slow the run
without drafting, and where they weigh more there (one scheduling step per token rather than per τ
tokens) efficiency exceeds 1."""

from __future__ import annotations

import math

from speculators.errors import DataError


def speedup_limit(
    acceptance_length: float, *, step_cost: float, verify_cost: float, draft_cost: float
) -> float:
    """Largest speedup that forwards alone allow: τ · V(1) / (V(K+1) + D(K)).

    acceptance_length: τ ≥ 1. step_cost: V(1). verify_cost: V(K+1). draft_cost: D(K), the whole
    phase, 0 for a drafter that costs nothing. The three costs share one unit (any). DataError if a
    value cannot be a time."""
    if not (math.isfinite(acceptance_length) and acceptance_length >= 1.0):
        raise DataError(
            f"acceptance_length is {acceptance_length}, expected at least 1: every round commits a"
            " token"
        )
    _check("step_cost, V(1)", step_cost)
    _check("verify_cost, V(K+1)", verify_cost)
    _check("draft_cost, D(K)", draft_cost, positive=False)
    return acceptance_length * step_cost / (verify_cost + draft_cost)


def efficiency(measured_speedup: float, limit: float) -> float:
    """Measured speedup against the same engine ÷ `speedup_limit`."""
    _check("measured_speedup", measured_speedup)
    _check("limit", limit)
    return measured_speedup / limit


def _check(name: str, value: float, *, positive: bool = True) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        expected = "a positive number" if positive else "zero or a positive number"
        raise DataError(f"{name} is {value}, expected {expected}: measure it again")
