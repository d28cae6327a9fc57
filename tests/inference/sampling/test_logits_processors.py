"""Processors change the logits of every drafted place as they would without drafting, whoever
drafts."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference import SamplingParams
from draftsmith.inference.requests.request import Request
from draftsmith.inference.sampling.logits_processors import FORBIDDEN, bad_word_ids
from draftsmith.inference.spec_decode.logits import process_draft_logits, process_logits
from draftsmith.inference.spec_decode.proposal import Proposal
from draftsmith.inference.spec_decode.proposers import head
from draftsmith.speculators.errors import ConfigError
from tests.support.processors import processed as processed_by_hand

V = 40
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
ALL = {key: value for setting in SETTINGS for key, value in setting.items()}
BAD = [[12], [4, 9], [9, 9, 3], [20, 21]]


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
    # the request remembers from round to round
    for committed in ([], [9], [9, 3, 20], [4, 4, 9, 9], [7]):
        output += committed
        request.token_ids += committed
        tree = [[], [9], [9, 9], [9, 9, 3], [4], [4, 9], [20], [20, 21, 20, 20], [33]]
        paths = [tree[i] for i in torch.randperm(len(tree), generator=source).tolist()]
        logits = 3 * torch.randn(len(paths), V, generator=source)
        expected = [
            processed_by_hand(row, params, PROMPT, output + path, bad)
            for row, path in zip(logits, paths, strict=True)
        ]
        request.processors.apply(logits, request.token_ids, paths)
        check(logits, torch.stack(expected))


def test_rows_without_processors_cost_nothing_and_keep_their_logits():
    logits = torch.randn(2, 3, V)
    proposal = Proposal(torch.tensor([[1, 2], [3, 0]]), [2, 1])
    without_stop_ids = make_request(SamplingParams(min_tokens=5))
    plain = [make_request(SamplingParams(top_p=0.5)), without_stop_ids]
    assert process_logits(logits, proposal, plain) is logits
    mixed = [plain[0], make_request(SamplingParams(presence_penalty=1.0))]
    before = logits.clone()
    assert process_logits(logits, proposal, mixed) is logits  # in place
    assert torch.equal(logits[0], before[0]) and not torch.equal(logits[1], before[1])
    assert torch.equal(logits[1, 2], before[1, 2])  # padding: the row drafted one token
    asked = [make_request(SamplingParams(logprobs=1)), mixed[1]]
    kept = before.clone()
    assert process_logits(kept, proposal, asked) is not kept and torch.equal(kept, before)


def test_stop_tokens_are_forbidden_until_min_tokens_are_written():
    request = make_request(SamplingParams(min_tokens=3, stop_token_ids=STOPS))
    forbidden = []
    for token in (9, 9, 9, 9, 9):
        logits = process_logits(torch.zeros(1, 1, V), Proposal.empty(1), [request])
        forbidden.append((logits[0, 0, list(STOPS)] < 0.1 * FORBIDDEN).all().item())
        request.token_ids.append(token)
    assert forbidden == [True, True, True, False, False]


def test_processing_is_in_float32():
    logits = torch.randn(1, 1, V).bfloat16()
    request = make_request(SamplingParams(repetition_penalty=1.1))
    expected = processed_by_hand(logits[0, 0], request.params, PROMPT, [])
    processed = process_logits(logits, Proposal.empty(1), [request])
    torch.testing.assert_close(processed[0, 0], expected, rtol=1e-6, atol=1e-6)


def test_bad_words_are_tokens_with_and_without_a_blank_before_them(byte_tokenizer):
    def ids(text):
        return byte_tokenizer(text, add_special_tokens=False).input_ids

    # a blank is a token of its own here
    assert bad_word_ids(byte_tokenizer, ["a", " bc"]) == [ids("a"), ids("bc")]

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
        expected = processed_by_hand(full, requests[0].params, PROMPT, path, BAD)[ids]
        check(processed[0, place], expected)


def test_a_drafter_that_has_no_allowed_token_has_a_distribution_too():
    request = make_request(SamplingParams(allowed_token_ids=[2, 4]))
    logits = process_draft_logits(
        torch.randn(1, 1, V // 2), [request], [[[]]], torch.arange(1, V, 2), V
    )
    assert torch.equal(logits.softmax(-1), torch.full_like(logits, 2 / V))


@pytest.mark.slow
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
    with pytest.raises(ConfigError, match="bad_words, which need a tokenizer"):
        bare.generate({"prompt_token_ids": [1]}, SamplingParams(bad_words=["a"]), False)
