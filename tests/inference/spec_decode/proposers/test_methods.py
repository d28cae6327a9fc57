"""One registry of drafting methods: a new one is its file and a line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.evaluation.engines import Drafting, RuntimeEngine
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers import methods
from draftsmith.inference.spec_decode.proposers.base import Proposer
from draftsmith.inference.spec_decode.proposers.options import MethodOptions, option
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.registry import FAMILIES
from draftsmith.train.cli import app


class RepeatProposer(Proposer):
    """Drafts the last token again and again."""

    def propose(self, requests, plan) -> Proposal:
        drafts = [
            [request.token_ids[-1]] * min(limit, self.num_speculative_tokens)
            for request, limit in zip(requests, plan.limits, strict=True)
        ]
        return Proposal.deterministic(drafts, "cpu")


class RepeatOptions(MethodOptions):
    repeat_count: int = option(2, "how often", ge=1)

    @property
    def default_tokens(self) -> int:
        return self.repeat_count

    def make_proposer(self, device: torch.device) -> RepeatProposer:
        return RepeatProposer(self.num_speculative_tokens)


@pytest.fixture
def repeat(monkeypatch) -> str:
    """The registry with a line for the method of this file."""
    monkeypatch.setitem(sys.modules, "repeat_method", SimpleNamespace(RepeatOptions=RepeatOptions))
    monkeypatch.setitem(methods.TRAINING_FREE, "repeat", "repeat_method:RepeatOptions")
    return "repeat"


@pytest.mark.parametrize("method", [*FAMILIES, *methods.TRAINING_FREE])
def test_every_method_has_its_options(method) -> None:
    kind = methods.method_options(method)
    assert kind.trained == (method in FAMILIES)
    own = {"model": "folder", "num_speculative_tokens": 3} if kind.trained else {}
    assert parse_speculative_config({"method": method, **own}).num_speculative_tokens > 0


def test_a_registered_method_is_known_everywhere(repeat, tiny_model, target_folder) -> None:
    llm = LLM(tiny_model("llama"), speculative_config={"method": repeat, "repeat_count": 3})
    assert isinstance(llm.engine.proposer, RepeatProposer)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 5, 5]}
    (drafted,) = llm.generate(prompt, params, False)
    (plain,) = llm.generate(prompt, params, False, speculate=False)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.get_metrics().num_drafts > 0

    rest = dict(num_speculative_tokens=2, rows=1, seed=0, options={"dtype": "float32"})
    engine = RuntimeEngine(Drafting.of(target_folder, None, repeat, **rest))
    assert isinstance(engine.llm.engine.proposer, RepeatProposer)
    engine.close()
    with pytest.raises(ConfigError, match="model"):
        RuntimeEngine(Drafting.of(target_folder, None, "eagle3", **rest))

    shown = CliRunner().invoke(app, ["inspect", repeat, "--json"])
    assert shown.exit_code == 0
    assert '"num_speculative_tokens": 2' in shown.output
    with pytest.raises(ConfigError, match="repeat_count"):
        parse_speculative_config({"method": "ngram", "repeat_count": 1})
