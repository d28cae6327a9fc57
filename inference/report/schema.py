"""The acceptance report as data: the models of the versioned `acceptance.json`, loading and saving.

The contents of the report, from the cells of cell.py upwards. The descriptions of the fields are
their documentation: scripts/docs_tables.py makes the tables of docs/acceptance-json.md of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from inference.report.cell import Cell, headline_cells
from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.record import Record
from inference.whole_file import write_whole
from speculators.errors import DataError

SCHEMA_VERSION: Literal["2.0"] = "2.0"
SUMMARY_KEYS = {  # t<T> stands for t0, t1, t0.7, ...
    "lossless_mismatches": (
        "prompts that differ from their reference by more than a tie, all checks added"
    ),
    "lossless_ties": "prompts whose first difference is a tie, all checks added",
    "expected_measured_gap": "largest `t<T>.expected_measured_gap` over the temperatures",
    "vllm_gap": "largest `t<T>.vllm_gap` over the temperatures that both engines were measured at",
    "t<T>.acceptance_length": "τ at temperature T (`t0`, `t1`, `t0.7`)",
    "t<T>.tokens_per_forward": "1 + accepted ÷ all rounds, those without a draft too",
    "t<T>.expected_acceptance_length": "τ that replay expects",
    "t<T>.expected_measured_gap": (
        "|measured − expected| ÷ expected, replayed over the text that drafting wrote"
    ),
    "t<T>.vllm_acceptance_length": "τ in vLLM, without drafts past the end of a text",
    "t<T>.vllm_gap": "|τ in vLLM − τ in this runtime| ÷ the latter",
    "t<T>.tokens_per_second": "with drafting",
    "t<T>.speedup_vs_autoregressive": "`t<T>.tokens_per_second` ÷ the same engine's without drafts",
    "t<T>.speedup_vs_transformers": "the same against `transformers.generate`",
    "t<T>.limit_speedup": "the cost model's limit",
    "t<T>.efficiency": "measured speedup ÷ limit",
}


class Bound(Record):
    """Bounds of a recipe on one figure of the summary."""

    min: float | None = Field(default=None, description="Smallest value that passes.")
    max: float | None = Field(default=None, description="Largest value that passes.")

    @model_validator(mode="after")
    def _binds(self) -> Bound:
        if self.min is None and self.max is None:
            raise ValueError("a gate without min and max cannot fail: give at least one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: no value can pass")
        return self


class Gate(Record):
    """One bound the recipe demands, and the figure that met or missed it."""

    name: str = Field(description="A key of `summary`.")
    value: float = Field(description="The figure reached.")
    min: float | None = Field(
        default=None, description="Smallest value that passes, null if unbounded."
    )
    max: float | None = Field(
        default=None, description="Largest value that passes, null if unbounded."
    )
    passed: bool = Field(description="min ≤ value ≤ max.")


class EngineFacts(Record):
    """An engine that was measured."""

    name: str = Field(description="`draftsmith` or `vllm`.")
    version: str = Field(description="Its version.")
    python_version: str | None = Field(
        default=None, description="Its interpreter; null: not known, or this one."
    )
    torch_version: str | None = Field(
        default=None, description="Its PyTorch; null: not known, or this one."
    )
    platform: str | None = Field(
        default=None, description="Kind of device it ran on, by its own word; null as above."
    )
    draft_sample_method: str | None = Field(
        default=None,
        description=(
            "How drafts are chosen at temperatures above 0: `probabilistic`, sampled from q, or"
            " `greedy`; null: the method has no q, or it is not known."
        ),
    )
    url: str | None = Field(
        default=None, description="Server that was asked; null: started for the evaluation."
    )


class Provenance(Record):
    """Everything needed to know what was measured, on what, and to measure it again."""

    draftsmith_version: str = Field(description="Version of this package.")
    git_commit: str | None = Field(
        description="Commit of the source tree, `-dirty` if changed; null outside git."
    )
    python_version: str = Field(description="Python interpreter.")
    torch_version: str = Field(description="PyTorch, with its build tag.")
    transformers_version: str = Field(description="transformers.")
    platform: str = Field(description="Operating system and architecture.")
    cpu_model: str = Field(description="Processor name.")
    cpu_cores: int = Field(description="Logical cores this process may use.")
    threads: int = Field(description="torch intra-op threads during the measurement.")
    device: str = Field(description="Device the target ran on.")
    accelerator: str | None = Field(default=None, description="Accelerator's name, null on CPU.")
    dtype: str = Field(description="Target's dtype during the timed runs.")
    recipe_name: str | None = Field(
        description="Recipe that asked for this report; null if there was none."
    )
    recipe_sha256: str | None = Field(description="Hash of the resolved recipe.")
    chat_template_sha256: str | None = Field(
        description="Hash of the tokenizer's chat template; null if it has none."
    )
    target_name: str = Field(description="Target as the recipe names it.")
    target_change: dict[str, float] | None = Field(
        default=None,
        description=(
            "Of a target that was trained along with its drafter: nats per token of held-out"
            " `responses`, `before` and `after`; null: the target is as it was."
        ),
    )
    target_weights_sha256: str = Field(
        description="Hash over the target's weight files, in name order."
    )
    drafter_method: str = Field(description="Method the summary and the gates speak of.")
    drafter_path: str | None = Field(
        default=None, description="Exported drafter that was loaded; null if training-free."
    )
    drafter_config: dict[str, Any] = Field(
        description="The drafter's own config.json, or its options."
    )
    drafter_weights_sha256: str | None = Field(
        default=None,
        description="Hash over the drafter's weight files, in name order; null if training-free.",
    )
    num_speculative_tokens: int = Field(ge=1, description="K: tokens drafted per round at most.")
    max_num_seqs: int | None = Field(default=None, description="Rows the runtime decodes at once.")
    engine: str = Field(
        default=OUR_ENGINE, description="Engine the summary and the gates speak of."
    )
    engines: list[EngineFacts] = Field(default=[], description="Every engine that was measured.")
    prompts_sha256: str | None = Field(
        default=None,
        description=(
            "Hash of the prompts' tokens and of what limits a response (max_tokens, top_p, top_k):"
            " engines are compared where it is equal."
        ),
    )
    created_at: str = Field(description="When the report was made: UTC, ISO 8601.")
    duration_s: float = Field(description="How long the evaluation took.")
    seeds: list[int] = Field(description="Seeds of the sampled runs.")


class HeldOutPoint(Record):
    """A held-out evaluation in training."""

    step: int = Field(description="Optimizer steps before it, of all stages.")
    supervised_tokens: int = Field(
        description="Tokens with a loss seen before it, repeats counted."
    )
    acceptance_length: float = Field(
        description="Expected τ by replay, mean over the temperatures."
    )
    standard_error: float | None = Field(
        description="Its standard error over prompts; null if not known."
    )


class TrainingProgress(Record):
    """How far the drafter is trained: the held-out acceptance against the tokens seen, and its
    trend."""

    steps: int = Field(description="Optimizer steps, of all stages.")
    supervised_tokens: int = Field(description="Tokens with a loss, repeats counted.")
    held_out: list[HeldOutPoint] = Field(description="Every held-out evaluation, in their order.")
    gain_per_doubling: float | None = Field(
        description=(
            "Change of the expected τ with each doubling of the tokens: the slope of a straight"
            " line in log2(tokens), least squares over the evaluations in the last two doublings;"
            " null with fewer than three."
        )
    )
    gain_standard_error: float | None = Field(
        description="Standard error of the slope, from the residuals of the line; null as above."
    )


class SuiteFile(Record):
    """A file of a suite."""

    path: str = Field(description="As it was given.")
    sha256: str = Field(description="Hash of its bytes.")


class SuiteFacts(Record):
    """A suite that was measured, and what a figure of it depends on besides target and drafter."""

    name: str = Field(description="`suite` of its cells.")
    files: list[SuiteFile] = Field(description="The files it was read from.")
    conversations: int = Field(description="Conversations that were held, at each temperature.")
    conversations_in_file: int = Field(description="Conversations in the files.")
    conversations_without_room: int = Field(
        default=0,
        description="Left out, because target and longest responses have no room for them.",
    )
    turns_not_asked: int = Field(
        default=0,
        description=(
            "Later turns, over all temperatures, whose prompt had grown too long by the answers."
        ),
    )
    max_tokens: int = Field(ge=1, description="Longest response.")
    num_speculative_tokens: int = Field(ge=1, description="K: tokens drafted per round at most.")
    thinking: Literal["on", "off", "template's default", "none"] = Field(
        description=(
            "Thinking mode: as the chat template was told, what it does untold, or none: it has no"
            " such mode."
        )
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables that the chat template was given."
    )


class AcceptanceReport(Record):
    """The whole of `acceptance.json`."""

    schema_version: Literal["2.0"] = Field(
        default=SCHEMA_VERSION, description="Version of this layout."
    )
    provenance: Provenance = Field(description="What was measured, with what, on what.")
    summary: dict[str, float] = Field(
        description=(
            "Headline figures of `provenance.drafter_method` over all workloads; keys below. What "
            "was not measured is absent."
        )
    )
    gates: list[Gate] = Field(
        default=[], description="The recipe's bounds and whether they are met."
    )
    suites: list[SuiteFacts] = Field(
        default=[], description="The suites that were measured; their cells name them."
    )
    results: list[Cell] = Field(
        description=(
            "One cell per workload, temperature, method and engine, and `all`, the workloads"
            " together; of each suite alike, whose workloads are its categories."
        )
    )
    training: TrainingProgress | None = Field(
        default=None,
        description=(
            "Held-out acceptance during training; null if the drafter was not trained in this run."
        ),
    )

    @property
    def headline(self) -> list[Cell]:
        """The cells of the evaluation's own prompts, or of the first suite if there are none. All
        methods below but `stalled_passes` look at these alone."""
        return headline_cells(self.results)

    def of_suite(self, name: str) -> AcceptanceReport:
        """The report as if that suite alone had been measured."""
        cells = [cell for cell in self.results if cell.suite == name]
        suites = [facts for facts in self.suites if facts.name == name]
        return self.model_copy(
            update={"results": cells, "suites": suites, "summary": {}, "gates": []}
        )

    def stalled_passes(self) -> list[str]:
        """Timed passes during which the machine stalled, each in words."""
        return [
            f"T={cell.temperature:g}, {line}"
            for cell in self.results
            if cell.workload != ALL_WORKLOADS
            for line in cell.stalled_passes
        ]

    @property
    def passed(self) -> bool:
        """True if every gate passed (a report without gates passes)."""
        return all(gate.passed for gate in self.gates)

    def cell(
        self,
        workload: str,
        temperature: float,
        method: str | None = None,
        engine: str | None = None,
    ) -> Cell | None:
        """The cell at these coordinates (`method` and `engine` default to the report's own), None
        if it was not measured."""
        coordinates = (
            workload,
            method or self.provenance.drafter_method,
            engine or self.provenance.engine,
        )
        for cell in self.headline:
            if (
                cell.workload,
                cell.method,
                cell.engine,
            ) == coordinates and cell.temperature == temperature:
                return cell
        return None

    def cells_at(self, temperature: float) -> list[Cell]:
        """The cells of the report's own method and engine at one temperature, `all` last."""
        cells = (self.cell(workload, temperature) for workload in self.workloads())
        return [cell for cell in cells if cell is not None]

    def own_cells(self) -> list[Cell]:
        """The cells of the report's own method and engine, by temperature."""
        return [cell for temperature in self.temperatures() for cell in self.cells_at(temperature)]

    def temperatures(self) -> list[float]:
        """Every temperature measured, ascending."""
        return sorted({cell.temperature for cell in self.headline})

    def workloads(self) -> list[str]:
        """Every workload in the order measured; `all` last, if it is there."""
        names = list(dict.fromkeys(cell.workload for cell in self.headline))
        return sorted(names, key=lambda name: name == ALL_WORKLOADS)

    def methods(self) -> list[str]:
        """Every method, the report's own first."""
        names = list(dict.fromkeys(cell.method for cell in self.headline))
        return sorted(names, key=lambda name: name != self.provenance.drafter_method)

    def engines(self) -> list[str]:
        """Every engine, the report's own first."""
        names = list(dict.fromkeys(cell.engine for cell in self.headline))
        return sorted(names, key=lambda name: name != self.provenance.engine)


def save_report(report: AcceptanceReport, path: str | os.PathLike[str]) -> Path:
    """Write `acceptance.json` (indented, UTF-8); whole or not at all, so a crash leaves no half
    report."""
    return write_whole(Path(path), report.model_dump_json(indent=2) + "\n")


def load_report(path: str | os.PathLike[str]) -> AcceptanceReport:
    """Read `acceptance.json`; DataError naming the file and the field if it is not a report of this
    version."""
    try:
        return AcceptanceReport.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        again = (
            f" (version {first['input']!r}: evaluate again)" if where == "schema_version" else ""
        )
        raise DataError(
            f"{path}: {where}: {first['msg']}{again}, {error.error_count()} problem(s) in all"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as JSON ({error}); expected an acceptance.json"
        ) from error
