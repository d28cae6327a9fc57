"""The whole job on a tiny random target: recipe -> responses -> head -> export -> report, twice,
and its failures."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.export import read_drafter_config
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.commands.features import cache_features
from draftsmith.train.pipeline.run import run
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.joint_target import cross_entropy
from tests.quickstart_data import source as quickstart
from tests.support.models import make_tiny_model
from tests.support.quantised import save_quantised
from tests.support.tokenizers import byte_level

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
SHORT = [
    "evaluation.lossless_check=false",
    "evaluation.baseline_transformers=false",
    "evaluation.repeats=0",
]


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    """A random model of 4 layers with the embedded target's tokenizer, saved as a user's would
    be."""
    folder = tmp_path_factory.mktemp("target")
    make_tiny_model(
        "qwen3", vocab_size=4096, num_hidden_layers=4, eos_token_id=2, max_position_embeddings=512
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / "target" / name, folder / name)
    return folder


@pytest.fixture
def recipe(tiny_target, tmp_path):
    source = quickstart("train", 12)
    content = {
        "name": "tiny",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_target)},
        "drafter": {"unroll_steps": 3, "draft_vocab_size": 256, "tap_layers": [1, 2, 3]},
        "data": {
            "train": [source, quickstart("code-train", 3)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "regenerate": {"max_new_tokens": 12, "batch_size": 8},
        "training": {"steps": 4, "batch_size": 2, "eval_every": 2},
        "evaluation": {
            "prompts": [quickstart("test", 3)],
            "prompts_per_workload": 1,
            "max_tokens": 8,
            "repeats": 1,
            "num_speculative_tokens": 2,
        },
        "trackers": ["tensorboard"],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.integration
def test_cached_features(recipe, tiny_target, tmp_path, capsys, monkeypatch):
    """Parts written ahead of time are read by the run, which then trains as one whose features are
    kept in memory; those of a template that has changed are not read."""
    where = f"features.dir={tmp_path / 'features'}"
    cached = [
        "features.mode=cache",
        "features.encoding=exact",
        where,
        "training.mixed_precision=no",
    ]
    for part in (1, 2):
        cache_features(recipe, cached, f"{part}/2")
    said = capsys.readouterr().out
    assert "1,280 bytes per token" not in said and "512 bytes per token (exact)" in said
    [folder] = (tmp_path / "features").iterdir()
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) == 2
    assert run(recipe, [*cached, *SHORT]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "0 B to be written" in said
        and sorted(path.name for path in folder.glob("*.safetensors")) == shards
    )
    export = tmp_path / "run" / "export" / "model.safetensors"
    weights = load_file(export)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert (
        run(recipe, ["training.mixed_precision=no", "training.keep_features_gb=0.1", *SHORT]) == 0
    )
    assert weights.keys() == (again := load_file(export)).keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)

    changed = tmp_path / "changed"
    shutil.copytree(tiny_target, changed)
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    other = [*cached, *SHORT, f"target.model={changed}", f"output_dir={tmp_path / 'second'}"]
    cache_features(recipe, other)
    assert len(list(folder.parent.iterdir())) == 2, "a folder of its own"
    monkeypatch.setattr(
        "draftsmith.train.pipeline.features_stage.shutil.disk_usage",
        lambda _: SimpleNamespace(free=1000),
    )
    with pytest.raises(
        ConfigError, match="are needed for .* and 1 kB are free .* features.mode: online"
    ):
        cache_features(recipe, [*other, "features.encoding=rotated"])


@pytest.mark.integration
def test_run_with_a_fitted_start_muon_and_kept_features_trains_nothing_twice(
    recipe, tmp_path, capsys
):
    """The quickstart's way: a stage more."""
    fitted = [
        "drafter.init=least_squares",
        "drafter.num_key_value_heads=4",
        "drafter.norm_before_residual=true",
        "training.optimizer=muon",
        "training.keep_features_gb=0.1",
        *SHORT,
    ]
    assert run(recipe, fitted) == 0
    assert "[3/6] fit the start" in capsys.readouterr().out
    assert read_drafter_config(tmp_path / "run" / "export").norm_before_residual
    weights = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert run(recipe, fitted) == 0
    assert "fit the start" not in capsys.readouterr().out
    assert (tmp_path / "run" / "export" / "model.safetensors").read_bytes() == weights


@pytest.mark.integration
def test_recipe_to_report_and_again(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(recipe) == 0
    for name in (
        "recipe.yaml",
        "acceptance.json",
        "report.html",
        "export/config.json",
        "export/model.safetensors",
    ):
        assert (out / name).exists(), name
    report = json.loads((out / "acceptance.json").read_text())
    assert report["summary"]["lossless_mismatches"] == 0
    assert read_drafter_config(out / "export").draft_vocab_size == 256
    assert any(out.rglob("events.out.tfevents*"))
    weights = (out / "export" / "model.safetensors").read_bytes()
    responses = sorted((out / "responses").iterdir())
    sizes = [path.stat().st_size for path in responses]

    # the same command again: nothing is regenerated or trained a second time, the result is the
    # same; of a gate that is missed the report is there, and the status says so
    assert run(recipe, ["gates.acceptance_length={min: 2.9}", *SHORT]) == 1
    assert (out / "export" / "model.safetensors").read_bytes() == weights
    assert [path.stat().st_size for path in responses] == sizes
    assert json.loads((out / "acceptance.json").read_text())["gates"][0]["passed"] is False

    # another training recipe in the same folder is refused and changes nothing there, and so are
    # other position weights and other rows under the same path; a warm start from the export is not
    given = (out / "recipe.yaml").read_text()
    with pytest.raises(CheckpointError, match="another recipe"):
        run(recipe, ["training.learning_rate=0.5"])
    with pytest.raises(CheckpointError, match="another recipe"):
        run(recipe, ["position_weights={uniform: true}"])
    assert (out / "recipe.yaml").read_text() == given
    warm = [
        f"drafter.init_from={out / 'export'}",
        "name=warm",
        f"output_dir={tmp_path / 'warm'}",
        "trackers=none",
    ]
    warm += SHORT
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


@pytest.mark.integration
def test_run_killed_during_the_report_continues_with_the_same_weights_and_report(recipe, tmp_path):
    """Killed with every response written and no report; then with its page half in place."""
    out = tmp_path / "run"
    kept: dict[str, bytes] = {}
    for moment in ("evaluation", "page"):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, moment, recipe, *SHORT], capture_output=True, text=True
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
        assert (out / "acceptance.json").exists() == (moment == "page")
        assert not (out / "report.html").exists()
        assert not kept or files_of(out) == kept, "asked or trained again"
        kept = files_of(out)
    before = json.loads((out / "acceptance.json").read_text())
    assert run(recipe, SHORT) == 0
    assert files_of(out) == kept
    assert json.loads((out / "acceptance.json").read_text())["summary"] == before["summary"]
    assert "</html>" in (out / "report.html").read_text() and not list(out.glob("*.tmp"))


@pytest.mark.integration
def test_stages_go_on_from_one_another(recipe, tmp_path, capsys):
    """Each with its data and budget, in a folder of its own; the second begins with the first one's
    head."""
    first = {"name": "corpus", "regenerate": {"enabled": False}}
    second = {
        "name": "sampled",
        "training": {"steps": 2, "learning_rate": 1e-6},
        "loss": {"tv": 1.0},
    }
    staged = [f"stages={json.dumps([first, second])}", *SHORT]
    assert run(recipe, staged) == 0
    said = capsys.readouterr().out
    assert (
        "[1/8] tokenise" in said
        and "train eagle3: corpus" in said
        and "[6/8] train eagle3: sampled" in said
    )
    root = tmp_path / "run" / "checkpoints"
    states = [
        checkpoint.read_state(checkpoint.latest(root / name)) for name in ("corpus", "sampled")
    ]
    assert [state.step for state in states] == [4, 2]
    heads = [
        load_file(root / name / "best" / "drafter.safetensors") for name in ("corpus", "sampled")
    ]
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, atol=1e-4, rtol=0)  # two steps of 1e-6
    weights = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert run(recipe, staged) == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").read_bytes() == weights
    # only the second is another, whether or not the first is trained anew: nothing is overwritten
    given = (tmp_path / "run" / "recipe.yaml").read_text()
    second["training"]["learning_rate"] = 1e-3
    for _ in range(2):
        with pytest.raises(CheckpointError, match="sampled"):
            run(recipe, [f"stages={json.dumps([first, second])}"])
        assert (tmp_path / "run" / "recipe.yaml").read_text() == given
        shutil.rmtree(root / "corpus")


@pytest.mark.integration
def test_an_on_policy_stage_follows_a_supervised_one(recipe, tmp_path):
    """Its texts are below its own checkpoints, and the same command again writes none."""
    second = {
        "name": "corrected",
        "on_policy": {"share": 1.0, "prompts": 6, "refresh_every": 2, "max_new_tokens": 12},
    }
    staged = [f"stages={json.dumps([{'name': 'supervised'}, second])}", *SHORT]
    assert run(recipe, staged) == 0
    root = tmp_path / "run" / "checkpoints"
    assert not (root / "supervised" / "on_policy").exists()
    texts = {path: path.stat().st_mtime_ns for path in (root / "corrected" / "on_policy").iterdir()}
    history = checkpoint.read_state(checkpoint.latest(root / "corrected")).history
    assert texts and [record["on_policy_share"] for record in history] == [1.0] * 4
    weights = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert run(recipe, staged) == 0
    assert (tmp_path / "run" / "export" / "model.safetensors").read_bytes() == weights
    assert texts == {
        path: path.stat().st_mtime_ns for path in (root / "corrected" / "on_policy").iterdir()
    }
    second["on_policy"]["prompts"] = 5
    with pytest.raises(CheckpointError, match="another recipe"):
        run(recipe, [f"stages={json.dumps([{'name': 'supervised'}, second])}"])


@pytest.mark.integration
def test_a_draft_model_from_recipe_to_report(recipe, tmp_path):
    """Its export is what the report measured, and the same command again trains nothing."""
    student = tmp_path / "student"
    tokenizer = byte_level(600, eos_token="<|end|>")
    make_tiny_model(
        "qwen3", vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=512
    ).save_pretrained(student)
    tokenizer.save_pretrained(student)
    drafter = {"init_from": str(student), "vocab": "intersection"}
    options = ["family=draft_model", f"drafter={json.dumps(drafter)}", "trackers=none"]
    assert run(recipe, options) == 0
    out = tmp_path / "run"
    assert json.loads((out / "acceptance.json").read_text())["summary"]["lossless_mismatches"] == 0
    assert read_drafter_config(out / "export").other_tokenizer
    weights = [path.read_bytes() for path in sorted((out / "export").rglob("*.safetensors"))]
    assert run(recipe, [*options, *SHORT]) == 0
    assert [
        path.read_bytes() for path in sorted((out / "export").rglob("*.safetensors"))
    ] == weights
    with pytest.raises(
        ConfigError, match="tokenizer is not the target's.*drafter.vocab: intersection"
    ):
        run(recipe, [*options, "drafter.vocab=same", f"output_dir={tmp_path / 'other'}"])


@pytest.mark.slow
def test_launcher_of_another_family_and_dry_run(recipe, tmp_path, capsys):
    with pytest.raises(ConfigError, match="this launcher trains"):
        run(recipe, families=("medusa",))
    assert run(recipe, dry_run=True) == 0
    assert not (tmp_path / "run").exists()
    assert "tap" in capsys.readouterr().out


@pytest.mark.integration
def test_medusa_2_exports_the_target_it_trained(recipe, tiny_target, tmp_path):
    """The LoRA is in what is exported and measured; the original is untouched; the change is
    stated."""
    tree = yaml.safe_load(recipe.read_text()) | {"family": "medusa", "drafter": {"num_heads": 2}}
    tree["joint"] = {
        "r": 4,
        "export": "adapter",
        "head_lr_multiplier": 0.5,
        "heads_schedule": "constant",
    }
    tree["training"] |= {"learning_rate": 1e-2}
    recipe.write_text(yaml.safe_dump(tree))
    before = (tiny_target / "model.safetensors").read_bytes()
    assert run(recipe) == 0
    out = tmp_path / "run"
    assert (tiny_target / "model.safetensors").read_bytes() == before
    report = json.loads((out / "acceptance.json").read_text())
    assert report["summary"]["lossless_mismatches"] == 0
    change = report["provenance"]["target_change"]
    assert change["before"] != change["after"] and change["responses"] == 12
    adapted = FrozenTarget.from_pretrained(str(out / "target"))
    texts = [([5, 6, 7], [8, 9, 10, 11])]
    assert cross_entropy(adapted, texts) != pytest.approx(
        cross_entropy(FrozenTarget.from_pretrained(str(tiny_target)), texts)
    )


def trained_lora(
    target: Path, ids: torch.Tensor, folder: Path, steps: int, learning_rate: float, gain: float
):
    """The target with a LoRA, saved in `folder`, that was trained on `ids` until their loss had
    fallen by `gain`."""
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    adapted = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.Adam(
        [p for p in adapted.parameters() if p.requires_grad], lr=learning_rate
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - gain
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.integration
def test_an_adapted_target_continues_the_head_of_its_base(recipe, tiny_target, tmp_path):
    """The base's head is trained, a LoRA trained on the target, and the head continued for both
    merged: texts, features and report are those of the merged target, whose folder is written
    once."""
    assert run(recipe, SHORT) == 0
    ids = torch.arange(40, 104).view(2, 32)
    adapted = trained_lora(
        tiny_target, ids, tmp_path / "lora", steps=8, learning_rate=0.05, gain=0.5
    )

    out = tmp_path / "adapted"
    changes = [
        *SHORT[1:],
        f"output_dir={out}",
        f"target.adapter={tmp_path / 'lora'}",
        f"drafter.init_from={tmp_path / 'run' / 'export'}",
        "evaluation.temperatures=[0.0]",
    ]
    assert run(recipe, changes) == 0
    merged = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    with torch.no_grad():
        gap = merged(ids).logits - adapted(ids).logits
    assert gap.abs().max() < 1e-3
    report = load_report(out / "acceptance.json")
    assert (
        report.provenance.target_name == str(out / "target")
        and report.summary["lossless_mismatches"] == 0
    )
    assert json.loads((out / "export" / "config.json").read_text())["draftsmith"]["target"][
        "name_or_path"
    ] == str(out / "target")
    written = (out / "target" / "model.safetensors").stat().st_mtime_ns
    assert run(recipe, changes) == 0  # nothing is left to do
    assert (out / "target" / "model.safetensors").stat().st_mtime_ns == written
    fields = json.loads((tmp_path / "lora" / "adapter_config.json").read_text()) | {
        "target_modules": ["q_proj"]
    }
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"target\.adapter .*lora: the adapter's tensors are not those"
    ):
        run(recipe, changes)


def of_target(recipe, folder: Path, tiny_target: Path, name: str, **config) -> list[str]:
    """Overrides for a target of another architecture with the same tokenizer."""
    model = make_tiny_model(
        name, vocab_size=4096, eos_token_id=2, max_position_embeddings=512, **config
    )
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_target / file, folder / file)
    return [f"target.model={folder}", "training.steps=2", "evaluation.temperatures=[0.0]"]


@pytest.mark.integration
def test_a_recurrent_target_goes_from_recipe_to_report(recipe, tiny_target, tmp_path):
    """Responses, held-out texts, cached features of packed rows, export and report, lossless in
    float32."""
    other = of_target(recipe, tmp_path / "hybrid", tiny_target, "qwen3_next")
    cached = [
        "features.mode=cache",
        f"features.dir={tmp_path / 'features'}",
        "training.mixed_precision=no",
    ]
    assert (
        run(
            recipe,
            [*other, *cached, "evaluation.repeats=0", "evaluation.baseline_transformers=false"],
        )
        == 0
    )
    report = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert (
        report["summary"]["lossless_mismatches"] == 0
        and report["summary"]["t0.acceptance_length"] >= 1
    )


@pytest.mark.integration
def test_the_language_model_of_a_multimodal_target_goes_from_recipe_to_report(
    recipe, tiny_target, tmp_path
):
    other = of_target(recipe, tmp_path / "multimodal", tiny_target, "qwen2_5_vl")
    assert run(recipe, [*other, "evaluation.repeats=0"]) == 0
    report = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert (
        report["summary"]["lossless_mismatches"] == 0
        and report["summary"]["t0.acceptance_length"] >= 1
    )
    assert read_drafter_config(tmp_path / "run" / "export").target_hidden_size == 32


@pytest.mark.integration
def test_a_quantised_target_goes_from_recipe_to_report(recipe, tiny_target, tmp_path, capsys):
    """One that stays quantised, whose features by vLLM are planned. An adapter is not merged into
    it."""
    other = of_target(recipe, tmp_path / "plain", tiny_target, "qwen3")
    folder = tmp_path / "quantised"
    shutil.copytree(tmp_path / "plain", folder)
    save_quantised(
        make_tiny_model("qwen3", vocab_size=4096, eos_token_id=2, max_position_embeddings=512),
        folder,
        "bitnet",
    )
    other[0] = f"target.model={folder}"
    with torch.compiler.set_stance("force_eager"):
        assert run(recipe, [*other, "evaluation.repeats=0"]) == 0
    report = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert (
        report["summary"]["lossless_mismatches"] == 0
        and report["summary"]["t0.acceptance_length"] >= 1
    )
    capsys.readouterr()
    by_vllm = ["features.mode=cache", "features.engine=vllm", f"output_dir={tmp_path / 'planned'}"]
    assert run(recipe, [*other, *by_vllm], dry_run=True) == 0
    assert re.search(r"features +\d+ kB", capsys.readouterr().out)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(UnsupportedTarget, match=r"target\.adapter: .*quantised is quantised"):
        run(
            recipe,
            [
                *other,
                f"target.adapter={tmp_path / 'lora'}",
                f"output_dir={tmp_path / 'adapted'}",
            ],
        )


@pytest.mark.integration
def test_a_target_that_gives_features_alone_is_trained_and_exported(
    recipe, tiny_target, tmp_path, capsys
):
    """Its states are outside of the cache, so that nothing is decoded here."""
    kinds = ["recurrent", "attention", "recurrent"]
    other = of_target(
        recipe, tmp_path / "other", tiny_target, "recurrent_gemma", lru_width=32, block_types=kinds
    )
    keys = "regenerate.enabled, data.validation, evaluation.engines"
    with pytest.raises(UnsupportedTarget, match=keys):
        run(recipe, other)
    alone = [
        "data.validation=[]",
        "regenerate.enabled=false",
        "evaluation.prompts=[]",
        "features.mode=cache",
    ]
    assert run(recipe, [*other, *alone, f"features.dir={tmp_path / 'features'}"]) == 0
    assert read_drafter_config(tmp_path / "run" / "export").family == "eagle3"
    assert "acceptance: not measured" in capsys.readouterr().out
