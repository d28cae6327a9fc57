"""The README.md of a drafter on the Hub: metadata and text, from its configuration and its acceptance report.

Every figure stands in the report. What was not measured is said to be so; without a report, everything. The text is
`templates/model_card.md.j2`. Knows nothing of recipes, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from inference.report.cell import ALL_WORKLOADS, Cell
from inference.report.schema import AcceptanceReport
from speculators.config import DrafterConfig
from speculators.export.formats import NATIVE
from speculators.export.serving_commands import draftsmith_snippet
from speculators.export.serving_commands import serving as ways_to_serve

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.j2"
TASK = "text-generation"
DIGITS = 4  # after the point, of figures in the metadata


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of besides the report."""

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
    data = ModelCardData(
        base_model=facts.base_model,
        license=facts.license,
        datasets=list(facts.datasets) or None,
        library_name="draftsmith",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-model", facts.config.family, "draftsmith", *_engines(snippets)],
        model_name=facts.repository.partition("/")[2] if report else None,
        eval_results=evaluation_results(report) if report else None,
    )
    card = ModelCard.from_template(
        data, template_path=str(TEMPLATE), facts=facts, report=report, serving=snippets, rows=_rows(report),
        positions=_positions(report), unmeasured=unmeasured(report), lossless=_lossless(report),
    )  # fmt: skip
    return str(card).rstrip() + "\n"


def _engines(snippets: Sequence[tuple[str, str, str]]) -> list[str]:
    return [engine.partition(",")[0].lower() for engine, _, _ in snippets if engine != "Draftsmith"]


def evaluation_results(report: AcceptanceReport) -> list[EvalResult]:
    """`model-index`: acceptance length and, where it was timed, speedup, of each workload at each temperature."""
    found = []
    for cell in _own_cells(report):
        if not cell.num_drafts:
            continue
        metrics = {"acceptance_length": ("acceptance length (tokens per verification)", cell.acceptance_length)}
        if cell.speedup_vs_autoregressive is not None:
            name = "speedup over the same engine without drafting"
            metrics["speedup"] = (name, cell.speedup_vs_autoregressive.median)
        for kind, (name, value) in metrics.items():
            found.append(
                EvalResult(
                    task_type=TASK,
                    dataset_type=cell.workload,
                    dataset_name=f"{cell.workload}, temperature {cell.temperature:g}",
                    dataset_config=f"temperature {cell.temperature:g}",
                    dataset_args={"temperature": cell.temperature, "prompts": cell.prompts},
                    metric_type=kind,
                    metric_name=name,
                    metric_value=round(value, DIGITS),
                )
            )
    return found


def serving(facts: CardFacts) -> list[tuple[str, str, str]]:
    """(engine, language of its snippet, snippet), of every engine that loads this family in this format."""
    config, target = facts.config, facts.base_model or facts.target_name
    found = []
    for way in ways_to_serve(
        config.family,
        folder=facts.repository,
        target=target,
        tokens=facts.num_speculative_tokens,
        config=config,
        format=(facts.fields.get("draftsmith") or {}).get("format", NATIVE),
    ):
        if way.engine == "Draftsmith" and way.options is not None:
            found.append((way.engine, "python", draftsmith_snippet(target, way.options)))
        elif way.command:
            name = "vLLM, with Draftsmith's plugin" if (way.engine, config.family) == ("vLLM", "mlp") else way.engine
            found.append((name, "bash", way.command))
    return found


def unmeasured(report: AcceptanceReport | None) -> list[str]:
    """What a reader could take for measured and was not, a sentence each."""
    if report is None:
        return []
    p, cells = report.provenance, _own_cells(report)
    said = [
        f"Other hardware, other dtypes than {p.dtype}, other targets, other workloads and other temperatures than "
        "those of the table.",
        _other_engines(report),
    ]
    if p.max_num_seqs:
        said.append(f"Batches of another size than {p.max_num_seqs}: speed was measured at that one.")
    if not any(cell.tokens_per_second for cell in cells):
        said.append("Speed: nothing was timed.")
    elif not any(cell.speedup_vs_autoregressive for cell in cells):
        said.append("Speedup: there was no timed run without drafting.")
    if not any(cell.lossless for cell in cells):
        said.append("Equality of outputs with and without drafting.")
    return said


def _other_engines(report: AcceptanceReport) -> str:
    """Where else it was measured, and where not."""
    other = next((name for name in report.engines() if name != report.provenance.engine), None)
    if other is None:
        return "vLLM and SGLang: the figures are those of Draftsmith's own runtime."
    lengths = [
        f"{cell.acceptance_length:.2f} at temperature {temperature:g}"
        for temperature in report.temperatures()
        if (cell := report.cell(ALL_WORKLOADS, temperature, engine=other)) is not None
    ]
    return (
        f"SGLang. The table is of {report.provenance.engine}; in {other} the acceptance length over all workloads was "
        f"{', '.join(lengths)}."
    )


def _own_cells(report: AcceptanceReport) -> list[Cell]:
    method = report.provenance.drafter_method
    return [
        cell
        for temperature in report.temperatures()
        for workload in report.workloads()
        if (cell := report.cell(workload, temperature, method)) is not None
    ]


def _rows(report: AcceptanceReport | None) -> list[dict[str, str]]:
    """The table: one row per workload and temperature, `all` last of each temperature."""
    rows = []
    for cell in _own_cells(report) if report else []:
        rates, speedup = cell.tokens_per_second, cell.speedup_vs_autoregressive
        rows.append(
            {
                "workload": f"**{ALL_WORKLOADS}**"
                if cell.workload == ALL_WORKLOADS
                else cell.workload.replace("|", "\\|"),
                "temperature": f"{cell.temperature:g}",
                "prompts": str(cell.prompts),
                "acceptance_length": f"{cell.acceptance_length:.2f}" if cell.num_drafts else "–",
                "speedup": f"{speedup.median:.2f} ({speedup.low:.2f}–{speedup.high:.2f})" if speedup else "–",
                "drafting": f"{rates.speculative.median:.1f}" if rates else "–",
                "without": f"{rates.autoregressive.median:.1f}" if rates and rates.autoregressive else "–",
            }
        )
    return rows


def _positions(report: AcceptanceReport | None) -> list[dict[str, Any]]:
    """Acceptance by draft position over all workloads, one entry per temperature."""
    return [
        {
            "temperature": f"{cell.temperature:g}",
            "joint": [_percent(rate) for rate in cell.joint_acceptance_per_position],
            "conditional": [_percent(rate) for rate in cell.conditional_acceptance_per_position],
        }
        for cell in (_own_cells(report) if report else [])
        if cell.workload == ALL_WORKLOADS
    ]


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def _lossless(report: AcceptanceReport | None) -> list[str]:
    """What the checks of token equality found, a sentence per dtype and reference."""
    found: dict[tuple[str, str], list[int]] = {}
    for cell in _own_cells(report) if report else []:
        for check in cell.lossless if cell.workload != ALL_WORKLOADS else []:
            counts = found.setdefault((check.dtype, check.reference), [0, 0, 0])
            for i, count in enumerate((check.checked_prompts, check.mismatches, check.ties)):
                counts[i] += count
    reference = {"autoregressive": "the same engine without drafting", "transformers_generate": "transformers"}
    return [
        f"Greedy, {dtype}: {checked} prompts against {reference.get(other, other)}, {mismatches} different"
        + (f", {ties} tied in the target's own arithmetic" if ties else "")
        + "."
        for (dtype, other), (checked, mismatches, ties) in found.items()
    ]
