"""The clock of rounds: every moment of a round is in one part, and a run is what it is without
it."""

from __future__ import annotations

from itertools import count

import pytest

from draftsmith.inference import SamplingParams
from draftsmith.inference.engine import round_clock
from draftsmith.inference.engine.round_clock import RoundClock
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.metrics import DRAFT_HEAD, PARTS
from tests.support.cases import make
from tests.support.configurations import FAMILIES
from tests.support.engines import drafting_llm, ids_of, make_llm

PROMPTS = [{"prompt_token_ids": [40, 41, 50, 51] * 3}, {"prompt_token_ids": [60, 61, 62]}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "dynamic", "ngram", "off"])
def test_every_moment_of_a_round_is_in_one_part(kind, temperature, model, monkeypatch) -> None:
    """The clock goes one on whenever it is read, so a round lasts as long as it was read often."""
    llm = drafting_llm(kind, model, max_num_seqs=2)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=3, ignore_eos=True)
    expected = ids_of(llm.generate(PROMPTS, params, False))
    readings = count()
    monkeypatch.setattr(round_clock, "perf_counter", lambda: float(next(readings)))
    clock = RoundClock(llm.engine)
    with clock.running():
        outputs = llm.generate(PROMPTS, params, False)
    times = clock.times()
    assert ids_of(outputs) == expected
    assert len(times) == max(len(output.metrics.accepted_per_round) for output in outputs)
    assert sum(time.drafts for time in times) == sum(o.metrics.num_draft_tokens for o in outputs)
    assert sum(time.total for time in times) == next(readings) - len(times)
    assert times[0].rows == 2
    parts = set().union(*(time.seconds for time in times))
    drafts = {"off": 3, "ngram": 4}.get(kind, 5)
    assert len(parts) == drafts and parts <= set(PARTS)
    assert (DRAFT_HEAD in parts) == (drafts == 5)
    llm.generate(PROMPTS, params, False)
    assert clock.times() == []


def test_clock_does_not_wait_for_the_device(claimed_gpu, tiny_model, byte_tokenizer) -> None:
    target, drafter = make(FAMILIES["eagle3"], tiny_model("qwen3", vocab_size=260))
    llm = make_llm(
        target.to("cuda"),
        drafter=drafter.to("cuda").freeze(),
        num_speculative_tokens=3,
        tokenizer=byte_tokenizer,
        max_model_len=100,
        max_num_seqs=1,
    )
    llm.submit(Prompt(None, [40, 41, 50]), SamplingParams(max_tokens=60, seed=0, ignore_eos=True))
    llm.engine.step()
    with claimed_gpu.waits() as expected:
        llm.engine.step()
    clock = RoundClock(llm.engine)
    with clock.running(), claimed_gpu.waits() as waits:
        llm.engine.step()
    assert waits == expected
    (time,) = clock.times()
    assert set(time.seconds) == set(PARTS) and time.drafts == 3
    llm.abort("0")
