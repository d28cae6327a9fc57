"""How responses end, what they count, seeds, streams and aborts. That the text is the target's own,
whoever drafts, is proved in tests/lossless."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.speculators.errors import DraftsmithError
from tests.support.engines import drafting_llm, ids_of
from tests.support.errors import raises_at

K, LIMIT, VOCAB = 3, 64, 94  # the byte tokenizer's first 94 tokens are printable
PROMPTS = {  # name -> prompt ids
    "plain": [67, 68, 69, 0, 69, 7, 87, 8, 25],
    "one token": [65],
    "at the limit": [3 + (i * i) % 90 for i in range(LIMIT - 1)],
    "near the limit": [5 + i % 7 for i in range(LIMIT - 6)],
    "long": [3 + (7 * i) % 50 for i in range(40)],
}


@pytest.fixture(scope="module")
def texts(model) -> dict[tuple[int, ...], list[int]]:
    """What the target writes greedily after each prompt, by its own forward over the whole text, up
    to the limit."""
    written = {}
    for prompt in PROMPTS.values():
        ids = list(prompt)
        while len(ids) < LIMIT:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        written[tuple(prompt)] = ids[len(prompt) :]
    return written


@pytest.fixture(scope="module")
def make_llm(model, texts):
    """make_llm(kind, **options): an LLM over the tiny model that drafts as `kind` says."""

    def make(kind: str, **options) -> LLM:
        return drafting_llm(kind, model, texts, **options)

    return make


def token_prompts(*names):
    return [{"prompt_token_ids": PROMPTS[name]} for name in names]


# ---------------------------------------------------------------------- how a response ends


def greedy_cases(texts, tokenizer) -> list[tuple[str, dict, list[int], str, object]]:
    """(prompt, params, expected tokens, finish reason, stop reason)."""
    cases: list = [(name, {}, texts[tuple(ids)], "length", None) for name, ids in PROMPTS.items()]
    for name in ("plain", "long"):
        text = texts[tuple(PROMPTS[name])]
        for length in (1, 2, 6):  # inside a block, wherever blocks fall
            cases.append((name, {"max_tokens": length}, text[:length], "length", None))
        for token in (text[0], text[5], text[7]):
            end = text.index(token) + 1
            cases.append((name, {"stop_token_ids": [token]}, text[:end], "stop", token))
        late = next(i for i, token in enumerate(text) if i >= 4 and token not in text[:i])
        stop = tokenizer.decode(text[late - 2 : late + 1])
        end = next(i for i in range(len(text)) if stop in tokenizer.decode(text[: i + 1])) + 1
        cases.append((name, {"stop": [stop]}, text[:end], "stop", stop))
    return cases


@pytest.mark.parametrize("kind", ["off", "right", "wrong", "ragged"])
def test_every_way_a_response_can_end(kind, make_llm, texts, byte_tokenizer):
    cases = greedy_cases(texts, byte_tokenizer)
    llm = make_llm(kind, max_num_seqs=5)
    asked = [SamplingParams(**{"temperature": 0, "max_tokens": None} | case[1]) for case in cases]
    outputs = llm.generate(token_prompts(*(case[0] for case in cases)), asked, use_tqdm=False)
    for output, (name, params, tokens, reason, stop_reason) in zip(outputs, cases, strict=True):
        completion, rounds = output.outputs[0], output.metrics.accepted_per_round
        ended = (completion.token_ids, completion.finish_reason, completion.stop_reason)
        assert ended == (tokens, reason, stop_reason), (name, params)
        check_counts(output, len(tokens))
        if kind == "right":  # every round but the last is full: tokens after the end do not count
            assert rounds[:-1] == [K] * (len(rounds) - 1)
            assert sum(rounds) >= (len(tokens) - 1) * K // (K + 1)
            assert output.metrics.num_draft_tokens <= K * len(rounds)
        if kind in ("wrong", "off"):
            assert rounds == [0] * (len(tokens) - 1)
    counters, metrics = llm.get_metrics(), [output.metrics for output in outputs]
    assert counters.num_accepted_tokens == sum(one.num_accepted_tokens for one in metrics)
    if kind in ("right", "wrong"):
        assert counters.num_drafts == sum(len(one.accepted_per_round) for one in metrics)


def check_counts(output, length: int) -> None:
    m = output.metrics
    assert m.num_accepted_tokens == sum(m.accepted_per_round) == sum(m.num_accepted_tokens_per_pos)
    rounds = [accepted + 1 for accepted in m.accepted_per_round]
    # a last round may end on an accepted draft, without a bonus
    assert 0 <= 1 + sum(rounds) - length <= 1
    assert m.arrival_time <= m.first_token_time <= m.finished_time


@pytest.mark.parametrize("kind", ["off", "right", "eagle3"])
def test_end_of_sequence_min_tokens_and_ignore_eos(kind, make_llm, model, texts, monkeypatch):
    text = texts[tuple(PROMPTS["plain"])]
    eos = text[2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [eos, VOCAB - 1, 10_000])
    llm = make_llm(kind)
    params = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=12),
        SamplingParams(temperature=0, max_tokens=30, include_stop_str_in_output=True),
    ]
    ended, ignored, later, shown = (
        o.outputs[0] for o in llm.generate(token_prompts(*["plain"] * 4), params, False)
    )
    assert ended.token_ids == text[: text.index(eos) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids[:-1])
    assert len(shown.text) > len(ended.text)
    assert ignored.token_ids == text[:30] and ignored.finish_reason == "length"
    assert len(later.token_ids) > 12 and eos not in later.token_ids[:12]


# ---------------------------------------------------------------------- rows, seeds, streams


def test_seeds(make_llm):
    params = SamplingParams(max_tokens=12)
    prompts = token_prompts("plain", "plain", "long")
    first = ids_of(make_llm("off", seed=3, max_num_seqs=1).generate(prompts, params, False))
    assert first == ids_of(make_llm("off", seed=3, max_num_seqs=5).generate(prompts, params, False))
    assert first != ids_of(make_llm("off", seed=4).generate(prompts, params, False))
    assert first[0] != first[1]  # every request has its own
    llm = make_llm("eagle3")
    seeded = SamplingParams(max_tokens=12, seed=5)
    assert ids_of(llm.generate(prompts, seeded, False)) == ids_of(
        llm.generate(prompts, seeded, False)
    )


def test_n_responses_are_those_of_consecutive_seeds(make_llm):
    llm = make_llm("fake", max_num_seqs=2)
    (output,) = llm.generate(
        token_prompts("plain"), SamplingParams(n=3, seed=7, max_tokens=8), False
    )
    assert [o.index for o in output.outputs] == [0, 1, 2] and output.finished
    for i, completion in enumerate(output.outputs):
        (single,) = llm.generate(
            token_prompts("plain"), SamplingParams(seed=7 + i, max_tokens=8), False
        )
        assert single.outputs[0].token_ids == completion.token_ids
    assert output.metrics.num_drafts == sum(
        o.spec_decode_metrics.num_drafts for o in output.outputs
    )


@pytest.mark.parametrize("kind", ["off", "right", "eagle3"])
@pytest.mark.parametrize("options", [{}, {"stop": True}, {"n": 2, "temperature": 1.0, "seed": 1}])
def test_stream_says_what_generate_says(kind, options, make_llm, texts, byte_tokenizer):
    options = dict(options)
    if options.pop("stop", False):
        options["stop"] = byte_tokenizer.decode(texts[tuple(PROMPTS["plain"])][4:7])
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})
    llm = make_llm(kind)
    (whole,) = llm.generate(token_prompts("plain"), params, False)
    response, pieces = llm.submit(Prompt(None, PROMPTS["plain"]), params, streaming=True), []
    while not response.finished:
        llm.engine.step()
        pieces += filter(None, [response.delta()])
    assert response.delta() is None
    assert len(pieces) > 1 and [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    for completion in whole.outputs:
        streamed = [o for piece in pieces for o in piece.outputs if o.index == completion.index]
        assert "".join(o.text for o in streamed) == completion.text
        assert [token for o in streamed for token in o.token_ids] == completion.token_ids
        assert (streamed[-1].finish_reason, streamed[-1].stop_reason) == (
            completion.finish_reason,
            completion.stop_reason,
        )


def test_step_first_tokens_wait_for_no_round_and_rows_for_one_prefill_at_most(make_llm):
    llm = make_llm("off", max_num_seqs=4)
    params, written = SamplingParams(temperature=0, max_tokens=20), []
    responses = []
    for _ in range(4):
        responses.append(llm.submit(Prompt(None, PROMPTS["plain"]), params))
        llm.engine.step()
        written.append([len(r.requests[0].output_token_ids) for r in responses])
    for response in responses:
        llm.abort(response.request_id)
    assert written == [[1], [2, 0], [2, 1, 1], [3, 2, 2, 0]]


def test_aborts_leave_the_engine_as_it_was(make_llm, texts):
    llm = make_llm("eagle3", max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20)
    prompt, expected = Prompt(None, PROMPTS["plain"]), texts[tuple(PROMPTS["plain"])]
    first, other = (llm.submit(prompt, params, streaming=True) for _ in range(2))
    llm.engine.step()
    assert not first.delta().finished
    llm.abort(first.request_id)
    last = first.delta()
    assert last.finished and last.outputs[0].finish_reason == "abort"
    with raises_at(DraftsmithError, "engine"):
        llm.generate(token_prompts("plain"), params, False, speculate=False)
    while not other.finished:
        llm.engine.step()
    assert other.output().outputs[0].token_ids == expected[:20]
    assert ids_of(llm.generate(token_prompts("plain"), params, False)) == [expected[:20]]


def test_an_error_in_a_round_does_not_poison_the_engine(make_llm, texts, monkeypatch):
    llm = make_llm("right")
    params = SamplingParams(temperature=0, max_tokens=20)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.proposer, "propose", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(token_prompts("plain", "long"), params, False)
    assert ids_of(llm.generate(token_prompts("plain"), params, False)) == [
        texts[tuple(PROMPTS["plain"])][:20]
    ]


@pytest.mark.parametrize("kind", ["ngram", "lookahead", "ragged", "sampled", "fake", "dynamic"])
def test_a_request_has_as_many_drafts_as_it_asks_for(kind, make_llm, monkeypatch):
    """One without drafts uses its seed as if there were no drafter."""
    most = [None, 0, 1, 2, 7]
    params = [
        SamplingParams(seed=i, max_tokens=14 + i, num_speculative_tokens=drafts)
        for i, drafts in enumerate(most)
    ]
    llm = make_llm(kind, max_num_seqs=5)
    depths: dict[int, list[int]] = {i: [] for i in range(len(most))}

    def look(requests, plan):
        proposal = propose(requests, plan)
        drafted = zip(requests, proposal.depths(), proposal.counts, strict=True)
        for request, row, count in drafted:
            depths[request.params.seed].append(max(row[:count], default=0))
        return proposal

    propose = llm.engine.proposer.propose
    monkeypatch.setattr(llm.engine.proposer, "propose", look)
    prompts = token_prompts("plain", "plain", "one token", "long", "long")
    outputs = llm.generate(prompts, params, False)
    for i, asked in enumerate(most):
        assert depths[i] and max(depths[i]) <= (K if asked is None else min(asked, K))
        assert outputs[i].metrics.num_drafts == sum(depth > 0 for depth in depths[i])
    assert max(depths[0]) > 0 and outputs[1].metrics.num_draft_tokens == 0
    counters = llm.get_metrics()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(counters, name) == sum(getattr(output.metrics, name) for output in outputs)
    llm.reset_metrics()
    plain = llm.generate(prompts, params, False, speculate=False)
    assert ids_of(outputs)[1] == ids_of(plain)[1] and llm.get_metrics().num_drafts == 0
