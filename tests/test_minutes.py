"""scripts/minutes.py: its variants are recipes, and its table is of the runs it was given."""

from __future__ import annotations

import pytest

from draftsmith.train.recipe.load import load_recipe
from scripts import minutes, minutes_picture


@pytest.mark.parametrize("variant", minutes.VARIANTS)
def test_a_variant_is_a_recipe_that_differs_from_the_default(variant, tmp_path):
    def recipe(name):
        run = minutes.Run(name, 10.0, 0, "eagle3", ())
        path, *overrides = run.words(tmp_path)
        return load_recipe(path, overrides).model_dump()

    assert (recipe(variant) != recipe("default")) == (variant != "default")


def test_the_command_line_is_that_of_the_comparison(capsys):
    with pytest.raises(SystemExit) as stopped:
        minutes.main(["--variant", "taps", "--variant", "nonsense", "--minutes", "6"])
    assert stopped.value.code == 2 and "nonsense: expected default, taps" in capsys.readouterr().err


def test_a_row_is_the_mean_of_the_seeds_of_one_variant_and_budget():
    def run(seed, tau, variant="default", budget=10.0, always=(), machine="A"):
        return {
            "family": "eagle3",
            "variant": variant,
            "machine": machine,
            "always": always,
            "minutes": budget,
            "seed": seed,
            "steps": 100 + 2 * seed,
            "tokens": 1000,
            "judged": {"chat": {"tau": tau}},
        }

    runs = [run(0, 1.5), run(1, 1.7), run(0, 1.4, "row_1"), run(0, 1.9, budget=20.0)]
    runs.append(run(0, 2.0, budget=20.0, always=["features.mode=cache"]))
    runs.append(run(0, 1.3, machine="B"))
    head, *rows = minutes.rows({"runs": {str(i): one for i, one in enumerate(runs)}})
    assert head[-1] == "τ, chat"
    assert rows == [
        [
            "`eagle3`",
            "`default`",
            "A",
            "computed",
            "10",
            "2",
            "101",
            "1,000",
            "1.600 (1.500 to 1.700)",
        ],
        ["`eagle3`", "`row_1`", "A", "computed", "10", "1", "100", "1,000", "1.400"],
        ["`eagle3`", "`default`", "A", "computed", "20", "1", "100", "1,000", "1.900"],
        ["`eagle3`", "`default`", "A", "read", "20", "1", "100", "1,000", "2.000"],
        ["`eagle3`", "`default`", "B", "computed", "10", "1", "100", "1,000", "1.300"],
    ]


def test_items_are_spread_over_the_whole_list():
    assert minutes.spread_over(range(10), 5) == [0, 2, 4, 6, 8]
    assert minutes.spread_over(range(3), 5) == [0, 1, 2]


def test_a_line_of_a_picture_goes_through_the_means_of_the_budgets_of_one_machine():
    def run(minutes, tokens, tau):
        judged = {name: {"tau": tau} for name in minutes_picture.JUDGES}
        return {
            "family": "eagle3",
            "variant": "default",
            "machine": "A",
            "always": [],
            "minutes": minutes,
            "tokens": tokens,
            "judged": judged,
        }

    of_one_machine = [run(20, 400, 2.0), run(10, 180, 1.5), run(10, 220, 1.7)]
    elsewhere = [run(30, 900, 2.5) | {"machine": "B"}, run(60, 1800, 2.6) | {"machine": "B"}]
    alone = run(10, 200, 1.6) | {"machine": "C"}
    results = {"runs": dict(enumerate([*elsewhere, *of_one_machine, alone]))}
    peer = {"speculators": run(0, 90, 1.25), "disk": run(0, 200, 1.6)}
    other = {"speculators": run(0, 900, 1.3), "disk": elsewhere[0]}
    peers = {"runs": {"10": peer, "30 (B)": other}}
    assert minutes_picture.machines(results) == ["A", "B"]
    runs = minutes_picture.trainings(results, peers, "A")
    assert minutes_picture.lines(runs, "tokens", "chat") == {
        "eagle3, default, states computed": [(200.0, 1.6), (400.0, 2.0)],
        "speculators": [(90.0, 1.25)],
    }
    figures = minutes_picture.pictures(results, peers)
    assert [figure.get_label().endswith(name) for figure, name in zip(figures, "AB")] == [True] * 2
    for figure in figures:
        _, named = figure.axes[0].get_legend_handles_labels()
        assert named == [minutes_picture.ALONE, "eagle3, default, states computed"]
