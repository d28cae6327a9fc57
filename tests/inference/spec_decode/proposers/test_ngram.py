"""Prompt lookup finds the longest and most recent match, whatever way the text grew."""

from __future__ import annotations

import random

import pytest

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.ngram import NgramIndex, NgramOptions
from draftsmith.inference.spec_decode.round_plan import RoundPlan


def by_search(text: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """The definition: longest n first, then the last place before the end where the n-gram
    stands."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                grown = list(text)
                for i in range(count):
                    grown.append(grown[start + n + i])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_index_equals_its_definition_on_growing_text(sizes):
    source = random.Random(0)
    for vocabulary in (2, 3, 6):
        index = NgramIndex(*sizes)
        text = [source.randrange(vocabulary) for _ in range(source.randint(1, 9))]
        for _ in range(60):
            count = source.randint(1, 5)
            assert index.lookup(text, count) == by_search(text, *sizes, count), text
            text += [source.randrange(vocabulary) for _ in range(source.randint(1, 4))]


@pytest.mark.parametrize(("option", "size"), [("prompt_lookup_max", 1), ("prompt_lookup_min", 6)])
def test_one_size_bounds_the_default_of_the_other(option, size):
    options = NgramOptions(method="ngram", **{option: size})
    assert options.make_proposer()._sizes == (size, size)


def request(tokens):
    params, length = SamplingParams(max_tokens=None), len(tokens) + 2
    return Request("0", 0, tokens, params, generator=None, max_model_len=length)


def test_rows_have_their_own_counts_limits_and_survive_moves():
    sizes = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    proposer = NgramOptions(method="ngram", num_speculative_tokens=4, **sizes).make_proposer()
    rows = [request([1, 2, 3, 1, 2]), request([5, 6, 7]), request([8, 9, 8, 9])]
    for row in range(3):
        proposer.reset(row)
    proposal = proposer.propose(rows, RoundPlan([4, 4, 2]))
    assert proposal.counts == [4, 0, 2] and proposal.q is None
    assert proposal.token_ids.tolist() == [[3, 1, 2, 3], [0] * 4, [8, 9, 0, 0]]
    proposer.move(2, 0)
    rows[2].token_ids += [1, 8, 9]
    assert proposer.propose([rows[2], rows[1]], RoundPlan([1, 1])).token_ids.tolist() == [[1], [0]]
    assert proposer.propose([rows[2]], RoundPlan([3])).token_ids.tolist() == [[1, 8, 9]]
