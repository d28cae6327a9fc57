"""Merges the reports of two engines on the same export and the same prompts into one."""

from __future__ import annotations

from pathlib import Path

from inference.report.measurement import ALL_WORKLOADS, OUR_ENGINE
from inference.report.schema import AcceptanceReport, Provenance, load_report
from speculators.errors import DataError

SAME = (  # fields of Provenance that make two reports comparable
    *("target_weights_sha256", "drafter_method", "drafter_config"),
    *("num_speculative_tokens", "prompts_sha256", "dtype"),
)


def differences(one: Provenance, other: Provenance) -> list[str]:
    """The fields in which two evaluations are not of the same thing; empty if they can be
    compared."""
    return [
        name
        for name in SAME
        if getattr(one, name) != getattr(other, name) or getattr(one, name) is None
    ]


def lay_beside(report: AcceptanceReport, other: AcceptanceReport) -> AcceptanceReport:
    """`report`, of this runtime, with the cells that `other` has of another engine (in place of
    older ones of that engine) and, in the summary, how far the two are from each other. The gates
    are left out: the summary is another.

    DataError if they are not of the same export, prompts and precision.
    """
    if fields := differences(report.provenance, other.provenance):
        raise DataError(
            f"two reports cannot be laid side by side: they differ in {', '.join(fields)}"
        )
    name = other.provenance.engine
    cells = [cell for cell in report.results if cell.engine != name]
    facts = [
        engine for engine in report.provenance.engines if engine.name != name
    ] + other.provenance.engines
    provenance = report.provenance.model_copy(update={"engines": facts})
    joined = report.model_copy(
        update={"results": cells + other.results, "provenance": provenance, "gates": []}
    )
    kept = {key: value for key, value in report.summary.items() if "vllm" not in key}
    return joined.model_copy(update={"summary": kept | _gaps(joined, name)})


def _gaps(report: AcceptanceReport, name: str) -> dict[str, float]:
    """|τ − τ of this runtime| ÷ the latter, by temperature; absent where one of them was not
    measured or does not say what it counted past the end of a text, and above temperature 0 where
    one samples its drafts and the other does not."""
    figures: dict[str, float] = {}
    gaps = []
    alike = len({engine.draft_sample_method for engine in report.provenance.engines}) == 1
    for temperature in report.temperatures():
        if temperature > 0 and not alike:
            continue
        ours = report.cell(ALL_WORKLOADS, temperature, engine=OUR_ENGINE)
        theirs = report.cell(ALL_WORKLOADS, temperature, engine=name)
        if ours is None or theirs is None or theirs.committed_acceptance_length is None:
            continue
        tau = theirs.committed_acceptance_length
        gaps.append(abs(tau - ours.acceptance_length) / ours.acceptance_length)
        figures |= {
            f"t{temperature:g}.{name}_acceptance_length": tau,
            f"t{temperature:g}.{name}_gap": gaps[-1],
        }
    return figures | ({f"{name}_gap": max(gaps)} if gaps else {})


def measured_before(folders: list[Path], name: str, fresh: Provenance) -> AcceptanceReport | None:
    """The first report called `name` in one of `folders` that is of this runtime and of the same
    thing as `fresh`."""
    for folder in folders:
        if not (folder / name).is_file():
            continue
        try:
            report = load_report(folder / name)
        except DataError:  # of another version: not comparable either
            continue
        if report.provenance.engine == OUR_ENGINE and not differences(report.provenance, fresh):
            return report
    return None
