"""Processors change the logits of every drafted place as they would without drafting, whoever
drafts."""

from __future__ import annotations

import pytest
import torch

from inference import SamplingParams
from inference.requests.request import Request
from inference.sampling.logits_processors import FORBIDDEN, bad_word_ids
from inference.sampling.penalties import Penalties
from inference.spec_decode.logits import process_draft_logits, process_logits
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers import drafter as head
from inference.spec_decode.verification.rejection_sampler import verify_and_sample
from speculators.errors import ConfigError
from tests.inference.engine.test_engine import (  # noqa: F401 (fixtures)
    SMALL_PROMPT,
    WRITTEN,
    check_joint,
    exact_joint,
    ids_of,
    small,
)

V, LIMIT, LENGTH = 40, 64, 14
STOPS = (7, 11)
PROMPT = [3, 4, 5, 3, 4, 9]
SETTINGS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.9},
    {"logit_bias": {3: 2.5, 5: -40.0, 39: 1.0}},
    {"allowed_token_ids": [3, 4, 7, 9, 12, 30]},
    {"min_tokens": 4, "stop_token_ids": STOPS},
    {},  # bad words
]
ALL = {key: value for each in SETTINGS for key, value in each.items()}
BAD = [[12], [4, 9], [9, 9, 3], [20, 21]]


def reference(logits, params: SamplingParams, prompt, output, bad=()) -> torch.Tensor:
    """One place, token by token, in Python floats: logits [V] -> [V], in vLLM's order."""
    values = [float(x) for x in logits]
    for token in range(len(values)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = FORBIDDEN
        if any(
            word[-1] == token and list(output)[len(output) - len(word) + 1 :] == word[:-1]
            for word in bad
        ):
            values[token] = FORBIDDEN
        if len(output) < params.min_tokens and token in params.stop_token_ids:
            values[token] = FORBIDDEN
        values[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            scale = params.repetition_penalty
            values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
        values[token] -= params.frequency_penalty * list(output).count(token)
        values[token] -= params.presence_penalty * (token in output)
    return torch.tensor(values)


def check(logits, expected, tolerance=1e-5) -> None:
    """Equal where tokens are allowed; the others are forbidden in both."""
    low = 0.1 * FORBIDDEN
    torch.testing.assert_close(
        logits.clamp(min=low), expected.clamp(min=low), rtol=tolerance, atol=tolerance
    )


def make_request(params: SamplingParams, bad=(), prompt=PROMPT) -> Request:
    return Request("0", 0, prompt, params, generator=None, max_model_len=10_000, bad_words=bad)


# ---------------------------------------------------------------------- each against the reference


@pytest.mark.parametrize("settings", [*SETTINGS, ALL], ids=str)
def test_every_place_of_a_tree_is_what_plain_decoding_would_see(settings):
    params = SamplingParams(**settings)
    bad = BAD if not settings or settings == ALL else []
    source = torch.Generator().manual_seed(0)
    request = make_request(params, bad)
    output: list[int] = []
    for committed in (
        [],
        [9],
        [9, 3, 20],
        [4, 4, 9, 9],
        [7],
    ):  # the request remembers from round to round
        output += committed
        request.token_ids += committed
        tree = [[], [9], [9, 9], [9, 9, 3], [4], [4, 9], [20], [20, 21, 20, 20], [33]]
        paths = [tree[i] for i in torch.randperm(len(tree), generator=source).tolist()]
        logits = 3 * torch.randn(len(paths), V, generator=source)
        expected = [
            reference(row, params, PROMPT, output + path, bad)
            for row, path in zip(logits, paths, strict=True)
        ]
        request.processors.apply(logits, request.token_ids, paths)
        check(logits, torch.stack(expected))


def test_rows_without_processors_cost_nothing_and_keep_their_logits():
    logits = torch.randn(2, 3, V)
    proposal = Proposal(torch.tensor([[1, 2], [3, 0]]), [2, 1])
    plain = [
        make_request(SamplingParams(top_p=0.5)),
        make_request(SamplingParams(min_tokens=5)),
    ]  # no stop ids
    assert process_logits(logits, proposal, plain) is logits
    mixed = [plain[0], make_request(SamplingParams(presence_penalty=1.0))]
    before = logits.clone()
    assert process_logits(logits, proposal, mixed) is logits  # in place
    assert torch.equal(logits[0], before[0]) and not torch.equal(logits[1], before[1])
    assert torch.equal(logits[1, 2], before[1, 2])  # padding: the row drafted one token
    asked = [make_request(SamplingParams(logprobs=1)), mixed[1]]
    kept = before.clone()
    assert process_logits(kept, proposal, asked) is not kept and torch.equal(kept, before)


def test_processing_is_in_float32():
    logits = torch.randn(1, 1, V).bfloat16()
    request = make_request(SamplingParams(repetition_penalty=1.1))
    expected = reference(logits[0, 0], request.params, PROMPT, [])
    processed = process_logits(logits, Proposal.empty(1), [request])
    torch.testing.assert_close(processed[0, 0], expected, rtol=1e-6, atol=1e-6)


def test_bad_words_are_tokens_with_and_without_a_blank_before_them(byte_tokenizer):
    def ids(text):
        return byte_tokenizer(text, add_special_tokens=False).input_ids

    assert bad_word_ids(byte_tokenizer, ["a", " bc"]) == [
        ids("a"),
        ids("bc"),
    ]  # a blank is a token of its own here

    class Pieces:  # one token per word, another one after a blank
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type(
                "Encoding", (), {"input_ids": [{"cat": 1, " cat": 2, "a": 3, " a": 3}[text]]}
            )

    assert bad_word_ids(Pieces(), ["cat", "a"]) == [[1], [2], [3]]


# ---------------------------------------------------------------------- drafters


@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafters_logits_are_changed_as_the_targets(reduced):
    draft_to_target = torch.arange(1, V, 2) if reduced else None
    requests = [make_request(SamplingParams(**ALL), BAD), make_request(SamplingParams())]
    logits = torch.randn(2, 2, V // 2 if reduced else V)
    paths = [[[9], [9, 9]], [[9], [9, 9]]]
    processed = process_draft_logits(logits, requests, paths, draft_to_target, V)
    assert torch.equal(processed[1], logits[1])
    for place, path in enumerate(paths[0]):
        full = torch.zeros(V)
        ids = torch.arange(V) if draft_to_target is None else draft_to_target
        full[ids] = logits[0, place]
        expected = reference(full, requests[0].params, PROMPT, path, BAD)[ids]
        check(processed[0, place], expected)


def test_a_drafter_that_has_no_allowed_token_has_a_distribution_too():
    request = make_request(SamplingParams(allowed_token_ids=[2, 4]))
    logits = process_draft_logits(
        torch.randn(1, 1, V // 2), [request], [[[]]], torch.arange(1, V, 2), V
    )
    assert torch.equal(logits.softmax(-1), torch.full_like(logits, 2 / V))


def test_processed_drafts_are_accepted_more_often(model, drafting_llm, monkeypatch):
    params = SamplingParams(
        seed=1, max_tokens=40, allowed_token_ids=list(range(20, 40)), repetition_penalty=1.5
    )
    prompts = [{"prompt_token_ids": [3 + i, 4, 5]} for i in range(6)]
    accepted = []
    for processed in (True, False):
        llm = drafting_llm("fake", model)
        with monkeypatch.context() as patch:
            if not processed:
                patch.setattr(head, "process_chain_logits", lambda logits, *others: logits)
            llm.generate(prompts, params, False)
        accepted.append(llm.get_metrics().num_accepted_tokens)
    assert accepted[0] > 2 * accepted[1]


# ---------------------------------------------------------------------- the whole engine


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model("qwen3", vocab_size=94, max_position_embeddings=LIMIT)
    model.generation_config.eos_token_id = None
    return model


KINDS = ["ngram", "right", "wrong", "random", "ragged", "sampled", "fake", "static", "dynamic"]
MIXED = [  # (prompt, parameters): prompts differ, since stubs know texts by them
    ([67, 68, 69, 0, 69, 7], {"repetition_penalty": 1.6}),
    ([67, 68, 69, 0, 69, 8], {"frequency_penalty": 1.5, "presence_penalty": 1.0}),
    ([65], {"logit_bias": {3: 6.0, 60: 6.0, 61: 5.0}, "bad_words": ["$"]}),
    ([65, 66], {"allowed_token_ids": list(range(0, 60, 3)), "presence_penalty": -1.5}),
    ([67, 68, 69, 0, 69, 9], {}),
    ([3, 4, 5] * 6, {"bad_words": ["ab", "&'", "%&"], "allowed_token_ids": [3, 4, 5, 6, 64, 65]}),
    (
        [3, 4, 5] * 7,
        {"min_tokens": 8, "stop_token_ids": list(range(0, 94, 2)), "repetition_penalty": 0.7},
    ),
    (
        [3, 4, 5] * 8,
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}, "top_k": 10},
    ),
]


def mixed(**options):
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in MIXED]
    return prompts, [SamplingParams(max_tokens=LENGTH, **options, **each) for _, each in MIXED]


@pytest.fixture(scope="module")
def texts(model, drafting_llm):
    outputs = drafting_llm("off", model, max_num_seqs=1).generate(*mixed(temperature=0), False)
    return {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}


def test_the_reference_is_the_greedy_text(model, drafting_llm, texts, byte_tokenizer):
    """The texts that drafting must reproduce, by the target's own forward and the plain
    reference."""
    for (prompt, settings), (_, text) in zip(MIXED, texts.items(), strict=True):
        params, output = SamplingParams(temperature=0, max_tokens=LENGTH, **settings), []
        bad = bad_word_ids(byte_tokenizer, params.bad_words)
        for _ in text:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            output.append(int(reference(logits, params, prompt, output, bad).argmax()))
        assert output == text
    plain = drafting_llm("off", model).generate(
        mixed()[0], SamplingParams(temperature=0, max_tokens=LENGTH), False
    )
    assert sum(a != b for a, b in zip(ids_of(plain), texts.values(), strict=True)) == len(MIXED) - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_text_is_the_same_whoever_drafts(kind, rows, model, drafting_llm, texts):
    llm = drafting_llm(kind, model, texts, max_num_seqs=rows)
    assert ids_of(llm.generate(*mixed(temperature=0), False)) == list(texts.values())
    if kind == "right":
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens > 0.6 * metrics.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "off"])
def test_every_place_that_is_verified(
    kind, model, drafting_llm, texts, byte_tokenizer, monkeypatch
):
    """Sampled, so that texts differ from those the stubs know; raw logits come from a forward
    without any cache."""
    llm = drafting_llm(kind, model, texts, max_num_seqs=3)
    decide, checked = llm.engine._decide, []

    def checking(logits, proposal, requests):
        def verify(processed, *others):
            for row, request in enumerate(requests):
                bad = bad_word_ids(byte_tokenizer, request.params.bad_words)
                for place, path in enumerate(proposal.paths(row)):
                    with torch.no_grad():
                        raw = model(torch.tensor([request.token_ids + path])).logits[0, -1]
                    text = request.token_ids + path
                    prompt, output = (
                        text[: request.num_prompt_tokens],
                        text[request.num_prompt_tokens :],
                    )
                    expected = reference(raw, request.params, prompt, output, bad)
                    check(processed[row, place], expected, 1e-3)
                    checked.append(place)
            return verify_and_sample(processed, *others)

        with monkeypatch.context() as patch:
            patch.setattr("inference.engine.engine.verify_and_sample", verify)
            return decide(logits, proposal, requests)

    monkeypatch.setattr(llm.engine, "_decide", checking)
    llm.generate(*mixed(seed=5), False)
    assert len(checked) > 8 * LENGTH - 9 and (max(checked) >= 3) == (kind != "off")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["off", "ngram", "sampled", "fake", "dynamic"])
def test_a_row_does_not_depend_on_its_neighbours(kind, model, drafting_llm):
    prompts, params = mixed(seed=3)
    alone = drafting_llm(kind, model, max_num_seqs=1)
    expected = [
        ids_of(alone.generate(*each, False))[0] for each in zip(prompts, params, strict=True)
    ]
    for rows in (2, 5):
        assert (
            ids_of(drafting_llm(kind, model, max_num_seqs=rows).generate(prompts, params, False))
            == expected
        )


JOINT = [
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 2.0, "top_k": 3},
    {"logit_bias": {0: -1.0, 3: 0.5}, "allowed_token_ids": [0, 2, 3], "temperature": 1.2},
    {"min_tokens": 4, "stop_token_ids": [3], "frequency_penalty": 1.0, "top_p": 0.95},
]


JOINT_CASES = [("off", 0), ("ngram", 1), ("random", 2), ("static", 0), ("dynamic", 1)]
JOINT_CASES += [(kind, i) for kind in ("sampled", "fake") for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), JOINT_CASES)
def test_joint_of_the_first_four_tokens(kind, setting, small, drafting_llm):
    samples = 600
    params = SamplingParams(**{"temperature": 1.0, **JOINT[setting]}, max_tokens=WRITTEN, n=samples)
    rows = {"max_num_seqs": 500, "max_num_batched_tokens": 8000, "tokenizer": None}
    llm = drafting_llm(kind, small, seed=11, **rows)
    (output,) = llm.generate({"prompt_token_ids": SMALL_PROMPT}, params, False)
    check_joint(output, processed_joint(small, params))
    assert (llm.get_metrics().num_accepted_tokens > 40) == (kind != "off")


def test_penalties_that_do_not_count_drafts_are_noticed(small, drafting_llm, monkeypatch):
    """The power of the test above."""

    apply = Penalties.apply
    monkeypatch.setattr(
        Penalties,
        "apply",
        lambda self, logits, text, paths: apply(self, logits, text, [[] for _ in paths]),
    )
    with pytest.raises(AssertionError):
        test_joint_of_the_first_four_tokens("sampled", 0, small, drafting_llm)


def processed_joint(model, params) -> torch.Tensor:
    """The target's own probability of every text of four tokens, with the plain reference."""
    return exact_joint(
        model, params, lambda logits, text: reference(logits, params, SMALL_PROMPT, text)
    )


# ---------------------------------------------------------------------- what cannot be honoured


def test_what_may_forbid_every_token_is_refused(model, drafting_llm, byte_tokenizer):
    a, b = byte_tokenizer("ab").input_ids
    llm = drafting_llm("off", model)
    for asked in (
        dict(allowed_token_ids=[a, b], bad_words=["a", "b"]),
        dict(allowed_token_ids=[a, b], bad_words=["bb", "ba"]),
        dict(allowed_token_ids=[a], stop_token_ids=[a], min_tokens=1),
        dict(stop_token_ids=list(range(94)), min_tokens=1),
    ):
        with pytest.raises(ConfigError, match="allowed_token_ids"):
            llm.generate("x", SamplingParams(**asked), False)


def test_what_this_model_cannot_honour_is_named(model, drafting_llm):
    llm, bare = drafting_llm("off", model), drafting_llm("off", model, tokenizer=None)
    for wrong, message in [
        (dict(logit_bias={94: 1.0}), "logit_bias"),
        (dict(allowed_token_ids=[1, 95]), "allowed_token_ids"),
        (dict(logprobs=95), "logprobs"),
        (dict(bad_words=["a b"]), "bad_words"),  # the blank is beyond this vocabulary
    ]:
        with pytest.raises(ConfigError, match=message):
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(**wrong), False)
    with pytest.raises(ConfigError, match="bad_words need a tokenizer"):
        bare.generate({"prompt_token_ids": [1]}, SamplingParams(bad_words=["a"]), False)
