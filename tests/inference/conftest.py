"""Fixtures of the runtime's tests: what tests/support makes, by name."""

from __future__ import annotations

import pytest
import torch

from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support import engines
from tests.support.drafters import random_eagle3


@pytest.fixture(scope="session")
def tiny_eagle3():
    """tiny_eagle3(model, tap_layers): a random head of half of the vocabulary."""
    return random_eagle3


@pytest.fixture(scope="session")
def model(tiny_model):
    """A target of the byte tokenizer's first 94 tokens, which are printable."""
    sizes = {"vocab_size": 94, "max_position_embeddings": 64, "num_hidden_layers": 2}
    return tiny_model("qwen3", **sizes)


@pytest.fixture(scope="session")
def byte_tokenizer():
    return engines.byte_tokenizer()


@pytest.fixture(scope="session")
def drafting_llm():
    """drafting_llm(kind, model, texts, **options): see tests/support/engines.py."""
    return engines.drafting_llm


@pytest.fixture(scope="session")
def target_folder(tiny_model, byte_tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=259).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def folders(tiny_model, tmp_path_factory) -> tuple[str, str]:
    """A tiny target whose distributions are neither flat nor sure, and a head with a vocabulary of
    its own that was started in closed form: about half of its drafts are accepted."""
    root = tmp_path_factory.mktemp("measured")
    options = {"eos_token_id": 257, "pad_token_id": 258, "max_position_embeddings": 1024}
    model = tiny_model("llama", vocab_size=259, initializer_range=0.1, **options)
    model.lm_head.weight.data *= 6
    model.save_pretrained(root / "target")
    engines.byte_tokenizer().save_pretrained(root / "target")
    target, taps = FrozenTarget(model, [1, 2, 3]), [1, 2, 3]
    torch.manual_seed(1)
    config = config_for_target(target, "eagle3", tap_layers=taps, draft_vocab_size=200)
    drafter = Eagle3(config).attach(target)
    drafter.target_ids.copy_(torch.randperm(259)[:200].sort().values)
    export_drafter(drafter.initialise_from(target), root / "head", dtype=torch.float32)
    return str(root / "target"), str(root / "head")
