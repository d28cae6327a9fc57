"""The gate of a refresh: a gain beyond chance on the target's own texts, and no forgetting."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from draftsmith.inference import SamplingParams
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.traffic import LoggedText, Sampling
from draftsmith.train.pipeline.refresh_gate import Judgement, judge, refusals
from tests.support.cases import Case, make
from tests.support.engines import make_llm
from tests.support.models import make_tiny_model

TEXTS = 40


@functools.cache
def world():
    """A target, a head that knows nothing of it, and one that begins with its parts."""
    case = Case("eagle3", {"draft_vocab_size": 101}, taps=(1, 2, 3))
    target, strong = make(case, make_tiny_model("llama"), noise=0.05)
    strong.initialise_from(target)
    _, weak = make(case, make_tiny_model("llama"), noise=0.3)
    weak.attach(target)
    return target, weak.freeze(), strong.freeze()


@functools.cache
def written(temperature: float, seed: int | None = None) -> list[LoggedText]:
    """Texts of the target at a temperature, or of another model with its vocabulary."""
    target = world()[0]
    if seed is not None:
        target = FrozenTarget(make_tiny_model("qwen2"), ())
    llm = make_llm(target, max_num_seqs=TEXTS, max_model_len=100)
    prompts = [{"prompt_token_ids": [3 + i % 90, 5 + i * 7 % 90, 9]} for i in range(TEXTS)]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=i)
        for i in range(TEXTS)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    sampling = Sampling(temperature, 1.0, 0)
    return [
        LoggedText(float(i), f"{i}", o.prompt_token_ids, o.outputs[0].token_ids, sampling)
        for i, o in enumerate(outputs)
    ]


def shuffled(texts: list[LoggedText]) -> list[LoggedText]:
    rng = np.random.default_rng(0)
    return [
        LoggedText(
            text.time,
            text.conversation,
            text.prompt_ids,
            rng.permutation(text.output_ids).tolist(),
            text.sampling,
        )
        for text in texts
    ]


@pytest.mark.slow
def test_gate_takes_a_real_gain_and_refuses_none_and_a_loss():
    target, weak, strong = world()
    samples = [written(1.0), written(0.0)]
    better = judge(target, (weak, strong), samples, 3)
    same = judge(target, (weak, weak), samples, 3)
    worse = judge(target, (strong, weak), samples, 3)
    assert better.gain > 0 and refusals(better, better) == []
    assert (worse.gain, worse.error) == pytest.approx((-better.gain, better.error))
    assert (same.gain, same.error) == (0, 0) and len(refusals(same, same)) == 1
    assert len(refusals(better, worse)) == 1 and len(refusals(worse, worse)) == 2
    assert (better.texts, better.conversations) == (2 * TEXTS, TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("noise", ["shuffled", "another model"])
def test_gate_refuses_texts_of_another_hand_however_well_they_are_drafted(noise, temperature):
    target, weak, strong = world()
    foreign = shuffled(written(temperature))
    if noise == "another model":
        foreign = written(temperature, seed=1)
    of_another = judge(target, (weak, strong), [foreign], 3)
    of_target = judge(target, (weak, strong), [written(temperature)], 3)
    assert of_another.excess - 2 * of_another.excess_error > 0.1
    assert of_target.excess < 3 * of_target.excess_error
    gained = Judgement(TEXTS, TEXTS, 2.0, 2.5, 0.01, of_another.excess, of_another.excess_error)
    (reason,) = refusals(gained, gained)
    assert "not the target's own" in reason


def judgement(before=2.0, after=2.0, error=0.01, excess=0.0) -> Judgement:
    return Judgement(100, 100, before, after, error, excess, 0.0)


@pytest.mark.parametrize(
    ("newest", "old", "count"),
    [
        (judgement(after=2.03), judgement(), 0),
        (judgement(after=2.0199), judgement(), 1),
        (judgement(after=2.03), judgement(after=1.981), 0),
        (judgement(after=2.03), judgement(after=1.979), 1),  # 2 % of τ - 1, not of τ
        (judgement(after=math.nan), judgement(after=math.nan), 2),
        (judgement(after=2.03, excess=0.11), judgement(), 1),
        (judgement(after=2.03, excess=math.nan), judgement(), 1),
    ],
)
def test_refusals_at_their_bounds(newest, old, count):
    assert len(refusals(newest, old)) == count
