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

from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.commands.options import Overrides, RecipeFile

if TYPE_CHECKING:
    from draftsmith.train.data.loss_mask import ConversationTokenizer, TokenRow
    from draftsmith.train.data.prepare import Prepared
    from draftsmith.train.data.sources import Example
    from draftsmith.train.recipe.recipe import Recipe

ELIDED = 300  # characters shown at either end of a long stretch without supervision
FIRST = 120  # characters shown of the first row left out for a reason
QUANTILES = {"min": 0, "median": 50, "p90": 90, "p99": 99, "max": 100}
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Read the data of a recipe as a run would: counts, lengths, what is left out and why, and a
    sample's mask."""
    from draftsmith.train.data.packing import conversation_tokenizer
    from draftsmith.train.data.prepare import bad_rows, training_examples, validation_examples
    from draftsmith.train.recipe.load import load_recipe

    checked = load_recipe(recipe, overrides or ())
    if validation and not checked.data.validation:
        raise ConfigError(
            "data.validation is empty; there is nothing to look at", where=f"{recipe}"
        )
    folder = Path(checked.output_dir)
    bad = bad_rows(checked.data, folder, "validation" if validation else "")
    bad.stop = False  # all are shown; a run may stop at the first
    with Console(stderr=True).status("reading and tokenising"):
        if validation:
            prepared = validation_examples(checked, bad)
        else:
            prepared = training_examples(checked, bad, folder)
        tokenizer = conversation_tokenizer(checked.data, checked.target.load_tokenizer())
        report = make_report(checked, prepared, tokenizer)
    if sample >= len(prepared.examples):
        raise ConfigError(
            f"there are {len(prepared.examples)} examples, numbered from 0",
            where=f"--sample {sample}",
        )
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        console = Console()
        _print(console, report)
        _print_sample(console, prepared.examples[sample], tokenizer)
    if bad.reasons and checked.data.on_bad_row == "error":
        raise DataError(
            f"error stops the run: {bad}; drop leaves them out", where="data.on_bad_row"
        )


def make_report(
    recipe: Recipe, prepared: Prepared, tokenizer: ConversationTokenizer
) -> dict[str, Any]:
    """The report as JSON. Tokenises all examples as a run does it; bad ones go to `prepared.bad`.
    DataError if no row is left.

    Where the target rewrites the responses, those of the data are an indication only, and need not
    be there."""
    from draftsmith.train.data.bad_rows import BadRow
    from draftsmith.train.data.packing import tokenise

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
        found = [] if isinstance(tokenised, BadRow) else tokenised
        if asked is not None:
            written = asked.rows(example, times)
            if written is None:
                continue
            found = written
        examples[example.workload] += times
        prompt_tokens[example.workload] += times * prompt
        rows.setdefault(example.workload, []).extend(found * times)
    if not examples or not (regenerated or any(rows.values())):
        raise DataError(f"no row is left: {bad}")
    everything = [row for workload in rows.values() for row in workload]
    overall = _lengths(everything, data.max_length, examples.total(), prompt_tokens.total())
    left_out = Counter(item.why for item in prepared.left_out)
    first = {item.why: f"{item.origin}: like {item.like}" for item in reversed(prepared.left_out)}
    if bad.reasons:
        left_out["bad"], first["bad"] = len(bad.reasons), bad.first()
    left_out.update(asked.account.left_out if asked else {})
    if overall["dropped_cut"]:
        left_out[f"no response within {data.max_length} tokens"] = overall["dropped_cut"]
    lists = {bad.path: bad.reasons, prepared.listed_in: prepared.left_out}
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
            {"why": why, "count": count, "first": first.get(why, "")}
            for why, count in left_out.items()
        ],
        "lists": [str(path) for path, listed in lists.items() if path and listed],
        **tokenizer.template_facts(),
    }


class _Asked:
    """What a run would ask the target for, one response of every example: its rows have as many
    tokens of a response as the data's own, max_new_tokens at most."""

    def __init__(self, recipe: Recipe, tokenizer: ConversationTokenizer) -> None:
        from draftsmith.train.pipeline.data_stage import facts_of
        from draftsmith.train.regeneration.conversations import Account, ConversationRules

        facts = facts_of(recipe, tokenizer.tokenizer)
        facts = replace(facts, max_model_len=min(recipe.data.max_length, facts.max_model_len))
        self.tokenizer, self.account = tokenizer, Account()
        self.rules = ConversationRules(recipe.regenerate, tokenizer, self.account, facts)

    def rows(self, example: Example, times: int) -> list[TokenRow] | None:
        """The rows of an example that is used `times` times; None if it is left out."""
        from draftsmith.train.data.loss_mask import TokenRow
        from draftsmith.train.regeneration.conversations import Conversation

        for _ in range(times):
            ask = Conversation(0, example, 0.0, self.rules).ask()
        if ask is None:
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
    """Counts and quantiles of the rows' tokens, as they are trained on."""
    import numpy as np

    from draftsmith.train.data.packing import fit_rows

    kept, statistics = fit_rows(rows, max_length)
    statistics.examples = examples
    lengths, shares = [len(row) for row in kept] or [0], list(QUANTILES.values())
    quantiles = np.percentile(lengths, shares, method="inverted_cdf").astype(int).tolist()
    return {
        "examples": examples,
        "prompt_tokens": prompt_tokens,
        **statistics.to_dict(),
        "lengths": dict(zip(QUANTILES, quantiles)) if kept else {},
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    numbers = ("examples", "prompt", "rows", "tokens", "superv.", "cut")
    table = _table("", "workload", *numbers, right=numbers)
    groups = [*report["workloads"].items(), ("all", report["all"])]
    for name, counts in groups if len(groups) > 2 else groups[:1]:
        cells = [f"{counts['examples']:,}"]
        cells.append(f"{counts['prompt_tokens'] / max(counts['examples'], 1):.0f}")
        if counts["rows"]:
            cells += [f"{counts[key]:,}" for key in ("rows", "tokens")]
            cells += [f"{counts['supervised_share']:.0%}", f"{counts['truncated']:,}"]
        else:
            cells.append("to be written")
        table.add_row(*map(Text, [name, *cells]), style="bold" if name == "all" else "")
    console.print(table)
    if lengths := report["all"]["lengths"]:
        quantiles = ", ".join(f"{name} {value:,}" for name, value in lengths.items())
        console.print(f"Tokens per row: {quantiles}", highlight=False)
    if report["responses"] == "to be rewritten by the target":
        console.print(
            "The run has the target write the responses anew; rows show the data's own, cut at"
            " max_new_tokens.",
            style="dim",
        )
    if earlier := report["earlier_turns"]:
        console.print(
            f"{earlier:,} conversations: an earlier turn, as the last prompt leaves no room",
            style="dim",
        )
    if report["left_out"]:
        table = _table("Left out", "why", "rows", "the first", right=("rows",))
        for item in report["left_out"]:
            first = item["first"]
            shown = first if len(first) <= FIRST else first[: FIRST - 3] + "..."
            table.add_row(Text(item["why"]), f"{item['count']:,}", Text(shown, style="dim"))
        console.print(table)
    for path in report["lists"]:
        console.print(f"{path} lists them.", style="dim", highlight=False, soft_wrap=True)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _print_sample(console: Console, example: Example, tokenizer: ConversationTokenizer) -> None:
    """The rows of an example, supervised text green and the rest dim; the prompt alone if it has no
    row."""
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
        count = f"{mask.sum()} of {len(ids)} tokens are supervised (green)"
        console.print(count, style="dim", highlight=False)
