"""What an export may take the place of: nothing, or a drafter."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import check_replaceable, fresh_folder
from draftsmith.train.pipeline.export_stage import reexport
from tests.support.errors import raises_at


@pytest.fixture
def run(tmp_path):
    """A run with an export."""
    folder = tmp_path / "runs" / "head"
    for name in ("export", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: head")
    (folder / "export" / "config.json").write_text(json.dumps({"draftsmith": {}}))
    return folder


def test_an_export_takes_the_place_of_a_drafter_or_of_nothing(run, tmp_path):
    check_replaceable(run / "export", run)
    check_replaceable(tmp_path / "new" / "folder", run)
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty", run)


@pytest.mark.parametrize(
    "out, source",
    [
        ("runs/head", "runs/head"),
        ("runs/head", "runs/head/export"),  # the run whose export is read
        ("runs", "runs/head"),
        ("runs/link", "runs/head"),
        ("runs/other", "runs/head"),  # another run
        ("model", "runs/head"),
        ("file", "runs/head"),
    ],
)
def test_an_export_takes_the_place_of_nothing_else(out, source, run, tmp_path):
    (run.parent / "link").symlink_to(run)
    for name in ("checkpoints", "recipe.yaml"):
        (run.parent / "other" / name).mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "file").write_text("text")
    with raises_at(ConfigError, "export"):
        check_replaceable(tmp_path / out, tmp_path / source)


def test_a_run_is_still_there_after_an_export_into_it_is_refused(run):
    with pytest.raises(ConfigError):
        reexport(run, run)
    assert (run / "checkpoints").is_dir() and (run / "recipe.yaml").is_file()


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with fresh_folder(link) as fresh:
        torch.save({}, fresh / "new")
    assert link.is_symlink() and [path.name for path in real.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_a_place_that_may_not_be_written_is_named_and_no_scratch(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("os.mkdir", refuse)  # root may write anywhere
    for folder in (tmp_path / "out", tmp_path / "new" / "out"):
        with pytest.raises(PermissionError) as error, fresh_folder(folder):
            pass
        assert error.value.filename == str(folder)
