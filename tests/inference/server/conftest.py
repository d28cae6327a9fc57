"""The target of the servers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def model(tiny_model, byte_tokenizer):
    return tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
