"""`draftsmith prepare`: a recipe's data before anything is trained on it, as tables, bars and a sample with its mask.

Must not know how examples are read or masks are found (`train.data.prepare`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculators.errors import ConfigError
from train.data.bad_rows import REASONS

if TYPE_CHECKING:
    from train.commands.prepare_report import DataReport, Sample
    from train.data.prepare import Prepared

BLOCKS = "▁▂▃▄▅▆▇█"
ELIDED = 300  # characters shown at either end of a long stretch without supervision
FIRST = 120  # characters of the first row left out for a reason
LEFT_OUT = {
    "duplicate": "asks what an earlier example asks",
    "near_duplicate": "asks nearly what an earlier example asks",
    "contaminated": "asks what the evaluation asks",
}


def prepare(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, such as those in recipes/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Overrides, such as data.max_length=4096."),
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Show the mask of this example, counted from 0.")] = 0,
    validation: Annotated[bool, typer.Option("--validation", help="Look at data.validation instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Read the data of a recipe as a run would: counts, lengths, what is left out and why, and a sample's mask."""
    from inference.entrypoints.loading import load_tokenizer
    from train.commands.prepare_report import report, show_sample
    from train.data.packing import conversation_tokenizer
    from train.data.prepare import bad_rows, training_examples, validation_examples
    from train.recipe.load import load_recipe

    checked = load_recipe(recipe, overrides or ())
    if validation and not checked.data.validation:
        raise ConfigError(f"{recipe}: data.validation is empty; there is nothing to look at")
    folder, stage = Path(checked.output_dir), "validation" if validation else ""
    bad = bad_rows(checked.data, folder, stage)
    with Console(stderr=True).status("reading and tokenising"):
        prepared = validation_examples(checked, bad) if validation else training_examples(checked, bad, folder)
        t = checked.target
        own = load_tokenizer(t.model, None, trust_remote_code=t.trust_remote_code, revision=t.revision)
        tokenizer = conversation_tokenizer(checked.data, own)
        found = report(checked, prepared, tokenizer)
    if sample >= len(prepared.examples):
        raise ConfigError(f"--sample {sample}: there are {len(prepared.examples)} examples, numbered from 0")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    else:
        shown = show_sample(prepared.examples[sample], tokenizer, regenerated=checked.regenerate.enabled)
        _print(Console(), found, prepared, shown)
    bad.finish()


def _print(console: Console, found: DataReport, prepared: Prepared, sample: Sample) -> None:
    console.print(_counts(found))
    if found.regenerated:
        console.print("Responses are those of the data; the run replaces them by the target's own.\n", style="dim")
    _print_lengths(console, found)
    if reasons := _left_out(found):
        console.print(reasons)
        for path in found.lists:
            console.print(f"{path} lists them.", style="dim", highlight=False, soft_wrap=True)
        console.print()
    _print_sample(console, sample)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _counts(found: DataReport) -> Table:
    numbers = ("examples", "prompt", "rows", "tokens", "superv.", "cut")
    table = _table("", "workload", *numbers, f"1 … {found.max_length}", right=numbers)
    groups = found.workloads
    for each in [*groups, found.all] if len(groups) > 1 else groups:
        cells = [each.name, f"{each.examples:,}", f"{each.mean_prompt:.0f}"]
        if each.rows:
            share = f"{each.supervised / each.tokens:.0%}"
            cells += [f"{each.rows:,}", f"{each.tokens:,}", share, f"{each.truncated:,}", _sparks(each.histogram)]
        else:
            cells += ["to be written", "-", "-", "-", "-"]
        table.add_row(*map(Text, cells), style="bold" if each is found.all else "")
    return table


def _sparks(counts: list[int]) -> str:
    """One character per bucket, as high as its share of the fullest; a space for an empty one."""
    top = max(counts)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * n / top)] if n else " " for n in counts)


def _print_lengths(console: Console, found: DataReport) -> None:
    """How many rows are how long, over all workloads."""
    counts, edges = found.all.histogram, found.edges
    if not found.all.rows:
        return
    console.print(Text("Tokens per row", style="bold"), Text(found.all.quantiles_text(), style="dim"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim")
    grid.add_column(width=max(min(console.width - 30, 60), 10))
    grid.add_column(justify="right")
    for low, high, count in zip(edges, edges[1:], counts):
        grid.add_row(f"{low + 1:,} – {high:,}", Bar(max(counts), 0, count, color="cyan"), f"{count:,}")
    console.print(grid)
    console.print()


def _left_out(found: DataReport) -> Table | None:
    table = _table("Left out", "why", "rows", "the first", right=("rows",))
    for why, count, first in found.left_out:
        words = REASONS.get(why) or LEFT_OUT.get(why) or why
        told = first if len(first) <= FIRST else first[: FIRST - 3] + "..."
        table.add_row(Text(words), f"{count:,}", Text(told, style="dim"))
    return table if found.left_out else None


def _print_sample(console: Console, sample: Sample) -> None:
    """Green what is supervised, dim what is not."""
    console.print(Text(f"{sample.origin}, {sample.workload}", style="bold"))
    for row in sample.rows:
        text = Text()
        for words, supervised in row.parts:
            if not supervised and len(words) > 2 * ELIDED:
                words = f"{words[:ELIDED]} […] {words[-ELIDED:]}"
            text.append(_visible(words), style="green" if supervised else "dim")
        console.print(text)
        console.print(f"{row.supervised} of {row.tokens} tokens are supervised (green)", style="dim", highlight=False)


def _visible(words: str) -> str:
    """Control characters as pictures, so that a terminal shows them and obeys none."""
    pictures: dict[int, Any] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    return words.translate(pictures | {127: "␡"})
