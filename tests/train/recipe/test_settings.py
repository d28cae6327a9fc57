"""What a recipe that says little gets: settings that suit the length of the run, a mask token."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.recipe.drafter_config import default_mask_token, drafter_config
from draftsmith.train.recipe.recipe import make_recipe
from draftsmith.train.recipe.sections import SHORT_RUN
from tests.quickstart_data import DATA
from tests.support.cases import CASES, make
from tests.support.errors import raises_at
from tests.support.training import recipe_of

TARGET = DATA.parent / "target"


def recipe(family: str = "eagle3", **training):
    return recipe_of(family, target={"model": str(TARGET)}, training=training)


@pytest.mark.parametrize("family", ["eagle3", "mlp"])
def test_settings_of_a_short_run_are_the_familys(family):
    published, short = recipe(family).training, recipe(family).for_steps(600).training
    assert short.learning_rate > published.learning_rate
    assert (short.optimizer == "muon") == (family != "mlp")
    assert recipe(family).for_steps(SHORT_RUN).training == published


def test_settings_by_minutes_are_those_of_a_short_run():
    assert recipe(max_minutes=30).for_steps(None).training.optimizer == "muon"
    assert recipe(max_minutes=3000).for_steps(None).training.optimizer == "adamw"


def test_settings_that_a_recipe_names_stay():
    given = recipe(steps=100, warmup_ratio=0.001)
    assert given.training.settings == "given" and given.for_steps(100) is given
    for source in (given, recipe(steps=100)):
        again = make_recipe(source.model_dump(mode="json"))
        assert again.for_steps(100).training == source.for_steps(100).training


def test_mask_token_is_a_special_token_that_no_conversation_has(tmp_path, caplog):
    """As of SmolLM2, whose tokens use every row of the embedding."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.add_tokens(
        [AddedToken("<repo>", special=True), AddedToken("<jupyter>", special=True)]
    )
    tokenizer.mask_token = None
    tokenizer.chat_template = tokenizer.chat_template + "{# <jupyter> #}"
    tokenizer.save_pretrained(tmp_path)
    built = recipe("dflash")
    built = built.model_copy(
        update={"target": built.target.model_copy(update={"model": str(tmp_path)})}
    )

    class Full:
        vocab_size = max(tokenizer.get_vocab().values()) + 1

    assert default_mask_token(built, Full()) == tokenizer.convert_tokens_to_ids("<repo>")
    assert "<repo>" in caplog.text
    every = " ".join(token.content for token in tokenizer.added_tokens_decoder.values())
    tokenizer.chat_template += "{# " + every + " #}"
    tokenizer.save_pretrained(tmp_path)
    with raises_at(ConfigError, "drafter.mask_token_id"):
        default_mask_token(built, Full())


def test_dspark_starts_from_a_dflash_head(tiny_model, tmp_path):
    """Its block is the head's; the Markov and the confidence head are new."""
    target, head = make(CASES["dflash"], tiny_model("llama"))
    export_drafter(head, tmp_path / "dflash", dtype=torch.float32)
    drafter = {"init_from": str(tmp_path / "dflash"), "markov_rank": 8}
    given = recipe_of("dspark", drafter=drafter, training={"steps": 1})
    config = drafter_config(given, target)
    assert (config.family, config.markov_rank, config.first_slot) == ("dspark", 8, 1)
    started = make_drafter(given, config, target, None, None, tmp_path).state_dict()
    block = head.state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in block.items())
    assert {name.split(".")[0] for name in set(started) - set(block)} == {
        "markov_head",
        "confidence_head",
    }
    given = recipe_of("dspark", drafter=drafter | {"num_layers": 4})
    with raises_at(ConfigError, "drafter.num_layers"):
        drafter_config(given, target)
