"""Suffix decoding drafts what counting by hand would, and forgets what it should."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.suffix import SuffixProposer
from draftsmith.inference.spec_decode.proposers.suffix_automaton import SuffixCounts, SuffixStore

DEPTH = 6


def occurrences(texts, depth=DEPTH) -> Counter:
    """How often each pattern of at most `depth` tokens stands in the texts."""
    counts: Counter = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + depth, len(text)) + 1):
                counts[tuple(text[start:end])] += 1
    return counts


def check_counts(counts: SuffixCounts, texts, vocabulary: int) -> None:
    """Every pattern that occurs is matched, and led on to its most frequent follower, with the
    counts' ratio."""
    expected = occurrences(texts)
    for pattern, count in expected.items():
        if len(pattern) == DEPTH:
            continue
        state, shortest, longest = counts.matches(pattern)[0]
        assert shortest <= longest == len(pattern) and counts._count[state] == count, pattern
        following = {token: expected[(*pattern, token)] for token in range(vocabulary)}
        tokens, score, _ = counts.follow(state, 1, 0.0)
        if max(following.values()) == 0:
            assert tokens == []
        else:
            assert following[tokens[0]] == max(following.values())
            assert score == pytest.approx(following[tokens[0]] / count)
    assert counts.matches([vocabulary]) == []


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 8])
def test_counts_of_a_growing_text_are_those_of_counting_by_hand(vocabulary):
    source = random.Random(vocabulary)
    counts, text = SuffixCounts(DEPTH), []
    for _ in range(25):
        new = [source.randrange(vocabulary) for _ in range(source.randint(1, 4))]
        if len(text) > 4 and source.random() < 0.3:
            new = text[source.randrange(len(text) - 3) :][:5]  # a repetition
        counts.extend(new)
        text += new
        check_counts(counts, [text], vocabulary)
    assert len(counts) <= 2 * len(text)


@pytest.mark.parametrize("vocabulary", [1, 2, 4])
@pytest.mark.parametrize("most", [1, 3])
def test_a_store_counts_its_last_texts(vocabulary, most):
    source = random.Random(7)
    store, texts = SuffixStore(DEPTH, most), []
    for _ in range(40):
        text = [source.randrange(vocabulary) for _ in range(source.randint(0, 12))]
        texts.append(text)
        store.add(text)
        held = len(texts) if len(texts) < 2 * most else most + len(texts) % most
        check_counts(store.counts, texts[-held:], vocabulary)


def by_counting(own, served, options, most) -> list[int]:
    """The definition: for every match length go on with the most frequent follower, of equals the
    last one to become so; the best sum of probabilities, the request's own text and longer matches
    first."""
    best, drafted, depth = 0.0, [], options["max_tree_depth"]
    for texts in ([own], served):
        expected = occurrences(texts, depth)
        last = {}  # pattern -> when it was last counted
        for i, text in enumerate(texts):
            for end in range(len(text) + 1):
                last |= {
                    tuple(text[start:end]): (i, end) for start in range(max(0, end - depth), end)
                }
        for m in range(min(depth - 1, len(own)), 0, -1):
            pattern = tuple(own[-m:])
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


@pytest.mark.parametrize(
    "options", [{}, {"max_spec_factor": 2.5}, {"max_spec_factor": 0.5, "min_token_prob": 0.4}]
)
def test_drafts_are_those_of_the_definition(options):
    options = OPTIONS | options
    source = random.Random(3)
    proposer, served, drafted = SuffixProposer(8, **options), [], 0
    for _ in range(6):
        phrases = [[source.randrange(10) for _ in range(source.randint(2, 7))] for _ in range(4)]
        row = request([9, 8, 7])
        proposer.reset(0)
        for _ in range(12):
            row.token_ids += source.choice(phrases + served[-1:])[:9]
            limit = source.randint(1, 9)
            proposal = proposer.propose([row], [limit])
            assert proposal.token_ids[0].tolist() == by_counting(
                row.token_ids, served, options, min(limit, 8)
            )
            drafted += proposal.counts[0]
        row.finish("stop")
        served.append(row.output_token_ids)
    assert drafted > 100


def drafts_of(proposer, *requests) -> list[list[int]]:
    proposal = proposer.propose(requests, [9] * len(requests))
    return [
        row[:count] for row, count in zip(proposal.token_ids.tolist(), proposal.counts, strict=True)
    ]


def test_finished_responses_are_remembered_and_forgotten_in_their_order():
    proposer = SuffixProposer(8, **OPTIONS | {"max_cached_requests": 1})
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
    proposer = SuffixProposer(8, **OPTIONS)
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
    assert (
        len(drafts_of(proposer, rows[2])) == 1
    )  # the other left unfinished, and is not remembered
    rows[2].token_ids += [52]
    assert drafts_of(proposer, rows[2]) == [[53]]


def test_confidence_grows_with_what_was_seen():
    """Of each draft, in (0, 1): surer after three times the same than after once, unsure where the
    counts differ."""
    proposer = SuffixProposer(8, **OPTIONS | {"max_cached_requests": 0, "min_token_prob": 0.0})
    confidences = []
    for text in ([1, 2, 3, 9, 1, 2], [1, 2, 3, 9] * 3 + [1, 2], [9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]):
        proposer.reset(0)
        proposal = proposer.propose([request(text)], [1])
        assert proposal.token_ids.shape == proposal.confidence.shape == (1, 1)
        confidences.append(float(proposal.confidence))
    assert 0 < confidences[2] < confidences[0] < confidences[1] < 1
