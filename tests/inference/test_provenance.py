"""Provenance: the machine's part fills the report's fields, and hashes follow content and names."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import torch

from draftsmith.inference.provenance import environment, git_commit
from draftsmith.inference.report.schema import Provenance


def test_environment_names_fields_of_the_report(tmp_path: Path) -> None:
    facts = environment("cpu", torch.bfloat16)
    assert set(facts) <= set(Provenance.model_fields) and facts["cpu_model"]
    assert (facts["device"], facts["dtype"], facts["accelerator"]) == ("cpu", "bfloat16", None)
    assert re.fullmatch(r"None|[0-9a-f]{40}(-dirty)?", str(facts["git_commit"]))
    assert git_commit(tmp_path) is None


def test_environment_outside_an_install_has_no_version(monkeypatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert environment("cpu", torch.float32)["draftsmith_version"] == "0+unknown"
