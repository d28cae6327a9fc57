"""The command line: it starts without torch, says in a paragraph what can be mended, and each
command does its work."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.console import EXTRAS
from draftsmith.inference.flags import Command
from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.digests import weights_sha256
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import (
    export_drafter,
    load_drafter,
    read_drafter_config,
    read_fields,
)
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.cli import app
from draftsmith.train.pipeline.evaluate_again import evaluate_run
from draftsmith.train.pipeline.export_stage import recipe_of
from draftsmith.train.recipe.drafter_config import drafter_config
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import describe_schema
from draftsmith.train.trainer import checkpoint
from tests.support.cli import call, refused
from tests.support.errors import raises_at
from tests.support.targets import save_target
from tests.support.tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------ starting and failing


def test_starts_without_torch():
    """`--help` must not wait for torch or transformers."""
    code = (
        "import sys; from draftsmith.train.cli import app;"
        " assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_every_command_is_listed_with_a_whole_sentence():
    listed = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    names = get_command(app).commands
    lines = [line for line in listed.splitlines() if line.split()[:1] and line.split()[0] in names]
    assert len(lines) == len(names)
    assert not [line for line in lines if not line.endswith(".") or line.endswith("...")]


@pytest.mark.parametrize("name", get_command(app).commands)
def test_every_command_takes_the_home_folder_as_recipes_do(name):
    assert isinstance(get_command(app).commands[name], Command)


@pytest.mark.parametrize("name", get_command(app).commands)
def test_help_every_option_says_what_it_takes(name):
    parameters = get_command(app).commands[name].params
    assert not [parameter.name for parameter in parameters if not parameter.help]


WITHOUT_EXTRAS = """
import sys
from draftsmith.inference.console import EXTRAS
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in EXTRAS.keys() - {"anyio", "httpx2"}:  # huggingface_hub's
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from draftsmith.inference import LLM
from draftsmith.train.cli import app
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        print("exit code", end.code)
"""

BRIEFLY = "--model recipes/quickstart/target --num-prompts 1 --repeats 1 --max-tokens 2"


@pytest.mark.parametrize("extra", ["train", "serve"])
def test_extras_every_package_names_an_extra_that_has_it(extra):
    """`report` is a part of `train`, and openai of both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"]
    listed = wanted["train"][1:] + wanted["report"] if extra == "train" else wanted[extra]
    modules = {re.split("[.<>=]", line)[0].replace("-", "_") for line in listed}
    named = {module for module, name in EXTRAS.items() if name == extra}
    assert named <= modules <= {*named, "openai"}


@pytest.mark.slow
def test_commands_without_the_extras_run_or_name_the_extra():
    expected = {
        "inspect ngram": ("0", "draftsmith generate"),
        "inspect recipes/quickstart/target": ("0", "every tensor is there"),
        "schema loss": ("0", "divergences by name"),
        f"try {BRIEFLY}": ("0", "lookahead"),
        f"try {BRIEFLY} --prompts no.jsonl": ("2", "pip install 'draftsmith[train]'"),
        "train recipes/quickstart/mlp.yaml": ("2", "pip install 'draftsmith[train]'"),
        "serve --model nowhere": ("2", "pip install 'draftsmith[serve]'"),
    }
    output = subprocess.run(
        [sys.executable, "-u", "-c", WITHOUT_EXTRAS, *expected],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout
    *parts, _ = re.split(r"exit code (\d)", output)
    for printed, code, (number, text) in zip(parts[::2], parts[1::2], expected.values()):
        assert code == number and text in printed, output
    assert len(parts) == 2 * len(expected), output


@pytest.mark.parametrize(
    "overrides", [["training.stepz=3", "loss.jds=1"], [f"name.{300 * 'x'}=1"]], ids=["keys", "long"]
)
def test_main_error_of_a_recipe_is_printed_whole_and_nothing_is_made(recipe_file, overrides):
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe_file, overrides)
    before = sorted(recipe_file.parent.iterdir())
    assert refused("train", recipe_file, *overrides) == f"error: {error.value}\n"
    assert sorted(recipe_file.parent.iterdir()) == before


# ------------------------------------------------------------------ schema


def test_schema_is_the_manual_whole_or_of_one_section():
    code, output = call("schema", "--json")
    assert code == 0
    assert [tuple(row.values()) for row in json.loads(output)] == describe_schema()
    code, output = call("schema", "loss")
    assert code == 0 and "loss" in output and "target.model" not in output
    assert "nope" in refused("schema", "nope")


# ------------------------------------------------------------------ --dry-run


@pytest.mark.slow
def test_dry_run_says_what_would_happen_and_does_nothing(recipe_file):
    code, output = call("train", recipe_file, "--dry-run")
    assert code == 0, output
    for words in ("64 of 4,096 tokens", "30 examples", "10 steps", "min: 3"):
        assert words in output
    assert not (recipe_file.parent / "run").exists()


def test_dry_run_needs_config_json_alone(recipe_file, tmp_path, target_folder):
    """Neither weights nor a tokenizer: what is not there is not counted, and the rest is."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(target_folder / "config.json", bare)
    code, output = call("train", recipe_file, f"target.model={bare}", "--dry-run")
    assert code == 0, output
    assert "Memory of one device where it takes the most, about\n" in output  # a title, in one line
    words = " ".join(output.split())  # a table wraps its cells
    assert "the target's tokenizer" in words and "trained parameters" in words


# ------------------------------------------------------------------ export and inspect


@pytest.mark.parametrize("name", ["run", "run #2"])
def test_export_writes_the_best_drafter_of_a_run(name, recipe_file, target_folder, tmp_path):
    recipe, run_dir = load_recipe(recipe_file), tmp_path / name
    target = FrozenTarget.from_pretrained(str(target_folder), tap_layers=[1, 2, 3])
    torch.manual_seed(1)
    drafter = family_class("eagle3")(drafter_config(recipe, target)).attach(target)
    drafter.draft_to_target.copy_(torch.arange(64) * 3)
    assert "recipe.yaml" in refused("export", run_dir, tmp_path / "out")
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(recipe.resolved_yaml())
    assert "no complete checkpoint" in refused("export", run_dir, tmp_path / "out")
    checkpoint.save_best(run_dir / "checkpoints", drafter)
    best = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with torch.no_grad():
        drafter.fc.weight.zero_()  # what came after the best
    state = checkpoint.TrainState(step=7, best_step=4, best_value=2.0)
    checkpoint.save(run_dir / "checkpoints", drafter, {}, state)
    code, output = call("export", run_dir, tmp_path / "out")
    assert code == 0, output
    loaded = load_drafter(tmp_path / "out", target)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, best[name], msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draftsmith"]["step"] == 4
    moved = load_recipe(recipe_file, ["target.model=gone", "target.revision=v1"])
    (run_dir / "recipe.yaml").write_text(moved.resolved_yaml())
    assert "gone" in refused("export", run_dir, tmp_path / "half")
    named = ("--model", target_folder, "--dtype", "bfloat16")
    assert call("export", run_dir, tmp_path / "half", *named)[0] == 0
    assert load_file(tmp_path / "half" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    described = read_fields(tmp_path / "half")["draftsmith"]["target"]
    assert described["name_or_path"] == str(target_folder)


def test_recipe_of_a_run_takes_no_model_where_the_run_wrote_its_target(recipe_file, tmp_path):
    with raises_at(CheckpointError, tmp_path / "nothing"):
        recipe_of(tmp_path / "nothing")
    recipe = load_recipe(recipe_file, ["target.adapter=org/lora"])
    (tmp_path / "recipe.yaml").write_text(recipe.resolved_yaml())
    assert recipe_of(tmp_path).target.model == str(tmp_path / "target")
    with raises_at(ConfigError, "--model org/target"):
        recipe_of(tmp_path, "org/target")


INTO = ("--into", "target")
INT8 = ("--quantize", "int8")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("run", ["--target-layers", 4]),
        ("run", ["--prompts", "p.jsonl"]),
        ("run", ["--max-acceptance-loss", 0.02]),
        ("run", ["--prompts", "p.jsonl", *INT8]),
        ("run", ["--target-layers", 4, *INT8]),
        ("drafter", ["--prompts", "p.jsonl"]),
        ("drafter", ["--max-acceptance-loss", 0.02]),
        ("drafter", ["--target-layers", 4, *INT8]),
        ("drafter", ["--dtype", "auto", *INTO]),
        ("drafter", ["--format", "vllm", *INTO]),
        ("drafter", ["--model", "org/target", *INTO]),
        ("drafter", ["--target-layers", 4, *INTO]),
        ("drafter", ["--prompts", "p.jsonl", *INTO]),
    ],
)
def test_export_refuses_options_that_it_would_not_use(source, options, tmp_path):
    for name in ("run/recipe.yaml", "drafter/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    output = refused("export", tmp_path / source, tmp_path / "out", *options)
    assert output.startswith(f"error: {options[0]}: ")


def test_export_dresses_a_drafter_in_another_format(drafter_folder, target_folder, tmp_path):
    speculators = ("--format", "speculators", "--model", "org/target")
    code, output = call("export", drafter_folder, tmp_path / "out", *speculators)
    assert code == 0, output
    assert f"vllm serve {tmp_path / 'out'}" in output
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    target = FrozenTarget.from_pretrained(str(target_folder), tap_layers=[1, 2, 3])
    load_drafter(tmp_path / "out", target)
    refused("export", drafter_folder, tmp_path / "b", "--format", "gguf")
    refused("export", drafter_folder, drafter_folder)


def test_inspect_says_what_a_drafter_is_and_how_to_serve_it(drafter_folder):
    code, output = call("inspect", drafter_folder, "--tensors")
    assert code == 0 and "lm_head.weight" in output and '"method": "eagle3"' in output, output


def test_export_into_a_target(drafter_folder, tmp_path):
    """The target's copy has the tensors of the export, and everything else of its own."""
    target = tmp_path / "target"
    shutil.copytree(drafter_folder, target)
    tensors = load_file(target / "model.safetensors")
    zeroed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(zeroed | {"own.weight": torch.ones(3)}, target / "model.safetensors")
    (target / "tokenizer.json").write_text("{}")
    code, output = call("export", drafter_folder, tmp_path / "copy", "--into", target)
    assert code == 0, output
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert copy.pop("own.weight").all() and (tmp_path / "copy" / "tokenizer.json").is_file()
    assert all(torch.equal(copy[name], tensor) for name, tensor in tensors.items())


def faults(*arguments) -> set[str]:
    """Places of the faults that `inspect` prints as JSON and that are no warnings."""
    code, output = call("inspect", "--json", *arguments)
    report = json.loads(output[output.index("{") :])
    assert code == (not report["sound"])
    return {fault["where"] for fault in report["faults"] if not fault["warning"]}


def test_inspect_names_faults_and_what_vllm_does(drafter_folder, target_folder, tmp_path):
    weights = drafter_folder / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("norm.weight")
    save_file(tensors, weights)
    code, output = call("inspect", drafter_folder)
    assert code == 1 and "norm.weight is missing" in output and "vLLM runs with ones" in output
    (tmp_path / "empty").mkdir()
    assert call("inspect", tmp_path / "empty")[0] == 1
    assert "no such folder" in refused("inspect", tmp_path / "nowhere at all")
    assert faults(drafter_folder, "--model", target_folder) == {"norm.weight"}


def test_inspect_holds_a_mask_token_to_the_targets_tokenizer(target_folder, tmp_path):
    target = FrozenTarget.from_pretrained(str(target_folder))
    config = config_for_target(target, "dflash", tap_layers=(1, 2), block_size=4, mask_token_id=100)
    folder = export_drafter(family_class("dflash")(config), tmp_path / "block", dtype=torch.float32)
    assert not faults(folder)  # no tokenizer to ask
    assert faults(folder, "--model", target_folder) == {"mask_token_id"}
    target.model.save_pretrained(bare := tmp_path / "bare")
    assert not faults(folder, "--model", bare)


def test_inspect_of_a_drafter_of_other_weights_warns(drafter_folder, target_folder, tmp_path):
    other = save_target(tmp_path / target_folder.name, initializer_range=0.2)
    config = json.loads((drafter_folder / "config.json").read_text())
    config["draftsmith"]["target"]["weights_sha256"] = weights_sha256(target_folder)
    (drafter_folder / "config.json").write_text(json.dumps(config))
    warned = {}
    for model in (target_folder, other):
        code, output = call("inspect", "--json", drafter_folder, "--model", model)
        faults = json.loads(output[output.index("{") :])["faults"]
        warned[model] = [fault["where"] for fault in faults if fault["warning"]]
        assert code == 0
    assert warned == {target_folder: [], other: ["target"]}


def test_inspect_of_a_target_with_a_module_of_its_own_serves_that_target(tmp_path):
    whole = save_target(tmp_path / "whole", "qwen2")
    target = FrozenTarget.from_pretrained(str(whole))
    module = family_class("mtp")(config_for_target(target, "mtp"))
    alone = export_drafter(module, tmp_path / "alone", dtype=torch.float32)
    shutil.copy(alone / "model.safetensors", whole / "mtp.safetensors")
    code, output = call("inspect", whole)
    assert code == 0 and f"taps                [{target.num_layers}]" in output
    assert f"vllm serve {whole} --speculative-config" in output
    assert "TARGET" not in output and "hf-overrides" not in output


@pytest.mark.parametrize("rows", [4000, 4160])
def test_inspect_of_a_model_whose_table_vllm_refuses_names_the_command_that_mends_it(
    target_folder, tmp_path, rows
):
    """Sizes of one model line are padded to different numbers of rows."""
    model = save_target(tmp_path / "draft", vocab_size=rows, num_hidden_layers=1)
    held = ("--model", target_folder)
    assert faults(model, *held) == {"vocab_size"}
    words = call("inspect", model, *held)[1].split()  # prose is wrapped
    assert f"draftsmith export {model} OUT --model {target_folder}" in " ".join(words)
    assert call("export", model, tmp_path / "fitted", *held)[0] == 0
    assert not faults(tmp_path / "fitted", *held)
    assert read_drafter_config(tmp_path / "fitted").vocab_size == 4096


def test_export_of_a_model_of_another_tokenizer_for_a_target_is_refused(target_folder, tmp_path):
    """Its table would then be taken for one of the target's tokens."""
    other = byte_level(400)
    model = save_target(tmp_path / "draft", vocab_size=len(other), num_hidden_layers=1)
    other.save_pretrained(model)
    held = ("--model", target_folder)
    assert f"--model {target_folder}: " in refused("export", model, tmp_path / "out", *held)


def test_inspect_shows_the_hash_of_the_chat_template_whole(drafter_folder):
    digest = "0123456789abcdef" * 4
    config = json.loads((drafter_folder / "config.json").read_text())
    config["draftsmith"]["chat_template_sha256"] = digest
    (drafter_folder / "config.json").write_text(json.dumps(config))
    shown = CliRunner().invoke(app, ["inspect", str(drafter_folder)], env={"COLUMNS": "60"})
    assert digest in "".join(shown.output.split())


def test_a_runs_folder_in_place_of_its_drafter_names_the_drafter(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"a run's folder: give {tmp_path / 'export'}"):
        read_drafter_config(tmp_path)


def test_inspect_refuses_what_is_no_version_of_vllm():
    for drafter in ("ngram", "org/drafter"):
        assert "'abc'" in refused("inspect", drafter, "--vllm-version", "abc")


def test_inspect_of_methods_without_a_folder():
    code, output = call("inspect", "ngram", "--model", "org/target")
    assert code == 0 and '"method": "ngram"' in output and "--speculative-algorithm NGRAM" in output
    assert "vLLM has no lookahead" in call("inspect", "lookahead")[1]


# ------------------------------------------------------------------ evaluate and generate


@pytest.mark.slow
def test_evaluate_measures_suites_by_name(target_folder, drafter_folder, tmp_path):
    path, out = tmp_path / "question.jsonl", tmp_path / "out"
    path.write_text('{"category": "writing", "turns": ["Tell a tale.", "Once more."]}\n')
    of = ("evaluate", "--model", target_folder, "--drafter", drafter_folder)
    small = ("--max-tokens", 8, "-k", 2, "--temperature", 0, "--repeats", 0, "--out", out)
    code, output = call(*of, "--suite", "spec_bench", "--suite-path", path, *small)
    assert code == 0, output
    report = load_report(out / "acceptance.json")
    (facts,) = report.suites
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (facts.name, facts.conversations, facts.max_tokens) == ("spec_bench", 1, 8)
    assert report.summary["lossless_mismatches"] == 0
    assert "spec_bench" in (out / "report.html").read_text()
    assert "suites/spec_bench.jsonl" in refused(*of, "--suite", "spec_bench", "--out", out)
    assert "expected names of spec_bench" in refused(*of, "--suite", "spec")


@pytest.mark.slow
def test_evaluate_of_a_recipe_uses_its_export_and_gates(recipe_file, drafter_folder, tmp_path):
    assert "no export; run the recipe first" in refused("evaluate", recipe_file)
    (tmp_path / "run").mkdir()
    shutil.copytree(drafter_folder, tmp_path / "run" / "export")
    small = "max_tokens=8 prompts_per_workload=1 temperatures=[0.0] num_speculative_tokens=2"
    changes = [f"evaluation.{key}" for key in [*small.split(), "repeats=1"]]
    code, output = call("evaluate", recipe_file, *changes)
    assert code == 1, output  # an untrained head misses the gate
    assert load_report(tmp_path / "run" / "acceptance.json").passed is False


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--model", "org/target", "target.model"),
        ("--drafter", "org/drafter", "the run's export"),
        ("--method", "ngram", "the run's export"),
        ("--prompts", "prompts.jsonl", "evaluation.prompts"),
        ("--suite", "spec_bench", "evaluation.suites"),
        ("--suite-path", "suite.jsonl", "evaluation.suites"),
        ("--chat-template-kwargs", "{}", "data.chat_template_kwargs"),
        ("--num-speculative-tokens", 2, "evaluation.num_speculative_tokens"),
        ("--speculative-config", "{}", "evaluation.speculative_config"),
        ("--temperature", 0, "evaluation.temperatures"),
        ("--max-tokens", 128, "evaluation.max_tokens"),
        ("--prompts-per-workload", 16, "evaluation.prompts_per_workload"),
        ("--repeats", 0, "evaluation.repeats"),
        ("--dtype", "auto", "target.dtype"),
        ("--out", "runs/evaluation", "output_dir"),
    ],
)
def test_evaluate_of_a_recipe_refuses_what_the_recipe_decides(option, value, key):
    assert f"{option} ({key})" in refused("evaluate", "recipe.yaml", option, value)


def test_evaluate_of_an_export_of_another_family_is_refused(recipe_file, drafter_folder, tmp_path):
    export = tmp_path / "run" / "export"
    shutil.copytree(drafter_folder, export)
    with raises_at(CheckpointError, export):
        evaluate_run(load_recipe(recipe_file, ["family=mlp", "drafter={}"]))


@pytest.mark.parametrize(
    "line, option",
    [
        (("evaluate", "--model", "nowhere", "--method", "ngram"), "--out"),
        (("certify", "http://127.0.0.1:1", "--baseline", "http://127.0.0.1:1"), "--output"),
    ],
)
def test_output_that_cannot_be_written_is_refused_before_the_work(line, option, tmp_path):
    (tmp_path / "file").write_text("kept")
    assert f"{option} {tmp_path / 'file'}" in refused(*line, option, tmp_path / "file" / "a.json")


def test_evaluate_of_a_suite_that_there_is_not_names_the_option():
    output = refused("evaluate", "--model", "org/target", "--method", "ngram", "--suite", "foo")
    assert output.startswith("error: evaluate: --suite: expected names of spec_bench")


@pytest.mark.parametrize(
    "line",
    [
        ("evaluate", "--method", "ngram", "--prompts"),
        ("try", "--prompts"),
        ("init", "--data"),
        ("init", "--data", "chats.jsonl", "--validation"),
    ],
)
def test_a_file_that_is_not_there_names_its_option(line, target_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command, *options = line
    output = refused(command, "--model", target_folder, *options, "nowhere.jsonl")
    assert f"error: {options[-1]} nowhere.jsonl: no such file" in output


def test_generate_streams_what_the_runtime_writes(target_folder, drafter_folder):
    """Same text as LLM.chat, whoever drafts."""
    llm = LLM(str(target_folder))
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    for config in (
        {},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "eagle3", "model": str(drafter_folder), "num_speculative_tokens": 3},
    ):
        arguments = ["--speculative-config", json.dumps(config)] if config else []
        ask = ("generate", "Hi", "--model", target_folder, "--max-tokens", 12)
        done = CliRunner().invoke(app, [*map(str, ask), *arguments])
        assert done.exit_code == 0, done.output
        assert done.stdout == expected[0].outputs[0].text + "\n"
        assert "12 tokens" in done.stderr
        if config.get("method") != "ngram":  # which may find nothing to draft
            assert ("acceptance length" in done.stderr) == bool(config)


def test_help_lists_the_commands_in_order_and_is_readable_at_80_columns():
    code, output = call("-h")
    listed = [line.split()[0] for line in output.partition("Commands:")[2].splitlines() if line]
    assert code == 0 and listed[:3] == ["init", "prepare", "regenerate"]
    for command in get_command(app).commands:
        shown = CliRunner().invoke(app, [command, "-h"], env={"COLUMNS": "80"})
        assert shown.exit_code == 0
        assert not re.search(r"--[\w-]*…", shown.output)
    code, output = call("--version")
    assert code == 0 and output.startswith("draftsmith ")
