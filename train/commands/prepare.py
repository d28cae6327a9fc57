"""`draftsmith prepare`: a recipe's data before anything is trained on it, as tables and a sample
with its mask.

Examples are read and tokenised as a run does it; torch is imported when the command runs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speculators.errors import ConfigError, DataError
from train.commands.options import Overrides, RecipeFile
from train.data.bad_rows import REASONS, BadRow

if TYPE_CHECKING:
    from train.data.loss_mask import ConversationTokenizer, TokenRow
    from train.data.prepare import Prepared
    from train.data.sources import Example
    from train.recipe.recipe import Recipe

BUCKETS = 8  # of a histogram of lengths
BLOCKS = "▁▂▃▄▅▆▇█"
ELIDED = 300  # characters shown at either end of a long stretch without supervision
FIRST = 120  # characters shown of the first row left out for a reason
LEFT_OUT = {
    "duplicate": "asks what an earlier example asks",
    "contaminated": "asks what the evaluation asks",
}


def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Show the mask of this example, counted from 0.")
    ] = 0,
    validation: Annotated[
        bool, typer.Option("--validation", help="Look at data.validation instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Read the data of a recipe as a run would: counts, lengths, what is left out and why, and a
    sample's mask."""
    from train.data.packing import conversation_tokenizer
    from train.data.prepare import bad_rows, training_examples, validation_examples
    from train.recipe.load import load_recipe

    checked = load_recipe(recipe, overrides or ())
    if validation and not checked.data.validation:
        raise ConfigError(f"{recipe}: data.validation is empty; there is nothing to look at")
    folder, stage = Path(checked.output_dir), "validation" if validation else ""
    bad = bad_rows(checked.data, folder, stage)
    with Console(stderr=True).status("reading and tokenising"):
        prepared = (
            validation_examples(checked, bad)
            if validation
            else training_examples(checked, bad, folder)
        )
        tokenizer = conversation_tokenizer(checked.data, checked.target.load_tokenizer())
        report = make_report(checked, prepared, tokenizer)
    if sample >= len(prepared.examples):
        raise ConfigError(
            f"--sample {sample}: there are {len(prepared.examples)} examples, numbered from 0"
        )
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        console = Console()
        _print(console, report, regenerated=checked.regenerate.enabled)
        _print_sample(
            console, prepared.examples[sample], tokenizer, regenerated=checked.regenerate.enabled
        )
    bad.finish()


def make_report(
    recipe: Recipe, prepared: Prepared, tokenizer: ConversationTokenizer
) -> dict[str, Any]:
    """The report as JSON. Tokenises all examples as a run does it; bad ones go to `prepared.bad`.
    DataError if no row is left.

    Where the target rewrites the responses, those of the data are an indication only, and need not
    be there."""
    from train.data.packing import tokenise

    data, regenerated, bad = recipe.data, recipe.regenerate.enabled, prepared.bad
    asked = _Asked(recipe, tokenizer) if regenerated and recipe.regenerate.turns == "last" else None
    uses = Counter(map(id, prepared.examples))
    unique = list({id(example): example for example in prepared.examples}.values())
    rows: dict[str, list[TokenRow]] = {}
    examples, prompt_tokens = Counter[str](), Counter[str]()
    for example, tokenised in zip(unique, tokenise(unique, tokenizer, data.max_length)):
        try:
            if isinstance(tokenised, BadRow) and not regenerated:
                raise tokenised
            prompt = len(tokenizer.prompt_ids(example))
        except BadRow as error:
            bad.refuse(error)
            continue
        times = uses[id(example)]
        if asked is not None:
            written = asked.rows(example, times)
            if written is None:
                continue
            tokenised = written
        examples[example.workload] += times
        prompt_tokens[example.workload] += times * prompt
        rows.setdefault(example.workload, []).extend(
            [] if isinstance(tokenised, BadRow) else tokenised * times
        )
    if not examples or not (regenerated or any(rows.values())):
        raise DataError(f"no row is left: {bad}; the first is {bad.first()}")
    everything = [row for workload in rows.values() for row in workload]
    overall = _lengths(everything, data.max_length, examples.total(), prompt_tokens.total())
    choices = Counter(item.why for item in prepared.left_out)
    first = {item.why: f"{item.origin}: like {item.like}" for item in reversed(prepared.left_out)}
    left_out = [(why, count, bad.first(why)) for why, count in bad.by_reason().items()]
    left_out += [(why, count, first[why]) for why, count in choices.items()]
    left_out += [(why, count, "") for why, count in asked.left_out.items()] if asked else []
    if overall["dropped_cut"]:
        left_out.append(
            (f"no response within {data.max_length} tokens", overall["dropped_cut"], "")
        )
    lists = [(bad.path, bad.count()), (prepared.listed_in, len(prepared.left_out))]
    return {
        "use": bad.use,
        "max_length": data.max_length,
        "responses": "to be rewritten by the target" if regenerated else "those of the data",
        "earlier_turns": asked.account.earlier if asked else 0,
        "all": overall,
        "workloads": {
            name: _lengths(own, data.max_length, examples[name], prompt_tokens[name])
            for name, own in rows.items()
        },
        "left_out": [
            {"why": why, "count": count, "first": example} for why, count, example in left_out
        ],
        "lists": [str(path) for path, count in lists if path and count],
        **tokenizer.template_facts(),
    }


class _Asked:
    """What a run would ask the target for, one response of every example: its rows have as many
    tokens of a response as the data's own, max_new_tokens at most."""

    def __init__(self, recipe: Recipe, tokenizer: ConversationTokenizer) -> None:
        from train.pipeline.data_stage import facts_of
        from train.regeneration.conversations import Account, ConversationRules

        facts = facts_of(recipe, tokenizer.tokenizer)
        facts = replace(facts, max_model_len=min(recipe.data.max_length, facts.max_model_len))
        self.tokenizer, self.section, self.account = tokenizer, recipe.regenerate, Account()
        self.rules = ConversationRules(self.section, tokenizer, self.account, facts)

    @property
    def left_out(self) -> dict[str, int]:
        return dict(self.account.left_out)

    def rows(self, example: Example, times: int) -> list[TokenRow] | None:
        """The rows of an example that is used `times` times; None if it is left out."""
        from train.data.loss_mask import TokenRow
        from train.regeneration.conversations import Conversation

        before = self.account.earlier
        ask = Conversation(0, example, 0.0, self.rules).ask()
        self.account.earlier += (times - 1) * (self.account.earlier - before)
        if ask is None:
            for why in self.left_out:
                self.account.left_out[why] += times - 1
            return None
        turn = len(ask.example.messages)
        if example.prompt is not None or turn >= len(example.messages):
            return []  # the data have no response to it
        text = example.messages[turn].get("content") or ""
        length = len(self.tokenizer.tokenizer(text, add_special_tokens=False).input_ids) + 1
        written = min(length, ask.params.max_tokens or length)
        return [TokenRow.from_response(ask.prompt_ids, [0] * written, example.workload)]


def _lengths(
    rows: list[TokenRow], max_length: int, examples: int, prompt_tokens: int
) -> dict[str, Any]:
    """Counts, quantiles and a histogram of the rows' tokens, as they are trained on."""
    import numpy as np

    from train.data.packing import fit_rows

    kept, statistics = fit_rows(rows, max_length)
    statistics.examples = examples
    lengths = np.array([len(row) for row in kept], int)
    edges = np.unique(np.linspace(0, max_length, BUCKETS + 1).round().astype(int)).tolist()
    buckets = np.bincount(
        np.searchsorted(edges[1:], lengths), minlength=len(edges) - 1
    ).tolist()  # (low, high]
    names = {"min": 0, "median": 50, "p90": 90, "p99": 99, "max": 100}
    quantiles = (
        np.percentile(lengths, list(names.values()), method="inverted_cdf").tolist() if kept else []
    )
    return {
        "examples": examples,
        "prompt_tokens": prompt_tokens,
        **statistics.to_dict(),
        "lengths": dict(zip(names, map(int, quantiles))),
        "histogram": [
            {"from": low + 1, "to": high, "rows": count}
            for low, high, count in zip(edges, edges[1:], buckets)
        ],
    }


def _print(console: Console, report: dict[str, Any], *, regenerated: bool) -> None:
    console.print(_counts(report))
    if regenerated:
        console.print(
            "The run has the target write the responses anew; rows show the data's own, cut at"
            " max_new_tokens.\n",
            style="dim",
        )
    if earlier := report["earlier_turns"]:
        console.print(
            f"{earlier:,} conversations: an earlier turn, as the last prompt leaves no room\n",
            style="dim",
        )
    if report["all"]["rows"]:
        quantiles = ", ".join(
            f"{name} {value:,}" for name, value in report["all"]["lengths"].items()
        )
        console.print(Text("Tokens per row", style="bold"), Text(quantiles, style="dim"))
    if not report["left_out"]:
        return
    table = _table("Left out", "why", "rows", "the first", right=("rows",))
    for item in report["left_out"]:
        why, first = item["why"], item["first"]
        words = REASONS.get(why) or LEFT_OUT.get(why) or why
        shown = first if len(first) <= FIRST else first[: FIRST - 3] + "..."
        table.add_row(Text(words), f"{item['count']:,}", Text(shown, style="dim"))
    console.print(table)
    for path in report["lists"]:
        console.print(f"{path} lists them.", style="dim", highlight=False, soft_wrap=True)
    console.print()


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=title or None,
        title_justify="left",
        title_style="bold",
    )
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _counts(report: dict[str, Any]) -> Table:
    numbers = ("examples", "prompt", "rows", "tokens", "superv.", "cut")
    table = _table("", "workload", *numbers, f"1 … {report['max_length']}", right=numbers)
    groups = list(report["workloads"].items())
    for name, counts in [*groups, ("all", report["all"])] if len(groups) > 1 else groups:
        cells = [
            name,
            f"{counts['examples']:,}",
            f"{counts['prompt_tokens'] / max(counts['examples'], 1):.0f}",
        ]
        if counts["rows"]:
            cells += [
                f"{counts['rows']:,}",
                f"{counts['tokens']:,}",
                f"{counts['supervised_share']:.0%}",
            ]
            cells += [
                f"{counts['truncated']:,}",
                _sparkline([bucket["rows"] for bucket in counts["histogram"]]),
            ]
        else:
            cells += ["to be written", "-", "-", "-", "-"]
        table.add_row(*map(Text, cells), style="bold" if counts is report["all"] else "")
    return table


def _sparkline(counts: list[int]) -> str:
    """One character per bucket, its height relative to the fullest; a space for an empty one."""
    top = max(counts)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * n / top)] if n else " " for n in counts)


def _print_sample(
    console: Console, example: Example, tokenizer: ConversationTokenizer, *, regenerated: bool
) -> None:
    """The rows of an example, supervised text green and the rest dim; the prompt alone if its
    response is missing."""
    import numpy as np

    try:
        rows = [(row.input_ids, row.loss_mask) for row in tokenizer.rows(example)]
    except BadRow:
        if not regenerated:
            raise
        ids = np.asarray(tokenizer.prompt_ids(example))
        rows = [(ids, np.zeros(len(ids), dtype=bool))]
    console.print(Text(f"{example.origin}, {example.workload}", style="bold"))
    for ids, mask in rows:
        text = Text()
        for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
            words, supervised = (
                str(tokenizer.tokenizer.decode(ids[part], skip_special_tokens=False)),
                mask[part[0]],
            )
            if not supervised and len(words) > 2 * ELIDED:
                words = f"{words[:ELIDED]} […] {words[-ELIDED:]}"
            text.append(_visible(words), style="green" if supervised else "dim")
        console.print(text)
        console.print(
            f"{mask.sum()} of {len(ids)} tokens are supervised (green)",
            style="dim",
            highlight=False,
        )


def _visible(words: str) -> str:
    """Control characters as pictures, so that a terminal shows them and obeys none."""
    pictures: dict[int, Any] = {
        code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"
    }
    return words.translate(pictures | {127: "␡"})
