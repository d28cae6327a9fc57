"""Held-out evaluation: texts as the report samples them, as many as the recipe says, and how sure
the figure is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.train.data.examples import Example
from draftsmith.train.pipeline import held_out as module
from draftsmith.train.pipeline.data_stage import workloads_in_turn
from draftsmith.train.pipeline.held_out import held_out_evaluation, held_out_measure
from draftsmith.train.regeneration.store import Response
from tests.support.cases import Case, make
from tests.support.models import make_tiny_model
from tests.support.training import recipe_of
from tests.support.worlds import Scenario, in_worlds

EAGLE3 = Case("eagle3", {"draft_vocab_size": 101}, taps=(1, 2, 3))


def recipe(**sections):
    texts = [{"path": "chats.jsonl"}]
    return recipe_of("eagle3", data={"train": texts, "validation": texts}, **sections)


def example(workload: str) -> Example:
    return Example(workload, "here", prompt="?")


def random_ids(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 100, (count, length)).tolist()


def test_held_out_texts_are_replayed_under_the_reports_filters() -> None:
    filters = {"top_k": 60, "top_p": 0.95}
    target, drafter = make(EAGLE3, make_tiny_model("llama"), noise=0.05)
    drafter.initialise_from(target)
    drafter.freeze()
    texts = [(row[:4], row[4:]) for row in random_ids(20, 40)]
    responses = [Response.of("w", *text, 1.0) for text in texts]
    evaluation = {"num_speculative_tokens": 3, **filters}
    results = held_out_evaluation(recipe(evaluation=evaluation), target, {1.0: responses})(drafter)

    def expected(**filters) -> float:
        replayed = expected_acceptance(target, drafter, texts, 1.0, 3, **filters)
        return sum(replayed, ReplayResult()).expected_acceptance_length

    assert results["expected_acceptance_length"] == expected(**filters)
    assert expected(**filters) < min(expected(top_k=60), expected(top_p=0.95))  # each counts
    assert results["expected_standard_error"] == results["expected_standard_error_t1"] > 0


def shared_replays(folder: Path) -> list[tuple[dict, list[int]]]:
    """(results, texts replayed at each temperature) of one process alone and of two together."""
    accelerator = Accelerator(cpu=True)
    target, drafter = make(EAGLE3, make_tiny_model("llama"))
    drafter.freeze()
    texts = [Response.of("w", row[:4], row[4:], 0.0) for row in random_ids(5, 12)]
    replayed: list[int] = []
    whole = module.expected_acceptance

    def counted(target, drafter, texts, *arguments, **options):
        replayed.append(len(texts))
        return whole(target, drafter, texts, *arguments, **options)

    module.expected_acceptance = counted
    outcomes = []
    for shared in (None, accelerator):
        replayed.clear()
        held_out = {0.0: texts, 1.0: texts}
        evaluate = held_out_evaluation(recipe(), target, held_out, shared)
        outcomes.append((evaluate(drafter), list(replayed)))
    module.expected_acceptance = whole
    return gather_object([outcomes])


@pytest.mark.slow
def test_held_out_texts_are_shared_by_processes_that_all_have_the_result(tmp_path) -> None:
    (everyone,) = in_worlds(shared_replays, [Scenario("two", 2)], tmp_path).values()
    for (alone, all_texts), (together, _) in everyone:
        assert all_texts == [5, 5] and together == pytest.approx(alone)
    assert [counts for _, (_, counts) in everyone] == [[3, 3], [2, 2]]
    assert everyone[0][1][0] == everyone[1][1][0]


TEXT = Response.of("w", (3, 4), (5, 6), 1.0)


@pytest.mark.parametrize(
    ("evaluation", "held_out", "same"),
    [
        ({"repeats": 1, "suites": []}, {1.0: [TEXT]}, True),
        ({"num_speculative_tokens": 1}, {1.0: [TEXT]}, False),
        ({"top_p": 0.9}, {1.0: [TEXT]}, False),
        ({"top_k": 5}, {1.0: [TEXT]}, False),
        ({}, {0.0: [TEXT]}, False),
        ({}, {1.0: [TEXT, TEXT]}, False),
    ],
)
def test_held_out_measure_is_another_where_values_would_be(evaluation, held_out, same) -> None:
    usual = held_out_measure(recipe(), {1.0: [TEXT]})
    assert (held_out_measure(recipe(evaluation=evaluation), held_out) == usual) == same


def test_a_budget_of_texts_is_shared_by_the_workloads() -> None:
    examples = [example(name) for name in "aaaaaaaaabbc"]
    chosen = [examples[number] for number in workloads_in_turn(examples, 7)]
    assert Counter(e.workload for e in chosen) == {"a": 4, "b": 2, "c": 1}
    assert [e.workload for e in chosen] == sorted(e.workload for e in chosen)  # in their order
    assert workloads_in_turn(examples, 99) == list(range(len(examples)))
