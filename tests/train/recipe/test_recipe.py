"""A recipe means one thing, survives being written out, and every mistake in it is named where it
is."""

from __future__ import annotations

import math

import pytest
import yaml

from speculators.errors import ConfigError
from speculators.registry import FAMILIES
from train.recipe.load import load_recipe
from train.recipe.recipe import Recipe, describe_schema
from train.recipe.sections import GATE_METRICS, split_gate

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


# --------------------------------------------------------------------------------------------- what
# is right


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
    assert [(t.temperature, t.share) for t in recipe.regenerate.temperatures] == [(1.0, 1.0)]
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
    spelt_out = load_recipe(recipe_file("training: {learning_rate: 0.0001}  # as is\n" + MINIMAL))
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
        "regenerate.temperatures={0: 0.25, 1.0: 0.75}",
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
    assert [(t.temperature, t.share) for t in recipe.regenerate.temperatures] == [
        (0, 0.25),
        (1.0, 0.75),
    ]
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


def test_temperatures_in_a_list_share_equally(recipe_file):
    recipe = load_recipe(recipe_file(MINIMAL), ["regenerate.temperatures=[0.0, 0.7, 1.0]"])
    assert math.isclose(sum(entry.share for entry in recipe.regenerate.temperatures), 1)


def test_a_recipe_does_not_change_after_loading(recipe_file):
    recipe = load_recipe(recipe_file(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 5


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
    assert of("evaluation.suites=[gsm8k, spec_al]") == {
        "gsm8k": "suites/gsm8k.jsonl",
        "spec_al": "suites",
    }
    assert of("evaluation.suites.mbpp=here.jsonl", "evaluation.suites.gsm8k=") == {
        "mbpp": "here.jsonl",
        "gsm8k": "suites/gsm8k.jsonl",
    }


# --------------------------------------------------------------------------------------------- what
# is wrong

AT = "recipes/x.yaml: "

# Added to the minimal recipe -> the whole message, or what it starts with if it ends in "...".
MALFORMED = {
    "drafter: {num_layers: two}": AT + "drafter.num_layers: expected an integer >= 1, got 'two'",
    "drafter: {num_layers: 0}": AT + "drafter.num_layers: expected an integer >= 1, got 0",
    "drafter: {num_layers: true}": AT + "drafter.num_layers: expected an integer >= 1, got true",
    "drafter: {num_layers: null}": AT + "drafter.num_layers: expected an integer >= 1, got null",
    "drafter: {tap_layers: [3, 1, 3]}": (
        AT + "drafter.tap_layers: expected layer numbers in rising order, each once, "
        "got [3, 1, 3]; write [1, 3]"
    ),
    "drafter: {tap_layers: [-1, 2]}": AT + "drafter.tap_layers.0: expected an integer >= 0, got -1",
    "drafter: {tap_layers: []}": (
        AT + "drafter.tap_layers: expected a non-empty list, each an integer >= 0 or null, got []"
    ),
    "drafter: {draft_vocab_size: 1}": (
        AT + "drafter.draft_vocab_size: expected an integer >= 2 or null, got 1"
    ),
    "drafter: {num_attention_heads: 6, num_key_value_heads: 4}": (
        AT + "drafter: num_attention_heads (6) must be a multiple of num_key_value_heads (4)"
    ),
    "drafter: {fc_norm: true, norm_before_fc: true}": (
        AT + "drafter: norm_before_fc and fc_norm both norm the taps; set one of them"
    ),
    "drafter: 3": AT + "drafter: expected a mapping, got 3",
    "training: {learning_rte: 1}": (
        AT + "training.learning_rte: unknown key; did you mean 'learning_rate'?"
    ),
    "training: {learning_rate: fast}": (
        AT + "training.learning_rate: expected a number > 0 and <= 1, got 'fast'"
    ),
    "training: {learning_rate: .inf}": (
        AT + "training.learning_rate: expected a number > 0 and <= 1, got inf"
    ),
    "training: {steps: 5, epochs: 1}": (
        AT + "training: expected steps or epochs, got both (steps=5, epochs=1); set one "
        "of them to null"
    ),
    "training: {steps: 2.5}": AT + "training.steps: expected an integer >= 1 or null, got 2.5",
    "training: {mixed_precision: fp8}": (
        AT + "training.mixed_precision: expected one of auto, bf16, no, got 'fp8'"
    ),
    "training: {lr_schedule: linear, seed: -1}": (
        AT + "training.lr_schedule: expected one of cosine, constant, got "
        "'linear'; training.seed: expected an integer >= 0, got -1"
    ),
    "learning_rate: 1e-4": (
        AT + "learning_rate: unknown key; did you mean 'training.learning_rate'?"
    ),
    "zzz: 1": AT + "zzz: unknown key; valid keys here: name, output_dir, ...",
    "family: eagle9": AT + f"family: expected one of {', '.join(FAMILIES)}, got 'eagle9'",
    "loss: {kl: 1}": AT + "loss.kl: unknown divergence; ...",
    "loss: {tv: -1}": AT + "loss.tv.weight: expected a positive number, got -1...",
    "loss: {jsd: {weight: 1, gamma: 2}}": (
        AT + "loss.jsd.gamma: unknown option of jsd; it takes beta"
    ),
    "loss: {}": AT + "loss: empty; name at least one of forward_kl, ...",
    "gates: {speed: {min: 2}}": (
        AT + "gates.speed: unknown figure 'speed'; expected one of lossless_mismatches, ..."
    ),
    "gates: {efficiency: {}}": AT + "gates.efficiency: expected min, max or both",
    "gates: {efficiency: {min: 2, max: 1}}": (
        AT + "gates.efficiency: min (2) is above max (1): nothing could pass"
    ),
    "gates: {efficiency: 0.85}": AT + "gates.efficiency: expected a mapping, got 0.85",
    "gates: {t0.5.efficiency: {min: 1}}": (
        AT + "gates.t0.5.efficiency: nothing is measured at temperature 0.5; "
        "evaluation.temperatures is [0.0, 1.0]"
    ),
    "gates: {t0.lossless_mismatches: {max: 0}}": AT + "gates.t0.lossless_mismatches: ...",
    "{gates: {lossless_mismatches: {max: 0}}, evaluation: {lossless_check: false}}": (
        AT + "gates.lossless_mismatches: needs evaluation.lossless_check: true"
    ),
    "evaluation: {temperatures: [0, 0.0]}": (
        AT + "evaluation.temperatures: each temperature may be given once, ..."
    ),
    "evaluation: {prompts: [{}]}": (
        AT + "evaluation.prompts.0: expected exactly one of path, name, preset, stdlib, got none"
    ),
    "evaluation: {suites: [spec]}": (
        AT + "evaluation.suites: expected names of spec_al, spec_bench, mt_bench, gsm8k, ..."
    ),
    "evaluation: {suites: [mbpp, mbpp]}": (
        AT + "evaluation.suites: each suite may be given once, got ['mbpp', 'mbpp']"
    ),
    "evaluation: {suites: mbpp}": AT + "evaluation.suites: expected a mapping, got 'mbpp'",
    "data: {train: []}": AT + "data.train: expected a non-empty list, each a mapping, got []",
    "data: {train: [{path: a.jsonl, name: b/c}]}": (
        AT + "data.train.0: expected exactly one of path, name, preset, stdlib, got path and name"
    ),
    "data: {train: [{stdlib: {}, split: test}]}": (
        AT + "data.train.0: split has no meaning for a stdlib source; write it under stdlib"
    ),
    "data: {train: [{stdlib: {split: half}}]}": (
        AT + "data.train.0.stdlib.split: expected one of train, validation, test, got 'half'"
    ),
    "data: {}": AT + "data.train: required, but missing: sources of the examples to train on",
    "regenerate: {temperatures: {0: 0.5, 1: 0.4}}": (
        AT + "regenerate.temperatures: expected shares that add up to 1, got 0.9"
    ),
    "regenerate: {top_p: 0}": AT + "regenerate.top_p: expected a number > 0 and <= 1, got 0",
    "regenerate: {enabled: yes}": AT + "regenerate.enabled: expected true or false, got 'yes'",
    "target: {}": (
        AT + "target.model: required, but missing: folder or Hugging Face id of the target; ..."
    ),
    "target: {model: ''}": AT + "target.model: expected a string, got ''",
    "target: some/target": AT + "target: expected a mapping, got 'some/target'",
    "export: {formats: [gguf]}": (
        AT + "export.formats.0: expected one of vllm, speculators, sglang, transformers, got 'gguf'"
    ),
    "export: {formats: [vllm, vllm]}": (
        AT + "export.formats: each format may be given once, got ['vllm', 'vllm']"
    ),
    "trackers: [mlflow]": (
        AT + "trackers.0: expected one of wandb, trackio, tensorboard, got 'mlflow'"
    ),
    "features: {encoding: rotated9}": (
        AT + "features.encoding: expected one of exact, bf16, fp8, int4, ..."
    ),
    "joint: {}\nfeatures: {mode: cache}": (
        AT + "features.mode: a trained target's features change at every step; needs online"
    ),
    "data: {train: [{path: chats.jsonl}], fan_out: true}\nregenerate: {turns: all}": (
        AT + "data.fan_out: with regenerate.turns: all every turn ..."
    ),
    "position_weights: {gamma: 0}": AT + "position_weights.gamma: expected ...",
    "name: ../escape": AT + "name: expected a string matching ...",
}


@pytest.mark.parametrize("addition", MALFORMED)
def test_malformed_recipes_say_what_and_where(recipe_file, addition):
    tree = yaml.safe_load(MINIMAL)
    # the addition is written as text, so that the recipe's own reading of YAML is what is tested
    sections = {
        key: value
        for key, value in tree.items()
        if f"{key}:" not in addition.lstrip("{").split(" ")[0]
    }
    body = (
        addition[1:-1].replace("}, evaluation", "}\nevaluation")
        if addition.startswith("{")
        else addition
    )
    found = error_of(recipe_file(yaml.safe_dump(sections) + body + "\n"))
    expected = MALFORMED[addition]
    assert found.startswith(expected[:-3]) if expected.endswith("...") else found == expected


def test_all_mistakes_are_reported_at_once(recipe_file):
    found = error_of(recipe_file(MINIMAL + "drafter: {num_layers: two}\nexportt: {}\n"))
    assert "drafter.num_layers: expected" in found
    assert "exportt: unknown key; did you mean 'export'?" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\n  target: b\n",
            "recipes/x.yaml: line 2, column 9: mapping values are not allowed here",
        ),
        (
            "name: [a\n",
            "recipes/x.yaml: line 2, column 1: expected ',' or ']', but got '<stream end>'",
        ),
        (MINIMAL + "name: b\n", 'recipes/x.yaml: line 6, column 1: found duplicate key "name"'),
        (
            "training:\n  seed: 1\n  seed: 2\n",
            'recipes/x.yaml: line 3, column 3: found duplicate key "seed"',
        ),
        (MINIMAL + "[a]: 1\n", "recipes/x.yaml: ('a',): Keys should be strings"),
        ("", "recipes/x.yaml: expected a mapping of sections at the top, got nothing"),
        ("- a\n", "recipes/x.yaml: expected a mapping of sections at the top, got a list"),
        (
            "name: !!python/name:os.system\n",
            "recipes/x.yaml: line 1, column 7: could not determine a constructor",
        ),
    ],
)
def test_unreadable_yaml_names_the_line(recipe_file, text, message):
    assert error_of(recipe_file(text)).startswith(message)


def test_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("recipes/none.yaml").startswith("recipes/none.yaml: no such recipe file")
    assert "is a directory; give the recipe file itself" in error_of(".")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.setps=3", "command line: training.setps: unknown key; did you mean 'steps'?"),
        ("trainig.steps=3", "command line: trainig: unknown key; did you mean 'training'?"),
        (
            "drafter.num_layers=two",
            "command line: drafter.num_layers: expected an integer >= 1, got 'two'",
        ),
        ("loss.jsdd=1", "command line: loss.jsdd: unknown divergence"),
        ("gates.t1.speed.min=1", "command line: gates.t1.speed: unknown figure"),
        ("data.train.3.limit=1", "command line: data.train.3.limit=1: data.train is a list of 1"),
        (
            "data.train.first.limit=1",
            "command line: data.train.first.limit=1: data.train is a list of 1",
        ),
        ("name.x=1", "command line: name.x=1: name is 'tiny/eagle3', not a section"),
        ("training.steps", "command line: expected section.key=value, got 'training.steps'"),
        ("training.=3", "command line: expected section.key=value, got 'training.=3'"),
        ("drafter.tap_layers=[1", "command line: drafter.tap_layers=[1: line 1"),
    ],
)
def test_wrong_overrides_blame_the_command_line(recipe_file, override, message):
    assert error_of(recipe_file(MINIMAL), override).startswith(message)


def test_mistakes_in_both_places_are_kept_apart(recipe_file):
    found = error_of(recipe_file(MINIMAL + "drafter: {num_layers: 0}\n"), "training.steps=0")
    assert found.splitlines() == [
        "recipes/x.yaml: drafter.num_layers: expected an integer >= 1, got 0",
        "command line: training.steps: expected an integer >= 1 or null, got 0",
    ]


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
