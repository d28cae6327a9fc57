"""vLLM's counts in this project's terms: what it accepted past the end of a text is found, whatever
it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.http_client import drafting_counters, parse_metrics
from inference.metrics import SpecDecodeCounters
from inference.vllm_bridge.counters import committed_rounds, counted_past_end, metrics_of, sizes_of
from speculators.errors import DataError

K = 4
ROUNDS = st.lists(
    st.none() | st.integers(0, K), min_size=1, max_size=12
)  # accepted; None: nothing was proposed


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
    assert metrics.accepted_per_round == committed and metrics.num_accepted_past_end == 0


@given(st.lists(st.integers(0, K), min_size=1, max_size=12), st.integers(1, 40))
def test_where_every_round_proposes_the_length_alone_tells(rounds, limit) -> None:
    sizes, accepted, committed = cut(rounds, limit)
    assert sizes_of(sum(sizes), accepted) == sizes
    assert counted_past_end(sum(sizes), len(accepted), sum(accepted)) == sum(accepted) - sum(
        committed
    )


def test_counts_of_another_response_are_refused() -> None:
    for sizes, accepted in (
        ([1, 3, 2], [1, 1]),
        ([1, 2], []),
        ([2, 1], []),
        ([1, 1, 1], [0, 2, 2]),
    ):
        with pytest.raises(DataError, match="are not of one response"):
            committed_rounds(sizes, accepted)
    assert sizes_of(9, [1, 2]) is None and sizes_of(2, [1, 2]) is None
    assert counted_past_end(9, 2, 3) is None


def test_metrics_are_summed_over_the_engines_behind_a_server() -> None:
    text = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 7.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7953297338932453e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a b",position="0"} 1.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a b"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a b"} 1.0
"""
    metrics = parse_metrics(text)
    assert drafting_counters(metrics) == SpecDecodeCounters(10, 20, 8, [6, 2])
    assert (metrics["request_success stop"], metrics["request_success length"]) == (2, 1)
    assert drafting_counters(parse_metrics("vllm:request_success_total 4\n")) is None
