"""Suffix decoding drafts what counting by hand would, and forgets what it should."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.suffix import SuffixOptions, SuffixProposer
from draftsmith.inference.spec_decode.round_plan import RoundPlan


def occurrences(texts, depth) -> Counter:
    """How often each pattern of at most `depth` tokens stands in the texts."""
    counts: Counter = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + depth, len(text)) + 1):
                counts[tuple(text[start:end])] += 1
    return counts


def by_counting(written, served, options, most) -> list[int]:
    """The definition: for every match length go on with the most frequent follower, of equals the
    last one to become so; the best sum of probabilities, the request's own text and longer matches
    first."""
    best, drafted, depth = 0.0, [], options["max_tree_depth"]
    for texts in ([written], served):
        expected = occurrences(texts, depth)
        last = {}  # pattern -> when it was last counted
        for i, text in enumerate(texts):
            for end in range(len(text) + 1):
                last |= {
                    tuple(text[start:end]): (i, end) for start in range(max(0, end - depth), end)
                }
        for m in range(min(depth - 1, len(written)), 0, -1):
            pattern = tuple(written[-m:])
            budget = min(most, int(m * options["max_spec_factor"] + 1e-6), depth - m)
            tokens, probability, score = [], 1.0, 0.0
            while len(tokens) < budget and expected[pattern]:
                grown = max(
                    ((*pattern, t) for t in range(10)),
                    key=lambda p: (expected[p], last.get(p, (-1, 0))),
                )
                probability *= expected[grown] / expected[pattern]
                if probability < options["min_token_prob"] or probability == 0:
                    break
                tokens.append(grown[-1])
                pattern, score = grown, score + probability
            if score > best:
                best, drafted = score, tokens
    return drafted


def request(tokens, **options) -> Request:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None, **options})
    return Request("0", 0, tokens, params, generator=None, max_model_len=len(tokens) + 200)


OPTIONS = dict(max_tree_depth=12, max_cached_requests=10, max_spec_factor=1.0, min_token_prob=0.1)


def proposer_of(**options: Any) -> SuffixProposer:
    fields = {f"suffix_decoding_{name}": value for name, value in (OPTIONS | options).items()}
    return SuffixOptions(method="suffix", num_speculative_tokens=8, **fields).make_proposer()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_spec_factor": 2.5},
        {"max_spec_factor": 0.5, "min_token_prob": 0.4},
        {"max_tree_depth": 5, "max_cached_requests": 2, "min_token_prob": 0.0},
    ],
)
@pytest.mark.parametrize("vocabulary", [2, 10])
def test_drafts_are_those_of_the_definition(options, vocabulary):
    options = OPTIONS | options
    source, most = random.Random(3), options["max_cached_requests"]
    proposer, served, drafted = proposer_of(**options), [], 0
    for i in range(8):
        phrases = [
            [source.randrange(vocabulary) for _ in range(source.randint(2, 7))] for _ in range(4)
        ]
        row = request([1, 0])
        proposer.reset(0)
        count = i if i < most else most + i % most
        held = served[-count:] if i else []
        for _ in range(12):
            row.token_ids += source.choice(phrases + served[-1:])[:9]
            limit = source.randint(1, 9)
            proposal = proposer.propose([row], RoundPlan([limit]))
            assert proposal.token_ids[0].tolist() == by_counting(
                row.token_ids, held, options, min(limit, 8)
            )
            drafted += proposal.counts[0]
        row.finish("stop")
        served.append(row.output_token_ids)
    assert drafted > 100


def drafts_of(proposer, *requests) -> list[list[int]]:
    proposal = proposer.propose(requests, RoundPlan([9] * len(requests)))
    return [
        row[:count] for row, count in zip(proposal.token_ids.tolist(), proposal.counts, strict=True)
    ]


def test_finished_responses_are_remembered_and_forgotten_in_their_order():
    proposer = proposer_of(max_cached_requests=1)
    for token in (20, 30):
        served = request([5, 6])
        proposer.reset(0)
        served.token_ids += [1, token, token + 1]
        assert drafts_of(proposer, served) == [[]]  # nothing repeats in it
        served.finish("stop")
    proposer.reset(0)
    assert drafts_of(proposer, request([7, 5, 6])) == [[]]  # a prompt is nobody else's
    for token, draft in ((20, []), (30, [31])):
        proposer.reset(0)
        assert drafts_of(proposer, request([7, token])) == [draft]
    proposer.reset(0)
    assert drafts_of(proposer, request([7, 30], temperature=1.0, seed=3)) == [[31]]


def test_rows_keep_their_texts_when_they_move_and_leave():
    proposer = proposer_of()
    rows = [request([1, 2, 3, 1, 2]), request([5, 6, 7]), request([8, 9, 8, 9])]
    assert drafts_of(proposer, *rows) == [[3, 1], [], [8, 9]]
    rows[0].token_ids += [51, 52, 53]
    rows[0].finish("stop")
    proposer.move(2, 0)
    rows[2].token_ids += [1, 8, 9]
    rows[1].token_ids += [51, 52]
    assert drafts_of(proposer, rows[2], rows[1])[0][:1] in ([8], [1])
    assert drafts_of(proposer, rows[2], rows[1])[1] == [53]
    rows[1].token_ids += [54]
    # the other left unfinished, and is not remembered
    assert len(drafts_of(proposer, rows[2])) == 1
    rows[2].token_ids += [52]
    assert drafts_of(proposer, rows[2]) == [[53]]


def test_confidence_grows_with_what_was_seen():
    """Of each draft, in (0, 1): surer after three times the same than after once, unsure where the
    counts differ."""
    proposer = proposer_of(max_cached_requests=0, min_token_prob=0.0)
    confidences = []
    for text in ([1, 2, 3, 9, 1, 2], [1, 2, 3, 9] * 3 + [1, 2], [9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]):
        proposer.reset(0)
        proposal = proposer.propose([request(text)], RoundPlan([1]))
        assert proposal.token_ids.shape == proposal.confidence.shape == (1, 1)
        confidences.append(float(proposal.confidence))
    assert 0 < confidences[2] < confidences[0] < confidences[1] < 1
