"""vLLM's counts in this project's terms: what it accepted past the end of a text is found, whatever
it says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftsmith.inference.vllm_bridge.counters import committed_rounds, metrics_of
from draftsmith.speculators.errors import DataError
from tests.support.errors import raises_at

K = 4
# accepted; None: nothing was proposed
ROUNDS = st.lists(st.none() | st.integers(0, K), min_size=1, max_size=12)


def cut(rounds: list[int | None], limit: int) -> tuple[list[int], list[int], list[int]]:
    """A response of at most `limit` tokens: tokens of each step, drafts accepted in each round that
    had some, and committed drafts of every round: as verification goes, one token after the
    other."""
    sizes, accepted, committed, written = [1], [], [], 1
    for drafts in rounds:
        if written >= limit:
            break
        size = min((drafts or 0) + 1, limit - written)
        sizes.append(size)
        committed.append(min(drafts or 0, size))
        accepted += [] if drafts is None else [drafts]
        written += size
    return sizes, accepted, committed


@given(ROUNDS, st.integers(1, 40))
def test_committed_drafts_follow_from_what_each_step_brought(rounds, limit) -> None:
    sizes, accepted, committed = cut(rounds, limit)
    assert committed_rounds(sizes, accepted) == committed
    metrics = metrics_of(sizes, accepted, [K] * len(accepted))
    assert metrics.num_accepted_tokens == sum(committed) == sum(metrics.num_accepted_tokens_per_pos)
    assert (metrics.num_drafts, metrics.num_draft_tokens) == (len(accepted), K * len(accepted))
    assert metrics.accepted_per_round == committed


def test_counts_of_another_response_are_refused() -> None:
    for sizes, accepted in (([1, 3, 2], [1, 1]), ([1, 2], []), ([1, 1, 1], [0, 2, 2])):
        with raises_at(DataError, "vLLM"):
            committed_rounds(sizes, accepted)
