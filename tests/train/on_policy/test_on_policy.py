"""On-policy steps: resumable to the bit, and a function of the step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from accelerate.utils import gather_object

from draftsmith.train.on_policy.refresh import FOLDER
from tests.support.models import make_tiny_model
from tests.support.training import assert_equal, cut_off, make_recipe, make_trainer, weights
from tests.support.worlds import Scenario, in_worlds


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 4, 5])
def test_killed_anywhere_ends_with_the_same_weights(tiny_model, tmp_path, stop_after) -> None:
    """Also where texts were written after the last checkpoint: those are written again."""
    whole = make_trainer(tiny_model, tmp_path / "whole", make_recipe(on_policy={}))
    whole.run()
    cut_off(make_trainer(tiny_model, tmp_path / "broken", make_recipe(on_policy={})), stop_after)
    folder = tmp_path / "broken" / FOLDER
    for path in folder.glob("step-????????.json"):
        if int(path.name[5:13]) >= stop_after // 2 * 2:  # what the run that goes on must not read
            path.write_text("{}")
    again = make_trainer(tiny_model, tmp_path / "broken", make_recipe(on_policy={}))
    state = again.run()
    assert_equal(weights(whole), weights(again))
    for key in ("loss", "on_policy", "text_age", "rollout_acceptance_length"):
        assert [r.get(key) for r in state.history] == [r.get(key) for r in whole.state.history]
    kept = {path.name for path in folder.iterdir()}
    assert kept == {path.name for path in (tmp_path / "whole" / FOLDER).iterdir()}


def test_texts_are_written_when_a_step_needs_them_and_removed_when_none_can(
    tiny_model, tmp_path
) -> None:
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(on_policy={}, steps=14))
    history = trainer.run().history
    for record in history:
        assert record["on_policy"] in (0, 1)
        assert ("text_age" in record) == bool(record["on_policy"])
        assert 0 <= record.get("text_age", 0) < 3
        assert not record["on_policy"] or 1 <= record["rollout_acceptance_length"] <= 3
    assert 0 < sum(record["on_policy"] for record in history) < 14
    written = sorted(int(path.name[5:13]) for path in (tmp_path / FOLDER).iterdir())
    # the last checkpoint before the last writing was made after step 12 at most
    assert written and written[0] >= 9
    needed = [record["step"] - 1 for record in history if record["on_policy"]]
    assert written[-1] == next(step for step in needed if step // 3 == written[-1] // 3)


def test_a_share_of_nothing_changes_nothing(tiny_model, tmp_path) -> None:
    plain = make_trainer(tiny_model, tmp_path / "plain", make_recipe())
    none = make_trainer(tiny_model, tmp_path / "none", make_recipe(on_policy={"share": 0.0}))
    plain.run(), none.run()
    assert_equal(weights(plain), weights(none))
    assert [r["loss"] for r in plain.state.history] == [r["loss"] for r in none.state.history]
    assert not (tmp_path / "none" / FOLDER).exists()


def test_which_steps_is_a_function_of_step_and_share(tiny_model, tmp_path) -> None:
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(on_policy={"share": 0.7})).on_policy
    expected = [[trainer.wants(step, micro) for step in range(500)] for micro in range(2)]
    assert expected[0] != expected[1] and np.mean(expected) == pytest.approx(0.7, abs=0.05)
    assert expected[0] == [trainer.wants(step, 0) for step in range(500)]


def two_job(folder: Path) -> list:
    """What the processes of this world hold after a training."""
    recipe = make_recipe(on_policy={"share": 0.6}, steps=6)
    trainer = make_trainer(make_tiny_model, folder, recipe)
    history = trainer.run().history
    total = sum(float(p.double().sum()) for p in trainer.parameters)
    return gather_object([(total, [(r["on_policy"], r["loss"]) for r in history])])


@pytest.mark.slow
def test_two_processes_write_their_parts_and_agree(tmp_path) -> None:
    a, b = in_worlds(two_job, [Scenario("two", 2)], tmp_path)["two"]
    assert a == b and 0 < sum(share for share, _ in a[1]) < 6
    texts = [json.loads(path.read_text())["rollouts"] for path in (tmp_path / FOLDER).iterdir()]
    assert texts and all(len(rollouts) == 5 for rollouts in texts)
