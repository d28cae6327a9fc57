"""A step that fails for one request is a step like any other for those beside it, whatever part of
it fails."""

from __future__ import annotations

import pytest

from inference import SamplingParams
from inference.entrypoints.prompts import Prompt
from inference.server.fault_isolation import guarded_step

PROMPTS = [[5, 6, 7] * 3, [40] * 11, [9, 80, 3, 9, 80], list(range(30, 50))]


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = None
    return model


def requests_of(llm, temperature=1.0):
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=25, logprobs=1)
        for i in range(len(PROMPTS))
    ]
    return [
        llm.submit(Prompt(None, ids), each).requests[0]
        for ids, each in zip(PROMPTS, params, strict=True)
    ]


def run(llm, requests):
    failed = []
    for _ in range(500):
        if not llm.engine.has_unfinished:
            return failed
        failed += guarded_step(llm.engine).failed
    raise AssertionError("it never ended")


def break_proposing(llm, victim):
    propose = llm.engine.proposer.propose

    def broken(rows, limits):
        if victim in rows and len(victim.output_token_ids) > 3:
            raise RuntimeError("proposing")
        return propose(rows, limits)

    llm.engine.proposer.propose = broken


def break_deciding(llm, victim):
    """After random numbers were drawn for everybody."""
    decide = llm.engine._decide

    def broken(logits, proposal, rows):
        kept = decide(logits, proposal, rows)
        if victim in rows and len(victim.output_token_ids) > 3:
            raise RuntimeError("deciding")
        return kept

    llm.engine._decide = broken


def break_committing(llm, victim):
    """After some rows have committed what they got, and before the others have."""
    commit = victim.commit

    def broken(tokens):
        if len(victim.output_token_ids) > 3:
            raise RuntimeError("committing")
        return commit(tokens)

    victim.commit = broken


def break_prefill(llm, victim):
    forward = llm.engine._forward

    def broken(start, stop, *rest):
        if victim in llm.engine.scheduler.running[start:stop] and not victim.output_token_ids:
            raise RuntimeError("prefilling")
        return forward(start, stop, *rest)

    llm.engine._forward = broken


@pytest.mark.slow
@pytest.mark.parametrize(
    "breaks", [break_proposing, break_deciding, break_committing, break_prefill]
)
@pytest.mark.parametrize("kind", ["fake", "ngram", "dynamic"])
def test_only_the_one_that_fails_is_ended(drafting_llm, model, kind, breaks):
    expected = requests_of(calm := drafting_llm(kind, model, max_num_seqs=3))
    assert run(calm, expected) == []
    llm = drafting_llm(kind, model, max_num_seqs=3)
    requests = requests_of(llm)
    victim = requests[1]
    breaks(llm, victim)
    ((failed, error),) = run(llm, requests)
    assert failed is victim and victim.finish_reason == "error" and isinstance(error, RuntimeError)
    for i in (0, 2, 3):
        assert requests[i].output_token_ids == expected[i].output_token_ids
        assert len(requests[i].logprobs) == len(requests[i].output_token_ids) == 25
    assert llm.engine.preempt_all() == [] and not llm.engine.has_unfinished


def test_a_fault_of_all_together_is_nobody_s(drafting_llm, model):
    """Such as memory for one row and not for three: everyone goes on alone."""
    expected = requests_of(calm := drafting_llm("ngram", model, max_num_seqs=3), temperature=0)
    run(calm, expected)
    llm = drafting_llm("ngram", model, max_num_seqs=3)
    requests, propose = requests_of(llm, temperature=0), llm.engine.proposer.propose

    def crowded(rows, limits):
        if len(rows) > 1:
            raise MemoryError
        return propose(rows, limits)

    llm.engine.proposer.propose = crowded
    assert run(llm, requests) == []
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in expected]
