"""`draftsmith prepare`: a recipe's data before anything is trained on it: counts, lengths, what is
left out, and a sample with its mask.

Examples are read and tokenised as a run does it; torch is imported when the command runs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.commands.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from draftsmith.train.data.loss_mask import ConversationTokenizer
    from draftsmith.train.data.sources import Example

ELIDED = 300  # characters shown at either end of a long stretch without supervision
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
) -> None:
    """Read a recipe's data as a run would: counts, lengths, what is left out and why, a mask."""
    from draftsmith.train.data.packing import prepare_rows
    from draftsmith.train.data.prepare import (
        Prepared,
        askable,
        bad_rows,
        run_tokenizer,
        training_examples,
    )
    from draftsmith.train.data.sources import load_sources
    from draftsmith.train.recipe.load import load_recipe

    checked, console = load_recipe(recipe, overrides or ()), Console(highlight=False)
    data, folder = checked.data, Path(checked.output_dir)
    bad = bad_rows(data, folder, use="validation" if validation else "")
    most = bad.max_share
    bad.stop, bad.max_share = False, 1.0  # all are shown, where a run may stop at the first
    tokenizer = run_tokenizer(checked, checked.target.load_tokenizer(), keep=True)
    with Stages(console=Console(stderr=True)).stage("read and tokenise"):
        if validation:
            prepared = Prepared(load_sources(data.validation, bad=bad), bad)
        else:
            prepared = training_examples(checked, bad, folder)
        if checked.regenerate.enabled:
            examples = askable(prepared.examples, tokenizer, bad)
            lengths = [len(tokenizer.prompt_ids(example)) for example in examples]
            what = f"{len(examples):,} prompts, whose responses the target is to write"
            if too_long := sum(length > data.max_length - 2 for length in lengths):
                what += f"; {too_long:,} leave no room in data.max_length"
        else:
            rows, statistics = prepare_rows(
                prepared.examples, tokenizer, max_length=data.max_length, bad=bad
            )
            lengths, what = list(map(len, rows)), str(statistics)
    if sample >= len(prepared.examples):
        raise ConfigError(f"there are {len(prepared.examples)}", where=f"--sample {sample}")
    workloads = Counter(example.workload for example in prepared.examples)
    console.print(", ".join(f"{name}: {count:,}" for name, count in workloads.items()), style="dim")
    console.print(f"{len(prepared.examples):,} examples: {what}")
    lengths.sort()
    at = {name: lengths[int(q * (len(lengths) - 1))] for name, q in QUANTILES.items()}
    console.print("tokens: " + ", ".join(f"{name} {count:,}" for name, count in at.items()))
    for text in filter(None, (str(prepared), str(bad))):
        console.print(Text(text.translate(CONTROL)))
    print_sample(console, prepared.examples[sample], tokenizer)
    if bad.reasons and data.on_bad_row == "error":
        raise DataError(f"error stops the run: {bad}", where="data.on_bad_row")
    bad.max_share = most
    bad.check_share()


def print_sample(console: Console, example: Example, tokenizer: ConversationTokenizer) -> None:
    """The rows of an example, supervised text green; the prompt alone if it has no row."""
    import numpy as np

    from draftsmith.train.data.bad_rows import BadRow

    try:
        rows = [(row.input_ids, row.loss_mask) for row in tokenizer.rows(example)]
    except BadRow:
        ids = np.asarray(tokenizer.prompt_ids(example))
        rows = [(ids, np.zeros(len(ids), dtype=bool))]
    console.print(Text(f"{example.origin}, {example.workload}", style="bold"))
    for ids, mask in rows:
        text = Text()
        for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
            words, supervised = str(tokenizer.tokenizer.decode(ids[part])), mask[part[0]]
            if not supervised and len(words) > 2 * ELIDED:
                words = f"{words[:ELIDED]} […] {words[-ELIDED:]}"
            # control characters as pictures, so that a terminal obeys none
            text.append(words.translate(CONTROL), style="green" if supervised else "dim")
        console.print(text)
        console.print(f"{mask.sum()} of {len(ids)} tokens are supervised (green)", style="dim")
