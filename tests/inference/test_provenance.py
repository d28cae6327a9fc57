"""Provenance: the machine's part fills the report's fields, and hashes follow content and names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from inference.provenance import config_sha256, environment, git_commit, text_sha256, weights_sha256
from inference.report.schema import Provenance
from speculators.errors import DataError


def test_environment_names_fields_of_the_report() -> None:
    found = environment("cpu", torch.bfloat16)
    assert set(found) <= set(Provenance.model_fields)
    assert (found["device"], found["dtype"], found["accelerator"]) == ("cpu", "bfloat16", None)
    assert found["cpu_cores"] >= 1 and found["cpu_model"]
    assert found["git_commit"] is None or re.fullmatch(
        r"[0-9a-f]{40}(-dirty)?", found["git_commit"]
    )


def test_a_folder_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None


def test_weight_hash_follows_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "config.json").write_text("{}")
    first = weights_sha256(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert weights_sha256(tmp_path) == first
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    renamed = weights_sha256(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"2")
    assert len({first, renamed, weights_sha256(tmp_path)}) == 3


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no weight files"):
        weights_sha256(tmp_path)


def test_text_hash() -> None:
    assert text_sha256(None) is None
    assert text_sha256("") != text_sha256(" ")


def test_config_is_hashed_by_what_it_says(tmp_path):
    def written(text: str) -> str:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        return config_sha256(tmp_path)

    first = written('{"rope_theta": 10000.0, "transformers_version": "4.57.0"}')
    assert (
        written(
            '{"transformers_version": "5.1.0",\n "_name_or_path": "elsewhere", "rope_theta":'
            " 10000.0}"
        )
        == first
    )
    assert written('{"rope_theta": 20000.0, "transformers_version": "4.57.0"}') != first
    with pytest.raises(DataError, match="config.json: cannot be read"):
        written("{")
