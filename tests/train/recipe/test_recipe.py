"""A recipe means one thing, survives being written out, and every mistake in it is named where it
is."""

from __future__ import annotations

import re

import pytest
import yaml

from draftsmith.speculators.errors import ConfigError
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe, describe_schema
from draftsmith.train.recipe.sections import GATE_METRICS, split_gate

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


def error_of(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


# ---------------------------------------------------------------------------------- what is right


def test_minimal_recipe_has_the_published_defaults(recipe_file):
    recipe = load_recipe(recipe_file(MINIMAL))
    assert recipe.output_dir == "runs/tiny/eagle3"
    assert (recipe.drafter.unroll_steps, recipe.drafter.tap_layers) == (7, None)
    assert recipe.position_weights == {"step_decay": 0.8}
    assert (
        recipe.training.learning_rate,
        recipe.training.max_grad_norm,
        recipe.training.epochs,
    ) == (
        1e-4,
        0.5,
        2,
    )
    assert recipe.training.steps is None
    assert recipe.regenerate.temperatures == {1.0: 1.0}
    assert recipe.loss == {"forward_kl": 1.0}
    assert recipe.gates == {}
    assert recipe.trackers == []


def test_resolved_recipe_is_the_same_recipe(recipe_file, tmp_path):
    text = (
        MINIMAL
        + "training: {steps: 5, mixed_precision: no}\nloss: {jsd: {weight: 1, beta: 0.3}, tv: 1}\n"
    )
    text += (
        "gates: {lossless_mismatches: {max: 0}, t0.acceptance_length: {min: 3}}\ntrackers: none\n"
    )
    recipe = load_recipe(recipe_file(text))
    (tmp_path / "resolved.yaml").write_text(recipe.resolved_yaml())
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again == recipe
    assert again.recipe_hash() == recipe.recipe_hash()
    assert len(recipe.recipe_hash()) == 64
    assert set(yaml.safe_load(recipe.resolved_yaml())) == set(Recipe.model_fields)


@pytest.mark.parametrize("name", ["no", "on", "2026-01-02", "1:30"])
def test_plain_words_stay_words(recipe_file, name):
    """YAML 1.1 has other ideas of them."""
    assert load_recipe(recipe_file(MINIMAL.replace("some/target", name))).target.model == name


def test_hash_follows_values_not_spelling(recipe_file):
    recipe = load_recipe(recipe_file(MINIMAL))
    spelt_out = load_recipe(recipe_file("training: {batch_size: 8}  # as is\n" + MINIMAL))
    assert recipe.recipe_hash() == spelt_out.recipe_hash()
    assert (
        recipe.recipe_hash()
        != load_recipe("recipes/x.yaml", ["training.learning_rate=2e-4"]).recipe_hash()
    )


def test_overrides_reach_sections_lists_and_keys_with_dots(recipe_file):
    text = MINIMAL + "gates: {t0.acceptance_length: {min: 3.0}}\nloss: {jsd: 1.0}\n"
    overrides = [
        "training.steps=200",
        "training.learning_rate=3e-4",
        "training.mixed_precision=no",
        "data.train.0.limit=7",
        "drafter.tap_layers=[1, 2]",
        "gates.t0.acceptance_length.min=2",
        "gates.t1.efficiency={max: 1.5}",
        "loss.jsd.beta=0.4",
        "loss.tv=0.5",
        "regenerate.temperatures=[0.0, 1.0]",
        "drafter.init_from=",
        "trackers=[tensorboard]",
    ]
    recipe = load_recipe(recipe_file(text), overrides)
    assert (recipe.training.steps, recipe.training.epochs) == (200, None)
    assert recipe.training.learning_rate == 3e-4
    assert recipe.training.mixed_precision == "no"
    assert recipe.data.train[0].limit == 7
    assert recipe.drafter.tap_layers == [1, 2]
    assert recipe.gates["t0.acceptance_length"].min == 2
    assert recipe.gates["t1.efficiency"].max == 1.5
    assert recipe.loss == {"jsd": {"weight": 1.0, "beta": 0.4}, "tv": 0.5}
    assert recipe.regenerate.temperatures == {0: 0.5, 1: 0.5}
    assert recipe.drafter.init_from is None
    assert recipe.trackers == ["tensorboard"]


def test_later_override_wins_and_null_restores_the_choice(recipe_file):
    path = recipe_file(MINIMAL + "training: {epochs: 3}\n")
    recipe = load_recipe(path, ["training.epochs=null", "training.steps=5", "training.steps=6"])
    assert (recipe.training.steps, recipe.training.epochs) == (6, None)


def test_a_stage_is_the_recipe_with_what_differs(recipe_file):
    text = MINIMAL + "training: {epochs: 3, batch_size: 4}\nloss: {tv: 1.0}\nstages:\n"
    text += "- {name: corpus, regenerate: {enabled: false}, training: {steps: 7}}\n"
    text += "- {name: sampled, loss: {forward_kl: 1.0}, drafter: {unroll_steps: 2}}\n"
    recipe = load_recipe(recipe_file(text))
    (_, corpus), (_, sampled) = recipe.training_stages()
    assert (corpus.training.steps, corpus.training.epochs, corpus.training.batch_size) == (
        7,
        None,
        4,
    )
    assert (corpus.regenerate.enabled, corpus.loss, corpus.drafter.unroll_steps) == (
        False,
        {"tv": 1.0},
        7,
    )
    assert (sampled.training.epochs, sampled.loss, sampled.drafter.unroll_steps) == (
        3,
        {"forward_kl": 1.0},
        2,
    )
    assert sampled.regenerate.enabled and sampled.stages == [] and sampled.name == recipe.name
    assert load_recipe(recipe_file(recipe.resolved_yaml())) == recipe
    assert load_recipe(recipe_file(MINIMAL)).training_stages()[0][0] == ""


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[{name: a}, {name: a}]", "each needs a name of its own"),
        (
            "[{name: a, training: {stepz: 3}}]",
            "stages.0 (a): training.stepz: unknown key; did you mean 'steps'",
        ),
        (
            "[{name: a}, {name: b, drafter: {num_layers: 2}}]",
            "stages.1.drafter.num_layers: a later stage goes on",
        ),
        ("[{name: a, data: {max_length: 0}}]", "data.max_length: expected"),
        ("[{name: a, evaluation: {}}]", "stages.0.evaluation: unknown key"),
    ],
)
def test_wrong_stages_are_named(recipe_file, stages, said):
    assert said in error_of(recipe_file(MINIMAL + f"stages: {stages}\n"))


def test_gate_names():
    assert split_gate("t0.7.efficiency") == (0.7, "efficiency")
    assert split_gate("t0.acceptance_length") == (0.0, "acceptance_length")
    assert split_gate("lossless_mismatches") == (None, "lossless_mismatches")
    for metric in GATE_METRICS:
        assert split_gate(metric) == (None, metric)


def test_every_key_is_described():
    rows = describe_schema()
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert all(row.description and row.type for row in rows)
    assert {
        "training.learning_rate",
        "data.train[].path",
        "gates.<name>.min",
        "loss",
        "target.model",
    } <= set(names)
    by_name = {row.name: row for row in rows}
    assert by_name["training.learning_rate"][1:3] == ("a number > 0 and <= 1", "0.0001")
    assert by_name["training.mixed_precision"][1:3] == ("one of auto, bf16, no", "auto")
    assert by_name["drafter.tap_layers"].type == "a non-empty list, each an integer >= 0 or null"
    assert by_name["target.model"].default == "required"
    assert by_name["evaluation.prompts"].description.endswith("(keys: see data.train[])")


def test_suites_are_names_or_paths(recipe_file):
    of = lambda *overrides: load_recipe(recipe_file(MINIMAL), overrides).evaluation.suite_paths
    assert of() == {}
    assert of("evaluation.suites=[gsm8k, mbpp]") == {
        "gsm8k": "suites/gsm8k.jsonl",
        "mbpp": "suites/mbpp.jsonl",
    }
    assert of("evaluation.suites.mbpp=here.jsonl", "evaluation.suites.gsm8k=") == {
        "mbpp": "here.jsonl",
        "gsm8k": "suites/gsm8k.jsonl",
    }


def test_a_recipe_extends_another(recipe_file, tmp_path):
    """Sections key by key; losses, lists and shares of temperatures as a whole; the name its
    own."""
    base = MINIMAL + (
        "loss: {forward_kl: 1.0}\ntraining: {steps: 9, seed: 3}\n"
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
    assert recipe.regenerate.temperatures == {1.0: 1.0}
    assert recipe.regenerate.top_k == 4
    assert [source.path for source in recipe.data.train] == ["mine.jsonl"]
    assert recipe.data.validation[0].path == "held-out.jsonl"
    for text, words in (
        ("extends: x.yaml\n", "extends itself"),
        ("extends: 3\n", "extends: expected the path"),
        ("extends: none.yaml\n", "none.yaml: no such recipe file"),
        ("extends: ../base.yaml\n", "name: required"),
    ):
        assert words in error_of(recipe_file(text))


# ---------------------------------------------------------------------------------- what is wrong

AT = "recipes/x.yaml: "

# Added to the minimal recipe -> the key that the error names.
MALFORMED = {
    "drafter: {num_layers: true}": "drafter.num_layers",
    "drafter: {tap_layers: [3, 1, 3]}": "drafter.tap_layers",
    "drafter: {num_attention_heads: 6, num_key_value_heads: 4}": "drafter",
    "training: {steps: 5, epochs: 1}": "training",
    "zzz: 1": "zzz",
    "family: eagle9": "family",
    "loss: {tv: -1}": "loss.tv.weight",
    "loss: {jsd: {weight: 1, gamma: 2}}": "loss.jsd.gamma",
    "gates: {speed: {min: 2}}": "gates.speed",
    "gates: {efficiency: {min: 2, max: 1}}": "gates.efficiency",
    "gates: {t0.5.efficiency: {min: 1}}": "gates.t0.5.efficiency",
    "gates: {lossless_mismatches: {max: 0}}\nevaluation: {lossless_check: false}": (
        "gates.lossless_mismatches"
    ),
    "evaluation: {suites: [mbpp, mbpp]}": "evaluation.suites",
    "data: {train: [{path: a.jsonl, name: b/c}]}": "data.train.0",
    "regenerate: {temperatures: {0: 0.5, 1: 0.4}}": "regenerate.temperatures",
    "target: {model: }": "target.model",
    "export: {formats: [vllm, vllm]}": "export.formats",
    "joint: {}\nfeatures: {mode: cache}": "features.mode",
    "joint: {}\ntraining: {keep_features_gb: 1.0}": "training.keep_features_gb",
    "position_weights: {gamma: 0}": "position_weights.gamma",
    "name: ../escape": "name",
}


@pytest.mark.parametrize("addition", MALFORMED)
def test_malformed_recipes_are_refused_by_key(recipe_file, addition):
    # the addition is written as text, so that the recipe's own reading of YAML is what is tested
    tree = yaml.safe_load(MINIMAL)
    kept = {key: tree[key] for key in tree if not re.search(f"^{key}:", addition, re.MULTILINE)}
    found = error_of(recipe_file(yaml.safe_dump(kept) + addition + "\n"))
    assert found.startswith(f"{AT}{MALFORMED[addition]}: ")


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("drafter: {num_layers: two}", "drafter.num_layers: expected an integer >= 1, got 'two'"),
        ("training: {lr: 1}", "training.lr: unknown key; valid keys here: steps, ..."),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean 'training.learning_rate'?"),
        ("data: {}", "data.train: required, but missing: sources of the examples to train on"),
        ("trackers: [mlflow]", "trackers.0: expected one of wandb, trackio, tensorboard, got ..."),
    ],
)
def test_an_error_says_what_was_expected(recipe_file, addition, expected):
    """A sentence per way of being wrong."""
    text = MINIMAL if "data:" not in addition else MINIMAL[: MINIMAL.index("data:")]
    found = error_of(recipe_file(text + addition + "\n"))
    assert found.startswith((AT + expected).removesuffix("..."))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: a\n  target: b\n", "line 2, column 9: "),
        (MINIMAL + "name: b\n", "line 6, column 1: found duplicate key"),
        ("training:\n  seed: 1\n  seed: 2\n", "line 3, column 3: found duplicate key"),
        (MINIMAL + "[a]: 1\n", "('a',): "),
        ("- a\n", "expected a mapping"),
        ("name: !!python/name:os.system\n", "line 1, column 7: "),
    ],
)
def test_unreadable_yaml_names_the_line(recipe_file, text, place):
    assert error_of(recipe_file(text)).startswith(AT + place)


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("recipes/none.yaml").startswith("recipes/none.yaml: no such recipe file")
    assert "is a directory; give the recipe file itself" in error_of(".")


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("training.setps=3", "training.setps: unknown key; did you mean 'steps'?"),
        ("drafter.num_layers=two", "drafter.num_layers: "),
        ("gates.t1.speed.min=1", "gates.t1.speed: "),
        ("data.train.3.limit=1", "data.train.3.limit=1: data.train is a list of 1"),
        ("name.x=1", "name.x=1: name is "),
        ("training.steps", "expected section.key=value"),
        ("drafter.tap_layers=[1", "drafter.tap_layers=[1: line 1"),
    ],
)
def test_wrong_overrides_blame_the_command_line(recipe_file, override, place):
    assert error_of(recipe_file(MINIMAL), override).startswith(f"command line: {place}")


def test_all_mistakes_are_reported_by_where_they_were_made(recipe_file):
    text = MINIMAL + "drafter: {num_layers: 0}\nexportt: {}\n"
    found = error_of(recipe_file(text), "training.steps=0").splitlines()
    assert found[0].startswith(f"{AT}drafter.num_layers: ") and "; exportt: " in found[0]
    assert found[1].startswith("command line: training.steps: ") and len(found) == 2


def test_gates_need_something_to_measure_on(recipe_file):
    text = (
        MINIMAL.replace("  validation: [{path: held-out.jsonl}]\n", "")
        + "gates: {efficiency: {min: 0.8}}\n"
    )
    assert "gates: there is nothing to measure on" in error_of(recipe_file(text))


def test_the_position_weights_of_a_recipe_are_its_own(recipe_file):
    """Those of its family where it names none; null is no value, and is not replaced."""
    path = recipe_file(MINIMAL + "family: dflash\ndrafter: {block_size: 8}\n")
    assert load_recipe(path).position_weights == {"gamma": 7.0}
    given = load_recipe(path, ["position_weights={step_decay: 0.1}"])
    assert given.position_weights == {"step_decay": 0.1}
    with pytest.raises(ConfigError, match="position_weights"):
        load_recipe(path, ["position_weights=null"])
    with pytest.raises(ConfigError, match=r"drafter\.step_decay"):
        load_recipe(path, ["drafter.step_decay=0.1"])
