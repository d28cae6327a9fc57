"""Prompts that share words are together, and what all share tells nothing."""

from __future__ import annotations

import random

from draftsmith.train.data.prompt_clusters import NAMING_PROMPTS, cluster_prompts

TEMPLATE = [1, 2, 3, 4]  # of every prompt
TOPICS = [range(100, 130), range(200, 230), range(300, 330)]
COUNTS = [50, 30, 20]


def prompts() -> tuple[list[list[int]], list[int]]:
    """Prompts, and the topic of each, in a random order."""
    drawn = random.Random(0)
    topics = [topic for topic, count in enumerate(COUNTS) for _ in range(count)]
    drawn.shuffle(topics)
    common = range(10, 40)  # words of any prompt
    return [
        [*TEMPLATE, *drawn.sample(TOPICS[topic], 8), *drawn.sample(common, 4), *TEMPLATE]
        for topic in topics
    ], topics


def test_clusters_are_the_topics_by_their_size():
    texts, topics = prompts()
    clusters = cluster_prompts(texts, 3)
    assert clusters.labels == topics  # which are numbered by their size, too
    for topic, tokens in zip(TOPICS, clusters.distinctive, strict=True):
        assert len(tokens) > 3 and set(tokens[:4]) <= set(topic)
    assert cluster_prompts(texts, 3) == clusters


def test_words_of_most_prompts_decide_nothing():
    """However often a prompt has them."""
    texts, topics = prompts()
    for i, text in enumerate(texts):
        for word in range(50, 56):
            text += [word] * (0 if (i + word) % 6 == 0 else 20)
    assert cluster_prompts(texts, 3).labels == topics


def test_token_of_few_prompts_names_no_cluster():
    """However much it is that cluster's own."""
    texts, topics = prompts()
    rare = 999
    having = [i for i, topic in enumerate(topics) if topic == 2]
    for i in having[: NAMING_PROMPTS - 1]:
        texts[i] += [rare] * 9
    assert rare not in cluster_prompts(texts, 3).distinctive[2]
    texts[having[NAMING_PROMPTS]] += [rare] * 9
    assert rare in cluster_prompts(texts, 3).distinctive[2]


def test_prompts_that_are_the_same_are_one_cluster():
    clusters = cluster_prompts([TEMPLATE] * 9, 3)
    assert clusters.labels == [0] * 9 and clusters.distinctive == [[]]
