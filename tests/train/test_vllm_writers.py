"""Who starts vLLM for the features of a run on several processes, on which devices, and what it is
told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inference.vllm_bridge.engine import child_environment
from speculators.errors import ConfigError
from train.pipeline.features_stage import Writer, vllm_writer


def writers(monkeypatch, machines: int, here: int, devices: int, **options: int) -> list[Writer]:
    """Of every process of a launch with `here` processes a machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    return [
        vllm_writer(
            SimpleNamespace(
                process_index=rank,
                num_processes=machines * here,
                local_process_index=rank % here,
                device=torch.device("cuda"),
            ),
            options,
            devices,
        )
        for rank in range(machines * here)
    ]


@pytest.mark.parametrize(
    ("machines", "here", "devices", "sizes", "sets"),
    [
        (1, 8, 8, {}, 8),
        (1, 8, 8, {"tensor_parallel_size": 2}, 4),
        (1, 8, 8, {"tensor_parallel_size": 8}, 1),
        (1, 8, 8, {"tensor_parallel_size": 3}, 2),  # two devices are left over
        (1, 1, 8, {"tensor_parallel_size": 4}, 1),
        (2, 4, 4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        (2, 2, 1, {}, 2),  # two processes on a device start one engine
    ],
)
def test_every_device_has_one_engine_at_most_and_every_part_one_writer(
    monkeypatch, machines, here, devices, sizes, sets
):
    found = writers(monkeypatch, machines, here, devices, **sizes)
    writing = [each for each in found if each.part is not None]
    assert sorted(each.part for each in writing) == [(i, sets) for i in range(sets)]
    for machine in range(machines):
        used = [
            d for each in found[machine * here : (machine + 1) * here] for d in each.devices or ()
        ]
        assert len(used) == len(set(used)) and set(used) <= set(range(devices))


def test_an_engine_that_takes_more_than_there_are_is_refused(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=4 takes 4 devices, and this machine has 2"
    ):
        writers(monkeypatch, 1, 2, 2, tensor_parallel_size=4)


def test_without_accelerators_there_is_one_engine_a_machine(monkeypatch):
    found = writers(monkeypatch, 2, 2, 0)
    assert [each.part for each in found] == [(0, 2), None, (1, 2), None]
    assert all(each.devices is None for each in found)


def test_a_child_is_not_told_of_its_parents_place(monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ACCELERATE_USE_FSDP",
        "FSDP_VERSION",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "somewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    found = child_environment([2, 3])
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-6,7" and found["HF_HOME"] == "somewhere"
    assert not {
        name
        for name in found
        if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHEL", "ACCEL", "FSDP"))
    }
    assert child_environment()["CUDA_VISIBLE_DEVICES"] == "4,5,GPU-6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert (
        child_environment([1])["CUDA_VISIBLE_DEVICES"] == "1"
        and "CUDA_VISIBLE_DEVICES" not in child_environment()
    )
