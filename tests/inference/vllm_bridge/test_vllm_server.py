"""A server by its URL: what is measured over the wire is what is measured here.

The servers of these tests are this project's, which have the routes of vLLM's that are used. Drafts
that vLLM counts past the end of a response: test_vllm_counters.py; real vLLM: tests/vllm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from draftsmith.inference import LLM
from draftsmith.inference.evaluation.evaluate import EvaluationSettings, evaluate
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.inference.vllm_bridge.vllm_server import VllmServer
from draftsmith.speculators.errors import ConfigError

K = 3
SETTINGS = EvaluationSettings(
    num_speculative_tokens=K,
    max_tokens=14,
    prompts_per_workload=4,
    timed_prompts=1,
    repeats=1,
    transformers=False,
    cost_trials=1,
    lossless_prompts=0,
)
PROMPTS = {
    name: [[3 + (i * i * 7 + n + seed) % 240 for i in range(n)] for n in (3, 5, 8)]
    for seed, name in enumerate("ab")
}


@pytest.fixture
def llm(folders) -> LLM:
    config = {"model": folders[1], "num_speculative_tokens": K, "rejection_sample_method": "token"}
    return LLM(folders[0], speculative_config=config)


@pytest.mark.slow
def test_server_is_measured_as_this_runtime(folders, llm, serving) -> None:
    ours = evaluate(*folders, PROMPTS, SETTINGS)
    url = serving(llm, per_request_spec_decode_metrics="detailed")
    engine = partial(VllmServer, url=url, baseline_url=f"{serving(LLM(folders[0]))}/v1/")
    report = evaluate(*folders, PROMPTS, SETTINGS, engine=engine)
    (facts,) = report.provenance.engines
    assert (report.provenance.engine, facts.url, bool(facts.version)) == ("vllm", url, True)
    counted = ("prompts", "output_tokens", "num_drafts", "num_draft_tokens")
    counted += ("num_accepted_tokens_per_pos", "acceptance_by_position")
    for cell in ours.results:
        theirs = report.cell(cell.workload, cell.temperature)
        for name in counted:
            assert getattr(theirs, name) == getattr(cell, name), name
        assert theirs.speedup_vs_autoregressive is not None
        if cell.temperature == 0:
            assert theirs.expected == cell.expected
            assert [check.mismatches for check in theirs.lossless] == [0]
        else:
            assert theirs.expected is None  # how it draws its drafts is not known


@pytest.mark.slow
def test_servers_that_cannot_be_measured_are_named(folders, llm, serving) -> None:
    silent = serving(llm, per_request_spec_decode_metrics="summary")
    url = serving(llm, per_request_spec_decode_metrics="detailed")
    other = replace(SETTINGS, num_speculative_tokens=2)
    for engine, settings, where in (
        (partial(VllmServer, url=silent), SETTINGS, silent),
        (partial(VllmServer, url=url), other, url),
        (partial(VllmServer, url=url, baseline_url=url), SETTINGS, f"--baseline-url {url}"),
    ):
        with pytest.raises(ConfigError) as error:
            evaluate(*folders, PROMPTS, settings, engine=engine)
        assert error.value.where == where


def test_server_that_is_not_there_is_named(folders) -> None:
    engine = partial(VllmServer, url="http://127.0.0.1:9")
    with pytest.raises(VllmError) as error:
        evaluate(*folders, PROMPTS, SETTINGS, engine=engine)
    assert error.value.where == "http://127.0.0.1:9"
    with pytest.raises(ConfigError):  # has rounds without a draft
        evaluate(folders[0], None, PROMPTS, SETTINGS, method="ngram", engine=engine)
