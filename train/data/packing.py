"""Examples -> token rows -> packed rows -> batches, with counts of what was lost on the way.

Rows longer than `max_length` are cut, those left without a supervised token are dropped; both are
counted. Packing joins documents into rows of at most `max_length` tokens with positions that
restart and segment ids that keep attention apart; `Shuffled` is the order in which steps see them.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.inference.progress import Advance, counted, unwatched
from draftsmith.speculators.errors import DataError
from draftsmith.train.data.bad_rows import BadRow, BadRows
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer, TokenRow
from draftsmith.train.data.template_date import asks_for_date, run_date
from draftsmith.train.data.tokenising import tokenise_examples
from draftsmith.train.recipe.data_sections import DataSection

logger = logging.getLogger(__name__)

THINKING = "enable_thinking"  # the chat templates' variable


@dataclass
class RowStatistics:
    """Counts of examples and rows; `tokens` and `supervised` are after cutting."""

    examples: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0  # rows cut at max_length and kept
    dropped_cut: int = 0  # rows whose supervised tokens all lay beyond max_length
    dropped_bad: int = 0  # examples whose mask cannot be proved

    def __str__(self) -> str:
        losses = {
            "cut": self.truncated,
            "dropped after cutting": self.dropped_cut,
            "bad": self.dropped_bad,
        }
        lost = "".join(f", {count} {what}" for what, count in losses.items() if count)
        share = self.supervised / max(self.tokens, 1)
        return (
            f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')},"
            f" {share:.0%} supervised{lost}"
        )


def chat_template_of(section: DataSection) -> str | None:
    """The text of the template file that a recipe's `data` section names; None: it names none."""
    if section.chat_template is None:
        return None
    if not Path(section.chat_template).is_file():
        raise DataError(f"no such file: {section.chat_template}", where="data.chat_template")
    try:
        return Path(section.chat_template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"data.chat_template: {section.chat_template}"
        raise DataError(f"not UTF-8: {error}; save it as such", where=where) from None


def template_date(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, run: Path, *, keep: bool = False
) -> datetime | None:
    """The date of the run in the folder `run`, as `run_date`; None if the chat template asks for
    none."""
    template = chat_template_of(section) or tokenizer.chat_template
    asks = asks_for_date(template if isinstance(template, str) else json.dumps(template))
    return run_date(run, keep=keep) if asks else None


def conversation_tokenizer(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, date: datetime | None = None
) -> ConversationTokenizer:
    """The recipe's `data` section as a ConversationTokenizer; reads the template file it names.
    `date`: of the run, by `template_date`."""
    template = chat_template_of(section)
    if THINKING not in section.chat_template_kwargs and knows_thinking(tokenizer, template):
        logger.warning(
            "the chat template has %s, and it is not set; give chat_template_kwargs {%s: false} or"
            " {%s: true}, as it will be served. Responses that begin with thoughts need thousands"
            " of new tokens",
            *[THINKING] * 3,
        )
    return ConversationTokenizer(
        tokenizer,
        chat_template=template,
        template_kwargs=section.chat_template_kwargs,
        reasoning=section.reasoning,
        date=date,
    )


def thinks(tokenizer: ConversationTokenizer) -> bool:
    """Whether responses begin with thoughts, which the chat template could turn off."""
    off = tokenizer.template_kwargs.get(THINKING) is False
    return not off and knows_thinking(tokenizer.tokenizer, tokenizer.chat_template)


def knows_thinking(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> bool:
    """Whether the chat template (`template`: its text, in place of the tokenizer's) makes another
    prompt with thinking than without."""
    if template is None and not tokenizer.chat_template:
        return False
    question = [{"role": "user", "content": "Hello"}]
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    try:
        prompts = {
            tokenizer.apply_chat_template(question, **options, **{THINKING: mode})
            for mode in (True, False)
        }
    except Exception:  # a template may raise anything; rows that it fails on say so
        return False
    return len(prompts) > 1


def prepare_rows(
    examples: Sequence[Example],
    tokenizer: ConversationTokenizer,
    *,
    max_length: int,
    bad: BadRows,
    num_proc: int | None = None,
    scratch: Path | None = None,
    progress: Advance = unwatched,
) -> tuple[list[TokenRow], RowStatistics]:
    """Token rows of at most `max_length` tokens, in the order of `examples`, and counts of what was
    lost. The last three: as in `tokenise_examples`.

    An example without a row goes to `bad`, which may raise. DataError if no row is left, or `bad`
    takes no more."""
    tokenised: list[TokenRow] = []
    dropped = 0
    convert = partial(tokenizer.rows, max_length=max_length)
    outcomes = tokenise_examples(
        examples, convert, num_proc=num_proc, scratch=scratch, progress=progress
    )
    for outcome in outcomes:
        if isinstance(outcome, BadRow):
            bad.refuse(outcome)
            dropped += 1
        else:
            tokenised += outcome
    kept, statistics = fit_rows(tokenised, max_length)
    statistics.examples = len(examples)
    statistics.dropped_bad = dropped
    if not kept:
        raise DataError(
            f"no row is left of {len(examples)} examples: {dropped} have no provable mask,"
            f" {statistics.dropped_cut} no response within max_length={max_length}. {bad}"
        )
    bad.check_share()
    return kept, statistics


def fit_rows(rows: Iterable[TokenRow], max_length: int) -> tuple[list[TokenRow], RowStatistics]:
    """Cuts rows at `max_length` tokens and drops those left without a supervised one."""
    kept = []
    statistics = RowStatistics()
    for row in rows:
        statistics.examples += 1
        if len(row) > max_length:
            ids = row.input_ids[:max_length]
            mask = row.loss_mask[:max_length]
            row = TokenRow(ids, mask, row.workload, truncated=True)
        if not row.loss_mask.any():
            statistics.dropped_cut += 1
            continue
        kept.append(row)
        statistics.rows += 1
        statistics.tokens += len(row)
        statistics.supervised += int(row.loss_mask.sum())
        statistics.truncated += row.truncated
    return kept, statistics


# ---------------------------------------------------------------------------------------------
# packing


@dataclass(eq=False)
class PackedRow:
    """Documents in one row of T tokens: `segment_ids` from 0, positions that restart in each."""

    input_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T]
    segment_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    workloads: tuple[str, ...]  # of each segment

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def of(cls, *rows: TokenRow) -> PackedRow:
        """One document after the other, each a segment."""
        lengths = [len(row) for row in rows]
        return cls(
            input_ids=np.concatenate([row.input_ids for row in rows]),
            position_ids=np.concatenate([np.arange(size, dtype=np.int32) for size in lengths]),
            segment_ids=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
            loss_mask=np.concatenate([row.loss_mask for row in rows]),
            workloads=tuple(row.workload for row in rows),
        )


def pack(rows: Sequence[TokenRow], max_length: int) -> list[PackedRow]:
    """`packed` at once."""
    return list(packed(rows, max_length))


def packed(rows: Sequence[TokenRow], max_length: int) -> Iterator[PackedRow]:
    """Puts every document into exactly one packed row of at most `max_length` tokens.

    Best fit, longest first: deterministic, and the order says nothing about content, so shuffle
    afterwards."""
    for members in best_fit(list(map(len, rows)), max_length):
        yield PackedRow.of(*(rows[i] for i in members))


def best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Bins of at most `max_length`, as indices: the longest first, where least room is left."""
    bins: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(max_length + 1)]  # room[r]: bins with r tokens left
    sizes: list[int] = []  # the r > 0 whose list is not empty, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = bisect.bisect_left(sizes, length)
        if place < len(sizes):
            left = sizes[place]
            chosen = room[left].pop()
            if not room[left]:
                del sizes[place]
        else:
            left = max_length
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(index)
        if left > length:
            if not room[left - length]:
                bisect.insort(sizes, left - length)
            room[left - length].append(chosen)
    return bins


class Shuffled:
    """The endless stream of 0 .. count - 1 in which each epoch is a permutation of its own."""

    def __init__(self, seed: Sequence[int], count: int) -> None:
        self.seed = seed
        self.count = count
        self._epoch: tuple[int, np.ndarray] | None = None

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, np.random.default_rng([*self.seed, epoch]).permutation(self.count)
        return int(self._epoch[1][offset])


def collate(rows: Sequence[PackedRow], *, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """A batch: input_ids, position_ids, segment_ids (int64) and loss_mask (bool), each [B, T] with
    the longest row's T. Padding has segment -1, position 0 and no loss."""
    size = max(map(len, rows))
    filling = {"input_ids": pad_token_id, "position_ids": 0, "segment_ids": -1, "loss_mask": False}
    batch = {}
    for name, fill in filling.items():
        dtype = torch.bool if name == "loss_mask" else torch.long
        batch[name] = torch.full((len(rows), size), fill, dtype=dtype)
        values = batch[name].numpy()  # the same memory
        for i, row in enumerate(rows):
            values[i, : len(row)] = getattr(row, name)
    return batch
