"""The README.md of a drafter on the Hub: metadata and text, from its configuration and its
acceptance report.

The text is `templates/model_card.md.j2`. Every figure in it stands in the report, and it names what
was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from inference.report.measurement import ALL_WORKLOADS
from inference.report.schema import AcceptanceReport
from speculators.config import DrafterConfig
from speculators.export.formats import NATIVE
from speculators.export.serving_commands import draftsmith_snippet
from speculators.export.serving_commands import serving as serving_commands

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
TASK = "text-generation"
DIGITS = 4  # after the point, of figures in the metadata


@dataclass(frozen=True)
class CardFacts:
    """The contents of a card besides the report."""

    repository: str  # org/name
    config: DrafterConfig
    fields: Mapping[str, Any]  # config.json
    num_speculative_tokens: int
    target_name: str  # as a reader should know it: an id, or the last part of a path
    base_model: str | None = None  # the target's id on the Hub
    license: str | None = None
    datasets: Sequence[str] = ()  # ids on the Hub
    other_data: Sequence[str] = ()  # what else it was trained on, in a word each
    recipe: str | None = None  # the resolved YAML
    files: Sequence[str] = ()
    remarks: Sequence[str] = ()  # whole sentences, for the beginning


def model_card(facts: CardFacts, report: AcceptanceReport | None) -> str:
    """README.md: YAML metadata, and the text below."""
    snippets = serving(facts)
    engines = [
        engine.partition(",")[0].lower() for engine, _, _ in snippets if engine != "Draftsmith"
    ]
    data = ModelCardData(
        base_model=facts.base_model,
        license=facts.license,
        datasets=list(facts.datasets) or None,
        library_name="draftsmith",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-model", facts.config.family, "draftsmith", *engines],
        model_name=facts.repository.partition("/")[2] if report else None,
        eval_results=evaluation_results(report) if report else None,
    )
    cells = report.own_cells() if report else []
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        facts=facts,
        report=report,
        serving=snippets,
        cells=cells,
        pooled=[cell for cell in cells if cell.workload == ALL_WORKLOADS],
        unmeasured=unmeasured(report),
        suites=[report.of_suite(facts.name) for facts in report.suites] if report else [],
    )
    return str(card).rstrip() + "\n"


def evaluation_results(report: AcceptanceReport) -> list[EvalResult]:
    """`model-index`: acceptance length and, where it was timed, speedup, of each workload at each
    temperature, those of all suites too."""
    results, shown = [], {cell.suite for cell in report.headline}
    beside = [report.of_suite(facts.name) for facts in report.suites if facts.name not in shown]
    for cell in (cell for part in [report, *beside] for cell in part.own_cells()):
        if not cell.num_drafts:
            continue
        metrics = [
            (
                "acceptance_length",
                "acceptance length (tokens per verification)",
                cell.acceptance_length,
            )
        ]
        if cell.speedup_vs_autoregressive is not None:
            name = "speedup over the same engine without drafting"
            metrics.append(("speedup", name, cell.speedup_vs_autoregressive.value))
        results += [
            EvalResult(
                task_type=TASK,
                dataset_type=cell.label,
                dataset_name=f"{cell.label}, temperature {cell.temperature:g}",
                dataset_config=f"temperature {cell.temperature:g}",
                dataset_args={"temperature": cell.temperature, "prompts": cell.prompts},
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, DIGITS),
            )
            for kind, name, value in metrics
        ]
    return results


def serving(facts: CardFacts) -> list[tuple[str, str, str]]:
    """(engine, language of its snippet, snippet), of every engine that loads this family in this
    format."""
    config, target = facts.config, facts.base_model or facts.target_name
    format_ = (facts.fields.get("draftsmith") or {}).get("format", NATIVE)
    commands = serving_commands(
        config.family,
        folder=facts.repository,
        target=target,
        tokens=facts.num_speculative_tokens,
        config=config,
        format=format_,
    )
    snippets = []
    for command in commands:
        if command.engine == "Draftsmith" and command.options is not None:
            snippet = draftsmith_snippet(target, command.options)
            snippets.append((command.engine, "python", snippet))
        elif command.command:
            snippets.append((command.engine, "bash", command.command))
    return snippets


def unmeasured(report: AcceptanceReport | None) -> list[str]:
    """Sentences that name what was not measured and could be taken for measured."""
    if report is None:
        return []
    p, cells = report.provenance, report.own_cells()
    said = [
        (
            f"Other hardware, other dtypes than {p.dtype}, other targets, other workloads and other"
            " temperatures than those of the table."
        ),
        _other_engines(report),
    ]
    if p.max_num_seqs:
        said.append(
            f"Batches of another size than {p.max_num_seqs}: speed was measured at that one."
        )
    if not any(cell.tokens_per_second for cell in cells):
        said.append("Speed: nothing was timed.")
    elif not any(cell.speedup_vs_autoregressive for cell in cells):
        said.append("Speedup: there was no timed run without drafting.")
    if not any(cell.lossless for cell in cells):
        said.append("Equality of outputs with and without drafting.")
    return said


def _other_engines(report: AcceptanceReport) -> str:
    other = next((name for name in report.engines() if name != report.provenance.engine), None)
    if other is None:
        return "vLLM and SGLang: the figures are those of Draftsmith's own runtime."
    lengths = [
        f"{cell.acceptance_length:.2f} at temperature {temperature:g}"
        for temperature in report.temperatures()
        if (cell := report.cell(ALL_WORKLOADS, temperature, engine=other)) is not None
    ]
    return (
        f"SGLang. The table is of {report.provenance.engine}; in {other} the acceptance length over"
        f" all workloads was {', '.join(lengths)}."
    )
