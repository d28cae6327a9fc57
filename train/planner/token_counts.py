"""The tokens in the sources of a recipe, counted on a sample or as the user says.

Local data and the target's tokenizer are read; datasets of the hub are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from inference.entrypoints.loading import load_tokenizer
from speculators.errors import CheckpointError
from train.data.bad_rows import BadRow, BadRows
from train.data.loss_mask import TokenRow
from train.data.packing import conversation_tokenizer, fit_rows
from train.data.prepare import bad_rows
from train.data.sources import Example, load_source
from train.recipe.data_sections import Source
from train.recipe.recipe import Recipe

SAMPLE = 200  # examples of each source that are tokenised
ASSUMED_SHARE = 0.6  # of a conversation's tokens that are its responses
ASSUMED_TOKENS = 800  # of a conversation, where nothing can be counted


@dataclass
class TokenCount:
    """The counts of one source. Estimates are the sample's means times the number of examples."""

    label: str
    examples: int | None = None  # None: not read
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    note: str = ""  # what is missing, or was assumed


def counter(recipe: Recipe) -> Callable[[Source], TokenCount]:
    """Counts the tokens of a source with the target's tokenizer, loaded once; without one, examples
    only."""
    t = recipe.target
    try:
        tokenizer = load_tokenizer(
            t.model, None, trust_remote_code=t.trust_remote_code, revision=t.revision
        )
        known = bool(
            tokenizer("a").input_ids
        )  # from config.json alone transformers makes one that knows no text
    except CheckpointError:
        known = False
    if not known:
        note = "not counted: the target's tokenizer is not on this machine"
        return lambda source: TokenCount(source.label, note=note)
    conversations = conversation_tokenizer(recipe.data, tokenizer)

    def tokenise(example: Example) -> list[TokenRow]:
        """Its rows; a response still to be written is as long as the one in the data."""
        r = recipe.regenerate
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

    def count(source: Source) -> TokenCount:
        if source.resolved().name is not None:
            return TokenCount(source.label, note="a hub dataset, not read in a dry run")
        examples = list(load_source(source, bad=BadRows()))[: source.limit]
        sample = examples[:: max(len(examples) // SAMPLE, 1)][:SAMPLE]
        found = [tokenise(example) for example in sample]
        _, statistics = fit_rows([row for rows in found for row in rows], recipe.data.max_length)
        scale = source.weight * len(examples) / max(len(sample), 1)
        return TokenCount(
            source.label,
            round(source.weight * len(examples)),
            rows=round(scale * statistics.rows),
            tokens=round(scale * statistics.tokens),
            supervised=round(scale * statistics.supervised),
        )

    return count


def assumed(
    count: TokenCount, source: Source, recipe: Recipe, examples: int | None, tokens: int | None
) -> TokenCount:
    """`count` with what could not be counted filled in: `examples` of this source (None: its limit,
    or those of the file), `tokens` of one example (None: assumed). Its note says what was assumed;
    it stays as it is if it was counted and nobody says otherwise, or if nobody knows how many
    examples there are."""
    if count.tokens and examples is None and tokens is None:
        return count
    known = examples or count.examples or source.limit
    if known is None and source.resolved().name is None:
        known = round(source.weight * len(list(load_source(source, bad=BadRows()))[: source.limit]))
    if known is None:
        note = f"{count.note}; give --examples for an estimate of time"
        return TokenCount(count.label, None, note=note)
    share = count.supervised / count.tokens if count.tokens else ASSUMED_SHARE
    each = tokens or (count.tokens / max(count.rows, 1) if count.tokens else ASSUMED_TOKENS)
    each = min(each, recipe.data.max_length)
    asked = each * share
    if recipe.regenerate.enabled:
        asked = min(asked, recipe.regenerate.max_new_tokens)
        each = min(each - each * share + asked, recipe.data.max_length)
    facts = [f"{known:,} examples of {each:.0f} tokens"]
    if not count.tokens:
        facts.append(f"{share:.0%} of the tokens supervised")
    note = "; ".join(filter(None, [count.note, f"assumed: {', '.join(facts)}"]))
    tokens_there, supervised = round(known * each), round(known * asked)
    return replace(
        count, examples=known, rows=known, tokens=tokens_there, supervised=supervised, note=note
    )
