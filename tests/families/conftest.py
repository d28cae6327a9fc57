"""Every family of drafters, small and random: what the contract tests run over. A new family adds its cases here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speculators.config import config_for_target
from speculators.drafter import Drafter, family_class
from speculators.target import FrozenTarget


@dataclass(frozen=True)
class Case:
    """One drafter: `shape` are fields of its config, `options` keys of its recipes."""

    family: str
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    architecture: str = "llama"
    taps: tuple[int, ...] = ()


CASES: dict[str, Case] = {
    "eagle3": Case("eagle3", {"draft_vocab_size": 40}, taps=(1, 2, 3)),
    "eagle3, whole vocabulary, gemma3": Case("eagle3", architecture="gemma3", taps=(0, 3)),
    "eagle3, two layers": Case("eagle3", {"num_layers": 2, "draft_vocab_size": 40}, taps=(1, 2, 3)),
    "mtp": Case("mtp"),
    "mtp, the state before the norm, qwen3": Case("mtp", {"hidden_state": "residual"}, {}, "qwen3", (3,)),
    "mtp, gemma3": Case("mtp", architecture="gemma3"),
    "mtp, layer of deepseek_v3": Case("mtp", architecture="deepseek_v3"),
}


def make(case: Case, model: Any, *, noise: float = 0.3) -> tuple[FrozenTarget, Drafter]:
    """The target and a drafter with every parameter random, attached and in evaluation mode."""
    target = FrozenTarget(model, case.taps)
    config = config_for_target(target, case.family, tap_layers=case.taps or None, **case.shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = family_class(case.family)(config).attach(target)
        for parameter in drafter.parameters():
            parameter.data += noise * torch.randn_like(parameter)
        if drafter.draft_to_target is not None:
            ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
            drafter.draft_to_target.copy_(ids)
    return target, drafter.eval()


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request) -> Case:
    """Every case in turn."""
    return request.param


@pytest.fixture
def world(case, tiny_model) -> tuple[FrozenTarget, Drafter]:
    return make(case, tiny_model(case.architecture))


@pytest.fixture(scope="session")
def make_drafter():
    """The function `make(case, model, noise=0.3)`."""
    return make


@pytest.fixture(scope="session")
def all_cases() -> dict[str, Case]:
    return CASES
