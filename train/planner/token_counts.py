"""The tokens in the training sources of a recipe, counted on a sample.

Local data and the target's tokenizer are read; datasets of the Hub are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from draftsmith.speculators.errors import CheckpointError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example, without_weights
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.prepare import run_tokenizer
from draftsmith.train.data.sources import read_source
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
    """The counts of `data.train`. `examples`: of each source that cannot be read. DataError for a
    source without any."""
    conversations = None
    try:
        tokenizer = recipe.target.load_tokenizer()
        # where there is a config.json and no tokenizer, transformers makes one without tokens
        if tokenizer("a").input_ids:
            conversations = run_tokenizer(recipe, tokenizer)
    except CheckpointError:
        pass
    counts = []
    for source in recipe.data.train:
        if source.resolved().name is not None:
            number = examples or source.limit
            note = "a dataset of the Hub, not read"
            counts.append(_assumed(recipe, source, number, note))
            continue
        rows = read_source(source, bad=BadRows())
        number = round(source.weight * len(rows))
        if conversations is None:
            note = "the target's tokenizer is not on this machine"
            counts.append(_assumed(recipe, source, number, note))
            continue
        sample = rows[:: max(len(rows) // SAMPLE, 1)][:SAMPLE]
        lengths = [expected_tokens(recipe, conversations, example) for example in sample]
        scale = number / len(sample)
        tokens = round(scale * sum(length for length, _ in lengths))
        supervised = round(scale * sum(count for _, count in lengths))
        counts.append(TokenCount(source.label, number, tokens, supervised))
    return counts


def expected_tokens(
    recipe: Recipe, conversations: ConversationTokenizer, example: Example
) -> tuple[int, int]:
    """Tokens of an example, and those that are supervised; (0, 0) for one that gives no row.

    A response still to be written is as long as the one in the data, or of full length where that
    has none. If the last turn leaves no room for one, an earlier turn of the conversation is
    answered, whose row is taken to be full."""
    longest = recipe.data.max_length
    written = recipe.regenerate.max_new_tokens
    try:
        prompt = len(conversations.prompt_ids(example))
    except BadRow:
        return 0, 0
    written_anew = recipe.regenerate.enabled
    try:
        rows = conversations.rows(without_weights(example) if written_anew else example)
    except BadRow:
        rows = []
    if not written_anew or (rows and recipe.regenerate.turns == "all"):
        masks = [row.loss_mask[:longest] for row in rows]
        if not written_anew:
            return sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
        return _written_anew([row.loss_mask for row in rows], longest, written)
    response = min(len(rows[-1]) - prompt if rows else written, written)
    turns = sum(message["role"] == "user" for message in example.messages)
    if prompt > longest - 2 and turns > 1:
        prompt = max(longest - response, 0)
    response = min(response, longest - prompt)
    return (prompt + response, response) if response > 0 else (0, 0)


def _written_anew(masks: Sequence[Any], longest: int, written: int) -> tuple[int, int]:
    """Tokens and supervised tokens of rows of which every response is cut after `written`."""
    tokens = 0
    supervised = 0
    for mask in masks:
        length = 0  # of the row, as it is written anew
        for is_response, part in groupby(mask.tolist()):
            count = len(list(part))
            if is_response:
                count = min(count, written)
            count = min(count, longest - length)
            length += count
            if is_response:
                supervised += count
        tokens += length
    return tokens, supervised


def _assumed(recipe: Recipe, source: Source, examples: int | None, note: str) -> TokenCount:
    if examples is None:
        return TokenCount(source.label, note=f"{note}; give --examples for an estimate of time")
    length = min(ASSUMED_TOKENS, recipe.data.max_length)
    note += f"; assumed: {examples:,} examples of {length} tokens, {ASSUMED_SHARE:.0%} supervised"
    tokens = examples * length
    return TokenCount(source.label, examples, tokens, round(tokens * ASSUMED_SHARE), note)
