"""One cell of the acceptance report: one method on one workload at one temperature, and its parts.

A cell checks on construction that its counters agree with each other and with the rates beside
them, so that an edited report does not load. The descriptions of the fields are their documentation
(docs/acceptance-json.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from inference.metrics import acceptance_length, conditional_rates, joint_rates
from inference.report.measurement import OUR_ENGINE, PHASES, LosslessCheck, Record
from speculators.errors import DataError


class Spread(Record):
    """A repeated measurement: its median and quartiles, and the repeats themselves."""

    median: float = Field(description="Median of the repeats.")
    low: float = Field(
        description="First quartile of the repeats (the only value, if there is one repeat)."
    )
    high: float = Field(
        description="Third quartile of the repeats (the only value, if there is one repeat)."
    )
    repeats: list[float] = Field(
        min_length=1, description="One value per interleaved repeat, in the order they ran."
    )

    @classmethod
    def of(cls, repeats: list[float]) -> Spread:
        """Median and quartiles (linear interpolation between the sorted repeats)."""
        if not repeats:
            raise DataError(
                "a spread needs at least one repeat and got none: measure at least once"
            )
        low, median, high = np.quantile(repeats, (0.25, 0.5, 0.75)).tolist()
        return cls(median=median, low=low, high=high, repeats=list(repeats))


class TokensPerSecond(Record):
    """Output tokens per second of wall time, prefill included, over the whole cell."""

    speculative: Spread = Field(description="This runtime, drafting on.")
    autoregressive: Spread | None = Field(
        default=None,
        description="The same engine on the same prompts with drafting off; null if not measured.",
    )
    transformers_generate: Spread | None = Field(
        default=None,
        description=(
            "`transformers.generate` on the same prompts, for reference; null if not measured."
        ),
    )


class TimeShares(Record):
    """Fractions of the speculative runs' wall time; they sum to 1."""

    draft: float = Field(description="Proposing tokens.")
    verify: float = Field(description="The target's forward over the proposals, lm_head included.")
    sample: float = Field(description="Logits to distributions, accept decisions, drawing tokens.")
    schedule: float = Field(description="Admitting requests, assembling batches.")
    commit: float = Field(
        description="Appending tokens, rolling caches back, stop conditions, detokenising."
    )
    prefill: float = Field(description="The target's forwards over prompts.")
    other: float = Field(description="Wall time that no phase claimed.")

    @model_validator(mode="after")
    def _sums_to_one(self) -> TimeShares:
        total = sum(getattr(self, phase) for phase in PHASES)
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"time shares sum to {total:.6f}, expected 1: shares are fractions of wall time"
            )
        return self


class CostModel(Record):
    """Limit of the speedup, from the parts measured alone; formulas in
    `inference/report/cost_model.py`."""

    target_step_ms: float = Field(
        description="V(1): one target forward over one token per row, lm_head included."
    )
    verify_ms: float = Field(
        description="V(K+1): one target forward over K+1 tokens per row, lm_head included."
    )
    draft_ms: float = Field(
        description="D(K): one whole draft phase of K tokens per row (not per token)."
    )
    batch_size: int | None = Field(
        default=None, description="Rows in the forwards that were timed."
    )
    context_length: int | None = Field(
        default=None, description="Tokens already in the cache of each timed row."
    )
    limit_speedup: float = Field(description="τ · V(1) / (V(K+1) + D(K)), τ of the timed runs.")
    efficiency: float | None = Field(
        default=None,
        description=(
            "Measured `speedup_vs_autoregressive.median` ÷ `limit_speedup`: what sampling, "
            "scheduling, committing and prefill leave of the limit. Null if the speedup was not "
            "measured."
        ),
    )


class ExpectedAcceptance(Record):
    """The acceptance length that training's replay expects, beside the one that was measured."""

    acceptance_length: float = Field(
        description=(
            "`expected_acceptance_length`: replay over text the target wrote at this temperature."
        )
    )
    relative_difference: float = Field(
        description="(measured − expected) ÷ expected, measured = `acceptance_length`."
    )
    standard_error: float = Field(
        description=(
            "Standard error of `relative_difference` from the spread over requests; a difference of"
            " more than about three of these is not chance."
        )
    )
    responses: int = Field(description="Responses the replay walked over.")
    own_text_acceptance_length: float | None = Field(
        default=None,
        description=(
            "The same replay over the very text that drafting wrote, where only the accept"
            " decisions are left to chance; null if not computed."
        ),
    )
    own_text_relative_difference: float | None = Field(
        default=None, description="(measured − expected on its own text) ÷ the latter."
    )
    own_text_standard_error: float | None = Field(
        default=None,
        description=(
            "Standard error of `own_text_relative_difference`: a much sharper test that training"
            " and runtime compute the same."
        ),
    )

    @property
    def gap(self) -> tuple[float, float]:
        """|measured − expected| ÷ expected and its standard error, over the same text if it was
        replayed.

        Over independent text the figure is mostly the difference between two samples of text.
        """
        if self.own_text_relative_difference is None:
            return abs(self.relative_difference), self.standard_error
        return abs(self.own_text_relative_difference), self.own_text_standard_error or 0.0


class OutputPositionBin(Record):
    """Acceptance of the rounds that start in one stretch of the output."""

    start: int = Field(
        description="First output index of the bin (0 is the token that prefill produced)."
    )
    stop: int = Field(description="One past the last output index of the bin.")
    rounds: int = Field(
        description=(
            "Rounds whose anchor (the last committed token when they began) lies in the bin."
        )
    )
    acceptance_length: float = Field(description="1 + accepted ÷ rounds, over these rounds.")


class TextPositionBin(Record):
    """Acceptance of the rounds that start in one stretch of the text, prompt included."""

    start: int = Field(
        description="First position of the bin: a power of two; 0 is the prompt's first token."
    )
    stop: int = Field(description="One past the last position of the bin, twice `start`.")
    rounds: int = Field(
        description=(
            "Rounds whose anchor (the last committed token when they began) lies in the bin."
        )
    )
    acceptance_length: float = Field(description="1 + accepted ÷ rounds, over these rounds.")


class Cell(Record):
    """One method on one workload at one temperature."""

    workload: str = Field(
        description="Workload name, or `all`: every workload pooled (sums, not means of means)."
    )
    temperature: float = Field(ge=0, description="Sampling temperature; 0 is greedy.")
    method: str = Field(description="Drafting method (`eagle3`, `ngram`, …).")
    engine: str = Field(
        default=OUR_ENGINE, description="Engine that ran it: `draftsmith` or `vllm`."
    )
    suite: str | None = Field(
        default=None,
        description=(
            "Suite of which the workload is a category, and `all` all of them; null: the"
            " evaluation's own prompts."
        ),
    )
    prompts: int = Field(
        description="Prompts in the cell; of a suite, every turn of a conversation is one."
    )
    output_tokens: int = Field(description="Tokens produced, over all prompts, in one pass.")
    num_drafts: int = Field(description="Rounds that verified a proposal.")
    num_draft_tokens: int = Field(description="Tokens drafted in those rounds.")
    num_accepted_tokens: int = Field(
        description=(
            "Drafted tokens that were accepted and committed (not those past the end of the text)."
        )
    )
    num_accepted_past_end: int | None = Field(
        default=0,
        description=(
            "Of them, those past the end of the text all the same, where an engine counts them and"
            " does not say in which round; null: it counts them and does not say how many."
        ),
    )
    num_accepted_tokens_per_pos: list[int] = Field(
        description="Accepted tokens by draft position 1…K."
    )
    acceptance_length: float = Field(
        description="τ, micro: 1 + num_accepted_tokens ÷ num_drafts over all rounds."
    )
    acceptance_length_macro: float = Field(
        description=(
            "τ, macro: mean over requests of each request's own acceptance length (requests without"
            " a round are left out)."
        )
    )
    joint_acceptance_per_position: list[float | None] = Field(
        description="P(first k drafts all accepted), k = 1…K; null without rounds."
    )
    conditional_acceptance_per_position: list[float | None] = Field(
        description=(
            "P(k-th draft accepted given the first k−1 were), k = 1…K; null where those never were."
        )
    )
    histogram: list[int] = Field(
        description="Rounds by number of accepted drafts, 0…K; sums to num_drafts."
    )
    acceptance_by_output_position: list[OutputPositionBin] = Field(
        default=[], description="Acceptance length along the output, to show decay on long answers."
    )
    acceptance_by_text_position: list[TextPositionBin] = Field(
        default=[],
        description=(
            "Acceptance length by absolute position, prompt included, to show decay in long texts;"
            " empty where an engine does not say what each round accepted."
        ),
    )
    tokens_per_second: TokensPerSecond | None = Field(
        default=None, description="Throughput; null if not timed."
    )
    speedup_vs_autoregressive: Spread | None = Field(
        default=None,
        description=(
            "Tokens per second with drafting ÷ without, same engine: one ratio per interleaved pair"
            " of runs, then the median."
        ),
    )
    speedup_vs_transformers: Spread | None = Field(
        default=None,
        description=(
            "The same against `transformers.generate`; another engine, so named by its name."
        ),
    )
    time_shares: TimeShares | None = Field(
        default=None, description="Where the speculative runs' time went."
    )
    cost_model: CostModel | None = Field(
        default=None, description="The limit and how close the runtime came."
    )
    expected: ExpectedAcceptance | None = Field(
        default=None, description="Acceptance that replay expects."
    )
    lossless: list[LosslessCheck] = Field(
        default=[],
        description="Token equality checks of this cell (greedy cells; one entry per dtype).",
    )

    @property
    def label(self) -> str:
        """The workload, with its suite if it is of one: `mt_bench/writing`."""
        return self.workload if self.suite is None else f"{self.suite}/{self.workload}"

    @property
    def committed_acceptance_length(self) -> float | None:
        """τ without drafts past the end of a text, which is how engines are compared; None if it is
        not known."""
        if self.num_accepted_past_end is None:
            return None
        return acceptance_length(
            self.num_accepted_tokens - self.num_accepted_past_end, self.num_drafts
        )

    @model_validator(mode="after")
    def _agree(self) -> Cell:
        where = f"results[{self.label}, T={self.temperature:g}, {self.method}, {self.engine}]"
        per_pos, drafts = self.num_accepted_tokens_per_pos, self.num_drafts
        expected: dict[str, Any] = {
            "num_accepted_tokens": sum(per_pos),
            "histogram": accepted_histogram(per_pos, drafts),
            "acceptance_length": acceptance_length(self.num_accepted_tokens, drafts),
            "joint_acceptance_per_position": known(joint_rates(per_pos, drafts)),
            "conditional_acceptance_per_position": known(conditional_rates(per_pos, drafts)),
        }
        for name, value in expected.items():
            if not _close(getattr(self, name), value):
                raise ValueError(
                    f"{where}.{name} is {getattr(self, name)}, but the cell's counters give {value}"
                )
        return self


def headline_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that summary, gates and figures speak of: those of the evaluation's own prompts, or
    of the first suite if there are no others."""
    first = None if any(cell.suite is None for cell in cells) or not cells else cells[0].suite
    return [cell for cell in cells if cell.suite == first]


def accepted_histogram(per_pos: list[int], num_drafts: int) -> list[int]:
    """Rounds that accepted exactly j drafts, j = 0…K, from the rounds that accepted at least k, k =
    1…K."""
    return [-difference for difference in np.diff([num_drafts, *per_pos, 0]).tolist()]


def known(rates: list[float]) -> list[float | None]:
    """NaN, which says "never measured" and which JSON lacks, as None."""
    return [None if math.isnan(rate) else rate for rate in rates]


def _close(left: Any, right: Any) -> bool:
    a, b = np.array(left, dtype=float), np.array(right, dtype=float)  # None becomes NaN
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
