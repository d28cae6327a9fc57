"""Who starts vLLM for the features of a run on several processes, and what it inherits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftsmith.inference.vllm_bridge.engine import child_environment
from draftsmith.train.pipeline.features_stage import _part


@pytest.mark.parametrize(("engine", "parts"), [("vllm", 2), ("draftsmith", 8)])
def test_every_part_of_the_rows_has_one_writer(monkeypatch, engine, parts):
    """With vLLM the first process of each of two machines."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    recipe = SimpleNamespace(features=SimpleNamespace(engine=engine))
    found = [
        _part(
            recipe,
            SimpleNamespace(process_index=i, num_processes=8, local_process_index=i % 4),
        )
        for i in range(8)
    ]
    assert [part for part in found if part] == [(i, parts) for i in range(parts)]
    assert all(found[i] for i in range(0, 8, 8 // parts))


def test_a_child_does_not_inherit_its_parents_rank(monkeypatch):
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in (*foreign, "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "somewhere")
    found = child_environment()
    assert found["HF_HOME"] == "somewhere"
    prefixes = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHEL", "ACCEL", "FSDP")
    assert not [name for name in found if name.startswith(prefixes)]
