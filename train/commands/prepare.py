"""`draftsmith prepare`: a recipe's data before anything is trained on it: a sample with its mask or
its prompt, counts, lengths, and what is left out.

Examples are read and tokenised as a run does it; torch is imported when the command runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.progress import Stages, counted
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.commands.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from draftsmith.train.data.bad_rows import BadRows
    from draftsmith.train.data.examples import Example
    from draftsmith.train.data.loss_mask import ConversationTokenizer
    from draftsmith.train.data.prepare import Prepared
    from draftsmith.train.recipe.recipe import Recipe

SAMPLE = 200  # examples whose tokens are counted, where the responses are not written yet
ELIDED = 200  # characters shown at either end of a long stretch of text
STRETCHES = 4  # of a conversation that are shown, the last ones
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: "␡"}


def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Show the mask of this example, counted from 0.")
    ] = 0,
    validation: Annotated[
        bool, typer.Option("--validation", help="Look at data.validation instead.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show the whole of the example, not its end.")
    ] = False,
) -> None:
    """Show a recipe's data as a run would read it. An example with its loss mask, counts, lengths,
    and what is left out and why."""
    from draftsmith.inference.whole_file import check_folder
    from draftsmith.train.data.prepare import bad_rows, run_tokenizer
    from draftsmith.train.recipe.load import load_recipe

    checked = load_recipe(recipe, overrides or ())
    check_folder("output_dir", Path(checked.output_dir))  # what is left out is listed there
    console = Console(highlight=False, soft_wrap=True)
    use = "validation" if validation else ""
    bad = bad_rows(checked.data, Path(checked.output_dir), use=use)
    most = bad.max_share
    # All are shown, where a run may stop at the first.
    bad.stop = False
    bad.max_share = 1.0
    tokenizer = run_tokenizer(checked, checked.target.load_tokenizer(), keep=True)
    with Stages(console=Console(stderr=True)).stage("read and tokenise"):
        prepared, lengths, what = _read(checked, tokenizer, bad, validation)
    if sample >= len(prepared.examples):
        raise ConfigError(f"there are {len(prepared.examples)}", where=f"--sample {sample}")
    answered = checked.regenerate.enabled or validation
    _print_example(console, prepared.examples[sample], tokenizer, full, answered)
    _print_counts(console, prepared, lengths, what)
    if checked.regenerate.enabled and not validation:
        console.print(supervision(checked, prepared.examples, tokenizer))
    if bad.reasons and checked.data.on_bad_row == "error":
        raise DataError(f"error stops the run: {bad}", where="data.on_bad_row")
    bad.max_share = most
    bad.check_share()


def _read(
    recipe: Recipe, tokenizer: ConversationTokenizer, bad: BadRows, validation: bool
) -> tuple[Prepared, list[int], str]:
    """The examples, the tokens of each prompt or row, and what these are."""
    from draftsmith.train.data.packing import prepare_rows
    from draftsmith.train.data.prepare import Prepared, training_examples
    from draftsmith.train.data.sources import load_sources
    from draftsmith.train.data.tokenising import prompts_of

    data = recipe.data
    if validation:
        prepared = Prepared(load_sources(data.validation, bad=bad), bad)
    else:
        prepared = training_examples(recipe, bad, Path(recipe.output_dir))
    if not (recipe.regenerate.enabled or validation):
        rows, statistics = prepare_rows(
            prepared.examples, tokenizer, max_length=data.max_length, bad=bad
        )
        return prepared, list(map(len, rows)), str(statistics)
    lengths = list(map(len, prompts_of(prepared.examples, tokenizer, bad).values()))
    what = f"{counted(len(lengths), 'prompt')}, whose responses the target is to write"
    if too_long := sum(length > data.max_length - 2 for length in lengths):
        what += f"; {too_long:,} leave no room in data.max_length"
        if recipe.regenerate.turns == "last":
            what += " (an earlier turn is answered, if there is one)"
    return prepared, lengths, what


def _print_example(
    console: Console,
    example: Example,
    tokenizer: ConversationTokenizer,
    full: bool,
    answered: bool,
) -> None:
    """One example: its prompt if the target answers it, else its rows."""
    console.print(Text(f"{example.origin}, {example.workload}", style="bold"))
    show = print_prompt if answered else print_rows
    show(console, example, tokenizer, full)


def _print_counts(console: Console, prepared: Prepared, lengths: Sequence[int], what: str) -> None:
    """The examples by workload, quantiles of their lengths, and what was left out."""
    workloads = Counter(example.workload for example in prepared.examples)
    console.print(", ".join(f"{name}: {count:,}" for name, count in workloads.items()), style="dim")
    console.print(f"{counted(len(prepared.examples), 'example')}: {what}")
    ordered = sorted(lengths)
    at = {name: ordered[int(q * (len(ordered) - 1))] for name, q in QUANTILES.items()}
    console.print("tokens: " + ", ".join(f"{name} {count:,}" for name, count in at.items()))
    for text in filter(None, (str(prepared), str(prepared.bad))):
        console.print(Text(text.translate(CONTROL)))


def supervision(
    recipe: Recipe, examples: Sequence[Example], tokenizer: ConversationTokenizer
) -> str:
    """The share of tokens that a run supervises, where the target writes the responses."""
    from draftsmith.train.planner.token_counts import expected_tokens

    sample = examples[:: max(len(examples) // SAMPLE, 1)]
    counts = [expected_tokens(recipe, tokenizer, example) for example in sample]
    tokens = sum(count for count, _ in counts)
    supervised = sum(count for _, count in counts)
    which = "last response" if recipe.regenerate.turns == "last" else "responses"
    return (
        f"supervised: the target's own {which} alone, about {supervised / max(tokens, 1):.0%} of"
        " the tokens if it writes as much as the data has"
    )


def print_prompt(
    console: Console, example: Example, tokenizer: ConversationTokenizer, full: bool
) -> None:
    """The prompt that the target answers, and the place of its response."""
    from draftsmith.train.data.bad_rows import BadRow

    try:
        ids = tokenizer.prompt_ids(example)
    except BadRow as error:
        console.print(Text(f"no prompt: {error.what}".translate(CONTROL), style="dim"))
        return
    text = Text(_shown(str(tokenizer.tokenizer.decode(ids)), full), style="dim")
    console.print(text.append("[here the target writes its response]", style="green"))
    console.print(f"a prompt of {len(ids):,} tokens", style="dim")


def print_rows(
    console: Console, example: Example, tokenizer: ConversationTokenizer, full: bool
) -> None:
    """The rows of an example, supervised text green; the last one's end, unless `full`."""
    import numpy as np

    from draftsmith.train.data.bad_rows import BadRow

    try:
        rows = tokenizer.rows(example)
    except BadRow as error:
        console.print(Text(f"no row: {error.what}".translate(CONTROL), style="dim"))
        return
    for row in rows if full else rows[-1:]:
        ids = row.input_ids
        mask = row.loss_mask
        text = Text()
        parts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
        if not full and len(parts) > STRETCHES:
            text.append(f"[{len(parts) - STRETCHES} stretches before; --full shows them] ")
            parts = parts[-STRETCHES:]
        for part in parts:
            words = _shown(str(tokenizer.tokenizer.decode(ids[part])), full)
            text.append(words, style="green" if mask[part[0]] else "dim")
        console.print(text)
        console.print(f"{mask.sum()} of {len(ids)} tokens are supervised (green)", style="dim")


def _shown(text: str, full: bool) -> str:
    """The text, its middle left out unless `full`. Control characters are pictures, so that a
    terminal obeys none."""
    if not full and len(text) > 2 * ELIDED:
        text = f"{text[:ELIDED]} […] {text[-ELIDED:]}"
    return text.translate(CONTROL)
