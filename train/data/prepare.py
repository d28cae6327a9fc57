"""From a recipe to the examples it trains on: read, fanned out, without duplicates and evaluation prompts, mixed.

The run and `draftsmith prepare` both come through here, so what is shown beforehand is what is trained on. What is
left out on the way is listed in the run's folder. Must not know: models, drafters, how anything is shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from speculators.errors import DataError
from train.data.bad_rows import BadRow, BadRows
from train.data.loss_mask import ConversationTokenizer
from train.data.selection import LeftOut, Lists, decontaminate, deduplicate, fan_out
from train.data.sources import Example, load_sources, mix, read_sources
from train.recipe.data_sections import DataSection, Source
from train.recipe.recipe import Recipe

BAD_ROWS, LEFT_OUT = "bad_rows.jsonl", "left_out.jsonl"


@dataclass
class Prepared:
    """The examples of a recipe, as often as they are used, and what became of the others; `listed_in`: the file that
    names what was left out by choice."""

    examples: list[Example]
    bad: BadRows
    left_out: list[LeftOut] = field(default_factory=list)
    read: int = 0  # examples that were read, before any was left out
    listed_in: Path | None = None

    def __str__(self) -> str:
        """One line on what was left out by choice; empty if nothing was."""
        counts = Counter(each.why.replace("_", "-") for each in self.left_out)
        listed = ", ".join(f"{count} {why}" for why, count in counts.items())
        return f"{listed} of {self.read} examples left out" if listed else ""


def bad_rows(section: DataSection, folder: Path | None = None, stage: str = "") -> BadRows:
    """The collector that a recipe's `data` section asks for; it lists bad rows in `folder`, if there is one."""
    path = None if folder is None else folder / _named(BAD_ROWS, stage)
    return BadRows(path, on_bad_row=section.on_bad_row, max_rows=section.max_bad_rows, max_share=section.max_bad_share)


def training_examples(recipe: Recipe, bad: BadRows, folder: Path | None = None, stage: str = "") -> Prepared:
    """The examples of `data.train`. `folder`: where what is left out is listed. DataError if nothing is left."""
    data = recipe.data
    lists = read_sources(data.train, seed=data.shuffle_seed, bad=bad.begin("train"))
    if data.fan_out:
        lists = [[one for example in some for one in fan_out(example)] for some in lists]
    read, left_out = sum(map(len, lists)), list[LeftOut]()
    if data.deduplicate != "off":
        similarity = data.near_duplicate_similarity if data.deduplicate == "near" else None
        lists, found = deduplicate(lists, responses=not recipe.regenerate.enabled, similarity=similarity)
        left_out += found
    held_out = _held_out_sources(recipe)
    if data.decontaminate != "off" and held_out:
        asked = load_sources(held_out, bad=BadRows())  # those that measure say themselves which rows are bad
        ngram = data.decontaminate_ngram if data.decontaminate == "ngram" else None
        lists, found = decontaminate(lists, asked, ngram=ngram)
        left_out += found
    path = None if folder is None else folder / _named(LEFT_OUT, stage)
    if path is not None:
        _list_left_out(path, left_out)
    prepared = Prepared(_mixed(data.train, lists, data.shuffle_seed), bad, left_out, read, path)
    if not prepared.examples:
        raise DataError(f"data.train: no example is left: {prepared}")
    return prepared


def validation_examples(recipe: Recipe, bad: BadRows) -> Prepared:
    """The examples of `data.validation`, of which none is left out by choice."""
    sources = recipe.data.validation
    examples = load_sources(sources, seed=recipe.data.shuffle_seed, bad=bad.begin("validation"))
    return Prepared(examples, bad, read=len(examples))


def _held_out_sources(recipe: Recipe) -> list[Source]:
    """What is measured on, each source once."""
    found = [*recipe.evaluation.prompts, *recipe.data.validation]
    return [source.model_copy(update={"share": None}) for i, source in enumerate(found) if source not in found[:i]]


def _mixed(sources: Sequence[Source], lists: Lists, seed: int) -> list[Example]:
    for source, some in zip(sources, lists):
        if source.share is not None and not some:
            raise DataError(f"{source.label}: nothing is left of it, so it cannot have a share of {source.share:g}")
    return mix(sources, lists, seed=seed)


def askable(examples: Sequence[Example], tokenizer: ConversationTokenizer, bad: BadRows) -> list[Example]:
    """The examples of which a prompt can be made; the others go to `bad`. DataError if none is left."""
    found = []
    for example in examples:
        try:
            tokenizer.prompt_ids(example)
        except BadRow as error:
            bad.refuse(error)
        else:
            found.append(example)
    if not found:
        raise DataError(f"no prompt can be made of any of {len(examples)} examples: {bad}; the first is {bad.first()}")
    return found


def _named(file: str, stage: str) -> str:
    """The file of a stage of the training: bad_rows.warm-up.jsonl."""
    return file.replace(".", f".{stage}.", 1) if stage else file


def _list_left_out(path: Path, left_out: Sequence[LeftOut]) -> None:
    if not left_out:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in left_out), encoding="utf-8")
