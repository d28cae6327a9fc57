"""scripts/turns.py: what it makes of the seconds of methods that answered prompts in turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scripts.turns import Answers, answer, results


def test_a_speed_is_of_all_tokens_over_all_seconds_beside_plain_decoding():
    timed = results(
        {
            "default": Answers([[1, 2], [3, 4, 5, 6]], [1.0, 2.0]),
            "ngram": Answers([[1, 2], [3, 4, 5, 6]], [1.0, 0.5]),
            "head": Answers([[1, 2], [3, 4, 5, 7]], [2.0, 2.0]),
        }
    )
    speeds = [one["metrics"]["speedup_vs_autoregressive"]["value"] for one in timed.values()]
    assert speeds == pytest.approx([1.0, 2.0, 0.75])
    assert [one["same"] for one in timed.values()] == [True, True, False]


def test_all_methods_answer_a_prompt_before_any_answers_the_next():
    asked = []

    def engine(name):
        def generate(inputs, params, use_tqdm):
            asked.append((inputs[0]["prompt_token_ids"][0], name))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])]

        return SimpleNamespace(generate=generate, warm_up=lambda longest: None)

    names = ("default", "ngram", "head")
    answer(SimpleNamespace(llms={name: engine(name) for name in names}), [[10], [20]], 4)
    assert asked[len(names) :] == [
        *((10, name) for name in ("default", "ngram", "head")),
        *((20, name) for name in ("ngram", "head", "default")),
    ]
