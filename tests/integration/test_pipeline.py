"""The whole job on a tiny random target: recipe -> responses -> head -> export -> report, twice,
and its failures."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.export import read_drafter_config, read_fields
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.commands.runs import cache_features
from draftsmith.train.pipeline.export_stage import reexport
from draftsmith.train.pipeline.run import run
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.joint_target import cross_entropy
from tests.support.forked import interpreter
from tests.support.models import make_tiny_model
from tests.support.quantised import save_quantised
from tests.support.tokenizers import byte_level
from tests.support.training import assert_equal

SHORT = ["evaluation.lossless_check=false", "evaluation.repeats=0"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "export" / "model.safetensors")


def summary(out: Path) -> dict[str, float]:
    return json.loads((out / "acceptance.json").read_text())["summary"]


@pytest.mark.integration
def test_cached_features(recipe, tiny_target, tmp_path):
    """Parts written ahead of time are read by the run, which then trains as one whose features are
    kept in memory; those of a template that has changed are not read."""
    features, exact = tmp_path / "features", "training.mixed_precision=no"
    cached = [f"features.dir={features}", "features.encoding=exact", "features.mode=cache", exact]
    for part in (1, 2):
        cache_features(recipe, cached, f"{part}/2")
    shards = sorted(features.rglob("*.safetensors"))
    assert len(shards) == 2
    assert run(recipe, [*cached, *SHORT]) == 0
    assert sorted(features.rglob("*.safetensors")) == shards
    from_disk = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert run(recipe, [exact, "training.keep_features_gb=0.1", *SHORT]) == 0
    assert_equal(from_disk, weights(tmp_path / "run"))

    changed = tmp_path / "changed"
    shutil.copytree(tiny_target, changed)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    cache_features(recipe, [*cached, f"target.model={changed}", f"output_dir={tmp_path / 'b'}"])
    assert len(list(features.iterdir())) == 2, "a folder of its own"


@pytest.mark.integration
def test_recipe_to_report_and_again(recipe, tmp_path, capsys):
    """The quickstart's way: a fitted start, Muon, kept features."""
    out, shape = tmp_path / "run", ["norm_before_residual=true", "num_key_value_heads=4"]
    fitted = [f"drafter.{key}" for key in ("init=least_squares", *shape)]
    fitted += ["training.optimizer=muon", "training.keep_features_gb=0.1"]
    assert run(recipe, fitted) == 0
    assert "fit the start" in capsys.readouterr().out
    names = ("recipe.yaml", "report.html", "export/config.json")
    assert all((out / name).exists() for name in names) and any(out.rglob("events.out.tfevents*"))
    assert summary(out)["lossless_mismatches"] == 0
    state = checkpoint.read_state(checkpoint.latest(out / "checkpoints"))
    assert state.best_value > 0 and state.measure, "which is compared with another measure's"
    kept = files_of(out)

    # the same command again: nothing is regenerated or trained a second time, the result is the
    # same; of a gate that is missed the report is there, and the status says so
    assert run(recipe, [*fitted, "gates.acceptance_length={min: 2.9}", *SHORT]) == 1
    assert files_of(out) == kept and "fit the start" not in capsys.readouterr().out
    assert json.loads((out / "acceptance.json").read_text())["gates"][0]["passed"] is False

    # another training recipe in the same folder is refused and changes nothing there, before texts
    # are written for it; a warm start from the export is not
    recipe_text = (out / "recipe.yaml").read_text()
    for change in (
        "training.learning_rate=0.5",
        "position_weights={uniform: true}",
        "regenerate.max_new_tokens=7",
    ):
        with pytest.raises(CheckpointError, match=f"another recipe.*delete {out}/checkpoints"):
            run(recipe, [*fitted, change])
    assert (out / "recipe.yaml").read_text() == recipe_text and files_of(out) == kept
    start = [f"drafter.{key}" for key in (f"init_from={out / 'export'}", *shape)]
    warm = [*start, f"output_dir={tmp_path / 'warm'}", "trackers=none", *SHORT]
    assert run(recipe, warm) == 0
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        run(recipe, [*warm, "drafter.draft_vocab_size=300"])


KILLED = """
import os, signal, sys
from draftsmith.inference import whole_file
from draftsmith.inference.evaluation import evaluate
from draftsmith.train.pipeline.run import run

replace = os.replace

def die(*_args):
    os.kill(os.getpid(), signal.SIGKILL)

def replace_or_die(scratch, path):
    die() if path.name == "report.html" else replace(scratch, path)

if sys.argv[1] == "evaluation":
    evaluate.build_report = die
else:
    whole_file.os.replace = replace_or_die
run(sys.argv[2], sys.argv[3:])
"""


def files_of(out: Path) -> dict[str, bytes]:
    """The responses of a run and its exported weights, by name."""
    paths = [*(out / "responses").iterdir(), out / "export" / "model.safetensors"]
    return {path.name: path.read_bytes() for path in paths}


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files of a folder but transformers' defaults for writing, by their names in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "generation_config.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.integration
def test_run_killed_during_the_report_continues_with_the_same_weights_and_report(recipe, tmp_path):
    """Killed with every response written and no report; then with its page half in place."""
    out = tmp_path / "run"
    kept: dict[str, bytes] = {}
    for moment in ("evaluation", "page"):
        killed = subprocess.run(
            [interpreter(), "-c", KILLED, moment, recipe, *SHORT], capture_output=True, text=True
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
        assert (out / "acceptance.json").exists() == (moment == "page")
        assert not (out / "report.html").exists()
        assert not kept or files_of(out) == kept, "asked or trained again"
        kept = files_of(out)
    before = summary(out)
    assert run(recipe, SHORT) == 0
    assert files_of(out) == kept and summary(out) == before
    assert "</html>" in (out / "report.html").read_text() and not list(out.glob(".*.tmp"))


@pytest.mark.integration
def test_stages_go_on_from_one_another(recipe, tmp_path):
    """Each with its data and budget, in a folder of its own; the second begins with the first one's
    head, and the third, on policy, has its texts below its own checkpoints."""
    few = {"steps": 2, "optimizer": "adamw", "learning_rate": 1e-6}
    texts = {"share": 1.0, "prompts": 6, "refresh_every": 2, "max_new_tokens": 12}
    stages = [
        {"name": "corpus", "regenerate": {"enabled": False}},
        {"name": "sampled", "training": dict(few), "loss": {"tv": 1.0}},
        {"name": "corrected", "training": dict(few), "on_policy": texts},
    ]
    staged = [f"stages={json.dumps(stages)}", *SHORT]
    assert run(recipe, staged) == 0
    out = tmp_path / "run"
    folders = [out / "checkpoints" / stage["name"] for stage in stages]
    states = [checkpoint.read_state(checkpoint.latest(folder)) for folder in folders]
    assert [state.step for state in states] == [4, 2, 2]
    assert [record["on_policy"] for record in states[2].history] == [1.0] * 2
    assert [(folder / "on_policy").exists() for folder in folders] == [False, False, True]
    heads = [load_file(folder / "best" / "drafter.safetensors") for folder in folders]
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, atol=1e-4, rtol=0)  # two steps of 1e-6
    written = {path: path.stat().st_mtime_ns for path in (folders[2] / "on_policy").iterdir()}
    before = weights(out)
    assert run(recipe, staged) == 0
    assert_equal(weights(out), before)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    # only the second is another, whether or not the first is trained anew: nothing is overwritten
    recipe_text = (out / "recipe.yaml").read_text()
    stages[1]["training"]["learning_rate"] = 1e-3
    for _ in range(2):
        with pytest.raises(CheckpointError, match="sampled"):
            run(recipe, [f"stages={json.dumps(stages)}"])
        assert (out / "recipe.yaml").read_text() == recipe_text
        shutil.rmtree(folders[0])


@pytest.mark.integration
def test_a_draft_model_from_recipe_to_report(recipe, tmp_path):
    """Of another tokenizer; the same command again trains nothing."""
    student, tokenizer = tmp_path / "student", byte_level(600, eos_token="<|end|>")
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 512}
    make_tiny_model("qwen3", **sizes).save_pretrained(student)
    tokenizer.save_pretrained(student)
    drafter = {"init_from": str(student), "vocab": "intersection"}
    options = ["family=draft_model", f"drafter={json.dumps(drafter)}", "trackers=none"]
    assert run(recipe, options) == 0
    out = tmp_path / "run"
    assert summary(out)["lossless_mismatches"] == 0
    assert read_drafter_config(out / "export").other_tokenizer
    again, _ = reexport(out, tmp_path / "again")
    assert contents(again) == contents(out / "export")
    before = weights(out)
    assert run(recipe, [*options, *SHORT]) == 0
    assert_equal(weights(out), before)
    with pytest.raises(ConfigError, match="drafter.vocab: intersection"):
        run(recipe, [*options, "drafter.vocab=same", f"output_dir={tmp_path / 'other'}"])


@pytest.mark.integration
def test_medusa_2_exports_the_target_it_trained(recipe, tiny_target, tmp_path):
    """The LoRA is in what is exported and measured; the original is untouched; the change is
    stated."""
    joint = {"r": 4, "export": "adapter", "heads_schedule": "constant", "head_lr_multiplier": 0.5}
    changes = ["family=medusa", "drafter={num_heads: 2}", f"joint={json.dumps(joint)}"]
    before = (tiny_target / "model.safetensors").read_bytes()
    assert run(recipe, [*changes, "training.learning_rate=0.01"]) == 0
    out = tmp_path / "run"
    assert (tiny_target / "model.safetensors").read_bytes() == before
    report = load_report(out / "acceptance.json")
    assert report.summary["lossless_mismatches"] == 0
    change = report.provenance.target_change
    assert change["before"] != change["after"] and change["responses"] == 12
    texts = [([5, 6, 7], [8, 9, 10, 11])]
    adapted, plain = (FrozenTarget.from_pretrained(str(f)) for f in (out / "target", tiny_target))
    assert cross_entropy(adapted, texts) != pytest.approx(cross_entropy(plain, texts))
    again, _ = reexport(out, tmp_path / "again")
    names = [read_fields(folder)["draftsmith"]["target"] for folder in (out / "export", again)]
    assert names[0] == names[1] and names[0]["name_or_path"] == str(out / "target")


def save_lora(target: Path, folder: Path):
    """The target with a random LoRA, saved in `folder`."""
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, config)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.integration
def test_an_adapted_target_continues_the_head_of_its_base(recipe, tiny_target, tmp_path):
    """The base's head is trained, and continued for the target with a LoRA merged: texts, features
    and report are those of the merged target, whose folder is written once."""
    assert run(recipe, SHORT) == 0
    adapted, out = save_lora(tiny_target, tmp_path / "lora"), tmp_path / "adapted"
    changes = [
        *SHORT[1:],
        f"output_dir={out}",
        f"target.adapter={tmp_path / 'lora'}",
        f"drafter.init_from={tmp_path / 'run' / 'export'}",
        "evaluation.temperatures=[0.0]",
    ]
    assert run(recipe, changes) == 0
    merged = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    ids = torch.arange(40, 104).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-3, rtol=0)
    report = load_report(out / "acceptance.json")
    assert report.provenance.target_name == str(out / "target")
    assert report.summary["lossless_mismatches"] == 0
    written = (out / "target" / "model.safetensors").stat().st_mtime_ns
    assert run(recipe, changes) == 0  # nothing is left to do
    assert (out / "target" / "model.safetensors").stat().st_mtime_ns == written
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ["q_proj"]}))
    with pytest.raises(CheckpointError, match=r"target\.adapter"):
        run(recipe, changes)


def of_target(folder: Path, tiny_target: Path, name: str, **config) -> list[str]:
    """Overrides for a target of another architecture with the same tokenizer."""
    sizes = {"vocab_size": 4096, "eos_token_id": 2, "max_position_embeddings": 512}
    model = make_tiny_model(name.partition(", ")[0], **sizes, **config)
    model.save_pretrained(folder)
    if name.endswith(", quantised"):
        save_quantised(model, folder, "bitnet")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_target / file, folder / file)
    return [f"target.model={folder}", "training.steps=2", "evaluation.temperatures=[0.0]"]


@pytest.mark.integration
@pytest.mark.parametrize("name", ["qwen3_next", "qwen2_5_vl", "qwen3, quantised"])
def test_a_target_of_another_kind_goes_from_recipe_to_report(recipe, tiny_target, tmp_path, name):
    """Recurrent, the text part of a multimodal one, and one that stays quantised: responses,
    held-out texts, features of packed rows on disk, export and report, lossless in float32."""
    other = of_target(tmp_path / "other", tiny_target, name)
    cached = ["features.mode=cache", f"features.dir={tmp_path / 'features'}"]
    with torch.compiler.set_stance("force_eager"):
        assert run(recipe, [*other, *cached, *SHORT[1:]]) == 0
    figures = summary(tmp_path / "run")
    assert figures["lossless_mismatches"] == 0 and figures["t0.acceptance_length"] >= 1


@pytest.mark.integration
def test_an_adapter_of_a_quantised_target_is_refused(recipe, tiny_target, tmp_path):
    other = of_target(tmp_path / "other", tiny_target, "qwen3, quantised")
    save_lora(tiny_target, tmp_path / "lora")
    with pytest.raises(UnsupportedTarget, match=r"target\.adapter"):
        run(recipe, [*other, f"target.adapter={tmp_path / 'lora'}"])


@pytest.mark.integration
def test_a_target_that_gives_features_alone_is_trained_and_exported(recipe, tiny_target, tmp_path):
    """Its states are outside of the cache, so that nothing is decoded here."""
    kinds = ["recurrent", "attention", "recurrent"]
    name, sizes = "recurrent_gemma", {"lru_width": 32, "block_types": kinds}
    other = of_target(tmp_path / "other", tiny_target, name, **sizes)
    with pytest.raises(UnsupportedTarget, match="regenerate.enabled"):
        run(recipe, other)
    alone = ["data.validation=[]", "regenerate.enabled=false", "evaluation.prompts=[]"]
    cached = ["features.mode=cache", f"features.dir={tmp_path / 'features'}"]
    assert run(recipe, [*other, *alone, *cached]) == 0
    assert read_drafter_config(tmp_path / "run" / "export").family == "eagle3"
