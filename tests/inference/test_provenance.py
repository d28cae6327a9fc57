"""Provenance: the software, the machine and the commit that a report names."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import torch
import transformers

from draftsmith.inference import provenance
from draftsmith.inference.provenance import environment, git_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_environment_is_of_the_device_and_of_what_is_installed() -> None:
    facts = environment("cpu", torch.bfloat16)
    assert facts.pop("cpu_model")
    assert facts == {
        "draftsmith_version": metadata.version("draftsmith"),
        "git_commit": git_commit(Path(provenance.__file__).resolve().parent),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "accelerator": None,
        "dtype": "bfloat16",
    }


def test_environment_on_an_accelerator_names_it(claimed_gpu) -> None:
    facts = environment("cuda", torch.float32)
    assert (facts["device"], facts["accelerator"]) == ("cuda", torch.cuda.get_device_name())


def test_git_commit_is_of_a_tree_that_tracks_the_folder(tmp_path: Path) -> None:
    package, installed = tmp_path / "package", tmp_path / "package" / "installed"
    installed.mkdir(parents=True)
    assert git_commit(package) is None
    code = package / "code.py"
    code.write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "first")
    (installed / "other.py").write_text("2")
    assert git_commit(package) == git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(installed) is None
    code.write_text("3")
    assert git_commit(package) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_environment_outside_an_install_has_no_version(monkeypatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert environment("cpu", torch.float32)["draftsmith_version"] == "0+unknown"
