"""What `draftsmith prepare` counts: rows, tokens, lengths and losses by workload; a sample with its mask.

Must not know how it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from speculators.errors import DataError
from train.data.bad_rows import BadRow
from train.data.loss_mask import ConversationTokenizer, TokenRow
from train.data.packing import RowStatistics, fit_rows, tokenise
from train.data.prepare import Prepared
from train.data.sources import Example
from train.recipe.recipe import Recipe

BUCKETS = 8  # of a histogram


@dataclass
class WorkloadReport:
    """Counts of one workload. `lengths`: tokens of each row as it is trained on; `edges`: of the buckets they go to."""

    name: str
    examples: int
    prompt_tokens: int
    statistics: RowStatistics
    lengths: np.ndarray
    edges: list[int]

    @property
    def rows(self) -> int:
        return self.statistics.rows

    @property
    def tokens(self) -> int:
        return self.statistics.tokens

    @property
    def supervised(self) -> int:
        return self.statistics.supervised

    @property
    def truncated(self) -> int:
        return self.statistics.truncated

    @property
    def mean_prompt(self) -> float:
        return self.prompt_tokens / max(self.examples, 1)

    @cached_property
    def histogram(self) -> list[int]:
        """Rows of each bucket (low, high]."""
        places = np.searchsorted(self.edges[1:], self.lengths)
        return np.bincount(places, minlength=len(self.edges) - 1).tolist()

    @property
    def quantiles(self) -> dict[str, int]:
        if not len(self.lengths):
            return {}
        names = {"min": 0, "median": 50, "p90": 90, "p99": 99, "max": 100}
        found = np.percentile(self.lengths, list(names.values()), method="inverted_cdf")
        return {name: int(value) for name, value in zip(names, found)}

    def quantiles_text(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in self.quantiles.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "prompt_tokens": self.prompt_tokens,
            **self.statistics.to_dict(),
            "lengths": self.quantiles,
            "histogram": [
                {"from": low + 1, "to": high, "rows": count}
                for low, high, count in zip(self.edges, self.edges[1:], self.histogram)
            ],
        }


@dataclass
class DataReport:
    """`all`: the workloads together; `left_out`: (reason, count, the first of them); `lists`: files that name each."""

    use: str
    max_length: int
    regenerated: bool
    workloads: list[WorkloadReport]
    all: WorkloadReport
    left_out: list[tuple[str, int, str]]
    lists: list[Path]
    template: dict[str, Any]
    edges: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "use": self.use,
            "max_length": self.max_length,
            "responses": "to be rewritten by the target" if self.regenerated else "those of the data",
            "all": self.all.to_dict(),
            "workloads": {each.name: each.to_dict() for each in self.workloads},
            "left_out": [{"why": why, "count": count, "first": first} for why, count, first in self.left_out],
            "lists": [str(path) for path in self.lists],
            **self.template,
        }


def report(recipe: Recipe, prepared: Prepared, tokenizer: ConversationTokenizer) -> DataReport:
    """Tokenises all examples, as the run would; bad ones go to `prepared.bad`. DataError if no row is left.

    Where the target rewrites the responses, those of the data are only an indication, and need not be there.
    """
    data, regenerated = recipe.data, recipe.regenerate.enabled
    uses = Counter(map(id, prepared.examples))
    once = list({id(example): example for example in prepared.examples}.values())
    rows: dict[str, list[TokenRow]] = {}
    examples, prompts = Counter[str](), Counter[str]()
    for example, found in zip(once, tokenise(once, tokenizer, data.max_length, data.num_proc)):
        try:
            if isinstance(found, BadRow) and not regenerated:
                raise found
            prompt = len(tokenizer.prompt_ids(example))
        except BadRow as error:
            prepared.bad.refuse(error)
            continue
        times = uses[id(example)]
        examples[example.workload] += times
        prompts[example.workload] += times * prompt
        rows.setdefault(example.workload, []).extend([] if isinstance(found, BadRow) else found * times)
    if not examples or not (regenerated or any(rows.values())):
        raise DataError(f"no row is left: {prepared.bad}; the first is {prepared.bad.first()}")
    edges = np.unique(np.linspace(0, data.max_length, BUCKETS + 1).round().astype(int)).tolist()

    def of(name: str, wanted: Sequence[str]) -> WorkloadReport:
        kept, statistics = fit_rows((row for each in wanted for row in rows[each]), data.max_length)
        count, asked = sum(examples[each] for each in wanted), sum(prompts[each] for each in wanted)
        statistics.examples = count
        return WorkloadReport(name, count, asked, statistics, np.array([len(row) for row in kept], int), edges)

    whole, bad = of("all", list(rows)), prepared.bad
    chosen = Counter(each.why for each in prepared.left_out)
    first = {each.why: f"{each.origin}: like {each.like}" for each in reversed(prepared.left_out)}
    left_out = [(why, count, bad.first(why)) for why, count in bad.by_reason().items()]
    left_out += [(why, count, first[why]) for why, count in chosen.items()]
    if whole.statistics.dropped_cut:
        left_out.append((f"no response within {data.max_length} tokens", whole.statistics.dropped_cut, ""))
    lists = [
        path for path, some in ((bad.path, bad.count()), (prepared.listed_in, len(prepared.left_out))) if path and some
    ]
    workloads = [of(name, [name]) for name in rows]
    facts = tokenizer.template_facts()
    return DataReport(bad.use, data.max_length, regenerated, workloads, whole, left_out, lists, facts, edges)


# --------------------------------------------------------------------------------------------- a sample


@dataclass(frozen=True)
class SampleRow:
    """`parts`: stretches of text, and whether each is supervised."""

    parts: list[tuple[str, bool]]
    supervised: int
    tokens: int


@dataclass(frozen=True)
class Sample:
    origin: str
    workload: str
    rows: list[SampleRow]


def show_sample(example: Example, tokenizer: ConversationTokenizer, *, regenerated: bool) -> Sample:
    """The rows of an example as text; of one whose response is still to be written, the prompt."""
    try:
        rows = [(row.input_ids, row.loss_mask) for row in tokenizer.rows(example)]
    except BadRow:
        if not regenerated:
            raise
        ids = np.asarray(tokenizer.prompt_ids(example))
        rows = [(ids, np.zeros(len(ids), dtype=bool))]
    made = []
    for ids, mask in rows:
        places = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
        decode = tokenizer.tokenizer.decode
        parts = [(str(decode(ids[some], skip_special_tokens=False)), bool(mask[some[0]])) for some in places]
        made.append(SampleRow(parts, int(mask.sum()), len(ids)))
    return Sample(example.origin, example.workload, made)
