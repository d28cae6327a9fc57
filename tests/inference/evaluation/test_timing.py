"""Timed passes: engines answer the same prompts in turns, and a stop keeps what is whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch

from draftsmith.inference.evaluation.timing import interleaved, turns_of
from draftsmith.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftsmith.inference.report.schema import TimedPass

CPU = torch.device("cpu")


def engines(names: str, before: Callable[[], None] = lambda: None):
    """Runs that write five tokens for each prompt, and the list of their calls. `before`: every
    call."""
    calls: list[tuple[str, range]] = []

    def run(name: str, turn: range) -> list[RequestOutput]:
        before()
        calls.append((name, turn))
        output = CompletionOutput(0, "", [7] * 5)
        return [
            RequestOutput("", None, [place], [output], True, RequestMetrics()) for place in turn
        ]

    return {name: partial(run, name) for name in names}, calls


def timed(*arguments) -> dict[str, list[tuple[TimedPass, list[int]]]]:
    """By run: its passes, and the places of the prompts that each answered."""
    passes: dict[str, list[tuple[TimedPass, list[int]]]] = {}
    try:
        for name, one, outputs in interleaved(*arguments):
            places = [output.prompt_token_ids[0] for output in outputs]
            passes.setdefault(name, []).append((one, places))
    except KeyboardInterrupt:
        pass
    return passes


def test_turns_are_all_places_in_order():
    assert turns_of(5, 2) == [range(2), range(2, 4), range(4, 5)]
    assert turns_of(3, 3) == turns_of(3, 9) == [range(3)]


def test_all_engines_answer_a_turn_before_any_takes_the_next_and_another_begins():
    runs, calls = engines("abc")
    passes = timed(runs, "w", turns_of(2, 1), 2, CPU, partial(next, count()))
    order = [("abc", 0), ("bca", 1), ("cab", 0), ("abc", 1)]
    assert calls == [(name, range(turn, turn + 1)) for names, turn in order for name in names]
    for of_run in passes.values():
        assert [(one.repeat, one.tokens, places) for one, places in of_run] == [
            (0, 10, [0, 1]),
            (1, 10, [0, 1]),
        ]
        # a second by the clock for each turn
        assert [one.seconds for one, _ in of_run] == [2, 2]


@pytest.mark.parametrize(
    "after, kept",
    [(1, []), (2, [[0]]), (5, [[0, 1]]), (6, [[0, 1, 2]]), (9, [[0, 1, 2]])],
)
def test_a_stop_keeps_whole_repeats_and_of_the_first_one_whole_turns(after, kept):
    calls = count()

    def before() -> None:
        if next(calls) == after:
            raise KeyboardInterrupt

    runs, _ = engines("ab", before)
    passes = timed(runs, "w", turns_of(3, 1), 2, CPU)
    assert set(passes) == (set("ab") if kept else set())
    assert all([places for _, places in of_run] == kept for of_run in passes.values())


def test_a_stop_goes_through():
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(interleaved(engines("ab", stop)[0], "w", turns_of(1, 1), 1, CPU))
