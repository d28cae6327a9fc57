"""Puts the acceptance report together: cells, summary and gates; two engines side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.inference.report.measurement import Measurement, make_cell
from draftsmith.inference.report.schema import (
    ALL_WORKLOADS,
    OUR_ENGINE,
    SPECULATIVE,
    AcceptanceReport,
    Cell,
    Estimate,
    Gate,
    Provenance,
    SuiteFacts,
)
from draftsmith.speculators.errors import ConfigError

OF_CELLS = (  # attributes of a cell that the summary has under the same names
    "acceptance_length",
    "tokens_per_forward",
    "speedup_vs_autoregressive",
)


class Bound(NamedTuple):
    """What a result must not pass."""

    min: float | None = None
    max: float | None = None


def build_report(
    measurements: Sequence[Measurement],
    provenance: Provenance,
    suites: Sequence[SuiteFacts] = (),
) -> AcceptanceReport:
    """One cell per measurement, then one `all` per temperature, method, engine and suite, and the
    summary."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.temperature, m.method, m.engine, m.suite), []).append(m)
    cells = [measurement.cell() for measurement in measurements]
    cells += [make_cell(group, ALL_WORKLOADS) for group in groups.values()]
    report = AcceptanceReport(provenance=provenance, summary={}, suites=list(suites), results=cells)
    report.summary = summarise(report.pooled())
    return report


def summarise(pooled: Sequence[Cell]) -> dict[str, float]:
    """The headline results of the `all` cells; one that was not measured is absent."""
    summary: dict[str, float] = {}
    if checks := [check for cell in pooled for check in cell.lossless]:
        summary["lossless_mismatches"] = sum(check.mismatches for check in checks)
        summary["lossless_ties"] = sum(check.ties for check in checks)
    if gaps := [abs(cell.expected.relative_difference) for cell in pooled if cell.expected]:
        summary["expected_measured_gap"] = max(gaps)
    for cell in pooled:
        results: dict[str, Any] = {name: getattr(cell, name) for name in OF_CELLS}
        results["tokens_per_second"] = cell.tokens_per_second.get(SPECULATIVE)
        if expected := cell.expected:
            results["expected_acceptance_length"] = expected.acceptance_length
            results["expected_measured_gap"] = abs(expected.relative_difference)
        for name, value in results.items():
            if value is not None:
                number = value.value if isinstance(value, Estimate) else value
                summary[f"t{cell.temperature:g}.{name}"] = number
    return summary


def check_gates(summary: Mapping[str, float], bounds: Mapping[str, Bound]) -> list[Gate]:
    """Each bound against its result. ConfigError if a gate names a result the evaluation did not
    produce."""
    gates = []
    for name, (low, high) in bounds.items():
        if name not in summary:
            measured = ", ".join(sorted(summary)) or "nothing"
            raise ConfigError(f"not measured; measured were: {measured}", where=f"gates.{name}")
        value = summary[name]
        passed = (low is None or low <= value) and (high is None or value <= high)
        gates.append(Gate(name=name, value=value, min=low, max=high, passed=passed))
    return gates


# ------------------------------------------------------------------ two engines


def lay_beside(report: AcceptanceReport, other: AcceptanceReport) -> AcceptanceReport:
    """`report`, of this runtime, with the cells of `other`, of another engine on the same prompts,
    and in the summary how far the two are from each other."""
    engines = report.provenance.engines + other.provenance.engines
    both = report.model_copy(
        update={
            "results": report.results + other.results,
            "provenance": report.provenance.model_copy(update={"engines": engines}),
        }
    )
    return both.model_copy(update={"summary": report.summary | _gaps(both, other)})


def _gaps(report: AcceptanceReport, other: AcceptanceReport) -> dict[str, float]:
    """|τ − τ of this runtime| ÷ the latter, by temperature; absent where one of them was not
    measured, and above temperature 0 where one samples its drafts and the other does not."""
    results: dict[str, float] = {}
    gaps = []
    name = other.provenance.engine
    alike = len({engine.draft_sample_method for engine in report.provenance.engines}) == 1
    for theirs in report.pooled(name):
        temperature = theirs.temperature
        ours = report.cell(ALL_WORKLOADS, temperature, OUR_ENGINE)
        if ours is None or (temperature > 0 and not alike):
            continue
        gaps.append(abs(theirs.acceptance_length / ours.acceptance_length - 1))
        results[f"t{temperature:g}.{name}_acceptance_length"] = theirs.acceptance_length
        results[f"t{temperature:g}.{name}_gap"] = gaps[-1]
    return results | ({f"{name}_gap": max(gaps)} if gaps else {})
