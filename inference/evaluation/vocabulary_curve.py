"""The size of a draft vocabulary, chosen by measurement: the tokens that a round writes at each
size over what such a round costs.

A small vocabulary makes a draft cheaper, and ends a chain at every token that it lacks. With K
drafts a round writes τ tokens in the time V(K + 1) + D(K) of a verification and of the drafts, and
plain decoding one in V(1) (engine/round_costs.py); the gain of a size is τ V(1) ÷ (V(K + 1) +
D(K)). Of these τ and D(K) depend on the size. What a round takes beside them, such as sampling from
p, is left out: it is the same for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from draftsmith.inference.engine.round_costs import time_round
from draftsmith.inference.engine_options import EngineOptions
from draftsmith.inference.entrypoints.draft_vocabulary import (
    SIZE,
    apply_draft_vocabulary,
    proposed_ids,
    read_token_ids,
)
from draftsmith.inference.entrypoints.loading import end_of_sequence_ids, load_drafter_for
from draftsmith.inference.entrypoints.text_generator import TextGenerator
from draftsmith.inference.evaluation.expected_acceptance import WrittenText, expected_acceptance
from draftsmith.inference.report.table import new_table
from draftsmith.inference.spec_decode.proposers.head_options import HeadOptions
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.draft_vocab import coverage

SMALLEST = 1024  # tokens: below it a head costs little beside everything else
SWEEPS = 2  # over all sizes, so that a machine that slows down does not slow one of them alone
NOISE = 0.01  # share of a gain, of measurements on a quiet machine
LONGEST = 256  # tokens of the texts that rounds are timed in

Drafters = Callable[[], Iterable[Drafter]]  # one for each size, one after the other


@dataclass(frozen=True)
class RoundPrice:
    """What a round with K drafts costs, in plain decoding steps. `drafts`: of these, the drafts;
    `whole`: with their verification."""

    drafts: float
    whole: float


@dataclass(frozen=True)
class VocabularySize:
    """A point of the curve.

    size               tokens that are scored
    coverage           the share of the judged text's tokens that are among them
    acceptance_length  τ at K drafts
    """

    size: int
    coverage: float
    acceptance_length: float
    price: RoundPrice

    @property
    def gain(self) -> float:
        """The expected speed of rounds with drafts, over plain decoding."""
        return self.acceptance_length / self.price.whole

    def record(self) -> dict[str, Any]:
        """Its figures as plain data."""
        return asdict(self) | {"gain": self.gain}


def sizes_to_try(most: int) -> list[int]:
    """`most` tokens, and the powers of two below it down to SMALLEST, descending."""
    powers = [1 << bits for bits in range(most.bit_length())]
    return [most, *(size for size in reversed(powers) if SMALLEST <= size < most)]


def fastest(curve: Sequence[VocabularySize]) -> VocabularySize:
    """The size with the largest gain; of those that noise alone parts from it the largest, which
    lacks least of other texts."""
    best = max(point.gain for point in curve)
    equal = [point for point in curve if point.gain >= best * (1 - NOISE)]
    return max(equal, key=lambda point: point.size)


def measure_prices(
    drafters: Drafters, target: FrozenTarget, k: int, rows: int
) -> dict[int, RoundPrice]:
    """The price of a round of `rows` requests by the size of its drafter's vocabulary. Every sweep
    makes the drafters anew, so that one at a time is in memory; the least of each time counts, as a
    disturbance only ever makes it longer."""
    plain: list[float] = []
    verification: list[float] = []
    drafts: dict[int, list[float]] = {}
    for _ in range(SWEEPS):
        for drafter in drafters():
            size = drafter.config.draft_vocab_size
            options = EngineOptions(
                max_num_seqs=rows, max_model_len=min(LONGEST, drafter.max_length or LONGEST)
            )
            generator = TextGenerator.from_modules(
                target, drafter=drafter, drafting={"num_speculative_tokens": k}, options=options
            )
            generator.warm_up(longest=options.max_model_len)
            seconds = time_round(generator.engine, rows)
            plain.append(seconds.plain)
            verification.append(seconds.verification)
            drafts.setdefault(size, []).append(seconds.drafts)
    step = min(plain)
    return {
        size: RoundPrice(min(times) / step, (min(verification) + min(times)) / step)
        for size, times in drafts.items()
    }


# ------------------------------------------------------------------ of a drafter that is there


class LoadedSizes:
    """An exported drafter at each size that its vocabulary can be reduced to when it is loaded.

    `config`: how it drafts; rows are chosen as at loading, by the counts that the export records or
    by `draft_token_ids`, so that no text that judges has chosen them. ConfigError: neither is
    there, or its rounds are not chains of K drafts, which alone a replay foresees."""

    def __init__(self, target: FrozenTarget, tokenizer: Any, config: HeadOptions) -> None:
        greedy = config.draft_sample_method == "greedy"
        varies = config.enable_adaptive_verification or config.num_speculative_tokens_per_batch_size
        if config.tree is not None or greedy or varies:
            raise ConfigError(
                "auto weighs chains of K drafts that are sampled; give a number of tokens, or leave"
                " trees, other lengths and greedy drafts out of --speculative-config",
                where="--draft-vocab",
            )
        self._tokenizer = tokenizer
        self._config = config.model_copy(update={SIZE: None})
        whole = config.model_copy(update={SIZE: None, "draft_token_ids": None})
        self.target, drafter = load_drafter_for(target, whole, tokenizer)
        assert drafter is not None, "options of a head name one"
        self._whole = whole
        self._ends = end_of_sequence_ids(self.target, tokenizer)
        most = len(proposed_ids(drafter))
        if config.draft_token_ids is not None:
            most = len(read_token_ids(config.draft_token_ids))
        self.sizes = sizes_to_try(most)

    def drafters(self) -> Iterator[Drafter]:
        """The drafter at each size, descending; each is the one before, with rows taken out."""
        _, drafter = load_drafter_for(self.target, self._whole, self._tokenizer)
        assert drafter is not None
        for size in self.sizes:
            if size < len(proposed_ids(drafter)):
                config = self._config.model_copy(update={SIZE: size})
                drafter = apply_draft_vocabulary(drafter, config, self._ends)
            yield drafter

    def curve(
        self,
        prices: Mapping[int, RoundPrice],
        texts: Sequence[WrittenText],
        temperature: float,
        k: int,
    ) -> list[VocabularySize]:
        """A point for each size, by exact replay of `texts`, which the target wrote at this
        temperature. `prices`: of its rounds."""
        counts = torch.zeros(self.target.vocab_size, dtype=torch.long)
        for _, output in texts:
            counts += torch.bincount(torch.tensor(output), minlength=len(counts))
        return [
            VocabularySize(
                size=size,
                coverage=coverage(counts, proposed_ids(drafter)),
                acceptance_length=_expected_length(self.target, drafter, texts, temperature, k),
                price=prices[drafter.config.draft_vocab_size],
            )
            for size, drafter in zip(self.sizes, self.drafters(), strict=True)
        ]


def _expected_length(
    target: FrozenTarget,
    drafter: Drafter,
    texts: Sequence[WrittenText],
    temperature: float,
    k: int,
) -> float:
    results = expected_acceptance(target, drafter, texts, temperature, k)
    return sum(results, ReplayResult()).expected_acceptance_length


# ------------------------------------------------------------------ printed


def curve_table(curve: Sequence[VocabularySize], title: str) -> Table:
    """A row for each size; the fastest is marked."""
    table = new_table(title, "tokens", "coverage", "τ", "drafts", "round", "gain", "")
    chosen = fastest(curve)
    for point in curve:
        table.add_row(
            f"{point.size:,}",
            f"{point.coverage:.2%}",
            f"{point.acceptance_length:.3f}",
            f"{point.price.drafts:.3f}",
            f"{point.price.whole:.3f}",
            f"{point.gain:.3f}",
            "chosen" if point is chosen else "",
        )
    table.caption = (
        "coverage: of the judged text; drafts, round: their cost in plain decoding steps; gain: τ"
        " over the cost of a round"
    )
    table.caption_justify = "left"
    return table
