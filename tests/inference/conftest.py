"""Fixtures of the runtime's tests: what tests/support makes, by name."""

from __future__ import annotations

import pytest

from tests.support import engines
from tests.support.drafters import random_eagle3


@pytest.fixture(scope="session")
def tiny_eagle3():
    """tiny_eagle3(model, tap_layers): a random head of half of the vocabulary."""
    return random_eagle3


@pytest.fixture(scope="session")
def byte_tokenizer():
    return engines.byte_tokenizer()


@pytest.fixture(scope="session")
def drafting_llm():
    """drafting_llm(kind, model, texts, **options): see tests/support/engines.py."""
    return engines.drafting_llm
