"""The claimed device refuses what a GPU refuses, counts what it waits for, computes what a CPU
computes, and goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from draftsmith.speculators.precision import on_device
from tests.support.device_emulation import DEVICE, MixedDevices


def test_mixed_devices_are_refused(claimed_gpu):
    host, remote = torch.ones(3), torch.ones(3, device=DEVICE)
    assert remote.device == DEVICE and (remote * 2).is_cuda and remote[1:].device == DEVICE
    for wrong in (
        lambda: host + remote,
        lambda: torch.cat([host, remote]),
        lambda: torch.stack([torch.ones(()), remote[0]]),
        lambda: host[remote.long()],
        lambda: remote.numpy(),
        lambda: nn.Linear(3, 3)(remote),
    ):
        with pytest.raises(MixedDevices):
            wrong()
    assert (remote + torch.ones(())).sum() == 6  # a number of the host is a number
    assert (host + remote.cpu()).device.type == "cpu"


def test_waits_are_counted(claimed_gpu):
    remote = torch.arange(4, device=DEVICE)
    with claimed_gpu.waits() as waits:
        kept = remote[remote.gather(0, remote)] * 2
        on_device([1, 2], DEVICE)
        kept[0] = kept[1:] = 5
    assert not waits, claimed_gpu.sites
    with claimed_gpu.waits() as waits:
        kept.tolist(), int(kept[0]), bool(kept.any()), kept.cpu()
        kept[kept > 1], kept.nonzero()
        torch.tensor([1, 2], device=DEVICE), torch.ones(2).to(DEVICE)
        kept[remote] = 5
    assert waits == {"read": 4, "size": 2, "upload": 3}


def test_it_computes_what_the_cpu_computes(claimed_gpu):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    moved = copy.deepcopy(model).to("cuda")
    assert (
        all(p.device == DEVICE for p in moved.parameters())
        and next(model.parameters()).device.type == "cpu"
    )
    x = torch.randn(3, 4)
    for module, inputs in ((model, x), (moved, x.to("cuda"))):
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        module(inputs).square().sum().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), moved.parameters()):
        assert torch.equal(a, b.detach().cpu()) and b.grad is not None
    assert all(p.device.type == "cpu" for p in moved.cpu().parameters())


def test_nothing_of_it_is_left():
    """Runs after the tests above, in the same process."""
    assert (
        nn.Module._apply.__qualname__ == "Module._apply"
        and torch.Generator("cpu").device.type == "cpu"
    )
    assert torch.ones(2).device.type == "cpu" and "Event" in torch.cuda.Event.__name__
