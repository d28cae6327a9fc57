"""A recipe means one thing, survives being written out, and a mistake in it is named by its key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.recipe.load import load_recipe, override_text, parse_override, read
from draftsmith.train.recipe.recipe import Recipe, describe_schema, yaml_text

MINIMAL = """\
name: tiny/eagle3
target: {model: some/target}
data:
  train: [{path: chats.jsonl}]
  validation: [{path: held-out.jsonl}]
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """Writes `recipes/x.yaml` below the working directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()

    def write(text: str) -> str:
        (tmp_path / "recipes" / "x.yaml").write_text(text)
        return "recipes/x.yaml"

    return write


def error_of(path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value


# ---------------------------------------------------------------------------------- what is right


def test_recipe_written_out_is_the_same_recipe(recipe_file, tmp_path):
    text = MINIMAL + (
        "training: {steps: 5, mixed_precision: no}\nloss: {jsd: {weight: 1, beta: 0.3}, tv: 1}\n"
        "gates: {lossless_mismatches: {max: 0}, t0.acceptance_length: {min: 3}}\ntrackers: none\n"
    )
    recipe = load_recipe(recipe_file(text))
    (tmp_path / "resolved.yaml").write_text(recipe.resolved_yaml())
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again == recipe and again.recipe_hash() == recipe.recipe_hash()
    assert set(read(tmp_path / "resolved.yaml")) == set(Recipe.model_fields)


@pytest.mark.parametrize("name", ["no", "2026-01-02"])
def test_plain_words_stay_words(recipe_file, name):
    """YAML 1.1 has other ideas of them."""
    assert load_recipe(recipe_file(MINIMAL.replace("some/target", name))).target.model == name


TEXTS = (
    "head #2",
    "2026",
    "0.5",
    "null",
    "~",
    "true",
    "a: b",
    "[draft]",
    " x",
    "",
    "\U0001f600\u2028é",
)
DATA = ({"steps": None, "max_minutes": 2.5}, [{"path": "x #1"}], 1e-7, False)


@pytest.mark.parametrize("value", [*TEXTS, *DATA])
def test_override_text_of_any_value_reads_back(value):
    assert parse_override(override_text("a.b", value)) == (["a", "b"], value)


def test_overrides_reach_sections_lists_and_keys_with_dots(recipe_file):
    text = MINIMAL + "gates: {t0.acceptance_length: {min: 3.0}}\nloss: {jsd: 1.0}\n"
    overrides = [
        "training.steps=300",
        "training.steps=200",
        "training.mixed_precision=no",
        "data.train.0.limit=7",
        "drafter.tap_layers=[1, 2]",
        "gates.t0.acceptance_length.min=2",
        "gates.t1.acceptance_length={max: 1.5}",
        "loss.jsd.beta=0.4",
        "drafter.init_from=",
    ]
    recipe = load_recipe(recipe_file(text), overrides)
    assert (recipe.training.steps, recipe.training.epochs) == (200, None)
    assert recipe.training.mixed_precision == "no"
    assert recipe.data.train[0].limit == 7
    assert recipe.drafter.tap_layers == [1, 2] and recipe.drafter.init_from is None
    assert recipe.gates["t0.acceptance_length"].min == 2
    assert recipe.gates["t1.acceptance_length"].max == 1.5
    assert recipe.loss == {"jsd": {"weight": 1.0, "beta": 0.4}}


def test_a_stage_is_the_recipe_with_what_differs(recipe_file):
    text = MINIMAL + "training: {epochs: 3, batch_size: 4}\nloss: {tv: 1.0}\nstages:\n"
    text += "- {name: corpus, regenerate: {enabled: false}, training: {steps: 7}}\n"
    text += "- {name: sampled, loss: {forward_kl: 1.0}, drafter: {unroll_steps: 2}}\n"
    text += "- {name: written, on_policy: {share: 0.5}}\n"
    recipe = load_recipe(recipe_file(text))
    (_, corpus), (_, sampled), (_, written) = recipe.training_stages()
    t = corpus.training
    assert (t.steps, t.epochs, t.batch_size) == (7, None, 4)
    assert not corpus.regenerate.enabled and corpus.loss == {"tv": 1.0}
    assert sampled.training.epochs == 3 and sampled.loss == {"forward_kl": 1.0}
    assert (corpus.drafter.unroll_steps, sampled.drafter.unroll_steps) == (7, 2)
    assert sampled.on_policy is None and written.on_policy.share == 0.5
    assert load_recipe(recipe_file(recipe.resolved_yaml())) == recipe
    assert load_recipe(recipe_file(MINIMAL)).training_stages()[0][0] == ""


def test_every_key_is_described():
    rows = describe_schema()
    by_name = {row.name: row for row in rows}
    assert len(by_name) == len(rows) and all(row.description and row.type for row in rows)
    assert by_name["training.learning_rate"][1:3] == ("number > 0 and <= 1 or null", "null")
    assert by_name["training.mixed_precision"][1:3] == ("one of auto, bf16, no", "auto")
    assert by_name["drafter.tap_layers"].type == "non-empty list of integer >= 0 or null"
    assert by_name["target.model"].default == "required"
    assert by_name["evaluation.prompts"].description.endswith("(keys: see data.train[])")


def test_suites_are_names_or_paths(recipe_file):
    paths = lambda *overrides: load_recipe(recipe_file(MINIMAL), overrides).evaluation.suite_paths
    assert paths("evaluation.suites=[gsm8k, mbpp]") == {
        "gsm8k": "suites/gsm8k.jsonl",
        "mbpp": "suites/mbpp.jsonl",
    }
    assert paths("evaluation.suites.mbpp=here.jsonl") == {"mbpp": "here.jsonl"}


def test_a_recipe_extends_another(recipe_file, tmp_path):
    """Sections key by key; losses, lists and shares of temperatures as a whole; the name its
    own."""
    base = MINIMAL + (
        "family: eagle3\nloss: {jsd: 1.0}\ntraining: {steps: 9, seed: 3}\n"
        "regenerate: {temperatures: {0.0: 0.5, 1.0: 0.5}, top_k: 4}\n"
    )
    (tmp_path / "base.yaml").write_text(base)
    path = recipe_file(
        "extends: ../base.yaml\nname: mine\nloss: {tv: 1.0}\ntraining: {steps: 5}\n"
        "regenerate: {temperatures: {1.0: 1.0}}\ndata: {train: [{path: mine.jsonl}]}\n"
    )
    recipe = load_recipe(path, ["training.batch_size=2"])
    assert (recipe.name, recipe.target.model, recipe.loss) == ("mine", "some/target", {"tv": 1.0})
    t = recipe.training
    assert (t.steps, t.seed, t.batch_size) == (5, 3, 2)
    assert (recipe.regenerate.temperatures, recipe.regenerate.top_k) == ({1.0: 1.0}, 4)
    assert [source.path for source in recipe.data.train] == ["mine.jsonl"]
    assert recipe.data.validation[0].path == "held-out.jsonl"
    other = "extends: ../base.yaml\nname: mine\nfamily: medusa\n"
    assert load_recipe(recipe_file(other)).loss == {"forward_kl": 1.0}  # the family's
    for text, where in (
        ("extends: x.yaml\n", "recipes/x.yaml"),
        ("extends: none.yaml\n", "recipes/none.yaml"),
    ):
        assert error_of(recipe_file(text)).where == where


def test_the_home_folder_may_be_written_short(recipe_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    overrides = ["output_dir=~/runs/m", "data.train.0.path=~/chats.jsonl"]
    recipe = load_recipe(recipe_file(MINIMAL), overrides)
    assert recipe.output_dir == "/home/someone/runs/m"
    assert recipe.data.train[0].path == "/home/someone/chats.jsonl"


def test_position_weights_null_is_no_value(recipe_file):
    """Nor is it replaced by those of the family, which stand where a recipe names none."""
    path = recipe_file(MINIMAL + "family: dflash\ndrafter: {block_size: 8}\n")
    assert load_recipe(path).position_weights == {"gamma": 7.0}
    assert "position_weights: " in str(error_of(path, "position_weights=null"))


# ---------------------------------------------------------------------------------- what is wrong

# Added to the minimal recipe -> the key that the error names.
MALFORMED = {
    "drafter: {num_layers: true}": "drafter.num_layers",
    "training: {steps: 5, epochs: 1}": "training",
    "family: eagle9": "family",
    "loss: {tv: -1}": "loss.tv.weight",
    "position_weights: {gamma: 0}": "position_weights.gamma",
    "gates: {speed: {min: 2}}": "gates.speed",
    "joint: {export: adapter}\nevaluation: {engines: [vllm]}": "joint.export",
    "gates: {t0.5.acceptance_length: {min: 1}}": "gates.t0.5.acceptance_length",
    "gates: {vllm_gap: {max: 1}}": "gates.vllm_gap",
    "gates: {lossless_mismatches: {max: 0}}\nevaluation: {lossless_check: false}": (
        "gates.lossless_mismatches"
    ),
    "evaluation: {suites: [mbppp]}": "evaluation.suites",
    "evaluation: {suites: 3}": "evaluation.suites",
    "evaluation: {suites: [[1], a]}": "evaluation.suites",
    "training: {seed: 4294967296}": "training.seed",
    "data: {train: [{path: a.jsonl, name: b/c}]}": "data.train.0",
    "data: {train: [{path: a.jsonl}]}\ngates: {lossless_mismatches: {max: 1}}": (
        "gates.lossless_mismatches"
    ),
    "regenerate: {temperatures: {0: 0.5, 1: 0.4}}": "regenerate.temperatures",
    "evaluation: {temperatures: [0, 0.0]}": "evaluation.temperatures",
    "joint: {}\nfeatures: {mode: cache}": "features.mode",
    "joint: {}\nfeatures: {engine: vllm, endpoints: ['http://a:1/v1']}": "features.endpoints",
    "joint: {}\non_policy: {}": "on_policy",
    "target: {model: x, sharding: fsdp}\njoint: {}": "target.sharding",
    "stages: [{name: a}, {name: a}]": "stages",
    "stages: [{name: a, training: {stepz: 3}}]": "stages.0: training.stepz",
    "stages: [{name: a}, {name: b, drafter: {num_layers: 2}}]": "stages.1.drafter.num_layers",
    "export: {push_to_hub: head}": "export.push_to_hub",
    "name: ../escape": "name",
}


@pytest.mark.parametrize("addition", MALFORMED)
def test_malformed_recipe_is_refused_by_key(recipe_file, addition):
    # the addition is written as text, so that the recipe's own reading of YAML is what is tested
    tree = read(Path(recipe_file(MINIMAL)))
    kept = {key: tree[key] for key in tree if not re.search(f"^{key}:", addition, re.MULTILINE)}
    error = error_of(recipe_file(yaml_text(kept) + addition + "\n"))
    assert error.where == "recipes/x.yaml"
    assert f": {MALFORMED[addition]}: " in str(error)


def test_unknown_keys_are_named_all_with_the_nearest(recipe_file):
    error = str(error_of(recipe_file(MINIMAL + "learning_rat: 1\n"), "training.stepz=3"))
    assert "did you mean 'training.learning_rate'" in error and "'training.steps'" in error


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: a\n  target: b\n", "line 2"),
        (MINIMAL + "name: b\n", "line 6"),
        ("- a\n", "mapping"),
        ("name: !!python/name:os.system\n", "line 1"),
    ],
)
def test_unreadable_yaml_names_file_and_line(recipe_file, text, place):
    error = error_of(recipe_file(text))
    assert error.where == "recipes/x.yaml" and place in str(error)


@pytest.mark.parametrize(
    "override", ["data.train.3.limit=1", "name.x=1", "training.steps", "drafter.tap_layers=[1"]
)
def test_override_that_cannot_be_is_named(recipe_file, override):
    assert error_of(recipe_file(MINIMAL), override).where == f"override {override}"
