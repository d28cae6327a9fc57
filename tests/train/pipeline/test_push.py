"""Pushing: what arrives equals the files, no path of this machine is sent, and a drafter that does
not load, a public repository is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from draftsmith.inference import LLM
from draftsmith.inference.progress import Stages
from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.errors import CheckpointError, ConfigError, HubError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.upload import Destination
from draftsmith.train.pipeline.acceptance_stage import accept
from draftsmith.train.pipeline.publish import PushOptions, assemble, push, push_run
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.cli import call
from tests.support.errors import raises_at
from tests.support.other_tokenizers import (  # noqa: F401 (fixtures)
    draft_folder,
    drafting,
    target_folder,
)
from tests.support.runs import tiny_run

REPO = "org/head"
TOKEN = "hf_secret9876543210"


class Hub:
    """huggingface_hub.HfApi as far as a push asks it."""

    def __init__(self) -> None:
        self.repositories: dict[str, SimpleNamespace] = {}
        self.failure: Exception | None = None

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.repositories.setdefault(name, SimpleNamespace(private=private, files={}))

    def model_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.repositories[name].private)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> SimpleNamespace:
        if self.failure is not None:
            raise self.failure
        files = self.repositories[repo_id].files
        for name in list(filter_repo_objects(files, allow_patterns=delete_patterns)):
            del files[name]
        files |= contents(folder_path)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/0a1b")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    api = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: api)
    return api


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> Path:
    """A run that is done: an export, measured, with its report and its recipe, made in its folder
    with relative paths."""
    root = tmp_path_factory.mktemp("somebody")
    with contextlib.chdir(root):
        made_run(tiny_model, Path("run"), Path("private-target"))
    return root / "run"


def made_run(tiny_model, root: Path, folder: Path) -> None:
    recipe = tiny_run(tiny_model, folder, root)
    recipe["data"]["train"] += [{"name": "org/conversations@main"}, {"name": "ultrachat"}]
    recipe["gates"] = {"lossless_mismatches": {"max": 0}}
    (root / "recipe.yaml").write_text(yaml_text(recipe))
    assert accept(load_recipe(root / "recipe.yaml"), stages=Stages(enabled=False)) == 0


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """The same run, to be spoilt."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def to(repository: str = REPO, **options) -> Destination:
    return Destination(repository, **{"token": TOKEN, **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def staged(folder: Path, out: Path, lines: list[str] | None = None, **options) -> dict[str, bytes]:
    out.mkdir()
    say = [].append if lines is None else lines.append
    return contents(assemble(folder, REPO, out, PushOptions(**options), say=say))


def metadata(card: bytes) -> dict:
    return ModelCard(card.decode()).data.to_dict()


OWN = {"README.md", "config.json", "model.safetensors"}
ALL = OWN | {"acceptance.json", "recipe.yaml", "report.html"}


# ------------------------------------------------------------------ what is sent


@pytest.mark.slow
def test_what_arrives_is_the_run_and_the_run_is_only_read(hub, run):
    before = contents(run)
    code, output = call("push", run, REPO, "--dry-run")
    assert code == 0 and hub.repositories == {} and all(name in output for name in ALL)
    code, output = call("push", run, REPO)
    assert code == 0, output
    files = hub.repositories[REPO].files
    assert hub.repositories[REPO].private and set(files) == ALL
    assert files["model.safetensors"] == before["export/model.safetensors"]
    assert files["report.html"] == before["report.html"]
    assert contents(run) == before


@pytest.mark.slow
def test_no_password_of_an_address_is_sent(copy, tmp_path):
    recipe = load_recipe(copy / "recipe.yaml", ["regenerate.endpoints=[http://me:secret@host/v1]"])
    (copy / "recipe.yaml").write_text(recipe.resolved_yaml())
    files = staged(copy, tmp_path / "staged")
    assert b"host/v1" in files["recipe.yaml"]
    assert not any(b"secret" in content for content in files.values())


@pytest.mark.slow
def test_no_absolute_path_is_sent(tiny_model, tmp_path):
    root, lines = tmp_path / "somebody" / "run", []
    made_run(tiny_model, root, root.parent / "private-target")
    files = staged(root, tmp_path / "staged", lines)
    assert set(files) == ALL - {"recipe.yaml", "report.html"}
    for name, content in files.items():
        assert str(tmp_path).encode() not in content, name
    assert b"private-target" in files["README.md"]
    assert "base_model" not in metadata(files["README.md"]) and len(lines) == 2


def test_a_card_beside_the_drafter_is_sent_as_it_is(copy, tmp_path):
    (copy / "export" / "README.md").write_text("own words")
    (copy / "export" / "notes.txt").write_text("not for others")
    files = staged(copy, tmp_path / "staged")
    assert files["README.md"] == b"own words" and "notes.txt" not in files


# ------------------------------------------------------------------ the card


def test_the_card_names_the_target_the_data_and_the_report(run, tmp_path):
    """Its figures: tests/inference/report/test_model_card.py."""
    files = staged(run, tmp_path / "staged", base_model="org/target", license="apache-2.0")
    card, fields = files["README.md"], json.loads(files["config.json"])
    assert fields["draftsmith"]["target"]["name_or_path"] == "org/target"
    provenance = load_report(tmp_path / "staged" / "acceptance.json").provenance
    assert (provenance.target_name, provenance.drafter_path) == ("org/target", REPO)
    assert provenance.drafter_config == fields
    data, report = metadata(card), load_report(run / "acceptance.json")
    assert data["base_model"] == "org/target" and data["license"] == "apache-2.0"
    assert data["datasets"] == ["org/conversations", "HuggingFaceH4/ultrachat_200k"]
    text = card.decode()
    assert "vllm serve org/target" in text and '"model": "org/head"' in text
    assert f"{report.cell('all', 0.0).acceptance_length:.2f}" in text and "prompts.jsonl" in text
    # an eagle3 head whose config.json does not name its taps in SGLang's field would be served with
    # others
    assert "sglang" not in text.lower().replace("vllm and sglang: the results", "")


@pytest.mark.parametrize("change", ["no report", "other weights", "other config"])
def test_without_a_report_of_these_files_the_card_has_no_figure(copy, tmp_path, change):
    if change == "no report":
        (copy / "acceptance.json").unlink()
    elif change == "other config":
        fields = json.loads((copy / "export" / "config.json").read_text())
        (copy / "export" / "config.json").write_text(json.dumps(fields | {"norm_output": True}))
    else:
        tensors = load_file(copy / "export" / "model.safetensors")
        tensors["norm.weight"] += 1
        save_file(tensors, copy / "export" / "model.safetensors", metadata={"format": "pt"})
    lines: list[str] = []
    files = staged(copy, tmp_path / "staged", lines)
    assert not {"acceptance.json", "report.html"} & set(files)
    assert "Nothing: no acceptance report" in files["README.md"].decode()
    if change != "no report":
        with pytest.raises(ConfigError, match="--report"):
            staged(copy, tmp_path / "asked", report=copy / "acceptance.json")


def test_a_report_that_a_push_no_longer_has_is_removed_there(hub, copy):
    push(copy, to(), PushOptions())
    (copy / "acceptance.json").unlink()
    push(copy, to(), PushOptions())
    assert set(hub.repositories[REPO].files) == ALL - {"acceptance.json", "report.html"}


# ------------------------------------------------------------------ refusals


def test_a_drafter_that_does_not_load_is_not_sent(hub, copy):
    (copy / "export" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=str(copy)):
        push(copy, to(), PushOptions())
    save_file({"fc.weight": torch.zeros(2, 2)}, copy / "export" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        push(copy, to(), PushOptions())
    with pytest.raises(CheckpointError):
        push(copy.parent, to(), PushOptions())
    assert hub.repositories == {}


def test_a_public_repository_is_refused(hub, run):
    push(run, to(private=False), PushOptions())
    with raises_at(ConfigError, "push to org/head"):
        push(run, to(), PushOptions())


@pytest.mark.parametrize("repository, base", [("head", None), (REPO, "target"), (REPO, REPO)])
def test_names_that_cannot_be_are_refused(run, tmp_path, repository, base):
    with raises_at(ConfigError, "push"):
        assemble(run, repository, tmp_path, PushOptions(base_model=base))


def test_what_the_hub_says_is_passed_on_without_the_token(hub, run, monkeypatch):
    hub.failure = RuntimeError(f"403 Forbidden\n\nfor {TOKEN}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(HubError, match=r"org/head: 403 Forbidden for \*\*\*$") as error:
        push(run, to(token=None), PushOptions())
    assert TOKEN not in "".join(traceback.format_exception(error.value))


@pytest.mark.slow
def test_a_draft_model_is_sent_with_its_token_map(target_folder, draft_folder, tmp_path):
    llm = LLM(
        target_folder, speculative_config=drafting(draft_folder, use_heterogeneous_vocab=True)
    )
    folder = export_drafter(llm.engine.proposer._drafter, tmp_path / "draft", dtype=torch.float32)
    files = staged(folder, tmp_path / "staged")
    assert {"token_map/model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert b'"use_heterogeneous_vocab": true' in files["README.md"]
    (folder / "token_map" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"token_map/model\.safetensors"):
        staged(folder, tmp_path / "again")


# ------------------------------------------------------------------ from a recipe


def test_a_run_pushes_itself_once_its_gates_are_passed(hub, copy):
    recipe = load_recipe(
        copy / "recipe.yaml", ["export.push_to_hub=org/head", f"output_dir={copy}"]
    )
    lines: list[str] = []
    push_run(recipe, 1, lines.append)
    assert hub.repositories == {} and len(lines) == 1
    push_run(recipe, 0, lines.append)
    assert hub.repositories[REPO].private and lines[-1].startswith("org/head (private): https")
    hub.failure = RuntimeError("503")
    with pytest.raises(HubError, match=f"draftsmith push {copy} org/head"):
        push_run(recipe, 0, lines.append)
