"""One registry of drafting methods: a new one is its file and a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.evaluation.engines import Drafting, RuntimeEngine
from draftsmith.inference.spec_decode.proposers import methods
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.cli import app

PAGE = Path(__file__).resolve().parents[4] / "docs" / "adding-a-family.md"


@pytest.fixture
def repeat(monkeypatch) -> str:
    """The registry with a line for the method that docs/adding-a-family.md shows."""
    section = PAGE.read_text(encoding="utf-8").partition("## A method without training")[2]
    module = ModuleType("repeat_method")
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "repeat_method", module)
    monkeypatch.setitem(methods.TRAINING_FREE, "repeat", "repeat_method:RepeatOptions")
    return "repeat"


@pytest.mark.parametrize("method", [*FAMILIES, *methods.TRAINING_FREE])
def test_every_method_has_its_options(method) -> None:
    kind = methods.method_options(method)
    assert kind.trained == (method in FAMILIES)
    options = {"model": "folder", "num_speculative_tokens": 3} if kind.trained else {}
    assert parse_speculative_config({"method": method, **options}).num_speculative_tokens > 0


def test_a_registered_method_is_known_everywhere(repeat, tiny_model, target_folder) -> None:
    llm = LLM(tiny_model("llama"), speculative_config={"method": repeat, "repeat_period": 3})
    assert llm.engine.proposer.period == 3
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 5, 5]}
    (drafted,) = llm.generate(prompt, params, False)
    (plain,) = llm.generate(prompt, params, False, speculate=False)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.get_metrics().num_drafts > 0

    rest = dict(num_speculative_tokens=2, rows=1, seed=0, options={"dtype": "float32"})
    engine = RuntimeEngine(Drafting.of(target_folder, None, repeat, **rest))
    assert engine.llm.engine.proposer.period == 1
    engine.close()
    with pytest.raises(ConfigError, match="model"):
        RuntimeEngine(Drafting.of(target_folder, None, "eagle3", **rest))

    shown = CliRunner().invoke(app, ["inspect", repeat, "--json"])
    assert shown.exit_code == 0
    assert '"num_speculative_tokens": 5' in shown.output
    with pytest.raises(ConfigError, match="repeat_period"):
        parse_speculative_config({"method": "ngram", "repeat_period": 1})
