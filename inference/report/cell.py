"""One cell of the acceptance report: one method on one workload at one temperature.

Counters and times are stored, every rate is a property computed from them. The descriptions of the
fields are their documentation (docs/acceptance-json.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from pydantic import Field, computed_field

from inference.metrics import acceptance_length, conditional_rates, joint_rates
from inference.report.cost_model import efficiency, speedup_limit
from inference.report.measurement import (
    AUTOREGRESSIVE,
    OUR_ENGINE,
    PHASES,
    SPECULATIVE,
    TRANSFORMERS,
    Costs,
    LosslessCheck,
)
from inference.report.record import Record
from inference.report.speed import Estimate, Speeds, TimedPass, stalled

KINDS = {  # of timed passes, in words
    SPECULATIVE: "drafting",
    AUTOREGRESSIVE: "drafting off",
    TRANSFORMERS: "transformers.generate",
}


class TokensPerSecond(Record):
    """Output tokens per second of wall time, prefill included, on the timed prompts."""

    speculative: Estimate = Field(description="Drafting on.")
    autoregressive: Estimate | None = Field(
        default=None, description="The same engine with drafting off; null if not measured."
    )
    transformers_generate: Estimate | None = Field(
        default=None, description="`transformers.generate`; null if not measured."
    )


class ExpectedAcceptance(Record):
    """The acceptance length that training's replay expects on the very text that drafting wrote,
    where only the accept decisions are left to chance."""

    acceptance_length: float = Field(description="`expected_acceptance_length` by replay.")
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


class PositionBin(Record):
    """Acceptance of the rounds with a draft that start in one stretch of the text, prompt
    included."""

    start: int = Field(
        description="First position of the bin: a power of two; 0 is the prompt's first token."
    )
    stop: int = Field(description="One past the last position of the bin, twice `start`.")
    rounds: int = Field(
        description=(
            "Rounds with a draft whose anchor (the last committed token when they began) lies in"
            " the bin."
        )
    )
    num_accepted_tokens: int = Field(description="Drafts accepted in them.")

    @computed_field(description="1 + accepted ÷ rounds, over these rounds.")
    @property
    def acceptance_length(self) -> float:
        return acceptance_length(self.num_accepted_tokens, self.rounds)


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
    num_rounds: int | None = Field(
        description="Target forwards after the prefills, counted per request; null: not known."
    )
    num_drafts: int = Field(description="Those of them that verified a proposal.")
    num_draft_tokens: int = Field(description="Tokens drafted in those rounds.")
    num_accepted_past_end: int | None = Field(
        default=0,
        description=(
            "Accepted drafts past the end of the text, where an engine counts them and does not say"
            " in which round; null: it counts them and does not say how many."
        ),
    )
    num_accepted_tokens_per_pos: list[int] = Field(
        description="Accepted tokens by draft position 1…K."
    )
    acceptance_length_macro: float = Field(
        description=(
            "τ, macro: mean over requests of each request's own acceptance length (requests without"
            " a draft are left out)."
        )
    )
    acceptance_by_position: list[PositionBin] = Field(
        default=[],
        description=(
            "Acceptance length by absolute position, prompt included, to show decay in long texts;"
            " empty where an engine does not say what each round drafted."
        ),
    )
    passes: dict[str, list[TimedPass]] = Field(
        default={},
        description=(
            "Every timed pass, by kind: `speculative`, `autoregressive`, `transformers_generate`;"
            " the same prompts in every repeat."
        ),
    )
    phase_seconds: dict[str, float] = Field(
        default={}, description="Seconds by phase, over all speculative passes."
    )
    costs: Costs | None = Field(default=None, description="The parts of a round, timed alone.")
    expected: ExpectedAcceptance | None = Field(
        default=None, description="Acceptance that replay expects."
    )
    lossless: list[LosslessCheck] = Field(
        default=[],
        description="Token equality checks of this cell (greedy cells; one entry per dtype).",
    )

    @computed_field(
        description="Drafted tokens that were accepted and committed (but `num_accepted_past_end`)."
    )
    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    @computed_field(
        description=(
            "τ, micro: 1 + num_accepted_tokens ÷ num_drafts, over all rounds with a draft (vLLM's"
            " definition)."
        )
    )
    @property
    def acceptance_length(self) -> float:
        return acceptance_length(self.num_accepted_tokens, self.num_drafts)

    @computed_field(
        description=(
            "1 + num_accepted_tokens ÷ num_rounds: over all rounds, those without a draft too. It"
            " is what the speedup goes by, and equals τ for drafters that always draft."
        )
    )
    @property
    def tokens_per_forward(self) -> float | None:
        if self.num_rounds is None:
            return None
        return acceptance_length(self.num_accepted_tokens, self.num_rounds)

    @computed_field(description="num_drafts ÷ num_rounds: share of the rounds with a draft.")
    @property
    def drafted_share(self) -> float | None:
        return self.num_drafts / self.num_rounds if self.num_rounds else None

    @computed_field(description="P(first k drafts all accepted), k = 1…K; null without rounds.")
    @property
    def joint_acceptance_per_position(self) -> list[float | None]:
        return _known(joint_rates(self.num_accepted_tokens_per_pos, self.num_drafts))

    @computed_field(
        description=(
            "P(k-th draft accepted given the first k−1 were), k = 1…K; null where those never were."
        )
    )
    @property
    def conditional_acceptance_per_position(self) -> list[float | None]:
        return _known(conditional_rates(self.num_accepted_tokens_per_pos, self.num_drafts))

    @computed_field(description="Rounds by number of accepted drafts, 0…K; sums to num_drafts.")
    @property
    def histogram(self) -> list[int]:
        at_least = [self.num_drafts, *self.num_accepted_tokens_per_pos, 0]
        return [-difference for difference in np.diff(at_least).tolist()]

    @cached_property
    def _speeds(self) -> Speeds | None:
        return Speeds(self.passes, SPECULATIVE) if self.passes.get(SPECULATIVE) else None

    @computed_field(
        description=(
            "Σ tokens ÷ Σ seconds over workloads, each with the median seconds per token of its"
            " repeats; null if not timed."
        )
    )
    @property
    def tokens_per_second(self) -> TokensPerSecond | None:
        if self._speeds is None:
            return None
        return TokensPerSecond.model_validate({kind: self._speeds.rate(kind) for kind in KINDS})

    @computed_field(
        description="`tokens_per_second.speculative` ÷ `.autoregressive`; null if not timed."
    )
    @property
    def speedup_vs_autoregressive(self) -> Estimate | None:
        return self._speeds and self._speeds.ratio(SPECULATIVE, AUTOREGRESSIVE)

    @computed_field(
        description="`tokens_per_second.speculative` ÷ `.transformers_generate`; another engine."
    )
    @property
    def speedup_vs_transformers(self) -> Estimate | None:
        return self._speeds and self._speeds.ratio(SPECULATIVE, TRANSFORMERS)

    @computed_field(
        description="Passes slower than 60 % of the median rate of their repeats, in words."
    )
    @property
    def stalled_passes(self) -> list[str]:
        return [
            f"{run.workload}, {KINDS.get(kind, kind)}, repeat {run.repeat + 1}:"
            f" {run.tokens / run.seconds:.0f} tokens/s, median {usual:.0f}"
            for kind, some in self.passes.items()
            for run, usual in stalled(some)
        ]

    @computed_field(
        description=(
            "Shares of the speculative passes' wall time by phase, and `other`, which no phase"
            " claimed; null if not known."
        )
    )
    @property
    def time_shares(self) -> dict[str, float] | None:
        wall = sum(run.seconds for run in self.passes.get(SPECULATIVE, []))
        if not self.phase_seconds or not wall:
            return None
        total = max(wall, sum(self.phase_seconds.values()))
        shares = {phase: self.phase_seconds.get(phase, 0.0) / total for phase in PHASES}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}

    @computed_field(
        description="τ · V(1) / (V(K+1) + D(K)), τ of the timed passes (of all, if none was timed)."
    )
    @property
    def limit_speedup(self) -> float | None:
        if self.costs is None:
            return None
        timed = self.passes.get(SPECULATIVE, [])
        rounds = sum(run.num_drafts for run in timed)
        accepted = sum(run.num_accepted_tokens for run in timed)
        return speedup_limit(
            acceptance_length(accepted, rounds) if rounds else self.acceptance_length,
            step_cost=self.costs.target_step_ms,
            verify_cost=self.costs.verify_ms,
            draft_cost=self.costs.draft_ms,
        )

    @computed_field(
        description=(
            "`speedup_vs_autoregressive.value` ÷ `limit_speedup`: what sampling, scheduling,"
            " committing and prefill leave of the limit."
        )
    )
    @property
    def efficiency(self) -> float | None:
        speedup = self.speedup_vs_autoregressive
        if speedup is None or self.limit_speedup is None:
            return None
        return efficiency(speedup.value, self.limit_speedup)

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


def headline_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that summary, gates and figures speak of: those of the evaluation's own prompts, or
    of the first suite if there are no others."""
    first = None if any(cell.suite is None for cell in cells) or not cells else cells[0].suite
    return [cell for cell in cells if cell.suite == first]


def _known(rates: list[float]) -> list[float | None]:
    """NaN, which says "never measured" and which JSON lacks, as None."""
    return [None if math.isnan(rate) else rate for rate in rates]
