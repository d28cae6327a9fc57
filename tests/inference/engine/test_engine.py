"""The engine writes what the target alone would, whoever drafts, however requests share rows
(ladder d and f)."""

from __future__ import annotations

import itertools

import pytest
import torch

from inference import LLM, SamplingParams
from inference.sampling.sampler import probabilities
from inference.spec_decode.tree_shape import DynamicTree, StaticTree
from speculators.errors import DraftsmithError
from speculators.vocab.draft_vocab import scatter_to_target
from tests.inference.modules import make_llm as llm_of

K, LIMIT, VOCAB, TAPS = 3, 64, 94, (1, 2)  # the byte tokenizer's first 94 tokens are printable
VARIANTS = {  # what follows the kind of drafter
    "": {},
    "greedy": {"draft_sample_method": "greedy"},
    "static": {"tree": StaticTree.parse([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])},
    "dynamic": {"tree": DynamicTree(topk=3, depth=3, budget=7)},
    **{rule: {"rejection_sample_method": rule} for rule in ("token", "sample_match")},
    "pruned": {"draft_sample_method": "greedy", "tree": DynamicTree(topk=3, depth=3, budget=7)},
}
PROPOSERS = [
    "off",
    "ngram",
    "suffix",
    "lookahead",
    "wrong",
    "right",
    "random",
    "ragged",
    "sampled",
    "fake",
    "eagle3",
]
PROPOSERS += ["eagle3 static", "eagle3 dynamic"]
TRAINING_FREE = {  # kind -> its options
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {"suffix_decoding_max_cached_requests": 3},
    "lookahead": {
        "lookahead_window_size": 4,
        "lookahead_ngram_size": 3,
        "lookahead_num_guesses": 3,
    },
}
PROMPTS = {  # name -> prompt ids
    "plain": [67, 68, 69, 0, 69, 7, 87, 8, 25],
    "one token": [65],
    "at the limit": [3 + (i * i) % 90 for i in range(LIMIT - 1)],
    "near the limit": [5 + i % 7 for i in range(LIMIT - 6)],
    "long": [3 + (7 * i) % 50 for i in range(40)],
}


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model(
        "qwen3", vocab_size=VOCAB, max_position_embeddings=LIMIT, num_hidden_layers=2
    )
    model.generation_config.eos_token_id = None
    return model


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
def make_llm(model, byte_tokenizer, stub_proposer, fake_head, tiny_eagle3, texts):
    """make_llm(kind, **options): an LLM over the tiny model that drafts as `kind` says."""

    def make(kind: str, model=model, **options) -> LLM:
        kind, _, variant = kind.partition(" ")
        options = {
            "max_num_batched_tokens": 16,
            "tokenizer": byte_tokenizer,
            "num_speculative_tokens": K,
            **options,
        }
        options |= VARIANTS[variant]
        size, vocab = model.config.hidden_size, model.config.vocab_size
        if kind == "fake":
            return llm_of(
                model, drafter=fake_head(vocab, TAPS, size, range(1, vocab, 2)), **options
            )
        if kind == "eagle3":
            return llm_of(model, drafter=tiny_eagle3(model, TAPS), **options)
        k = options.pop("num_speculative_tokens")
        if kind == "off":
            return LLM(model, **options)
        if kind in TRAINING_FREE:
            config = {"method": kind, "num_speculative_tokens": k, **TRAINING_FREE[kind]}
            return LLM(model, speculative_config=config, **options)
        return llm_of(model, proposer=stub_proposer(kind, k, vocab, texts), **options)

    return make


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def token_prompts(*names):
    return [{"prompt_token_ids": PROMPTS[name]} for name in names]


# ---------------------------------------------------------------------- ladder d: greedy equality


def greedy_cases(texts, tokenizer) -> list[tuple[str, SamplingParams, list[int], str, object]]:
    """(prompt, params, expected tokens, finish reason, stop reason)."""
    cases = []
    for name in PROMPTS:
        cases.append((name, dict(max_tokens=None), texts[tuple(PROMPTS[name])], "length", None))
    for name in ("plain", "one token", "long"):
        text = texts[tuple(PROMPTS[name])]
        for length in (1, 2, 6):  # inside a block, wherever blocks fall
            cases.append((name, dict(max_tokens=length), text[:length], "length", None))
        for place in (0, 5, 7):
            end = text.index(text[place]) + 1
            cases.append(
                (
                    name,
                    dict(max_tokens=None, stop_token_ids=[text[place]]),
                    text[:end],
                    "stop",
                    text[place],
                )
            )
        late = next(i for i, token in enumerate(text) if i >= 4 and token not in text[:i])
        stop = tokenizer.decode(text[late - 2 : late + 1])
        end = next(i for i in range(len(text)) if stop in tokenizer.decode(text[: i + 1])) + 1
        cases.append((name, dict(max_tokens=None, stop=[stop]), text[:end], "stop", stop))
    return [
        (name, SamplingParams(temperature=0, **options), *rest) for name, options, *rest in cases
    ]


def check_greedy(outputs, cases) -> None:
    """The responses, and why they ended, are those of `greedy_cases`."""
    for output, (name, params, tokens, reason, stop_reason) in zip(outputs, cases, strict=True):
        found = output.outputs[0]
        ended = (found.token_ids, found.finish_reason, found.stop_reason)
        assert ended == (tokens, reason, stop_reason), (name, params)
        check_counts(output, len(tokens))


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_greedy_equals_the_target_alone(kind, rows, make_llm, texts, byte_tokenizer):
    cases = greedy_cases(texts, byte_tokenizer)
    llm = make_llm(kind, max_num_seqs=rows)
    outputs = llm.generate(
        token_prompts(*(case[0] for case in cases)), [case[1] for case in cases], use_tqdm=False
    )
    check_greedy(outputs, cases)
    for output, (_, _, tokens, _, _) in zip(outputs, cases, strict=True):
        if kind == "right":  # every round but the last is full: tokens after the end do not count
            assert output.metrics.accepted_per_round[:-1] == [K] * (
                len(output.metrics.accepted_per_round) - 1
            )
            assert sum(output.metrics.accepted_per_round) >= (len(tokens) - 1) * K // (K + 1)
        if kind in ("wrong", "off"):
            assert output.metrics.accepted_per_round == [0] * (len(tokens) - 1)
    assert llm.get_metrics().num_accepted_tokens == sum(
        output.metrics.num_accepted_tokens for output in outputs
    )
    if kind not in ("off", "ragged", *TRAINING_FREE):
        assert llm.get_metrics().num_drafts == sum(
            len(output.metrics.accepted_per_round) for output in outputs
        )


def check_counts(output, length: int) -> None:
    m = output.metrics
    assert m.num_accepted_tokens == sum(m.accepted_per_round) == sum(m.num_accepted_tokens_per_pos)
    rounds = [accepted + 1 for accepted in m.accepted_per_round]
    assert (
        0 <= 1 + sum(rounds) - length <= 1
    )  # a last round may end on an accepted draft, without a bonus
    assert m.arrival_time <= m.first_token_time <= m.finished_time


def test_last_round_counts_only_committed_drafts(make_llm, texts):
    llm = make_llm("right")
    for length, rounds in [(2, [1]), (4, [3]), (5, [3]), (6, [3, 1]), (9, [3, 3])]:
        (output,) = llm.generate(
            token_prompts("plain"), SamplingParams(temperature=0, max_tokens=length), False
        )
        assert output.metrics.accepted_per_round == rounds
        assert output.metrics.num_draft_tokens == K * len(rounds)


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
    assert ended.token_ids == text[: text.index(eos) + 1] and (
        ended.finish_reason,
        ended.stop_reason,
    ) == ("stop", None)
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids[:-1]) and len(shown.text) > len(
        ended.text
    )
    assert ignored.token_ids == text[:30] and ignored.finish_reason == "length"
    assert len(later.token_ids) > 12 and eos not in later.token_ids[:12]


def test_min_tokens_forbids_the_end_the_same_way_with_drafts(make_llm, model, texts, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", texts[tuple(PROMPTS["plain"])][:6])
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=9)
    expected = ids_of(make_llm("off").generate(token_prompts("plain", "long"), params, False))
    for kind in ("ngram", "suffix", "random", "eagle3", "fake"):
        assert (
            ids_of(make_llm(kind).generate(token_prompts("plain", "long"), params, False))
            == expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_greedy_equality_with_sliding_windows(name, tiny_model, make_llm):
    model = tiny_model(name)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 9, 30)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    expected = ids_of(make_llm("off", model, max_num_seqs=1).generate(prompts, params, False))
    for kind in ("ngram", "suffix", "lookahead", "eagle3", "eagle3 static", "eagle3 dynamic"):
        llm = make_llm(kind, model, max_num_seqs=3, max_num_batched_tokens=12)
        assert ids_of(llm.generate(prompts, params, False)) == expected


# ---------------------------------------------------------------------- what a head is told


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_head_has_seen_the_committed_text_and_nothing_else(
    rows, temperature, make_llm, monkeypatch
):
    llm = make_llm("fake", max_num_seqs=rows)
    proposer, drafter = llm.engine.proposer, llm.engine.proposer._drafter
    propose, checked = proposer.propose, []

    def checking(requests, limits):
        proposal = propose(requests, limits)
        for row, request in enumerate(requests):
            ids = request.token_ids
            assert proposer.cache.lengths[row] == len(ids) - 1
            taps, hidden = llm.engine.target(torch.tensor([ids[:-1]]))
            slots = (
                drafter.embedding[ids[1:]] + (torch.cat([taps, hidden], -1) @ drafter.project)[0]
            )
            torch.testing.assert_close(
                proposer.cache._values[0][row, 0, : len(ids) - 1], slots, atol=1e-4, rtol=1e-4
            )
            assert proposer.cache._keys[0][row, 0, : len(ids) - 1, 0].tolist() == ids[1:]
            checked.append(row)
        return proposal

    monkeypatch.setattr(proposer, "propose", checking)
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, seed=n) for n in (5, 12, 1, 20, 9)
    ]
    llm.generate(
        token_prompts("plain", "one token", "long", "near the limit", "plain"), params, False
    )
    assert len(checked) > 15


# ------------------------------------------------------------ ladder f: the distribution at T > 0


@pytest.fixture(scope="module")
def small(tiny_model):
    model = tiny_model(
        "qwen3",
        vocab_size=SMALL_VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        initializer_range=0.25,
        pad_token_id=None,
    )
    model.generation_config.eos_token_id = None
    return model


SMALL_VOCAB, SMALL_PROMPT, WRITTEN = 4, [1, 2, 3, 1, 2, 3, 0, 1], 4
SAMPLES, ALPHA = (
    800,
    1e-6,
)  # 256 texts: a q of temperature 2 is noticed at p = 1e-7, one of 4 at 1e-30


def exact_joint(model, params, process=lambda logits, text: logits) -> torch.Tensor:
    """[4^4] float64: the target's own probability of every text of four tokens; process(logits [V],
    text) -> [V]."""
    joint = torch.ones(1, dtype=torch.float64)
    for length in range(WRITTEN):
        tails = list(itertools.product(range(SMALL_VOCAB), repeat=length))
        with torch.no_grad():
            logits = model(torch.tensor([[*SMALL_PROMPT, *tail] for tail in tails])).logits[:, -1]
        processed = torch.stack(
            [process(row, tail) for row, tail in zip(logits, tails, strict=True)]
        )
        joint = (joint[:, None] * probabilities(processed, params).double()).flatten()
    return joint


def count_texts(output) -> torch.Tensor:
    """[4, 4, 4, 4] float64: how many responses are each text of four tokens."""
    ids = torch.tensor([completion.token_ids for completion in output.outputs])
    codes = ids @ SMALL_VOCAB ** torch.arange(WRITTEN - 1, -1, -1)
    return (
        torch.bincount(codes, minlength=SMALL_VOCAB**WRITTEN).double().view([SMALL_VOCAB] * WRITTEN)
    )


def check_joint_pairs(output, joint: torch.Tensor) -> None:
    """χ² of pairs of the four tokens: the first two, those in the middle, the last two. Enough for
    few responses."""
    observed = count_texts(output)
    expected = joint.view_as(observed) * observed.sum()
    for others in ((2, 3), (0, 3), (0, 1)):
        check_counts_fit(observed.sum(others).flatten(), expected.sum(others).flatten())


def check_joint(output, joint: torch.Tensor) -> None:
    """χ² of the responses of four tokens, and of their last two alone, against the target's
    probabilities."""
    observed = count_texts(output)
    expected = joint.view_as(observed) * observed.sum()
    assert observed[expected == 0].sum() == 0
    check_counts_fit(observed.flatten(), expected.flatten())
    check_counts_fit(observed.sum((0, 1)).flatten(), expected.sum((0, 1)).flatten())


FILTERS = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
JOINT_CASES = [
    (kind, {})
    for kind in ("off", "ngram", "suffix", "lookahead", "sampled", "random", "fake", "eagle3")
]
JOINT_CASES += [(f"eagle3 {variant}", {}) for variant in VARIANTS if variant]
JOINT_CASES += [
    (kind, FILTERS)
    for kind in ("sampled", "eagle3", "sampled token", "eagle3 static", "eagle3 dynamic")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), JOINT_CASES)
def test_joint_of_the_first_four_tokens(kind, options, small, make_llm):
    params = SamplingParams(**{"temperature": 1.0, **options}, max_tokens=WRITTEN, n=SAMPLES)
    rows = {"max_num_seqs": 500, "max_num_batched_tokens": 8000}
    llm = make_llm(kind, small, seed=11, tokenizer=None, **rows)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint(output, exact_joint(small, params))
    assert (llm.get_metrics().num_accepted_tokens > 60) == (kind != "off")


def test_a_wrong_q_is_noticed(small, make_llm, monkeypatch):
    """The power of the test above: q as it was before a processor, here a temperature of a
    quarter."""

    def flattened(q, *vocabulary):
        return scatter_to_target(q**0.25 / (q**0.25).sum(-1, keepdim=True), *vocabulary)

    monkeypatch.setattr("inference.spec_decode.proposers.drafter.scatter_to_target", flattened)
    with pytest.raises(AssertionError):
        test_joint_of_the_first_four_tokens("fake", {}, small, make_llm)


def check_counts_fit(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """χ² with the cells that expect fewer than 5 taken together."""
    rare = expected < 5
    pooled = [
        torch.cat([counts[~rare], counts[rare].sum()[None]]) for counts in (observed, expected)
    ]
    keep = pooled[1] > 0
    statistic, cells = (
        float(((pooled[0] - pooled[1])[keep] ** 2 / pooled[1][keep]).sum()),
        int(keep.sum()),
    )
    assert cells > 8, cells
    assert float(p_value(statistic, cells - 1)) > ALPHA / (2 * len(JOINT_CASES)), (statistic, cells)


def p_value(statistic: float, freedom: int) -> torch.Tensor:
    """P(chi-square with so many degrees of freedom >= statistic)."""
    return torch.special.gammaincc(
        torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2).double()
    )


# ---------------------------------------------------------------------- rows, seeds, streams


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "off",
        "ngram",
        "suffix",
        "lookahead",
        "sampled",
        "fake",
        "eagle3",
        "eagle3 static",
        "eagle3 dynamic",
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(kind, make_llm):
    names = ["plain", "near the limit", "one token", "long", "plain", "long", "one token"]
    options = [(1, 1, 9), (0.7, 1, 20), (0, 1, 11), (1, 0.8, 7), (0, 1, 3), (2, 1, 15), (1, 1, 1)]
    params = [
        SamplingParams(temperature=t, top_p=top_p, seed=i, max_tokens=n, ignore_eos=True)
        for i, (t, top_p, n) in enumerate(options)
    ]
    alone = [
        ids_of(make_llm(kind, max_num_seqs=1).generate(token_prompts(name), each, False))[0]
        for name, each in zip(names, params, strict=True)
    ]
    for rows in (3, 7):
        assert (
            ids_of(make_llm(kind, max_num_seqs=rows).generate(token_prompts(*names), params, False))
            == alone
        )


@pytest.mark.parametrize(
    "kind", ["ngram", "suffix", "lookahead", "random", "ragged", "eagle3 greedy", "eagle3 pruned"]
)
def test_deterministic_drafts_leave_the_text_of_a_seed_as_it_is(kind, make_llm):
    """sample_match: the target draws every token itself, from the numbers that it draws it from
    without drafts."""
    names = ["plain", "one token", "long", "plain"]
    params = [
        SamplingParams(temperature=t, top_p=0.9, seed=7, max_tokens=18) for t in (1, 0.7, 1.3, 0)
    ]
    llm = make_llm(kind)
    drafted = ids_of(llm.generate(token_prompts(*names), params, False))
    assert llm.get_metrics().num_drafts > 0
    assert drafted == ids_of(llm.generate(token_prompts(*names), params, False, speculate=False))


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
    pieces = list(llm.stream({"prompt_token_ids": PROMPTS["plain"]}, params))
    assert len(pieces) > 1 and [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    for completion in whole.outputs:
        mine = [o for piece in pieces for o in piece.outputs if o.index == completion.index]
        assert "".join(o.text for o in mine) == completion.text
        assert [token for o in mine for token in o.token_ids] == completion.token_ids
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (
            completion.finish_reason,
            completion.stop_reason,
        )


def test_abort_and_closed_streams_leave_the_engine_as_it_was(make_llm, texts):
    llm = make_llm("eagle3", max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=20)
    prompt, expected = {"prompt_token_ids": PROMPTS["plain"]}, texts[tuple(PROMPTS["plain"])]
    stream = llm.stream(prompt, params)
    first = next(stream)
    other = llm.stream(prompt, params)  # shares the rounds of the first
    begun = next(other)
    llm.abort(first.request_id)
    (last,) = list(stream)
    assert last.finished and last.outputs[0].finish_reason == "abort"
    with pytest.raises(DraftsmithError, match="cannot be turned on or off"):
        llm.generate(prompt, params, False, speculate=False)
    rest = [token for piece in (begun, *other) for token in piece.outputs[0].token_ids]
    assert rest == expected[:20]
    unfinished = llm.stream(prompt, params)
    next(unfinished)
    unfinished.close()
    assert not llm.engine.has_unfinished
    assert ids_of(llm.generate(prompt, params, False)) == [expected[:20]]


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


def test_speculation_off_in_the_same_engine(make_llm, texts):
    llm = make_llm("right")
    params = SamplingParams(temperature=0, max_tokens=13)
    (off,) = llm.generate(token_prompts("plain"), params, False, speculate=False)
    assert llm.get_metrics().num_drafts == 0 and off.metrics.accepted_per_round == [0] * 12
    (on,) = llm.generate(token_prompts("plain"), params, False)
    assert (
        on.outputs[0].token_ids == off.outputs[0].token_ids and on.metrics.num_accepted_tokens == 9
    )
    llm.reset_metrics()
    assert llm.get_metrics().num_drafts == 0 and set(llm.engine.timers.values()) == {0.0}
