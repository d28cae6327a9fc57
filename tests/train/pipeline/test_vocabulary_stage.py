"""`drafter.draft_vocab_size: auto`: what a run measures before it trains, and keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import ValidationError

from draftsmith.inference.engine import round_costs
from draftsmith.inference.evaluation import vocabulary_curve
from draftsmith.inference.evaluation.vocabulary_curve import RoundPrice
from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import CheckpointError, ConfigError, DataError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline import vocabulary_stage
from draftsmith.train.pipeline.vocabulary_stage import (
    assumed_length,
    choice_file,
    coverages,
    with_draft_vocabulary,
)
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.recipe import Recipe
from tests.support.errors import raises_at
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import save_target
from tests.support.training import SHAPES, recipe_of
from tests.support.worlds import Scenario, in_worlds

AUTO = {"draft_vocab_size": "auto"}
CHEAP = RoundPrice(0.0, 0.5)
DEAR = RoundPrice(8.0, 9.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """With the embedded target's tokenizer of 4,096 tokens."""
    return save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def run_of(target: Path, folder: Path, **sections: Any) -> Recipe:
    least = {
        "target": {"model": str(target)},
        "output_dir": str(folder / "run"),
        "data": {"train": [quickstart("train", 6)], "max_length": 256},
        "drafter": {**AUTO, "tap_layers": [1, 2, 3]},
        "regenerate": {"enabled": False},
        "evaluation": {"num_speculative_tokens": 2},
    }
    return recipe_of("eagle3", **least | sections)


def chosen(recipe: Recipe, accelerator: Accelerator | None = None) -> Any:
    accelerator = accelerator or Accelerator(cpu=True)
    completed = with_draft_vocabulary(recipe, accelerator, Stages(enabled=False))
    return completed.drafter.draft_vocab_size


def prefer(monkeypatch, favourite: int) -> None:
    """Rounds of one size cost next to nothing."""

    def prices(drafters, target, k, rows):
        sizes = [drafter.config.draft_vocab_size for drafter in drafters()]
        return {size: CHEAP if size == favourite else DEAR for size in sizes}

    monkeypatch.setattr(vocabulary_stage, "measure_prices", prices)


def test_acceptance_before_training_is_that_of_the_stated_model():
    a = vocabulary_stage.ASSUMED_ACCEPTANCE
    assert assumed_length(0.0, 4) == 1.0
    assert math.isclose(assumed_length(0.5, 2), 1 + a / 2 + (a / 2) ** 2)


def test_coverage_is_of_rows_that_chose_no_token():
    def rows(held_out: list[int], others: list[int]) -> list[Any]:
        texts = [held_out if i % 5 == 0 else others for i in range(10)]
        return [
            SimpleNamespace(input_ids=np.array(ids), loss_mask=np.arange(len(ids)) > 0)
            for ids in texts
        ]

    # the first token of a row is not supervised
    assert coverages(rows([9, 1, 1], [9, 3, 3, 4]), 10, [1, 2]) == {1: 0.0, 2: 0.0}
    assert coverages(rows([9, 3, 1], [9, 3, 3, 4]), 10, [1, 10]) == {1: 0.5, 10: 1.0}
    with raises_at(DataError, "drafter.draft_vocab_size"):
        coverages(rows([1, 2], [3])[:1], 10, [1])


def test_choice_is_measured_once_and_kept(target, tmp_path, monkeypatch):
    recipe = run_of(target, tmp_path)
    prefer(monkeypatch, 2048)
    assert chosen(recipe) == 2048
    kept = json.loads(choice_file(recipe).read_text())
    assert [point["size"] for point in kept["curve"]] == [4096, 2048, 1024]
    assert kept["curve"][0]["coverage"] == 1.0 > kept["curve"][2]["coverage"] > 0
    prefer(monkeypatch, 1024)
    assert chosen(recipe) == 2048  # a run that goes on
    other = run_of(target, tmp_path, evaluation={"num_speculative_tokens": 3})
    assert chosen(other) == 1024
    assert chosen(recipe) == 2048  # another recipe in its folder took nothing from it
    assert chosen(run_of(target, tmp_path, drafter={"draft_vocab_size": 300})) == 300


def test_choice_that_cannot_be_read_is_refused(target, tmp_path):
    recipe = run_of(target, tmp_path)
    file = choice_file(recipe)
    file.parent.mkdir(parents=True)
    for text in ("", "{}", '{"draft_vocab_size": null}'):
        file.write_text(text)
        with raises_at(CheckpointError, file):
            chosen(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(SHAPES.keys() - {"dflash2"}))
def test_every_family_is_measured_without_trained_weights(family, tiny_model, monkeypatch):
    monkeypatch.setattr(round_costs, "MEASURING_SECONDS", 0.0)
    monkeypatch.setattr(vocabulary_curve, "SWEEPS", 1)
    model = FrozenTarget(tiny_model("llama"))
    drafter = SHAPES[family] | AUTO
    recipe = recipe_of(family, drafter=drafter, evaluation={"num_speculative_tokens": 2})
    config = drafter_config(recipe, model)
    assert not config.reduced_vocabulary  # what it is chosen from
    shares = {config.vocab_size: 1.0, 40: 0.5}
    whole, part = vocabulary_stage._curve(recipe, config, model, shares)
    assert (whole.size, part.size) == (config.vocab_size, 40)
    assert all(1 < p.price.whole and 0 < p.price.drafts < p.price.whole for p in (whole, part))


def _in_one_of_several(folder: str, *, target: str) -> list[Any]:
    """The processes would measure differently."""
    accelerator = Accelerator(cpu=True)
    favourite = (1024, 4096)[accelerator.process_index]
    with pytest.MonkeyPatch.context() as patch:
        prefer(patch, favourite)
        size = chosen(run_of(Path(target), Path(folder)), accelerator)
    return gather_object([size])


@pytest.mark.slow
def test_all_processes_take_the_choice_of_the_first(target, tmp_path):
    scenario = Scenario("two", 2, arguments={"target": str(target)})
    assert in_worlds(_in_one_of_several, [scenario], tmp_path)["two"] == [1024, 1024]


@pytest.mark.parametrize(
    "sections",
    [
        {"target": {"model": "tiny", "sharding": "fsdp"}},
        {"features": {"engine": "vllm", "endpoints": ["http://127.0.0.1:1/v1"]}},
    ],
)
def test_target_that_no_process_has_whole_is_refused(sections):
    with pytest.raises(ValidationError, match=r"draft_vocab_size: auto.*give a number"):
        recipe_of("eagle3", drafter=AUTO, **sections)


def test_drafter_whose_vocabulary_is_given_is_refused_before_anything_is_loaded(
    target, tmp_path, monkeypatch
):
    monkeypatch.setattr(vocabulary_stage, "load_target", lambda *_: pytest.fail("it was loaded"))
    fields = run_of(target, tmp_path).model_dump(mode="json")
    sections = {name: fields[name] for name in ("target", "output_dir", "data", "evaluation")}
    block = SHAPES["dflash2"] | AUTO
    with pytest.raises(ConfigError, match="selector's codebooks are over all tokens"):
        chosen(recipe_of("dflash2", drafter=block, **sections))
