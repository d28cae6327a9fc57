"""Acceptance length, rates and counters: one definition, under vLLM's names."""

import math

import pytest

from draftsmith.inference.metrics import SpecDecodeCounters, acceptance_length


def counted(rounds):
    counters = SpecDecodeCounters()
    for drafted, accepted in rounds:
        counters.add(drafted, accepted)
    return counters


def test_acceptance_length_is_tokens_committed_per_verification():
    rounds = [(3, 0), (3, 3), (3, 1), (2, 2)]
    committed = sum(accepted + 1 for _, accepted in rounds)
    assert counted(rounds).acceptance_length == committed / len(rounds)
    assert acceptance_length(6, 4) == 2.5
    assert acceptance_length(0, 0) == 1.0
    assert counted([(0, 0), (2, 1)]) == counted([(2, 1)]), "a round without drafts is no draft"


def test_conditional_rates_multiply_to_joint_rates_and_joint_rates_sum_to_the_length():
    counters = SpecDecodeCounters(113, 452, 171, [90, 61, 17, 3])
    joint, conditional = counters.joint_rates(), counters.conditional_rates()
    for k in range(4):
        assert math.prod(conditional[: k + 1]) == pytest.approx(joint[k])
    assert 1 + sum(joint) == pytest.approx(counters.acceptance_length)
    counters = counted([(3, 0), (3, 3), (3, 1), (3, 2)])
    assert counters.joint_rates() == [0.75, 0.5, 0.25]
    assert counters.conditional_rates() == pytest.approx([3 / 4, 2 / 3, 1 / 2])


def test_what_was_not_measured_is_not_a_number():
    assert all(map(math.isnan, SpecDecodeCounters(0, 0, 0, [0, 0]).joint_rates()))
    first, second = SpecDecodeCounters(5, 10, 0, [0, 0]).conditional_rates()
    assert first == 0 and math.isnan(second)


def test_merging_is_counting_together_and_a_difference_undoes_it():
    first, second = [(2, 1), (1, 0)], [(4, 4), (0, 0), (3, 2)]
    for one, other in ((first, second), (second, first)):
        merged = counted(one)
        merged.merge(counted(other))
        assert merged == counted(one + other)
        growth = merged.since(counted(one))
        assert growth.acceptance_length == counted(other).acceptance_length
        growth.merge(counted(one))
        assert growth == merged


def test_drafts_are_counted_by_method():
    first = SpecDecodeCounters()
    first.add(3, 1, method="eagle3")
    second = SpecDecodeCounters()
    for drafted, method in ((2, "suffix"), (3, "eagle3"), (0, "eagle3")):
        second.add(drafted, 0, method=method)
    whole = SpecDecodeCounters()
    whole.merge(first)
    whole.merge(second)
    assert whole.num_drafts_by_method == {"eagle3": 2, "suffix": 1}
    assert whole.since(first) == second


def test_counters_are_listed_as_vllms_metrics():
    counters = counted([(3, 2), (3, 0)])
    assert counters.to_dict() == {
        "vllm:spec_decode_num_drafts": 2,
        "vllm:spec_decode_num_draft_tokens": 6,
        "vllm:spec_decode_num_accepted_tokens": 2,
        "vllm:spec_decode_num_accepted_tokens_per_pos": [1, 1, 0],
    }
    listed = {m.name: m.values if m.value is None else m.value for m in counters}
    assert listed == counters.to_dict()


def test_more_accepted_than_drafted_is_refused():
    with pytest.raises(ValueError):
        SpecDecodeCounters().add(2, 3)
