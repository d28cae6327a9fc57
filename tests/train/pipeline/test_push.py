"""Pushing: what the Hub has afterwards equals the files, failures are resumed and said in words,
paths stay here.

The Hub is tests/fake_hub.py, the client is the real one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

from inference import LLM, SamplingParams
from inference.report.schema import load_report
from speculators.errors import CheckpointError, ConfigError, HubError
from speculators.export import export_drafter
from speculators.export.upload import Destination, account
from speculators.families.eagle3 import Eagle3
from speculators.registry import config_for_target
from speculators.target.frozen_target import FrozenTarget
from tests.fake_hub import READER, WRITER, File, Refused
from tests.speculators.families.draft_model.test_draft_model_vocabulary import (  # noqa: F401 (fixtures)
    draft_folder,
    drafting,
    target_folder,
)
from tests.train.pipeline.test_acceptance import byte_tokenizer
from train.cli import app
from train.pipeline.acceptance_stage import accept
from train.pipeline.progress import Stages
from train.pipeline.publish import PushOptions, push, push_run, stage
from train.recipe.load import load_recipe

REPO = "org/head"
SECRET = "hf_secret9876543210"


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> Path:
    """A run that is done: an export, measured, with its report and its recipe."""
    root = tmp_path_factory.mktemp("somebody") / "run"
    folder = root.parent / "private-target"
    model = tiny_model(
        "llama", vocab_size=258, eos_token_id=256, pad_token_id=257, initializer_range=0.1
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    target = FrozenTarget(model, [1, 2, 3])
    torch.manual_seed(1)
    drafter = (
        Eagle3(config_for_target(target, "eagle3", tap_layers=[1, 2, 3]))
        .attach(target)
        .initialise_from(target)
    )
    made = {"recipe": "tiny", "step": 3, "target": {"name_or_path": str(folder)}}
    export_drafter(drafter, root / "export", dtype=torch.float32, provenance=made)
    turns = [
        [{"role": "user", "content": f"sums {i}"}, {"role": "assistant", "content": "x"}]
        for i in range(4)
    ]
    rows = [{"workload": "sums", "messages": messages} for messages in turns]
    (root.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(root.parent / "prompts.jsonl")}
    recipe = {
        "name": "tiny",
        "output_dir": str(root),
        "target": {"model": str(folder)},
        "data": {"train": [source, {"name": "org/conversations"}]},
        "evaluation": {
            "prompts": [source],
            "num_speculative_tokens": 2,
            "max_tokens": 6,
            "repeats": 1,
            "prompts_per_workload": 2,
            "baseline_transformers": False,
        },
        "gates": {"lossless_mismatches": {"max": 0}},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert accept(load_recipe(root / "recipe.yaml"), stages=Stages(1, enabled=False)) == 0
    return root


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """The same run, to be spoilt."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def to(repository: str = REPO, **options) -> Destination:
    return Destination(repository, **{"token": WRITER, **options})


def sent(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def metadata(card: bytes) -> dict:
    return ModelCard(card.decode()).data.to_dict()


# ------------------------------------------------------------------------------------------------
# what is sent


@pytest.mark.slow
def test_the_hub_has_what_was_staged_and_a_second_push_adds_nothing(
    hub, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    before = sent(run)
    code, output = call("push", run, REPO)
    assert code == 0 and "org/head (private): http" in output, output
    repository = hub.repositories[REPO]
    staged = sent(stage(run, REPO, tmp_path / "staged", PushOptions(), say=lambda _: None))
    assert {
        name: content for name, content in repository.files().items() if name != ".gitattributes"
    } == staged
    assert set(staged) == {
        "README.md",
        "acceptance.json",
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "report.html",
    }
    assert staged["model.safetensors"] == before["export/model.safetensors"]
    assert json.loads(hub.asked("POST", "create$")[0].body)["visibility"] == "private"
    assert repository.private

    commits, stored = len(repository.commits), dict(hub.objects)
    code, output = call("push", run / "export", REPO)  # the export itself, rather than its run
    assert code == 0 and "everything was there already" in output
    assert (len(repository.commits), hub.objects) == (commits, stored)
    assert len(hub.asked("PUT", "^/lfs/")) == 1
    assert sent(run) == before


def test_dry_run_contacts_nobody(hub, run, tmp_path):
    code, output = call("push", run, REPO, "--dry-run", "--out", tmp_path / "look")
    assert code == 0 and str(tmp_path / "look") in output and hub.requests == []
    weights = tmp_path / "look" / "model.safetensors"
    assert f"{weights.stat().st_size:,} bytes" in output
    assert weights.is_symlink()
    with pytest.raises(ConfigError, match="holds something already"):
        stage(run, REPO, tmp_path / "look", PushOptions())
    # the folder can be sent as it is, its card edited
    (tmp_path / "look" / "README.md").write_text("mine")
    push(tmp_path / "look", to(), PushOptions(), say=lambda _: None)
    files = hub.repositories[REPO].files()
    assert (
        files["README.md"] == b"mine"
        and files["acceptance.json"] == sent(tmp_path / "look")["acceptance.json"]
    )


def test_no_path_of_this_machine_is_sent(run, tmp_path):
    said: list[str] = []
    staged = sent(stage(run, REPO, tmp_path / "staged", PushOptions(), say=said.append))
    for name, content in staged.items():
        assert str(run.parent).encode() not in content, name
    assert b"private-target" in staged["README.md"]
    assert "base_model" not in metadata(staged["README.md"]) and any(
        "--base-model" in line for line in said
    )
    assert load_recipe(tmp_path / "staged" / "recipe.yaml").target.model == "private-target"
    assert (
        load_report(tmp_path / "staged" / "acceptance.json").provenance.target_name
        == "private-target"
    )


# ------------------------------------------------------------------------------------------------
# the card


def test_the_card_states_the_report_and_nothing_else(run, tmp_path):
    options = PushOptions(base_model="org/target", license="apache-2.0")
    staged = sent(stage(run, REPO, tmp_path / "staged", options, say=lambda _: None))
    card, fields = staged["README.md"], json.loads(staged["config.json"])
    assert fields["draftsmith"]["target"]["name_or_path"] == "org/target"
    assert yaml.safe_load(staged["recipe.yaml"])["target"]["model"] == "org/target"
    data, report = metadata(card), load_report(run / "acceptance.json")
    assert data["base_model"] == "org/target" and data["license"] == "apache-2.0"
    assert data["datasets"] == ["org/conversations"] and data["pipeline_tag"] == "text-generation"
    assert {"speculative-decoding", "eagle3", "vllm"} <= set(data["tags"])
    found = {
        (
            result["dataset"]["type"],
            result["dataset"]["args"]["temperature"],
            metric["type"],
        ): metric["value"]
        for result in data["model-index"][0]["results"]
        for metric in result["metrics"]
    }
    expected = {}
    for cell in report.results:
        expected[cell.workload, cell.temperature, "acceptance_length"] = cell.acceptance_length
        if cell.speedup_vs_autoregressive:
            expected[cell.workload, cell.temperature, "speedup"] = (
                cell.speedup_vs_autoregressive.value
            )
    assert found == pytest.approx(expected, abs=1e-4)
    text = card.decode()
    assert "vllm serve org/target" in text and '"model": "org/head"' in text
    assert f"{report.cell('all', 0.0).acceptance_length:.2f}" in text and "prompts.jsonl" in text
    assert "\n\n\n" not in text
    assert (
        "Not measured:" in text
        and f"Other hardware, other dtypes than {report.provenance.dtype}" in text
    )
    # an eagle3 head whose config.json does not name its taps in SGLang's field would be served with
    # others
    assert "sglang" not in text.lower().replace("vllm and sglang: the figures", "")


def test_without_a_report_nothing_was_measured(copy, tmp_path):
    (copy / "acceptance.json").unlink()
    said: list[str] = []
    staged = sent(stage(copy, REPO, tmp_path / "staged", PushOptions(), say=said.append))
    assert "model-index" not in metadata(staged["README.md"])
    assert (
        b"Nothing: no acceptance report" in staged["README.md"]
        and b"tokens/s" not in staged["README.md"]
    )
    assert set(staged) & {"acceptance.json", "report.html"} == set() and any(
        "nothing was measured" in s for s in said
    )


@pytest.mark.parametrize("changed", ["weights", "config"])
def test_a_report_of_another_drafter_is_left_out(copy, tmp_path, changed):
    if changed == "config":
        fields = json.loads((copy / "export" / "config.json").read_text())
        (copy / "export" / "config.json").write_text(json.dumps(fields | {"norm_output": True}))
    else:
        from safetensors.torch import load_file, save_file

        tensors = load_file(copy / "export" / "model.safetensors")
        tensors["norm.weight"] += 1
        save_file(tensors, copy / "export" / "model.safetensors", metadata={"format": "pt"})
    said: list[str] = []
    staged = sent(stage(copy, REPO, tmp_path / "staged", PushOptions(), say=said.append))
    assert (
        "acceptance.json" not in staged and b"Nothing: no acceptance report" in staged["README.md"]
    )
    assert any("another drafter" in line for line in said)
    with pytest.raises(ConfigError, match="another drafter"):
        stage(copy, REPO, tmp_path / "asked", PushOptions(report=copy / "acceptance.json"))


def test_what_a_push_no_longer_has_goes(hub, copy):
    push(copy, to(), PushOptions(), say=lambda _: None)
    (copy / "acceptance.json").unlink()
    assert push(copy, to(), PushOptions(), say=lambda _: None).changed
    assert set(hub.repositories[REPO].files()) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.yaml",
    }


# ------------------------------------------------------------------------------------------------
# refusals


def test_a_drafter_that_does_not_load_is_not_sent(hub, copy):
    (copy / "export" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="nothing was sent"):
        push(copy, to(), PushOptions())
    from safetensors.torch import save_file

    save_file({"fc.weight": torch.zeros(2, 2)}, copy / "export" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"nothing was sent.*missing.*--force"):
        push(copy, to(), PushOptions())
    assert hub.requests == []
    push(copy, to(), PushOptions(force=True), say=lambda _: None)
    assert REPO in hub.repositories


@pytest.mark.slow
def test_a_repository_with_other_weights_or_a_public_one_is_refused(hub, run):
    push(run, to(private=False), PushOptions(), say=lambda _: None)
    assert not hub.repositories[REPO].private
    with pytest.raises(ConfigError, match="public already.*--public"):
        push(run, to(), PushOptions(), say=lambda _: None)
    hub.repositories[REPO].commit(
        "main", {"model-00001-of-00002.safetensors": File(b"", True)}, "of the target"
    )
    with pytest.raises(ConfigError, match="other weights.*model-00001-of-00002"):
        push(run, to(private=False), PushOptions(), say=lambda _: None)
    with pytest.raises(ConfigError, match="is the target itself"):
        push(run, to(), PushOptions(base_model=REPO), say=lambda _: None)
    with pytest.raises(ConfigError, match="not the id of a repository"):
        push(run, to("head"), PushOptions())


@pytest.mark.parametrize(
    "case, match",
    [
        ("none", "no token"),
        ("wrong", "does not accept the token"),
        ("reader", "not allowed to do this"),
    ],
)
def test_tokens_that_will_not_do(hub, run, case, match):
    token = {"none": None, "wrong": SECRET, "reader": READER}[case]
    with pytest.raises(HubError, match=match) as error:
        push(run, to(token=token), PushOptions(), say=lambda _: None)
    assert token is None or token not in str(error.value)
    assert REPO not in hub.repositories


def test_what_the_hub_says_of_a_card_is_passed_on(hub, run):
    hub.fail("POST", "validate-yaml", lambda _: Refused(400, "no such license"))
    with pytest.raises(HubError, match=r"status 400: Invalid metadata in README\.md"):
        push(run, to(), PushOptions(license="nonsense"), say=lambda _: None)


def test_offline_mode_is_named(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        push(run, to(), PushOptions(), say=lambda _: None)
    assert hub.requests == []


@pytest.mark.parametrize("given", ["environment", "option"])
@pytest.mark.parametrize("where", ["create$", "preupload", "batch$", "^/lfs/", "/commit/"])
@pytest.mark.slow
def test_no_token_in_what_is_printed(hub, run, monkeypatch, capfd, caplog, given, where):
    """Even from a server that quotes what it was sent."""

    def echo(request):
        return Refused(500 if "lfs" in where else 400, f"what is {request.token} {SECRET}?")

    monkeypatch.setattr("tests.fake_hub.WRITER", SECRET)
    method = "PUT" if where == "^/lfs/" else "POST"
    hub.fail(method, where, echo, times=30)
    arguments = ["push", run, REPO]
    if given == "environment":
        monkeypatch.setenv("HF_TOKEN", SECRET)
    else:
        arguments += ["--token", SECRET]
    code, output = call(*arguments)
    printed = output + "".join(capfd.readouterr()) + caplog.text
    assert code == 2 and "error: push to org/head" in printed, printed
    assert SECRET not in printed and "Traceback" not in printed


@pytest.mark.slow
def test_a_draft_model_with_its_own_tokenizer(hub, target_folder, draft_folder, tmp_path):
    """Its map and its tokenizer travel with it, and it drafts the same by its id."""
    llm = LLM(
        target_folder, speculative_config=drafting(draft_folder, use_heterogeneous_vocab=True)
    )
    folder = export_drafter(llm.engine.proposer._drafter, tmp_path / "draft", dtype=torch.float32)
    push(folder, to(private=False), PushOptions(), say=lambda _: None)
    files = hub.repositories[REPO].files()
    assert {"token_map/model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert b'"use_heterogeneous_vocab": true' in files["README.md"]
    by_id = LLM(target_folder, speculative_config=drafting(REPO))
    params = SamplingParams(temperature=0, max_tokens=8)
    assert (
        len(
            {
                tuple(each.generate(["ab"], params, False)[0].outputs[0].token_ids)
                for each in (llm, by_id)
            }
        )
        == 1
    )
    assert by_id.get_metrics() == llm.get_metrics()
    (folder / "token_map" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"token_map/model.safetensors is missing"):
        push(folder, to(), PushOptions())


# ------------------------------------------------------------------------------------------------
# failures


@pytest.mark.slow
def test_a_failure_that_stays_is_resumed_later(hub, copy):
    """Of two large files the one that arrived is not sent again."""
    (copy / "export" / "tokenizer.json").write_bytes(b"{}" + b" " * 4000)
    weights = hashlib.sha256((copy / "export" / "model.safetensors").read_bytes()).hexdigest()
    hub.fail("PUT", weights, lambda _: Refused(503, "busy"), times=1000)
    with pytest.raises(HubError, match="status 503.*the same command sends only what is missing"):
        push(copy, to(), PushOptions(), say=lambda _: None)
    assert len(hub.objects) == 1 and weights not in hub.objects
    assert set(hub.repositories[REPO].files()) == {".gitattributes"}  # never half a drafter
    hub.failures.clear()
    hub.requests.clear()
    push(copy, to(), PushOptions(), say=lambda _: None)
    assert [request.path for request in hub.asked("PUT", "^/lfs/")] == [f"/lfs/{weights}"]
    assert {"tokenizer.json", "model.safetensors", "README.md"} <= set(
        hub.repositories[REPO].files()
    )


def test_a_run_pushes_itself_once_its_gates_are_passed(hub, copy, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    overrides = ["export.push_to_hub=org/head", "export.hub_license=mit", f"output_dir={copy}"]
    recipe = load_recipe(copy / "recipe.yaml", overrides)
    assert (
        recipe.export.push_to_hub
        and recipe.export.hub_model_id == REPO
        and recipe.export.hub_private_repo
    )
    said: list[str] = []
    push_run(recipe, 1, said.append)
    assert hub.repositories == {} and "not pushed to org/head: a gate is missed" in said
    (copy / "recipe.yaml").write_text(recipe.resolved_yaml())
    push_run(recipe, 0, said.append)
    assert hub.repositories[REPO].private and said[-1].startswith("org/head (private): http")
    assert metadata(hub.repositories[REPO].files()["README.md"])["license"] == "mit"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="no token"):
        account()


@pytest.mark.parametrize(
    "section, match",
    [
        ({"push_to_hub": True}, "hub_model_id does not say where"),
        ({"push_to_hub": "head"}, "expected the id of a repository"),
        ({"hub_token": "x"}, "hub_token"),
    ],
)
def test_recipes_that_cannot_push_are_refused(copy, section, match):
    tree = yaml.safe_load((copy / "recipe.yaml").read_text())
    (copy / "recipe.yaml").write_text(yaml.safe_dump(tree | {"export": section}))
    with pytest.raises(ConfigError, match=match):
        load_recipe(copy / "recipe.yaml")
