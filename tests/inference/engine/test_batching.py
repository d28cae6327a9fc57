"""Rows come and go; none of it changes what is written."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine.memory import memory_fault
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.sampler import make_generator
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.engines import drafting_llm
from tests.support.engines import make_llm as llm_of

K, LIMIT, TAPS = 3, 64, (1, 2)
KINDS = ["off", "ngram", "suffix", "lookahead", "wrong", "right", "ragged", "branches", "sampled"]
KINDS += ["fake", "eagle3", "static", "dynamic"]
SYSTEM = [3 + (5 * i) % 40 for i in range(18)]
PROMPTS = [
    SYSTEM + [50, 51, 52, 53],
    SYSTEM + [50, 51, 60],
    SYSTEM,
    [7],
    [70 + i % 9 for i in range(25)],
    SYSTEM + [50 + i for i in range(20)],
]
PARAMS = [
    # a seed: the sampled stub draws at any temperature
    SamplingParams(temperature=0, seed=1, max_tokens=18),
    SamplingParams(temperature=1, seed=5, max_tokens=14),
    SamplingParams(temperature=0, seed=2, max_tokens=1),
    SamplingParams(temperature=1, seed=8, top_p=0.9, max_tokens=25),
    SamplingParams(temperature=1, seed=3, max_tokens=14, num_speculative_tokens=0),
    SamplingParams(temperature=0, seed=4, max_tokens=14, num_speculative_tokens=1),
]


@pytest.fixture(scope="module")
def texts(model):
    """What the target writes greedily after each prompt."""
    plain = LLM(model, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=25)
    outputs = plain.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, False)
    return {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}


@pytest.fixture(scope="module")
def make_llm(model, texts):
    """make_llm(kind, **options)"""
    return partial(drafting_llm, model=model, texts=texts)


@pytest.fixture(scope="module")
def alone(make_llm):
    """alone(kind, prompt, params): tokens, and drafts kept by round, of a request that has the
    engine for itself."""
    llms, known = {}, {}

    def run(kind: str, prompt: int, params: int):
        if kind not in llms:
            llms[kind] = make_llm(kind, max_num_seqs=1)
        if (kind, prompt, params) not in known:
            asked = {"prompt_token_ids": PROMPTS[prompt]}
            (output,) = llms[kind].generate(asked, PARAMS[params], False)
            rounds = output.metrics.accepted_per_round
            known[kind, prompt, params] = output.outputs[0].token_ids, rounds
        return known[kind, prompt, params]

    return run


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
)


class Schedule:
    """An engine under test: what was asked of it, and what must hold between any two steps."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.requests: list[tuple[Request, int, int]] = []
        self.ended: Counter[str] = Counter()
        self.aborted: set[str] = set()

    def add(self, prompt: int, params: int) -> None:
        asked = PARAMS[params]
        name, generator = str(len(self.requests)), make_generator(asked.seed)
        request = Request(name, 0, PROMPTS[prompt], asked, generator=generator, max_model_len=LIMIT)
        self.requests.append((request, prompt, params))
        self.engine.add(request)

    def step(self) -> None:
        self.ended.update(request.request_id for request in self.engine.step())

    def abort(self, which: int) -> None:
        if which < len(self.requests):
            request = self.requests[which][0]
            if not request.finished:
                self.aborted.add(request.request_id)
            self.engine.abort(request.request_id)

    def check(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        assert len(scheduler.running) <= scheduler.max_num_seqs
        present = [*scheduler.running, *scheduler.waiting]
        unfinished = [request for request, _, _ in self.requests if not request.finished]
        assert sorted(map(id, present)) == sorted(map(id, unfinished))
        # first come, first served
        running = {int(request.request_id) for request in scheduler.running}
        waiting = [int(request.request_id) for request in scheduler.waiting]
        assert waiting == sorted(waiting)
        assert max(running, default=-1) < min(waiting, default=len(self.requests))
        lengths = [len(request.token_ids) - 1 for request in scheduler.running]
        free = scheduler.max_num_seqs - len(running)
        assert engine.runner.cache.lengths == lengths + [0] * free

    def finish(self, alone, kind: str) -> None:
        for _ in range(500):
            if not self.engine.has_unfinished:
                break
            self.step()
            self.check()
        assert not self.engine.has_unfinished
        for request, prompt, params in self.requests:
            tokens, rounds = alone(kind, prompt, params)
            if request.request_id in self.aborted:
                assert request.finish_reason == "abort"
                assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == tokens and request.accepted_per_round == rounds
                assert self.ended[request.request_id] == 1
        assert set(self.ended).isdisjoint(self.aborted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_changes_what_a_request_writes(kind, make_llm, alone):
    """Whoever its neighbours are and whenever they come and go."""
    engines = {rows: make_llm(kind, max_num_seqs=rows) for rows in (1, 2, 4)}

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(sorted(engines)), st.lists(ACTIONS, min_size=4, max_size=16))
    def run(rows, actions):
        schedule = Schedule(engines[rows])  # earlier schedules have left their traces
        for action, first, second in actions:
            if action == "add":
                schedule.add(first, second)
            elif action == "abort":
                schedule.abort(first)
            else:
                for _ in range(first):
                    schedule.step()
                    schedule.check()
            schedule.check()
        schedule.finish(alone, kind)

    run()


def test_rows_that_do_not_fit_an_accelerator_are_refused_at_load(
    tiny_model, tiny_eagle3, claimed_gpu, monkeypatch
):
    """If their length was asked for; few texts reach a model's own limit."""
    target = FrozenTarget(tiny_model("llama", max_position_embeddings=1000)).to("cuda")
    drafter = tiny_eagle3(target.model, TAPS).to("cuda")
    fitting = llm_of(target, drafter=drafter, max_model_len=900).engine
    assert memory_fault(fitting.runner, fitting.proposer) is None
    assert fitting.runner.cache.bytes() == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (0, 0))
    drafting = llm_of(target, drafter=drafter).engine
    assert memory_fault(drafting.runner, drafting.proposer) is not None
    for name in ("max_num_seqs", "max_model_len"):
        with pytest.raises(ConfigError, match=name):
            llm_of(target, drafter=drafter, max_model_len=900)
