"""What a configuration of the matrix must write: greedy text token for token, sampled text by the
χ² of its first tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from draftsmith.inference import SamplingParams
from tests.support.chi2 import FAMILY_ALPHA, assert_joint_fits, target_joint
from tests.support.configurations import SAMPLED, Configuration, target_of
from tests.support.engines import byte_tokenizer, ids_of
from tests.support.processors import greedy_text, processed

LIMIT = 64
PROMPTS = [
    [67, 68, 69, 3, 69, 7, 87, 8, 25],
    [65],
    [3 + (7 * i) % 50 for i in range(30)],
    [3, 4, 5] * 6,
    [5 + i % 7 for i in range(LIMIT - 6)],
    [70, 71],
]
PROCESSORS: dict[str, list[dict[str, Any]]] = {  # of the requests in turn
    "none": [{}],
    "penalties": [
        {"repetition_penalty": 1.6},
        {"frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.5},
        {},
    ],
    "masks": [
        {"logit_bias": {3: 6.0, 60: 6.0, 61: 5.0}, "bad_words": ["$"]},
        {"allowed_token_ids": list(range(3, 60, 3)), "presence_penalty": -1.5},
        {},
        {"bad_words": ["ab", "&'", "%&"], "allowed_token_ids": [3, 4, 5, 6, 64, 65]},
    ],
    "ends": [
        {"max_tokens": 5},
        {"min_tokens": 8, "stop_token_ids": list(range(0, 94, 2))},
        {"max_tokens": None},
        {"stop": "stop", "max_tokens": None},  # a string that the target writes
        {"stop_token_ids": "stop"},  # a token that it writes
    ],
}


@cache
def greedy_requests(
    architecture: str, processors: str
) -> list[tuple[list[int], SamplingParams, list[int], str]]:
    """(prompt, params, what the target alone writes, why it ends)."""
    model = target_of(architecture)
    tokenizer = byte_tokenizer()
    requests = []
    for i, prompt in enumerate(PROMPTS):
        options = {"temperature": 0, "max_tokens": 10, "seed": i, **_turn(processors, i)}
        if "stop" in options.values():
            free, _ = greedy_text(
                model, prompt, SamplingParams(temperature=0, max_tokens=6), tokenizer, LIMIT
            )
            text = tokenizer.decode(free[3:5]).rstrip("\ufffd")  # without half a character
            end = text if "stop" in options else [free[4]]
            options |= {name: end for name, value in options.items() if value == "stop"}
        params = SamplingParams(**options)
        requests.append((prompt, params, *greedy_text(model, prompt, params, tokenizer, LIMIT)))
    return requests


def _turn(processors: str, i: int) -> dict[str, Any]:
    settings = PROCESSORS[processors]
    return settings[i % len(settings)]


def _limits(configuration: Configuration, i: int) -> dict[str, Any]:
    """What a request says about its drafts."""
    most = [None, 0, 1, 2, 7]
    return {"num_speculative_tokens": most[i % 5]} if configuration.length == "request" else {}


def check_greedy(configuration: Configuration, before: Callable[[], None] = lambda: None) -> None:
    """Every third request is sampled, beside the greedy ones. Where the target's own draws decide,
    a seed writes the same with drafts as without. `before`: called once the LLM is made."""
    expected = greedy_requests(configuration.architecture, configuration.processors)
    texts = {tuple(prompt): text for prompt, _, text, _ in expected}
    llm = configuration.llm(
        target_of(configuration.architecture), texts, max_model_len=LIMIT, max_num_batched_tokens=16
    )
    before()
    prompts = [{"prompt_token_ids": prompt} for prompt, *_ in expected]
    params = []
    for i, (_, greedy, *_) in enumerate(expected):
        hot = {"temperature": 1.0, "top_p": 0.9} if i % 3 == 2 else {}
        params.append(replace(greedy, **hot, **_limits(configuration, i)))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert (llm.get_metrics().num_drafts > 0) == (configuration.drafter != "off")
    for output, asked, (_, _, text, reason) in zip(outputs, params, expected, strict=True):
        (completion,) = output.outputs
        if asked.greedy:
            assert (list(completion.token_ids), completion.finish_reason) == (text, reason)
        check_counts(output)
    if configuration.matched:
        plain = llm.generate(prompts, params, use_tqdm=False, speculate=False)
        assert ids_of(outputs) == ids_of(plain)


def check_counts(output: Any) -> None:
    """Every token of a response was accepted, or is the target's own of a round."""
    metrics = output.metrics
    accepted = metrics.accepted_per_round
    assert metrics.num_accepted_tokens == sum(accepted) == sum(metrics.num_accepted_tokens_per_pos)
    committed = 1 + sum(accepted) + len(accepted)
    # a last round may end on an accepted draft, without the target's own token
    assert committed - len(output.outputs[0].token_ids) in (0, 1)


SMALL_VOCAB = 4
SMALL_PROMPT = [1, 2, 3, 1, 2, 3, 0, 1]
WRITTEN = 4
SAMPLES = 800
SAMPLING: dict[str, dict[str, Any]] = {
    "none": {},
    "filters": {"temperature": 2.0, "top_k": 3, "top_p": 0.95},
    "penalties": {
        "temperature": 1.2,
        "repetition_penalty": 1.5,
        "frequency_penalty": 2.0,
        "presence_penalty": 2.0,
    },
    "masks": {"logit_bias": {0: -1.0, 3: 0.5}, "allowed_token_ids": [0, 2, 3]},
    "ends": {"min_tokens": WRITTEN, "stop_token_ids": [3], "top_p": 0.95},
}


@cache
def exact_joint(architecture: str, processors: str) -> Tensor:
    params = sampling(processors)

    def process(logits: Tensor, text: tuple[int, ...]) -> Tensor:
        return processed(logits, params, SMALL_PROMPT, text)

    model = target_of(architecture, SMALL_VOCAB)
    return target_joint(model, SMALL_PROMPT, WRITTEN, params, process)


def sampling(processors: str, **options: Any) -> SamplingParams:
    # so that few texts are rare
    settings = {"temperature": 2.5, **SAMPLING[processors], **options}
    return SamplingParams(**settings, max_tokens=WRITTEN)


def check_sampled(configuration: Configuration, before: Callable[[], None] = lambda: None) -> None:
    """χ² of SAMPLES responses. `before`: called once the LLM is made."""
    llm = configuration.llm(
        target_of(configuration.architecture, SMALL_VOCAB),
        {},
        tokenizer=None,
        seed=11,
        max_num_batched_tokens=8000,
    )
    before()
    params = [
        sampling(configuration.processors, n=SAMPLES // 4, **_limits(configuration, i))
        for i in range(4)
    ]
    outputs = llm.generate([{"prompt_token_ids": SMALL_PROMPT}] * 4, params, use_tqdm=False)
    texts = [completion.token_ids for output in outputs for completion in output.outputs]
    assert len(texts) == SAMPLES
    joint = exact_joint(configuration.architecture, configuration.processors)
    assert_joint_fits(texts, joint, FAMILY_ALPHA / len(SAMPLED))
    assert llm.get_metrics().num_accepted_tokens > 20
