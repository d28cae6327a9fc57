"""Ids of the Hub wherever a folder is taken, with and without a revision.

On `main` of the drafter's repository lies another head than on `v1`, so that a revision that is
forgotten shows."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.loading import load_tokenizer, target_config
from draftsmith.inference.report.schema import load_report
from draftsmith.speculators.digests import model_weights_sha256
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import (
    export_drafter,
    load_drafter,
    read_drafter_config,
    read_fields,
)
from draftsmith.speculators.hub import cached_folder, repository_id, split_revision, with_revision
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.info import sketch_target
from draftsmith.train.pipeline.export_stage import reexport
from draftsmith.train.pipeline.run import run
from draftsmith.train.recipe.load import read
from draftsmith.train.recipe.recipe import yaml_text
from draftsmith.train.recipe.sections import TargetSection
from tests.support.cli import call
from tests.support.errors import raises_at
from tests.support.quickstart_data import source as quickstart

TARGET, HEAD = "org/target", "org/head"


@pytest.fixture
def filled(hub_cache, target_folder, drafter_folder, tmp_path):
    """A target and a head, both on `v1`; on main the head is another, and the target has no
    weights."""
    hub_cache(TARGET, target_folder, "v1")
    hub_cache(HEAD, drafter_folder, "v1")
    target = FrozenTarget.from_pretrained(str(target_folder))
    torch.manual_seed(5)
    config = config_for_target(target, "eagle3", draft_vocab_size=64)
    other = family_class("eagle3")(config).attach(target)
    hub_cache(HEAD, export_drafter(other, tmp_path / "other", dtype=torch.float32))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    hub_cache(TARGET, tmp_path / "empty")


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate(["A word"], SamplingParams(temperature=0, max_tokens=6))
    return list(output.outputs[0].token_ids)


# ------------------------------------------------------------------ names


def test_revisions_are_told_from_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_revision("org/name@v1") == ("org/name", "v1")
    assert split_revision("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for arguments in (("org/name", "v1"), ("org/name@v1", "v1")):
        assert split_revision(*arguments) == ("org/name", "v1")
    for other in ("org/name", "some/folder/x@y", "./x@y", "/x@y", "x@", "@x"):
        assert split_revision(other) == (other, None)
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    assert split_revision("org/name@v1") == ("org/name@v1", None)
    assert with_revision("org/name@v1", "v2") == "org/name@v1"
    with raises_at(ConfigError, "org/other@v1"):
        split_revision("org/other@v1", "v2")


def test_folders_are_no_repositories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert repository_id("org/name@v1") == repository_id("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    for folder in ("org/name", str(tmp_path / "x"), "../a", "~/a", "a/b/c", "a", ""):
        assert repository_id(folder) is None, folder
    assert repository_id("/x/hub/models--org--name-1/snapshots/0a1b/") == "org/name-1"


@pytest.mark.parametrize(
    "load",
    [
        FrozenTarget.from_pretrained,
        target_config,
        sketch_target,
        read_drafter_config,
        lambda folder: load_tokenizer(folder, None),
        lambda folder: TargetSection(model=folder).load_tokenizer(),
    ],
)
def test_loaders_without_the_folder_say_so(load, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load(str(tmp_path / "absent"))


# ------------------------------------------------------------------ the runtime


@pytest.mark.slow
def test_the_runtime_takes_ids(filled, target_folder, drafter_folder):
    expected = tokens(LLM(str(target_folder)))
    for options, target, head in (
        ({}, f"{TARGET}@v1", {"model": f"{HEAD}@v1"}),
        ({"revision": "v1"}, TARGET, {"model": HEAD, "revision": "v1"}),
    ):
        llm = LLM(target, speculative_config={**head, "num_speculative_tokens": 2}, **options)
        assert tokens(llm) == expected
    by_id = load_drafter(f"{HEAD}@v1", llm.engine.target).state_dict()
    for name, tensor in load_drafter(drafter_folder, llm.engine.target).state_dict().items():
        assert torch.equal(by_id[name], tensor), name
    assert cached_folder(f"{HEAD}@v1") == cached_folder(HEAD, "v1")


# ------------------------------------------------------------------ commands


@pytest.mark.slow
def test_a_recipe_from_end_to_end(filled, recipe_file, tmp_path, drafter_folder):
    """Target and starting weights by id: planned, looked at, trained, measured, exported
    again."""
    tree = read(recipe_file)
    tree |= {
        "target": {"model": f"{TARGET}@v1"},
        "drafter": {"init_from": f"{HEAD}@v1", "unroll_steps": 2},
        "data": {"train": [quickstart("train", 3)], "validation": [quickstart("validation", 1)]},
        "regenerate": {"max_new_tokens": 6},
        "training": {"steps": 1, "eval_every": 1, "mixed_precision": "no"},
        "evaluation": {"max_tokens": 6, "num_speculative_tokens": 2, "temperatures": [0.0]},
        "gates": {"lossless_mismatches": {"max": 0}},
    }
    tree["training"] |= {"learning_rate": 1e-9, "muon_learning_rate": 1e-9}
    tree["evaluation"] |= {"repeats": 1}
    recipe_file.write_text(yaml_text(tree))
    for command in (("train", "--dry-run"), ("prepare",)):
        code, output = call(command[0], recipe_file, *command[1:])
        assert code == 0, output
    assert run(recipe_file) == 0
    trained = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name, tensor in load_file(drafter_folder / "model.safetensors").items():
        torch.testing.assert_close(trained[name].float(), tensor.float(), atol=1e-6, rtol=1e-5)
    reexport(tmp_path / "run", tmp_path / "again")
    for folder in ("run/export", "again"):
        target = read_fields(tmp_path / folder)["draftsmith"]["target"]
        assert target["weights_sha256"] == model_weights_sha256(TARGET, "v1")
    assert load_report(tmp_path / "run" / "acceptance.json").provenance.target_name == TARGET


# ------------------------------------------------------------------ failures


def test_ids_that_are_not_in_the_cache_are_refused_offline(hub_cache):
    for load in (
        lambda: read_drafter_config(HEAD),
        lambda: target_config(TARGET),
        lambda: FrozenTarget.from_pretrained(TARGET),
        lambda: load_tokenizer(TARGET, None),
    ):
        with pytest.raises(CheckpointError, match=f"{HEAD}|{TARGET}"):
            load()


def test_two_revisions_that_differ_are_refused(filled):
    with pytest.raises(ConfigError, match="v2"):
        LLM(f"{TARGET}@v1", revision="v2")
    with raises_at(CheckpointError, "drafter org/head@v9"):
        read_drafter_config(f"{HEAD}@v9")
