"""Output follows its grammar whoever drafts, and a rejected draft leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from inference import SamplingParams, StructuredOutputsParams
from inference.sampling.sampler import probabilities
from inference.sampling.structured_outputs import Grammars
from inference.spec_decode.proposal import Proposal
from inference.spec_decode.proposers import drafter as head
from inference.spec_decode.proposers.base import Proposer
from speculators.errors import ConfigError
from tests.inference.engine.test_engine import check_counts_fit, ids_of

VOCAB, EOS = 260, 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "ok": {"type": "boolean"},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "ok", "sizes"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
KINDS = ["ngram", "right", "wrong", "random", "ragged", "sampled", "fake", "static", "dynamic"]


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model("qwen3", vocab_size=VOCAB, max_position_embeddings=128)
    model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module")
def grammars(byte_tokenizer):
    return Grammars(byte_tokenizer, VOCAB, [EOS])


def valid(text: str) -> bool:
    """Whether the text is JSON of SCHEMA."""
    found = json.loads(text)
    sizes = found["sizes"]
    return (
        set(found) == {"name", "ok", "sizes"}
        and re.fullmatch("[a-z]{1,6}", found["name"]) is not None
        and isinstance(found["ok"], bool)
        and len(sizes) <= 3
        and all(type(size) is int and 0 <= size <= 99 for size in sizes)
    )


CASES = [
    (JSON, valid),
    (StructuredOutputsParams(json=json.dumps(SCHEMA), whitespace_pattern="[ ]?"), valid),
    (
        StructuredOutputsParams(regex="(ab|c){2,4}x?"),
        lambda text: re.fullmatch("(ab|c){2,4}x?", text),
    ),
    (
        StructuredOutputsParams(choice=["yes", "yesterday", "no"]),
        lambda text: text in ("yes", "yesterday", "no"),
    ),
    (
        StructuredOutputsParams(grammar='start: "1" ("+" start)? | "(" "1" ")"'),
        lambda text: re.fullmatch(r"(1\+)*(1|\(1\))", text),
    ),
    (
        StructuredOutputsParams(grammar='root ::= "<" ("a" | "b")+ ">"'),  # GBNF
        lambda text: re.fullmatch("<[ab]+>", text),
    ),
]
PROMPTS = [{"prompt_token_ids": [60 + i, 61, 62, 60 + i]} for i in range(len(CASES))]
BIAS = {
    EOS: 2.0,
    **dict.fromkeys((29, 59), 8.0),
}  # '>' and ']' too: a random model would go on for long


def params_of(**options) -> list[SamplingParams]:
    return [
        SamplingParams(
            **{"max_tokens": 90, "logit_bias": BIAS, **options}, structured_outputs=params
        )
        for params, _ in CASES
    ]


@pytest.fixture(scope="module")
def greedy(model, drafting_llm):
    return ids_of(
        drafting_llm("off", model, max_num_seqs=1).generate(
            PROMPTS, params_of(temperature=0), False
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_output_is_the_same_whoever_drafts(kind, rows, model, drafting_llm, greedy):
    texts = {
        tuple(prompt["prompt_token_ids"]): ids for prompt, ids in zip(PROMPTS, greedy, strict=True)
    }
    llm = drafting_llm(kind, model, texts, max_num_seqs=rows)
    outputs = llm.generate(PROMPTS, params_of(temperature=0), False)
    assert ids_of(outputs) == greedy
    for output, (_, fits) in zip(outputs, CASES, strict=True):
        assert output.outputs[0].finish_reason == "length" or fits(output.outputs[0].text)
    if kind == "right":
        assert llm.get_metrics().num_accepted_tokens > 0.6 * llm.get_metrics().num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["off", "ngram", "random", "sampled", "fake"])
def test_sampled_output_fits_and_does_not_depend_on_neighbours(kind, model, drafting_llm):
    free = SamplingParams(seed=0, max_tokens=12, ignore_eos=True)
    prompts = [*PROMPTS, PROMPTS[0]]
    outputs = []
    for rows in (1, 5):
        llm = drafting_llm(kind, model, max_num_seqs=rows)
        for seed in (1, 2):
            outputs.append(llm.generate(prompts, [*params_of(seed=seed), free], False))
    assert [ids_of(each) for each in outputs[:2]] == [ids_of(each) for each in outputs[2:]]
    finished = 0
    for output, (_, fits) in (pair for each in outputs for pair in zip(each, CASES, strict=False)):
        (found,) = output.outputs
        if found.finish_reason == "stop":
            finished += 1
            assert fits(found.text), found.text
            assert found.token_ids[-1] == EOS and found.token_ids.count(EOS) == 1
    assert finished > 12


def test_a_head_whose_logits_are_masked_too_is_accepted_more_often(
    model, drafting_llm, monkeypatch
):
    accepted = []
    for masked in (True, False):
        llm = drafting_llm("fake", model)
        with monkeypatch.context() as patch:
            if not masked:
                patch.setattr(head, "process_chain_logits", lambda logits, *others: logits)
            llm.generate(
                [PROMPTS[0]] * 4,
                SamplingParams(seed=1, max_tokens=80, structured_outputs=JSON),
                False,
            )
        accepted.append(llm.get_metrics().num_accepted_tokens)
    assert accepted[0] > 3 * accepted[1]


class Violating(Proposer):
    """Drafts the start of the grammar's own text, then what the grammar forbids, then anything."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(4)
        self._text = text

    def propose(self, requests, limits) -> Proposal:
        tokens = []
        for request in requests:
            known = self._text[len(request.token_ids) - request.num_prompt_tokens :]
            tokens.append([*known[:1], 5, *known[1:2], EOS, 0, 0][:4])
        return Proposal(torch.tensor(tokens), [4] * len(requests))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 4}], ids=str)
def test_forbidden_drafts_are_rejected_and_leave_the_state_as_it_was(
    options, model, drafting_llm, grammars, greedy
):
    llm = drafting_llm("off", model)
    llm.engine.rows.proposer = llm.engine.proposer = Violating(greedy[0])
    llm.engine.rows.cache.max_len += 4
    seen = []

    def check(requests, proposal, new_tokens):
        (request,), (new,) = requests, new_tokens
        assert len(new) <= 2  # the first draft at most, and one token more
        matcher, text = request.processors._grammar, request.token_ids + new
        if EOS not in new:
            fresh = grammars.matcher(JSON, request.num_prompt_tokens)
            assert torch.equal(matcher.masks(text, [[]])[0], fresh.masks(text, [[]])[0])
            seen.append(len(text))

    llm.engine.on_round = check
    params = replace(params_of(**options)[0], max_tokens=60)
    (output,) = llm.generate(PROMPTS[0], params, False)
    assert output.outputs[0].finish_reason == "length" or valid(output.outputs[0].text)
    assert len(seen) > 10
    if "temperature" in options:
        assert output.outputs[0].token_ids == greedy[0][:60]


def test_masks_along_the_paths_of_a_tree(grammars, byte_tokenizer):
    def ids(text):
        return byte_tokenizer(text).input_ids

    def fresh(text):
        (mask,) = grammars.matcher(params, 2).masks([1, 2, *ids(text)], [[]])
        return mask

    params = StructuredOutputsParams(regex="(ab|c){2,4}x?")
    matcher = grammars.matcher(params, 2)
    for committed in ("", "ab", "abc", "abcc"):
        tree = ["", "c", "a", "ab", "abc", "cab", "q", "qa", "cc", "ccx", "aa"]
        paths = [ids(text) for text in tree]
        for order in (paths, paths[::-1]):
            masks = matcher.masks([1, 2, *ids(committed)], order)
            for text, mask in zip(
                [byte_tokenizer.decode(path) for path in order], masks, strict=True
            ):
                if begins(committed + text):
                    assert torch.equal(mask, fresh(committed + text)), (committed, text)
                else:
                    assert mask is None, (committed, text)
        (after_end,) = matcher.masks([1, 2, *ids(committed)], [[EOS]])
        assert after_end is None


def begins(text: str) -> bool:
    """Whether a text of (ab|c){2,4}x? begins so."""
    lengths = [itertools.product(("ab", "c"), repeat=n) for n in (2, 3, 4)]
    return any(("".join(parts) + "x").startswith(text) for each in lengths for parts in each)


def test_the_end_is_allowed_where_the_grammar_is_complete(grammars, byte_tokenizer):
    (a, b), matcher = (
        byte_tokenizer("ab").input_ids,
        grammars.matcher(StructuredOutputsParams(regex="ab?"), 0),
    )
    masks = matcher.masks([], [[], [a], [a, b]])
    assert [mask.nonzero().flatten().tolist() for mask in masks] == [[a], [b, EOS], [EOS]]
    assert matcher.masks([a, EOS], [[]]) == [None]  # an end that was ignored


def test_text_after_an_ignored_end_is_free(model, drafting_llm):
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(choice=["no"]),
    )
    texts = [
        ids_of(drafting_llm(kind, model).generate(PROMPTS[0], params, False))[0]
        for kind in ("off", "fake")
    ]
    assert texts[0] == texts[1] and texts[0][2] == EOS and len(texts[0]) == 12


@pytest.mark.slow
def test_the_distribution_within_a_grammar_is_the_targets(model, drafting_llm, byte_tokenizer):
    """χ² of whole responses: p of each token is that of the tokens its grammar allows, and no
    more."""
    choices = ["a", "ab", "abc", "b", "bcab", "bcb", "c", "ca", "cab", "cac", "cc", "acb"]
    params = SamplingParams(
        n=1000, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=choices)
    )
    expected = torch.tensor([exact(model, byte_tokenizer, choices, text) for text in choices])
    assert abs(float(expected.sum()) - 1) < 1e-5
    for kind in ("sampled", "fake"):
        llm = drafting_llm(kind, model, seed=3, max_num_seqs=500, max_num_batched_tokens=4000)
        (output,) = llm.generate(PROMPTS[0], params, False)
        written = [byte_tokenizer.decode(o.token_ids[:-1]) for o in output.outputs]
        observed = torch.tensor([float(written.count(text)) for text in choices])
        assert observed.sum() == 1000
        check_counts_fit(observed.double(), 1000 * expected.double())


def exact(model, tokenizer, choices, text) -> float:
    """The target's probability of a choice, each token among those that some choice goes on
    with."""
    probability = 1.0
    for i in range(len(text) + 1):
        nexts = {(c[i] if i < len(c) else "") for c in choices if c.startswith(text[:i])}
        allowed = {(tokenizer(c).input_ids[0] if c else EOS): c for c in nexts}
        ids = [*PROMPTS[0]["prompt_token_ids"], *tokenizer(text[:i]).input_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        mask = torch.full_like(logits, -torch.inf)
        mask[list(allowed)] = 0
        p = probabilities(logits + mask, SamplingParams())
        (token,) = [t for t, c in allowed.items() if c == text[i : i + 1]]
        probability *= float(p[token])
    return probability


# ---------------------------------------------------------------------- what cannot be honoured


WRONG = [
    (dict(), "nothing given; expected one of"),
    (dict(json={}, regex="a"), r"\['json', 'regex'\] given"),
    (dict(regex=""), "regex=''; expected text"),
    (dict(choice=[]), "choice="),
    (dict(choice="ab"), "choice='ab'"),
    (dict(json=3), "json=3; expected a JSON schema"),
    (dict(json_object=False), "json_object=False"),
    (dict(regex="a", disable_any_whitespace=1), "disable_any_whitespace=1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_parameters_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        StructuredOutputsParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(regex="a("),
        dict(json='{"type": 3}'),
        dict(json="{"),
        dict(grammar="start: foo"),
        dict(grammar="?"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_named_before_anything_runs(
    wrong, model, drafting_llm
):
    llm = drafting_llm("off", model)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wrong))
    with pytest.raises(ConfigError, match=rf"prompt 1: structured_outputs\.{next(iter(wrong))}: "):
        llm.generate([PROMPTS[0]] * 2, [SamplingParams(), params], False)
    assert not llm.engine.has_unfinished


def test_what_is_missing_is_named(model, tiny_model, drafting_llm, monkeypatch):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        drafting_llm("off", model, tokenizer=None).generate(PROMPTS[0], params, False)
    endless = tiny_model("qwen3", vocab_size=94)
    endless.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="needs an end-of-sequence token"):
        drafting_llm("off", endless).generate(PROMPTS[0], params, False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'pip install "draftsmith\[structured\]"'):
        drafting_llm("off", model).generate(PROMPTS[0], params, False)
