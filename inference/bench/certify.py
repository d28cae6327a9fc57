"""Whether a server that drafts writes what the same model writes without drafting.

Greedy texts are compared token by token with those of a baseline, and samples at temperature 1 by
the tests of two_samples.py. Each part has a verdict of its own, for which the server's counters
must show that it drafted there.

A greedy difference is a tie if the gap between the two tokens is no larger than the rounding error
that is measured there: the baseline repeats that position in other batch shapes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from draftsmith.inference.bench.completions import Completion, Completions
from draftsmith.inference.bench.load_generator import drafting_counters, drafting_results
from draftsmith.inference.bench.two_samples import (
    END,
    SIGNIFICANCE,
    SampledPrompt,
    compare_samples,
    token_score,
)
from draftsmith.inference.evaluation.lossless import first_difference
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.speculators.errors import ConfigError

LEADING = 5  # tokens whose log-probabilities say whether a greedy difference is a tie
SCORED = 20  # tokens whose log-probabilities score a sample: the most that vLLM gives by default
SAMPLED_TOKENS = 8  # of a sampled text
SAMPLED_PROMPTS = 4  # that are sampled from
BASELINE_SEED = 1 << 20  # first seed of the baseline's samples; the server's begin at 0

WORST_FIRST = ("lossy", "undecided", "lossless")
Part = dict[str, Any]
Leading = dict[tuple[int, ...], dict[int, float]]  # log-probabilities after a text's beginning


async def certify(
    server: Completions,
    baseline: Completions,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    samples: int,
    assume_drafting: bool = False,
) -> dict[str, Any]:
    """The certificate: `verdict`, the parts `greedy` and `sampled` (None without samples) with
    their own verdicts, counts, tests and the server's acceptance, null where it reports none, and
    `scope`: what was tested and what not. ConfigError: the baseline drafts, or tokenizes otherwise.

    "lossy": a greedy mismatch, or samples of another distribution. "undecided": none, but nothing
    shows that the server drafted in a part, or its texts could not have shown a difference;
    `assume_drafting`: it drafts, and has no counters."""
    model = await server.model()
    await _require_no_drafting(baseline)
    counters = [await drafting_counters(server.client)]
    texts = await server.greedy(prompts, max_tokens)
    references = await baseline.greedy(prompts, max_tokens, LEADING)
    _require_same_prompts(server, texts, references)
    greedy = await _greedy_part(server, baseline, texts, references, max_tokens)
    counters.append(await drafting_counters(server.client))
    parts = [_judged(greedy, counters, assume_drafting)]
    if samples:
        sampled_prompts = [reference.prompt for reference in references[:SAMPLED_PROMPTS]]
        sampled = await _sampled_part(server, baseline, sampled_prompts, samples)
        counters.append(await drafting_counters(server.client))
        parts.append(_judged(sampled, counters[1:], assume_drafting))
    verdicts = {part["verdict"] for part in parts}
    return {
        "verdict": next(verdict for verdict in WORST_FIRST if verdict in verdicts),
        "server": str(server.client.base_url),
        "model": model,
        "greedy": parts[0],
        "sampled": parts[1] if samples else None,
        "scope": _scope(parts, max_tokens, samples),
    }


async def _require_no_drafting(baseline: Completions) -> None:
    if await drafting_counters(baseline.client) is not None:
        raise ConfigError("this server drafts too", where=f"--baseline {baseline.client.base_url}")


def _require_same_prompts(
    server: Completions, texts: Sequence[Completion], references: Sequence[Completion]
) -> None:
    for text, reference in zip(texts, references, strict=True):
        if text.prompt != reference.prompt:
            raise ConfigError(
                f"its token ids of a prompt are {text.prompt}, and those of the baseline"
                f" {reference.prompt}; both must serve the same model with the same tokenizer",
                where=server.where,
            )


def _judged(
    part: Part, counters: Sequence[SpecDecodeCounters | None], assume_drafting: bool
) -> Part:
    """A part with its verdict. `counters`: the server's, before and after it."""
    before, after = counters
    drafting = drafting_results(before, after)
    drafted = bool(drafting) or (assume_drafting and before is None)
    verdict = "undecided"
    if part["lossy"]:
        verdict = "lossy"
    elif part["tested"] and drafted:
        verdict = "lossless"
    return {
        "verdict": verdict,
        **part,
        "drafted": drafted,
        "acceptance_length": drafting.get("spec_decode_acceptance_length"),
        "num_drafts": drafting.get("spec_decode_num_drafts"),
    }


def _statement(part: Part) -> str:
    """What a part shows, and on what it rests."""
    reason = part["description"]
    if part["verdict"] == "undecided" and not part["tested"]:
        reason += "; the texts are too few or too much alike to show a difference"
    elif part["verdict"] == "undecided":
        reason += "; no difference, but nothing shows that the server drafted there"
    elif part["num_drafts"] is not None:
        reason += (
            f"; {part['num_drafts']} drafts, acceptance length {part['acceptance_length']:.2f}"
        )
    return f"{part['verdict']} at temperature {part['temperature']}: {reason}"


def _scope(parts: Sequence[Part], max_tokens: int, samples: int) -> dict[str, list[str]]:
    """What was tested and what not, in sentences."""
    sampled = f"sampled tokens after the first {SAMPLED_TOKENS} of a text"
    not_tested = [
        f"greedy tokens after the first {max_tokens} of a text",
        sampled if samples else "samples",
        "other temperatures, and sampling parameters that change the distribution, such as"
        " top_p, top_k, min_p and penalties, the server's defaults among them",
        "other prompts, and more requests at a time",
        "counters that other clients' requests raised, or that are wrong",
    ]
    return {"tested": [_statement(part) for part in parts], "not_tested": not_tested}


# ------------------------------------------------------------------------------- greedy


async def _greedy_part(
    server: Completions,
    baseline: Completions,
    texts: Sequence[Completion],
    references: Sequence[Completion],
    max_tokens: int,
) -> Part:
    differences = [
        {"prompt": number, **difference}
        for number, pair in enumerate(zip(texts, references, strict=True))
        async for difference in _differences(server, baseline, *pair, max_tokens)
    ]
    tokens = sum(len(text.tokens) for text in texts)
    ties = sum(difference["tie"] for difference in differences)
    mismatches = len(differences) - ties
    return {
        "temperature": 0,
        "lossy": mismatches > 0,
        "tested": tokens > 0,
        "description": f"{tokens} tokens after {len(texts)} prompts, up to {max_tokens} each,"
        f" {mismatches} mismatches, {ties} ties",
        "prompts": len(texts),
        "tokens": tokens,
        "mismatches": mismatches,
        "ties": ties,
        "differences": differences,
    }


async def _differences(
    server: Completions,
    baseline: Completions,
    text: Completion,
    reference: Completion,
    max_tokens: int,
) -> AsyncIterator[dict[str, Any]]:
    """The differences of two greedy texts, judged. Behind a tie both servers go on from the
    baseline's token, if that does not end its text."""
    start = 0
    while (position := first_difference(reference.tokens, text.tokens)) is not None:
        judged = await _judge(baseline, reference, text, position)
        yield {"position": start + position, **judged}
        start += position + 1
        if not judged["tie"] or position + 1 == len(reference.tokens):
            return
        prompt = [*reference.prompt, *reference.tokens[: position + 1]]
        (text,) = await server.greedy([prompt], max_tokens - start)
        (reference,) = await baseline.greedy([prompt], max_tokens - start, LEADING)


async def _judge(
    baseline: Completions, reference: Completion, text: Completion, position: int
) -> dict[str, Any]:
    """Whether the first difference of two greedy texts is a tie: the gap between the two tokens in
    the baseline against the rounding error of its leading log-probabilities, which is their largest
    change between decoding, prefilling alone, and prefilling in a batch."""
    expected, produced = (
        written.tokens[position] if position < len(written.tokens) else None
        for written in (reference, text)
    )
    prefix = [*reference.prompt, *reference.tokens[:position]]
    (alone,) = await baseline.greedy([prefix], 1, LEADING)
    shorter = prefix[:-1] or prefix
    batch = await baseline.greedy([prefix, shorter, shorter, shorter], 1, LEADING)
    runs = [*reference.leading[position : position + 1], *alone.leading, *batch[0].leading]
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


# ------------------------------------------------------------------------------- sampled


async def _sampled_part(
    server: Completions, baseline: Completions, prompts: Sequence[list[int]], samples: int
) -> Part:
    sampled = []
    others = range(BASELINE_SEED, BASELINE_SEED + samples)
    for prompt in prompts:
        drawn = await server.sample(prompt, SAMPLED_TOKENS, range(samples))
        expected = await baseline.sample(prompt, SAMPLED_TOKENS, others, SCORED)
        leading = await _leading_after(baseline, prompt, drawn, expected)
        texts = [*drawn, *expected]
        rows = [[*text.tokens, *[END] * SAMPLED_TOKENS][:SAMPLED_TOKENS] for text in texts]
        scores = [_score(text, leading) for text in texts]
        tokens = np.array(rows).reshape(2, samples, SAMPLED_TOKENS)
        sampled.append(SampledPrompt(tokens, np.array(scores, dtype=float).reshape(2, samples)))
    result = compare_samples(sampled)
    return {
        "temperature": 1,
        "lossy": result["p_value"] <= SIGNIFICANCE,
        "description": f"tokens 1 to {SAMPLED_TOKENS} of {samples} texts after each of"
        f" {len(prompts)} prompts, p = {result['p_value']:.2g} at a level of {SIGNIFICANCE:g}",
        "prompts": len(prompts),
        "samples": samples,
        "tokens": SAMPLED_TOKENS,
        "significance": SIGNIFICANCE,
        **result,
    }


def _score(text: Completion, leading: Leading) -> float:
    """See two_samples.py."""
    return sum(
        token_score(leading[tuple(text.tokens[:i])], token) for i, token in enumerate(text.tokens)
    )


async def _leading_after(
    baseline: Completions,
    prompt: list[int],
    drawn: Sequence[Completion],
    expected: Sequence[Completion],
) -> Leading:
    """The baseline's leading log-probabilities after every beginning of a sampled text. Those of
    its own texts came with them; it is asked for the others."""
    known = {
        tuple(text.tokens[:i]): leading
        for text in expected
        for i, leading in enumerate(text.leading)
    }
    beginnings = {tuple(text.tokens[:i]) for text in drawn for i in range(len(text.tokens))}
    missing = sorted(beginnings - known.keys())
    asked = await asyncio.gather(
        *(
            baseline.complete([*prompt, *beginning], 1, leading=SCORED, temperature=1)
            for beginning in missing
        )
    )
    return known | {
        beginning: text.leading[0] for beginning, text in zip(missing, asked, strict=True)
    }
