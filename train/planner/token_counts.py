"""The tokens in the training sources of a recipe, counted on a sample.

Local data and the target's tokenizer are read; datasets of the Hub are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftsmith.inference.entrypoints.loading import load_tokenizer
from draftsmith.speculators.errors import CheckpointError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import conversation_tokenizer, fit_rows
from draftsmith.train.data.prepare import bad_rows
from draftsmith.train.data.sources import Example, load_source
from draftsmith.train.recipe.data_sections import Source
from draftsmith.train.recipe.recipe import Recipe

SAMPLE = 200  # examples of each source that are tokenised
ASSUMED_TOKENS = 800  # of a conversation, where nothing can be counted
ASSUMED_SHARE = 0.6  # of a conversation's tokens that are its responses


@dataclass
class TokenCount:
    """The tokens of one source: the sample's means times the number of examples."""

    label: str
    examples: int | None = None  # None: not known
    tokens: int = 0
    supervised: int = 0
    note: str = ""  # what is missing, or was assumed


def count_tokens(recipe: Recipe, examples: int | None = None) -> list[TokenCount]:
    """The counts of `data.train`. `examples`: of each source that cannot be read."""
    tokenise = _tokeniser(recipe)
    return [_count(recipe, source, tokenise, examples) for source in recipe.data.train]


def _count(
    recipe: Recipe,
    source: Source,
    tokenise: Callable[[Example], list[TokenRow]] | None,
    examples: int | None,
) -> TokenCount:
    if source.resolved().name is not None:
        return _assumed(recipe, source, examples or source.limit, "a dataset of the Hub, not read")
    found = list(load_source(source, bad=BadRows()))[: source.limit]
    number = round(source.weight * len(found))
    if tokenise is None:
        return _assumed(recipe, source, number, "the target's tokenizer is not on this machine")
    sample = found[:: max(len(found) // SAMPLE, 1)][:SAMPLE]
    rows = [row for example in sample for row in tokenise(example)]
    _, statistics = fit_rows(rows, recipe.data.max_length)
    scale = number / max(len(sample), 1)
    tokens, supervised = round(scale * statistics.tokens), round(scale * statistics.supervised)
    return TokenCount(source.label, number, tokens, supervised)


def _assumed(recipe: Recipe, source: Source, examples: int | None, note: str) -> TokenCount:
    if examples is None:
        return TokenCount(source.label, note=f"{note}; give --examples for an estimate of time")
    length = min(ASSUMED_TOKENS, recipe.data.max_length)
    note += f"; assumed: {examples:,} examples of {length} tokens, {ASSUMED_SHARE:.0%} supervised"
    tokens = examples * length
    return TokenCount(source.label, examples, tokens, round(tokens * ASSUMED_SHARE), note)


def _tokeniser(recipe: Recipe) -> Callable[[Example], list[TokenRow]] | None:
    """Makes the rows of an example; a response still to be written is as long as the one in the
    data. None without a tokenizer."""
    t, r = recipe.target, recipe.regenerate
    tokenizer: Any = None
    try:
        tokenizer = load_tokenizer(
            t.model, None, trust_remote_code=t.trust_remote_code, revision=t.revision
        )
    except CheckpointError:
        return None
    if not tokenizer("a").input_ids:  # of config.json alone: it knows no text
        return None
    conversations = conversation_tokenizer(recipe.data, tokenizer)

    def tokenise(example: Example) -> list[TokenRow]:
        rows, prompt = list[TokenRow](), list[int]()
        try:
            prompt = conversations.prompt_ids(example)
            rows = conversations.rows(example)
        except BadRow as error:
            if not (r.enabled and prompt):
                bad_rows(recipe.data).refuse(error)
                return []
        if not r.enabled:
            return rows
        response = len(rows[-1]) - len(prompt) if rows else r.max_new_tokens
        written = [0] * max(min(response, r.max_new_tokens), 1)
        return [TokenRow.from_response(prompt, written, example.workload)]

    return tokenise
