"""The README.md of a drafter on the Hub: metadata and text, from its configuration and its
acceptance report.

The text is `templates/model_card.md.j2`. Every result in it stands in the report, and it names what
was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.inference.report.schema import AcceptanceReport
from draftsmith.inference.report.table import how_timed, report_tables, suite_notes
from draftsmith.speculators.config import DrafterConfig
from draftsmith.speculators.export.formats import NATIVE
from draftsmith.speculators.export.serving_commands import draftsmith_snippet
from draftsmith.speculators.export.serving_commands import serving as serving_commands

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"


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
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", facts.config.family, "draftsmith", *engines],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        facts=facts,
        report=report,
        serving=snippets,
        tables=_tables(report) if report else [],
        how_timed=how_timed(report) if report else "",
        checks=[check for cell in report.pooled() for check in cell.lossless] if report else [],
        unmeasured=unmeasured(report) if report else [],
    )
    return str(card).rstrip() + "\n"


def _tables(report: AcceptanceReport) -> list[tuple[str, str, str]]:
    """(heading, sentence, table) of the evaluation's own prompts and of every suite."""
    parts = []
    if any(cell.suite is None for cell in report.headline):
        parts.append(("", "", report_tables(report)))
    for suite, about in zip(report.suites, suite_notes(report), strict=True):
        parts.append((suite.name, about, report_tables(report.of_suite(suite.name))))
    return parts


def serving(facts: CardFacts) -> list[tuple[str, str, str]]:
    """(engine, language of its snippet, snippet), of every engine that loads this family in this
    format."""
    config = facts.config
    target = facts.base_model or facts.target_name
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


def unmeasured(report: AcceptanceReport) -> list[str]:
    """Sentences that name what was not measured and could be taken for measured."""
    provenance = report.provenance
    cells = report.own_cells()
    lines = ["Hardware, dtypes, targets, workloads and temperatures other than those named here."]
    if others := report.engines()[1:]:
        lengths = ", ".join(
            f"{cell.acceptance_length:.2f} at temperature {cell.temperature:g}"
            for cell in report.pooled(others[0])
        )
        lines.append(
            f"SGLang. The table is of {provenance.engine}; τ over all in {others[0]}: {lengths}."
        )
    else:
        lines.append("vLLM and SGLang: the results are those of Draftsmith's own runtime.")
    if provenance.max_num_seqs:
        lines.append(f"Batches of another size than {provenance.max_num_seqs}.")
    if not any(cell.speedup_vs_autoregressive for cell in cells):
        lines.append("Speedup: there was no timed run without drafting.")
    if not any(cell.lossless for cell in cells):
        lines.append("Equality of outputs with and without drafting.")
    return lines
