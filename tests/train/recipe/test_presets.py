"""What a recipe that says little gets: a preset that suits the length of the run, a mask token."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.pipeline.run import optimizers_of
from draftsmith.train.recipe.drafter_config import default_mask_token, drafter_config
from draftsmith.train.recipe.recipe import make_recipe
from draftsmith.train.recipe.sections import PRESETS, SHORT_RUN, TUNED
from tests.support.cases import CASES, make
from tests.support.errors import raises_at
from tests.support.quickstart_data import DATA
from tests.support.training import NO_ROWS, recipe_of

TARGET = DATA.parent / "target"


def recipe(family: str = "eagle3", **training):
    return recipe_of(family, target={"model": str(TARGET)}, training=training)


@pytest.mark.parametrize("family", ["eagle3", "mlp"])
def test_preset_of_a_short_run_is_short(family):
    published = recipe(family).training_for(SHORT_RUN)
    short = recipe(family).training_for(SHORT_RUN - 1)
    assert (published.preset, short.preset) == ("published", "short")
    assert short.learning_rate > published.learning_rate
    assert (short.optimizer == "muon") == (family != "mlp")


def test_preset_by_minutes_is_that_of_a_short_run():
    assert recipe(max_minutes=30).training_for(None).optimizer == "muon"
    assert recipe(max_minutes=3000).training_for(None).optimizer == "adamw"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_with_one_key_named_changes_in_that_key_alone(family, preset):
    alone = {
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "muon_learning_rate": 0.003,
        "max_grad_norm": 7.0,
        "warmup_ratio": 0.5,
    }
    assert set(alone) == set(TUNED)
    before = recipe(family, steps=9, preset=preset).training.model_dump()
    for key, value in alone.items():
        after = recipe(family, steps=9, preset=preset, **{key: value}).training.model_dump()
        assert after == before | {key: value}


@pytest.mark.parametrize("family", FAMILIES)
def test_preset_short_adamw_has_a_rate_for_all_weights(family):
    """Neither Muon's nor that of the weights which Muon leaves."""
    short = recipe(family, steps=100).training
    adamw = recipe(family, steps=100, preset="short_adamw").training
    published = recipe(family, steps=SHORT_RUN).training
    assert adamw.optimizer == "adamw"
    assert published.learning_rate <= adamw.learning_rate <= short.learning_rate


def test_preset_under_its_older_name_is_the_same():
    older = {"given": "published", "published": "published", "short": "short", "auto": "short"}
    for settings, preset in older.items():
        assert recipe(steps=9, settings=settings) == recipe(steps=9, preset=preset)


def test_presets_are_written_out_where_the_length_is_known():
    """Steps or minutes; of epochs the rows are counted first, and stages have lengths of their
    own."""
    stages = [{"name": "a", "training": {"steps": 5}}, {"name": "b"}]
    staged = recipe_of("eagle3", training={"steps": SHORT_RUN}, stages=stages)
    assert recipe(steps=100).training.preset == "short"
    assert recipe(epochs=1.0).training.learning_rate is None
    assert staged.training.learning_rate is None
    (_, short), (_, long) = staged.training_stages()
    assert (short.training.preset, long.training.preset) == ("short", "published")
    for source in (recipe(steps=100), recipe(epochs=1.0), staged):
        again = make_recipe(source.model_dump(mode="json"))
        assert again == source and again.training_for(100) == source.training_for(100)


def test_optimizers_of_a_run_are_said_before_the_data_is_read():
    """With the rates and the preset; of epochs the rows are counted first."""
    stages = [{"name": "a", "training": {"steps": 5}}, {"name": "b"}]
    staged = recipe_of("eagle3", training={"steps": SHORT_RUN}, stages=stages)
    (short,) = optimizers_of(recipe(steps=100, learning_rate=0.00321))
    of_a, of_b = optimizers_of(staged)
    assert all(text in short for text in ("Muon at 0.02", "AdamW at 0.00321", "preset short,"))
    assert of_a.startswith("a: Muon") and "preset short," in of_a
    assert of_b.startswith("b: AdamW") and "preset published," in of_b
    assert optimizers_of(recipe(epochs=1.0)) == []


def test_preset_of_a_joint_training_is_published():
    joint = recipe_of("medusa", training={"steps": 5}, joint={})
    assert joint.training.preset == "published" and joint.training.optimizer == "adamw"


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

    for _ in range(2):  # an `init` asks for every plan that it makes
        assert default_mask_token(built, Full()) == tokenizer.convert_tokens_to_ids("<repo>")
    assert caplog.text.count("<repo>") == 1
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
    recipe = recipe_of("dspark", drafter=drafter, training={"steps": 1})
    config = drafter_config(recipe, target)
    assert (config.family, config.markov_rank, config.first_slot) == ("dspark", 8, 1)
    started = make_drafter(recipe, config, target, NO_ROWS, None).state_dict()
    block = head.state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in block.items())
    assert {name.split(".")[0] for name in set(started) - set(block)} == {
        "markov_head",
        "confidence_head",
    }
    recipe = recipe_of("dspark", drafter=drafter | {"num_layers": 4})
    with raises_at(ConfigError, "drafter.num_layers"):
        drafter_config(recipe, target)
