"""From a recipe to the examples it trains on: read, without duplicates and evaluation prompts,
mixed.

A run and `draftsmith prepare` share these functions, so that the examples that are shown are those
that are trained on. Examples that are left out are listed in the run's folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftsmith.inference.evaluation.suites import load_suite
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRows
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import conversation_tokenizer, template_date
from draftsmith.train.data.selection import LeftOut, decontaminate, deduplicate, mix
from draftsmith.train.data.sources import load_sources, read_sources
from draftsmith.train.recipe.data_sections import DataSection
from draftsmith.train.recipe.recipe import Recipe

BAD_ROWS = "bad_rows.jsonl"
LEFT_OUT = "left_out.jsonl"


@dataclass
class Prepared:
    """The examples of a recipe, as often as they are used, and those left out; `listed_in`: the
    file that lists the ones left out by choice."""

    examples: list[Example]
    bad: BadRows
    left_out: list[LeftOut] = field(default_factory=list)
    read: int = 0  # examples that were read, before any was left out
    listed_in: Path | None = None

    def __str__(self) -> str:
        """One line on what was left out by choice; empty if nothing was."""
        counts = Counter(item.why for item in self.left_out)
        reasons = ", ".join(f"{count} {why}" for why, count in counts.items())
        listed = "" if self.listed_in is None else f" ({self.listed_in} lists them)"
        return f"{reasons} of {self.read} examples left out{listed}" if reasons else ""


def bad_rows(
    section: DataSection, folder: Path | None = None, *, stage: str = "", use: str = ""
) -> BadRows:
    """The collector that a recipe's `data` section asks for; it lists bad rows in `folder`, if
    there is one. `use`: empty for training, the one whose share of bad rows is bounded."""
    path = None if folder is None else _named(folder / BAD_ROWS, stage, use)
    share = 1.0 if use else section.max_bad_row_share
    return BadRows(path, stop=section.on_bad_row == "error", max_share=share)


def run_tokenizer(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, keep: bool = False
) -> ConversationTokenizer:
    """The tokenizer of a run's conversations, whose template prints the date of the run. `keep`:
    the run starts here, if it has not before."""
    date = template_date(recipe.data, tokenizer, Path(recipe.output_dir), keep=keep)
    return conversation_tokenizer(recipe.data, tokenizer, date)


def training_examples(
    recipe: Recipe, bad: BadRows, folder: Path | None = None, stage: str = ""
) -> Prepared:
    """The examples of `data.train`; `folder` gets the list of those left out. DataError: none is
    left."""
    data = recipe.data
    lists = read_sources(data.train, bad=bad)
    read = sum(map(len, lists))
    lists, left_out = deduplicate(lists, responses=not recipe.regenerate.enabled)
    if data.decontaminate and recipe.measured:
        # the evaluation itself says which of its rows are bad
        sources = [*recipe.evaluation.prompts, *data.validation]
        held_out = load_sources(sources, bad=BadRows())
        lists, contaminated = decontaminate(lists, held_out, suite_turns(recipe))
        left_out += contaminated
    path = None if folder is None else _named(folder / LEFT_OUT, stage)
    if path is not None:
        lines = (json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in left_out)
        write_whole(path, "".join(lines))
    prepared = Prepared(mix(data.train, lists), bad, left_out, read, path)
    if not prepared.examples:
        for i, examples in enumerate(lists):
            if examples:
                share = (
                    f"a fraction of {data.train[i].weight:g} has none of {len(examples)} examples"
                )
                raise DataError(f"{share}; raise it", where=f"data.train.{i}.weight")
        raise DataError(f"no example is left: {prepared}", where="data.train")
    return prepared


def suite_turns(recipe: Recipe) -> list[Example]:
    """Every turn of the user in the recipe's suites, as a prompt. DataError: a file is missing."""
    return [
        Example(f"{name}/{row.category}", row.origin, ({"role": "user", "content": turn},))
        for name, path in recipe.evaluation.suite_paths.items()
        for row in load_suite(name, path)
        for turn in row.turns
    ]


def _named(path: Path, *names: str) -> Path:
    """The file of a stage or use: bad_rows.warm-up.jsonl."""
    return path.with_suffix("".join(f".{name}" for name in names if name) + path.suffix)
