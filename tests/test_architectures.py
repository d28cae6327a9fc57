"""scripts/architectures.py: what a model type can do is a line, and so is one that fails, hangs or
dies."""

from __future__ import annotations

import os
import time

import pytest

from scripts import architectures
from scripts.architectures import Row, examine, examine_apart, table


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type, chains, trees", [("llama", "yes", "yes"), ("qwen3_5_text", "yes", "draft chains")]
)
def test_attention_and_hybrids(model_type, chains, trees):
    row = examine(model_type)
    assert (row.features, row.chains) == ("yes", chains) and trees in row.trees
    assert (row.plain_path == "yes") == (model_type == "llama")
    assert row.built.endswith("ForCausalLM")


def test_failures_are_lines(monkeypatch):
    assert "KeyError" in examine("no_such_type").built
    monkeypatch.setattr(architectures, "examine", lambda model_type: os._exit(3))
    assert examine_apart("dies", 30).built == "its process ended with status 3"
    monkeypatch.setattr(architectures, "examine", lambda model_type: time.sleep(30))
    assert examine_apart("hangs", 0.1).built == "no answer within 0.1 s"
    text = table([Row("a", "A", "yes", "target A: b|c", "x" * 200, "model_type 'a' is none of b")])
    assert text.splitlines()[2] == rf"| a | A | yes | b\|c | {'x' * 157}... | no |"
