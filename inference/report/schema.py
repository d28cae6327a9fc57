"""The acceptance report as data: the models of the versioned `acceptance.json`, loading and saving.

Counters, times and the rates derived from them are stored; nothing is computed on loading. The
texts below the fields are their documentation: scripts/docs_tables.py makes the tables of
docs/evaluate.md of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import DataError

SCHEMA_VERSION: Literal["7.0"] = "7.0"
ALL_WORKLOADS = "all"
OUR_ENGINE = "draftsmith"  # this project's runtime
SPECULATIVE = "speculative"  # kinds of timed passes
AUTOREGRESSIVE = "autoregressive"
SUMMARY_KEYS = {  # t<T> stands for t0, t1, t0.7, ...
    "lossless_mismatches": (
        "prompts that differ from their reference by more than a tie, all checks added"
    ),
    "lossless_ties": "prompts whose first difference is a tie, all checks added",
    "expected_measured_gap": "largest `t<T>.expected_measured_gap` over the temperatures",
    "vllm_gap": "largest `t<T>.vllm_gap` over the temperatures that both engines were measured at",
    "t<T>.acceptance_length": "τ at temperature T (`t0`, `t1`, `t0.7`)",
    "t<T>.tokens_per_forward": "tokens after the first ÷ all rounds, those without a draft too",
    "t<T>.expected_acceptance_length": "τ that replay expects",
    "t<T>.expected_measured_gap": (
        "|measured − expected| ÷ expected, replayed over the text that drafting wrote"
    ),
    "t<T>.vllm_acceptance_length": "τ in vLLM",
    "t<T>.vllm_gap": "|τ in vLLM − τ in this runtime| ÷ the latter",
    "t<T>.tokens_per_second": "with drafting",
    "t<T>.speedup_vs_autoregressive": "`t<T>.tokens_per_second` ÷ the same engine's without drafts",
}


class Record(BaseModel):
    """No unknown keys, no NaN or infinity (JSON has neither)."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class TokenDifference(Record):
    """The first difference between an output and its reference, and whether it is a tie."""

    prompt: str
    """Which prompt: an id or its place in the workload."""
    position: int
    """Output index of the first difference."""
    reference_token: int | None
    """Token id of the reference, null if it had ended."""
    token: int | None
    """Token id that was produced, null if the output had ended."""
    top_two_gap: float | None = None
    """The target's top-two logit gap there, teacher-forced on the common prefix."""
    noise: float | None = None
    """Largest change of the gap between two leading logits at another batch shape."""
    tie: bool
    """True if the gap is below the noise: arithmetic, not drafting, decided."""


class LosslessCheck(Record):
    """Greedy outputs with drafting against those of the same engine without, token for token."""

    dtype: str
    """Weights' dtype during this check; float32 must be equal, bfloat16 may tie."""
    checked_prompts: int
    """Prompts compared."""
    mismatches: int
    """Prompts that differ by more than a tie. Anything but 0 is a failure."""
    ties: int
    """Prompts whose first difference is a tie."""
    details: list[TokenDifference] = []
    """One entry per differing prompt."""


class TimedPass(Record):
    """One pass over the timed prompts of a workload."""

    workload: str
    """Workload whose prompts were run."""
    repeat: int = Field(ge=0)
    """Passes of one repeat ran in turns, a few prompts at a time."""
    tokens: int = Field(gt=0)
    """Output tokens."""
    seconds: float = Field(gt=0)
    """Wall time, prefill included."""
    compiled_rounds: float | None = Field(None, ge=0, le=1)
    """Share of its rounds that the target ran compiled (docs/runtime.md); null: not known."""


class Estimate(Record):
    """A value, and the interval in which it lies in 90 % of the bootstrap's draws."""

    value: float
    """From the medians of the repeats."""
    low: float | None
    """5 % of the draws are lower; null below three repeats."""
    high: float | None
    """5 % of the draws are higher; null below three repeats."""


class ExpectedAcceptance(Record):
    """What training's replay expects on the very text that drafting wrote."""

    acceptance_length: float
    """`expected_acceptance_length` by replay."""
    relative_difference: float
    """(measured − expected) ÷ expected, measured = `acceptance_length`."""
    standard_error: float
    """Of `relative_difference`, from the spread over requests."""


class PositionBin(Record):
    """Acceptance of the rounds that start in one stretch of the text, prompt included."""

    start: int
    """First position of the bin, a power of two; the next one is at twice that."""
    rounds: int
    """Rounds with a draft whose anchor, the last token before them, lies in the bin."""
    num_accepted_tokens: int
    """Drafts accepted in them."""
    acceptance_length: float
    """1 + accepted ÷ rounds, over these rounds."""


class RoundCost(Record):
    """What a round with drafts costs, in plain decoding steps. Of a short pass of its own, in which
    rounds are timed part by part."""

    plain_step_seconds: float
    """Mean time of a round without drafting, of as many requests: the unit of all that follows."""
    timed_rounds: int
    """Rounds with a draft that were timed."""
    drafts_per_row: float
    """Drafts of a request in them."""
    verification: float
    """The target's forward over anchor and drafts, its output head included."""
    draft_forward: float
    """The drafter but for its head: its inputs and layers; of a matcher its search."""
    draft_head: float | None
    """The drafter's output head; null: it has none, or `draft_forward` is one step with it."""
    sampling: float
    """Choosing drafts, their q, accepting them, and the target's own token."""
    rest: float
    """What is left: the plan of the round, caches, features that are kept, commits."""
    break_even_acceptance_length: float
    """Sum of the five parts, and so the τ at which drafting is as fast as plain decoding."""
    break_even_by_length: list[float] = []
    """The same with 1…K drafts, on a line through the costs of 1 and K; empty: not timed."""


class Cell(Record):
    """One method on one workload at one temperature."""

    workload: str
    """Workload name, or `all`: every workload pooled (sums, not means of means)."""
    temperature: float = Field(ge=0)
    """Sampling temperature; 0 is greedy."""
    method: str
    """Drafting method (`eagle3`, `ngram`, …)."""
    engine: str = OUR_ENGINE
    """Engine that ran it: `draftsmith` or `vllm`."""
    suite: str | None = None
    """Suite of which the workload is a category; null: the evaluation's own prompts."""
    prompts: int
    """Prompts in the cell; of a suite, every turn of a conversation is one."""
    output_tokens: int
    """Tokens produced, over all prompts, in one pass."""
    num_rounds: int
    """Target forwards after the prefills, counted per request."""
    num_drafts: int
    """Those of them that verified a proposal."""
    num_draft_tokens: int
    """Tokens drafted in those rounds."""
    num_accepted_tokens: int
    """Drafted tokens that were accepted and committed."""
    num_accepted_tokens_per_pos: list[int]
    """Accepted tokens by draft position 1…K."""
    num_drafts_by_method: dict[str, int] = {}
    """num_drafts of a head and of the method beside it (`with`); empty where one method drafts."""
    acceptance_length: float
    """τ, as in vLLM: 1 + num_accepted_tokens ÷ num_drafts."""
    acceptance_length_macro: float
    """Mean of the acceptance lengths of requests that have a draft."""
    tokens_per_forward: float
    """Tokens written after the first of each response ÷ num_rounds: what the speedup goes by."""
    joint_acceptance_per_position: list[float | None]
    """P(first k drafts all accepted), k = 1…K; null without rounds."""
    conditional_acceptance_per_position: list[float | None]
    """P(k-th draft accepted given the first k−1 were), k = 1…K; null where those never were."""
    acceptance_by_position: list[PositionBin] = []
    """Acceptance length by position; empty where an engine does not say what rounds drafted."""
    passes: dict[str, list[TimedPass]] = {}
    """Every timed pass, by kind: `speculative`, `autoregressive`."""
    tokens_per_second: dict[str, Estimate] = {}
    """By kind: Σ tokens ÷ Σ seconds over workloads, seconds by the median of the repeats."""
    speedup_vs_autoregressive: Estimate | None = None
    """Rate of `speculative` ÷ that of `autoregressive`, the same engine; null if not timed."""
    round_cost: RoundCost | None = None
    """Where a round's time goes; null: not timed, or too few rounds drafted."""
    expected: ExpectedAcceptance | None = None
    """Acceptance that replay expects."""
    lossless: list[LosslessCheck] = []
    """Token equality checks of this cell (greedy cells; one entry per dtype)."""

    @property
    def label(self) -> str:
        """The workload, with its suite if it is of one: `mt_bench/writing`."""
        return self.workload if self.suite is None else f"{self.suite}/{self.workload}"


class Gate(Record):
    """One bound the recipe demands, and the result that met or missed it."""

    name: str
    """A key of `summary`."""
    value: float
    """The result reached."""
    min: float | None = None
    """Smallest value that passes, null if unbounded."""
    max: float | None = None
    """Largest value that passes, null if unbounded."""
    passed: bool
    """min ≤ value ≤ max."""


class EngineFacts(Record):
    """An engine that was measured."""

    name: str
    """`draftsmith` or `vllm`."""
    version: str
    """Its version."""
    torch_version: str | None = None
    """Its PyTorch; null: not known, or this one."""
    draft_sample_method: str | None = None
    """How drafts are chosen above temperature 0: `probabilistic` or `greedy`; null: not known."""
    rounds: str | None = None
    """How it was set to run rounds: `eager` or `compiled`; null: not known."""


class Provenance(Record):
    """Everything needed to know what was measured, on what, and to measure it again."""

    draftsmith_version: str
    """Version of this package."""
    git_commit: str | None
    """Commit of the source tree, `-dirty` if changed; null outside git."""
    torch_version: str
    """PyTorch, with its build tag."""
    transformers_version: str
    """transformers."""
    cpu_model: str
    """Processor name."""
    threads: int
    """torch intra-op threads during the measurement."""
    device: str
    """Device the target ran on."""
    accelerator: str | None = None
    """Accelerator's name, null on CPU."""
    dtype: str
    """Target's dtype during the timed runs."""
    recipe_name: str | None
    """Recipe that asked for this report; null if there was none."""
    recipe_sha256: str | None
    """Hash of the resolved recipe."""
    chat_template_sha256: str | None
    """Hash of the tokenizer's chat template; null if it has none."""
    target_name: str
    """Target as the recipe names it."""
    target_change: dict[str, float] | None = None
    """Of a jointly trained target: nats per token `before` and `after` on held-out `responses`."""
    target_weights_sha256: str
    """Hash over the target's weight files, in name order."""
    drafter_method: str
    """Method that was measured."""
    drafter_path: str | None = None
    """Exported drafter that was loaded; null if training-free."""
    drafter_config: dict[str, Any]
    """The drafter's own config.json, or its options."""
    drafter_weights_sha256: str | None = None
    """Hash over the drafter's weight files, in name order; null if training-free."""
    num_speculative_tokens: int = Field(ge=1)
    """K: tokens drafted per round at most."""
    speculative_config: dict[str, Any] = {}
    """Further options of drafting: adaptive lengths, trees; empty: chains of K."""
    max_num_seqs: int | None = None
    """Rows decoded at once while timing."""
    engine: str = OUR_ENGINE
    """Engine the summary and the gates speak of."""
    engines: list[EngineFacts] = []
    """Every engine that was measured."""
    created_at: str
    """When the report was made: UTC, ISO 8601."""
    duration_s: float
    """How long the evaluation took."""


class SuiteFacts(Record):
    """A suite that was measured, and what a result of it depends on besides target and drafter."""

    name: str
    """`suite` of its cells."""
    path: str
    """File it was read from, as given."""
    sha256: str
    """Hash of the file's bytes."""
    conversations: int
    """Conversations that were held, at each temperature."""
    conversations_in_file: int
    """Conversations in the file."""
    conversations_without_room: int = 0
    """Left out, because target and longest responses have no room for them."""
    max_tokens: int = Field(ge=1)
    """Longest response."""
    num_speculative_tokens: int = Field(ge=1)
    """K: tokens drafted per round at most."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables that the chat template was given."""


class AcceptanceReport(Record):
    """The whole of `acceptance.json`."""

    schema_version: Literal["7.0"] = SCHEMA_VERSION
    """Version of this layout."""
    provenance: Provenance
    """What was measured, with what, on what."""
    summary: dict[str, float]
    """Headline results over all workloads; keys below. What was not measured is absent."""
    gates: list[Gate] = []
    """The recipe's bounds and whether they are met."""
    suites: list[SuiteFacts] = []
    """The suites that were measured; their cells name them."""
    results: list[Cell]
    """A cell per workload, temperature and engine, and `all`; of suites by category."""

    @property
    def passed(self) -> bool:
        """True if every gate is met."""
        return all(gate.passed for gate in self.gates)

    @property
    def headline(self) -> list[Cell]:
        """The cells of the evaluation's own prompts, or of the first suite if there are none."""
        suites = [cell.suite for cell in self.results]
        first = None if None in suites or not suites else suites[0]
        return [cell for cell in self.results if cell.suite == first]

    def of_suite(self, name: str) -> AcceptanceReport:
        """The report as if that suite alone had been measured."""
        cells = [cell for cell in self.results if cell.suite == name]
        suites = [facts for facts in self.suites if facts.name == name]
        return self.model_copy(
            update={"results": cells, "suites": suites, "summary": {}, "gates": []}
        )

    def cell(self, workload: str, temperature: float, engine: str | None = None) -> Cell | None:
        """The headline's cell at these coordinates (`engine` defaults to the report's own), None if
        it was not measured."""
        cells = self.own_cells(engine)
        at = (workload, temperature)
        return next((cell for cell in cells if (cell.workload, cell.temperature) == at), None)

    def own_cells(self, engine: str | None = None) -> list[Cell]:
        """The headline's cells of one engine (default: the report's own) by temperature, `all` the
        last of each."""
        name = engine or self.provenance.engine
        cells = [cell for cell in self.headline if cell.engine == name]
        return sorted(cells, key=lambda cell: (cell.temperature, cell.workload == ALL_WORKLOADS))

    def pooled(self, engine: str | None = None) -> list[Cell]:
        """The headline's `all` cells of one engine, by temperature."""
        return [cell for cell in self.own_cells(engine) if cell.workload == ALL_WORKLOADS]

    def temperatures(self) -> list[float]:
        """Every temperature measured, ascending."""
        return sorted({cell.temperature for cell in self.headline})

    def workloads(self) -> list[str]:
        """Every workload in the order measured; `all` last, if it is there."""
        names = list(dict.fromkeys(cell.workload for cell in self.headline))
        return sorted(names, key=lambda name: name == ALL_WORKLOADS)

    def engines(self) -> list[str]:
        """Every engine, the report's own first."""
        names = list(dict.fromkeys(cell.engine for cell in self.headline))
        return sorted(names, key=lambda name: name != self.provenance.engine)


def save_report(report: AcceptanceReport, path: str | os.PathLike[str]) -> Path:
    """Write `acceptance.json` (indented, UTF-8); whole or not at all, so a crash leaves no half
    report."""
    return write_whole(Path(path), report.model_dump_json(indent=2) + "\n")


def load_report(path: str | os.PathLike[str]) -> AcceptanceReport:
    """Read `acceptance.json`; DataError if it is not a report of this version."""
    try:
        return AcceptanceReport.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"no acceptance.json of this version: {error}", where=f"{path}") from error
