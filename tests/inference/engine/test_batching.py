"""Rows come and go, take over each other's prefixes and give their memory back; none of it changes
what is written."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference import LLM, SamplingParams
from inference.kv_cache import memory_limit as kv_memory
from inference.kv_cache import prefix_cache as prefix_reuse
from inference.kv_cache.prefix_cache import PrefixReuse, common_prefix
from inference.requests.request import Request
from inference.sampling.sampler import make_generator
from speculators.errors import ConfigError
from tests.inference.modules import make_llm as llm_of

K, LIMIT, VOCAB, TAPS = 3, 64, 94, (1, 2)
KINDS = ["off", "ngram", "wrong", "right", "ragged", "sampled", "fake", "eagle3"]
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
    SamplingParams(
        temperature=0, seed=1, max_tokens=18
    ),  # a seed: the sampled stub draws at any temperature
    SamplingParams(temperature=1, seed=5, max_tokens=14),
    SamplingParams(temperature=0, seed=2, max_tokens=1),
    SamplingParams(temperature=1, seed=8, top_p=0.9, max_tokens=25),
    SamplingParams(temperature=1, seed=3, max_tokens=14, num_speculative_tokens=0),
    SamplingParams(temperature=0, seed=4, max_tokens=14, num_speculative_tokens=1),
]


@pytest.fixture(scope="module", autouse=True)
def _small_steps():
    """Prefixes of a few tokens are worth it, and memory grows by a few positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_reuse, "WORTH_COPYING", 2)
        patch.setattr(kv_memory, "STEP", 4)
        yield


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model(
        "qwen3", vocab_size=VOCAB, max_position_embeddings=LIMIT, num_hidden_layers=2
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def texts(model):
    """What the target writes greedily after each prompt."""
    plain = LLM(model, max_num_seqs=1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=25)
    outputs = plain.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, False)
    return {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}


@pytest.fixture(scope="module")
def make_llm(model, stub_proposer, fake_head, tiny_eagle3, texts):
    """make_llm(kind, **options)"""

    def make(kind: str, **options) -> LLM:
        options = {"max_num_batched_tokens": 16, **options}
        if kind == "fake":
            drafter = fake_head(VOCAB, TAPS, model.config.hidden_size, range(1, VOCAB, 2))
            return llm_of(model, drafter=drafter, num_speculative_tokens=K, **options)
        if kind == "eagle3":
            return llm_of(
                model, drafter=tiny_eagle3(model, TAPS), num_speculative_tokens=K, **options
            )
        if kind in ("off", "ngram"):
            config = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
            return LLM(model, speculative_config=config if kind == "ngram" else None, **options)
        return llm_of(model, proposer=stub_proposer(kind, K, VOCAB, texts), **options)

    return make


@pytest.fixture(scope="module")
def alone(make_llm):
    """alone(kind, prompt, params): tokens, and drafts kept by round, of a request that has the
    engine for itself."""
    llms, known = {}, {}

    def run(kind: str, prompt: int, params: int):
        if kind not in llms:
            llms[kind] = make_llm(kind, max_num_seqs=1, enable_prefix_caching=False)
        if (kind, prompt, params) not in known:
            (output,) = llms[kind].generate(
                {"prompt_token_ids": PROMPTS[prompt]}, PARAMS[params], False
            )
            known[kind, prompt, params] = (
                output.outputs[0].token_ids,
                output.metrics.accepted_per_round,
            )
        return known[kind, prompt, params]

    return run


def cache_bytes(engine) -> int:
    drafter = engine.proposer.cache if engine.proposer is not None else None
    return engine.rows.cache.bytes() + (drafter.bytes() if drafter is not None else 0)


def bytes_of_rows(make_llm, kind: str, rows: int, tokens: int) -> int:
    """A limit that so many rows of so many tokens just keep to."""
    return make_llm(kind, kv_cache_memory_bytes=1 << 30).engine.rows.memory_limit.bytes(
        rows, tokens
    )


# ---------------------------------------------------------------------- any schedule

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
        arrivals = [request.arrival for request in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        assert max([r.arrival for r in scheduler.running], default=-1) < min(
            arrivals, default=1 << 30
        )
        for row, request in enumerate(scheduler.running):
            assert engine.rows.cache.lengths[row] == len(request.token_ids) - 1
            assert engine.rows.prefix_cache.text(row) == (
                request.token_ids[:-1] if engine.rows.prefix_cache.enabled else []
            )
        assert max(engine.rows.cache.lengths) <= engine.rows.cache.capacity
        if engine.rows.memory_limit is not None:
            assert cache_bytes(engine) <= engine.rows.memory_limit.limit

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
    """Whoever its neighbours are and whenever they come and go, with prefixes taken over and rows
    preempted."""
    tight = bytes_of_rows(make_llm, kind, 2, 44)
    engines = {
        (rows, reuse, limit): make_llm(
            kind, max_num_seqs=rows, enable_prefix_caching=reuse, kv_cache_memory_bytes=limit
        )
        for rows, reuse, limit in [
            (3, True, None),
            (2, False, None),
            (4, True, tight),
            (4, False, tight),
        ]
    }
    seen: Counter[str] = Counter()

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(sorted(engines, key=str)), st.lists(ACTIONS, min_size=4, max_size=16))
    def run(which, actions):
        schedule = Schedule(engines[which])  # rows and texts of earlier schedules are still there
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
        seen.update(
            schedule.engine.counters.to_dict() | {"vllm:spec_decode_num_accepted_tokens_per_pos": 0}
        )

    run()
    assert seen["vllm:prefix_cache_hits"] > 0 and seen["vllm:num_preemptions"] > 0


# ---------------------------------------------------------------------- prefix reuse


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_prefilled_once(kind, make_llm, monkeypatch):
    llm = make_llm(kind, max_num_seqs=5)
    forward, fed = llm.engine._forward, []

    def counting(start, stop, token_ids):
        fed.append(token_ids.numel())
        return forward(start, stop, token_ids)

    monkeypatch.setattr(llm.engine, "_forward", counting)
    params = SamplingParams(temperature=1, n=4, seed=3, max_tokens=1)
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, False)
    length = len(PROMPTS[0])
    assert sum(fed) <= length + 3 * 2 and output.num_cached_tokens == 0
    counters = llm.get_metrics().to_dict()
    assert counters["vllm:prefix_cache_queries"] == 4 * length
    assert 3 * (length - 2) <= counters["vllm:prefix_cache_hits"] <= 3 * (length - 1)
    plain = make_llm(kind, enable_prefix_caching=False)
    (expected,) = plain.generate({"prompt_token_ids": PROMPTS[0]}, params, False)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in expected.outputs]
    assert plain.get_metrics().prefix_cache_queries == plain.get_metrics().prefix_cache_hits == 0


@pytest.mark.parametrize("kind", ["off", "ngram", "sampled", "fake", "eagle3"])
def test_a_conversation_goes_on_where_it_was(kind, make_llm):
    """Turn by turn, with other conversations between the turns: a row keeps its text until it is
    wanted."""
    llm, plain = make_llm(kind, max_num_seqs=3), make_llm(kind, enable_prefix_caching=False)
    params = SamplingParams(temperature=1, seed=2, max_tokens=5)
    histories = [list(PROMPTS[0]), list(PROMPTS[4])]
    for turn in range(3):
        for history in histories:
            prompt = {"prompt_token_ids": list(history)}
            (output,), (expected,) = (
                llm.generate(prompt, params, False),
                plain.generate(prompt, params, False),
            )
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.metrics.accepted_per_round == expected.metrics.accepted_per_round
            if turn:
                assert (
                    output.num_cached_tokens >= len(history) - 3 - 2 - K
                )  # all but the new tokens and the last round
            history += [*output.outputs[0].token_ids, 33, 34, 35]


def test_a_row_that_holds_most_of_the_text_is_taken(make_llm):
    """Whichever rows are free, in use or finished; and a request may decline."""
    llm = make_llm("eagle3", max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=6)
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[5]):
        llm.generate({"prompt_token_ids": prompt}, params, False)
    for prompt, least in (
        (PROMPTS[5], 37),
        (PROMPTS[0], 20),
        (PROMPTS[4], 23),
        (PROMPTS[1], 19),
        (PROMPTS[3], 0),
    ):
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, False)
        assert least <= output.num_cached_tokens <= least + 1
    request = Request("x", 0, PROMPTS[0], params, generator=None, max_model_len=LIMIT)
    request.may_reuse = False
    llm.reset_metrics()
    llm.engine.add(request)
    llm.engine.step()
    assert request.num_cached_tokens == llm.get_metrics().prefix_cache_queries == 0
    llm.engine.abort("x")
    llm.reset_prefix_cache()
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, False)
    assert output.num_cached_tokens == 0


def test_what_the_drafter_did_not_see_is_not_reused(make_llm):
    llm = make_llm("eagle3")
    params, prompt = SamplingParams(temperature=0, max_tokens=8), {"prompt_token_ids": PROMPTS[0]}
    (first,) = llm.generate(prompt, params, False)
    (off,) = llm.generate(prompt, params, False, speculate=False)
    (again,) = llm.generate(prompt, params, False)
    assert off.num_cached_tokens == again.num_cached_tokens == 0
    assert again.metrics.accepted_per_round == first.metrics.accepted_per_round


def test_after_an_error_no_row_is_a_source(make_llm, monkeypatch):
    llm = make_llm("fake")
    params, prompt = SamplingParams(temperature=0, max_tokens=8), {"prompt_token_ids": PROMPTS[0]}
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.proposer, "propose", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompt, params, False)
    (output,) = llm.generate(prompt, params, False)
    assert output.num_cached_tokens == 0 and len(output.outputs[0].token_ids) == 8


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(one, other):
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_who_shares_with_a_request_of_its_wave_waits_for_it(make_llm):
    reuse = PrefixReuse(make_llm("off").engine.rows.cache)
    requests = [
        Request(str(i), 0, prompt, SamplingParams(), generator=None, max_model_len=LIMIT)
        for i, prompt in enumerate([PROMPTS[3], PROMPTS[0], PROMPTS[0], PROMPTS[4]])
    ]
    assert [request.request_id for request in reuse.wave(requests)] == ["3", "1", "0"]
    requests[2].may_reuse = False
    assert [request.request_id for request in reuse.wave(requests)] == ["3", "1", "2", "0"]


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["off", "ragged", "eagle3"])  # all kinds: test_no_schedule_changes
def test_the_youngest_gives_way_and_writes_the_same_later(kind, make_llm, alone):
    limit = bytes_of_rows(make_llm, kind, 2, 30)  # either response alone, but not both to their end
    llm = make_llm(kind, max_num_seqs=4, kv_cache_memory_bytes=limit)
    order = [0, 1, 1, 0]
    for params in (0, 3):
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPTS[i]} for i in order], PARAMS[params], False
        )
        for i, output in zip(order, outputs, strict=True):
            expected = alone(kind, i, params)
            assert (output.outputs[0].token_ids, output.metrics.accepted_per_round) == expected
    assert llm.get_metrics().num_preemptions > 0
    assert cache_bytes(llm.engine) <= limit


def test_a_stream_does_not_notice_that_it_was_preempted(make_llm, alone):
    limit = bytes_of_rows(make_llm, "eagle3", 2, 30)
    llm = make_llm("eagle3", max_num_seqs=4, kv_cache_memory_bytes=limit)
    streams = [llm.stream({"prompt_token_ids": PROMPTS[i]}, PARAMS[3]) for i in (0, 1)]
    written = [[], []]
    for i in (0, 1, 1, *[0] * 30, *[1] * 40):
        piece = next(streams[i], None)
        written[i] += piece.outputs[0].token_ids if piece is not None else []
    assert written == [alone("eagle3", i, 3)[0] for i in (0, 1)]
    assert llm.get_metrics().num_preemptions > 0


def test_rows_and_positions_follow_what_is_used(make_llm):
    """One long text has the room of several short ones, and gives it back."""
    limit = bytes_of_rows(make_llm, "eagle3", 1, LIMIT)
    llm = make_llm("eagle3", max_num_seqs=8, kv_cache_memory_bytes=limit)
    engine, sizes = llm.engine, []
    step = engine._step

    def watching():
        finished = step()
        sizes.append((engine.rows.cache.rows, engine.rows.cache.capacity))
        assert cache_bytes(engine) <= limit
        return finished

    engine._step = watching
    short, long = (
        [{"prompt_token_ids": [5 + i]} for i in range(8)],
        {"prompt_token_ids": PROMPTS[5]},
    )
    few, many = (
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=None),
    )
    llm.generate(short, few, False)
    assert max(rows for rows, _ in sizes) >= 4
    llm.generate(long, many, False)
    assert sizes[-1] == (1, LIMIT + K)
    llm.generate(short, few, False)
    assert sizes[-1][0] >= 4


@pytest.mark.parametrize("kind", ["off", "eagle3"])
def test_what_can_never_fit_is_refused_before_anything_runs(kind, make_llm, monkeypatch):
    limit = bytes_of_rows(make_llm, kind, 1, 30)
    llm = make_llm(kind, kv_cache_memory_bytes=limit)
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("a step was made"))
    ok, long = SamplingParams(max_tokens=8), SamplingParams(max_tokens=9)
    message = (
        rf"prompt 1: .* 22 \+ 9 tokens.*kv_cache_memory_bytes={limit} holds 30 tokens. Lower"
        r" max_tokens"
    )
    with pytest.raises(ConfigError, match=message):
        llm.generate([{"prompt_token_ids": PROMPTS[0]}] * 2, [ok, long], False)
    with pytest.raises(ConfigError, match=r"22 \+ 42 tokens"):
        llm.stream({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=None))
    with pytest.raises(ConfigError, match="request x: "):
        llm.engine.add(Request("x", 0, PROMPTS[0], long, generator=None, max_model_len=LIMIT))
    with pytest.raises(ConfigError, match="does not hold two tokens"):
        make_llm(kind, kv_cache_memory_bytes=10)


def test_preempted_requests_can_be_aborted(make_llm, alone):
    limit = bytes_of_rows(make_llm, "fake", 2, 30)
    schedule = Schedule(make_llm("fake", max_num_seqs=2, kv_cache_memory_bytes=limit))
    schedule.add(0, 3), schedule.add(1, 3)
    while not schedule.engine.counters.num_preemptions:
        schedule.step()
        schedule.check()
    preempted = schedule.requests[1][0]
    assert list(schedule.engine.scheduler.waiting) == [preempted] and preempted.output_token_ids
    schedule.abort(1)
    schedule.check()
    schedule.finish(alone, "fake")
