"""Whether a server that drafts writes what the same model writes without drafting.

Greedy texts are compared token by token with those of a baseline; samples at temperature 1 by a
two-sample χ² test of their first tokens. Both servers speak OpenAI's completions API with
`logprobs`.

A greedy difference is a tie if the gap between the two tokens is no larger than the rounding error
that is measured there: the baseline repeats that position in other batch shapes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai
from scipy.stats import chi2_contingency

from draftsmith.inference.bench.load_generator import (
    drafting_counters,
    drafting_results,
    served_model,
)
from draftsmith.inference.evaluation.lossless import first_difference
from draftsmith.speculators.errors import ConfigError, DraftsmithError

LEADING = 5  # tokens whose log-probabilities are asked for
SAMPLED_TOKENS = 4  # of a sampled text
SAMPLED_PROMPTS = 4  # that are sampled from
LEAST_EXPECTED = 5.0  # samples of a server in a category of the χ² test; rarer ones are pooled
SIGNIFICANCE = 1e-3  # of all χ² tests together
BASELINE_SEED = 1 << 20  # first seed of the baseline's samples; the server's begin at 0


@dataclass(frozen=True)
class Text:
    """A completion: its tokens, and the leading log-probabilities at each of them."""

    tokens: list[str]
    leading: list[dict[str, float]]


class Completions:
    """One server. DraftsmithError if it does not answer, or without log-probabilities."""

    def __init__(self, client: openai.AsyncOpenAI, concurrency: int) -> None:
        self.client, self.model = client, ""  # until it is asked
        self._slots = asyncio.Semaphore(concurrency)

    async def complete(self, prompt: str, max_tokens: int, **fields: Any) -> Text:
        fields = {"max_tokens": max_tokens, "logprobs": LEADING, **fields}
        where = f"{self.client.base_url}completions"
        async with self._slots:
            try:
                create = self.client.completions.create
                choice = (await create(model=self.model, prompt=prompt, **fields)).choices[0]
            except openai.OpenAIError as error:
                raise DraftsmithError(f"{error}", where=where) from None
        if choice.logprobs is None or choice.logprobs.tokens is None:
            raise DraftsmithError("answers without logprobs, which are compared", where=where)
        leading = choice.logprobs.top_logprobs or []
        return Text(list(choice.logprobs.tokens), [dict(entry or {}) for entry in leading])

    async def greedy(self, prompts: Sequence[str], max_tokens: int) -> list[Text]:
        requests = (self.complete(prompt, max_tokens, temperature=0) for prompt in prompts)
        return await asyncio.gather(*requests)

    async def sample(self, prompt: str, count: int, first_seed: int) -> list[Counter[str]]:
        """Counts of the tokens at each of SAMPLED_TOKENS positions, of `count` samples at
        temperature 1; "" behind the end of a text."""
        complete = partial(self.complete, prompt, SAMPLED_TOKENS, temperature=1, top_p=1)
        seeds = range(first_seed, first_seed + count)
        texts = await asyncio.gather(*(complete(seed=seed) for seed in seeds))
        rows = ((*text.tokens, *[""] * SAMPLED_TOKENS)[:SAMPLED_TOKENS] for text in texts)
        return [Counter(position) for position in zip(*rows)]


async def certify(
    server: Completions,
    baseline: Completions,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    samples: int,
    assume_drafting: bool = False,
) -> dict[str, Any]:
    """The certificate: `verdict`, the counts and tests that it rests on, and the server's
    acceptance, null where it reports none. ConfigError if the baseline drafts.

    "lossy": a greedy mismatch, or samples of another distribution. "undecided": none, but nothing
    shows that the server drafted; `assume_drafting`: it does, and has no counters. "lossless"
    speaks of temperature 0 alone where no test of samples has a degree of freedom (`tested`)."""
    for one in (server, baseline):
        one.model = await served_model(one.client)
    before = await drafting_counters(server.client)
    if await drafting_counters(baseline.client) is not None:
        raise ConfigError("this server drafts too", where=f"--baseline {baseline.client.base_url}")
    texts = await server.greedy(prompts, max_tokens)
    references = await baseline.greedy(prompts, max_tokens)
    differences = [
        {"prompt": number, **difference}
        for number, compared in enumerate(zip(prompts, texts, references, strict=True))
        async for difference in _differences(server, baseline, *compared, max_tokens)
    ]
    tests = []
    for number, prompt in enumerate(prompts[:SAMPLED_PROMPTS] if samples else ()):
        drawn = await server.sample(prompt, samples, 0)
        expected = await baseline.sample(prompt, samples, BASELINE_SEED)
        for position in range(1, SAMPLED_TOKENS):  # nothing is drafted before the first token
            test = homogeneity(drawn[position], expected[position])
            tests.append({"prompt": number, "position": position, **test})
    drafting = drafting_results(before, await drafting_counters(server.client))
    ties = sum(difference["tie"] for difference in differences)
    smallest = min((test["p_value"] for test in tests), default=1.0)
    lossy = len(differences) > ties or smallest * max(len(tests), 1) < SIGNIFICANCE
    drafted = bool(drafting) or (assume_drafting and before is None)
    return {
        "verdict": "lossy" if lossy else "lossless" if drafted else "undecided",
        "server": str(server.client.base_url),
        "model": server.model,
        "greedy": {
            "prompts": len(prompts),
            "tokens": sum(len(text.tokens) for text in texts),
            "mismatches": len(differences) - ties,
            "ties": ties,
            "differences": differences,
        },
        "sampled": {
            "tested": any(test["degrees"] for test in tests),
            "samples": samples,
            "significance": SIGNIFICANCE,
            "smallest_p_value": smallest,
            "tests": tests,
        },
        "acceptance_length": drafting.get("spec_decode_acceptance_length"),
        "num_drafts": drafting.get("spec_decode_num_drafts"),
    }


async def _differences(
    server: Completions,
    baseline: Completions,
    prompt: str,
    text: Text,
    reference: Text,
    max_tokens: int,
) -> AsyncIterator[dict[str, Any]]:
    """The differences of two greedy texts, judged. Behind a tie both servers go on from the
    baseline's token."""
    start = 0
    while (position := first_difference(reference.tokens, text.tokens)) is not None:
        judged = await _judge(baseline, prompt, reference, text, position)
        yield {"position": start + position, **judged}
        start += position + 1
        if not judged["tie"] or start >= max_tokens:
            return
        prompt += "".join(reference.tokens[: position + 1])
        (text,) = await server.greedy([prompt], max_tokens - start)
        (reference,) = await baseline.greedy([prompt], max_tokens - start)


async def _judge(
    baseline: Completions, prompt: str, reference: Text, text: Text, position: int
) -> dict[str, Any]:
    """Whether the first difference of two greedy texts is a tie: the gap between the two tokens in
    the baseline against the rounding error of its leading log-probabilities, which is their largest
    change between decoding, prefilling alone, and prefilling in a batch."""
    expected, produced = (
        written.tokens[position] if position < len(written.tokens) else None
        for written in (reference, text)
    )
    prefix = prompt + "".join(reference.tokens[:position])
    alone = await baseline.complete(prefix, 1, temperature=0)
    batch = await baseline.greedy([prefix, *[prefix + " "] * 3], 1)
    runs = [*reference.leading[position : position + 1], *alone.leading[:1], *batch[0].leading[:1]]
    error = 0.0
    for first, second in itertools.combinations(runs, 2):
        changes = [first[token] - second[token] for token in first.keys() & second.keys()]
        error = max(error, max(changes, default=0.0) - min(changes, default=0.0))
    gaps = [
        abs(run[expected] - run[produced])
        for run in runs
        if expected in run and produced in run  # None, behind the end, is in none
    ]
    return {
        "expected": expected,
        "produced": produced,
        "gap": min(gaps, default=None),
        "rounding_error": error,
        "tie": bool(gaps) and min(gaps) <= error,
    }


def homogeneity(drawn: Counter[str], expected: Counter[str]) -> dict[str, float]:
    """The χ² test of the hypothesis that two samples come from one distribution. Categories with
    fewer than LEAST_EXPECTED expected samples are pooled."""
    total, other = drawn.total(), expected.total()
    share = min(total, other) / (total + other)
    pairs = [(drawn[token], expected[token]) for token in drawn.keys() | expected.keys()]
    cells = [pair for pair in pairs if sum(pair) * share >= LEAST_EXPECTED]
    rare = [pair for pair in pairs if sum(pair) * share < LEAST_EXPECTED]
    if rare:
        cells.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    test = chi2_contingency(cells, correction=False)
    statistic, p_value = float(test.statistic), float(test.pvalue)
    return {"chi2": statistic, "degrees": int(test.dof), "p_value": p_value}
