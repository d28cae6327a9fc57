"""The plugin for vLLM without vLLM: what it must not import or raise.

In real vLLM: tests/vllm/test_plugin_in_vllm.py.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inference import vllm_plugin
from inference.vllm_plugin import mlp_speculator
from inference.vllm_plugin.mlp_speculator import require_heads

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def heard(caplog):
    """What the plugin said."""
    caplog.set_level(logging.INFO, logger="vllm.draftsmith")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "vllm.draftsmith"
    ]


# ---------------------------------------------------------------------- what vLLM calls


def test_the_entry_points_name_functions() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins"}
    for points in groups.values():
        for value in points.values():
            module, _, name = value.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_without_vllm_nothing_heavy_is_imported_and_nothing_raised() -> None:
    """And what is left out is named."""
    code = (
        "import sys; import inference.vllm_plugin as plugin\nplugin.register();"
        " plugin.register()\nheavy = {'torch', 'transformers', 'speculators', 'train', 'pydantic',"
        " 'peft'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    hidden = (  # an environment that happens to have it is like the others
        "import sys; sys.modules['vllm'] = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden + code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "method 'mlp_speculator' left out" in done.stderr


def test_a_change_that_fails_is_named_and_nothing_is_raised(heard) -> None:
    def change():
        raise AttributeError("Runner has no propose")

    vllm_plugin.attempt(change)
    assert heard() == [
        "Draftsmith: method 'mlp_speculator' left out: AttributeError: Runner has no propose"
    ]


def test_parameters_that_are_missing_are_named() -> None:
    class Runner:
        def propose(self, tokens):
            """As documented."""
            return tokens

    def doubled(original):
        return lambda self, tokens: 2 * original(self, tokens)

    with pytest.raises(TypeError, match="Runner.propose takes no metadata, slots"):
        mlp_speculator._wrap(Runner, "propose", ("tokens", "slots", "metadata"), doubled)
    assert Runner().propose(3) == 3
    mlp_speculator._wrap(Runner, "propose", ("tokens",), doubled)
    assert Runner().propose(3) == 6 and Runner.propose.__doc__ == "As documented."


# ---------------------------------------------------------------------- heads


def test_no_more_tokens_than_heads() -> None:
    for tokens, heads in ((3, 3), (1, 3), (None, 3), (9, None)):
        require_heads(tokens, heads)
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens is 6.* has 3 heads .*ask for 3 or fewer"
    ):
        require_heads(6, 3)
