"""Two engines in one report: laid beside each other only where they did the same thing, and told
apart everywhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from inference.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inference.report.build import build_report
from inference.report.html import render_html
from inference.report.measurement import CellMeasurement
from inference.report.merge_engines import lay_beside, measured_before
from inference.report.schema import AcceptanceReport, EngineFacts, load_report, save_report
from inference.report.table import print_report
from speculators.errors import DataError
from tests.inference.report.test_report import provenance

OURS = {
    "a": [(9, 14), (6, 11)],
    "b": [(10, 9)],
}  # (rounds, accepted) of the requests of each workload


def requests(counts, past_end: int | None) -> list[RequestOutput]:
    made = []
    for rounds, accepted in counts:
        metrics = RequestMetrics(
            num_drafts=rounds,
            num_draft_tokens=2 * rounds,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=[min(accepted, rounds), max(accepted - rounds, 0)],
            num_accepted_past_end=past_end,
        )
        completion = CompletionOutput(index=0, text="", token_ids=[7] * (1 + rounds + accepted))
        made.append(RequestOutput("", None, [5], [completion], True, metrics))
    return made


def made(
    engine: str = "draftsmith",
    *,
    extra: int = 0,
    past_end: int | None = 0,
    temperatures=(0.0,),
    **changes,
) -> AcceptanceReport:
    """`extra`: accepted drafts that each request has besides those of OURS."""
    measured = [
        CellMeasurement(
            name,
            t,
            "eagle3",
            2,
            requests([(r, a + extra) for r, a in counts], past_end),
            engine=engine,
        )
        for t in temperatures
        for name, counts in OURS.items()
    ]
    facts = {"prompts_sha256": "ab" * 32, "num_speculative_tokens": 2, "engine": engine}
    sampled = changes.pop("draft_sample_method", "probabilistic")
    engines = [EngineFacts(name=engine, version="1.2", draft_sample_method=sampled)]
    return build_report(measured, provenance(**(facts | {"engines": engines} | changes)))


@pytest.mark.slow
def test_both_engines_are_in_the_file_the_table_and_the_page(tmp_path) -> None:
    report = lay_beside(made(), made("vllm", extra=1))
    assert load_report(save_report(report, tmp_path / "acceptance.json")) == report
    assert report.engines() == ["draftsmith", "vllm"] and report.provenance.engine == "draftsmith"
    assert (
        report.cell("a", 0).num_accepted_tokens == 25
        and report.cell("a", 0, engine="vllm").num_accepted_tokens == 27
    )
    console = Console(file=io.StringIO(), width=100)
    print_report(report, console)
    assert console.file.getvalue().count("in vllm") == 3
    page = render_html(report)
    assert "Side by side" in page and "<td>vllm</td>" in page
    assert "Side by side" not in render_html(made())


def test_the_gap_is_relative_to_this_runtime_and_leaves_out_what_lies_past_the_end() -> None:
    report = lay_beside(made(), made("vllm", extra=1))
    assert report.summary["t0.acceptance_length"] == pytest.approx(1 + 34 / 25)
    assert report.summary["t0.vllm_acceptance_length"] == pytest.approx(1 + 37 / 25)
    assert (
        report.summary["vllm_gap"]
        == report.summary["t0.vllm_gap"]
        == pytest.approx((3 / 25) / (1 + 34 / 25))
    )
    counted = lay_beside(made(), made("vllm", extra=1, past_end=1))
    assert counted.summary["vllm_gap"] == pytest.approx(0)
    assert counted.cell("all", 0, engine="vllm").num_accepted_past_end == 3
    assert "vllm_gap" not in lay_beside(made(), made("vllm", extra=1, past_end=None)).summary


def test_what_is_sampled_otherwise_is_not_compared_above_temperature_0() -> None:
    both = dict(temperatures=(0.0, 1.0))
    alike = lay_beside(made(**both), made("vllm", extra=1, **both)).summary
    assert alike["vllm_gap"] == max(alike["t0.vllm_gap"], alike["t1.vllm_gap"])
    other = lay_beside(
        made(**both), made("vllm", extra=1, draft_sample_method="greedy", **both)
    ).summary
    assert "t0.vllm_gap" in other and "t1.vllm_gap" not in other
    lower = lay_beside(
        made(**both), made("vllm", extra=1)
    ).summary  # one temperature was measured in vLLM
    assert lower["vllm_gap"] == lower["t0.vllm_gap"] and "t1.vllm_gap" not in lower


def test_a_later_measurement_takes_the_place_of_the_earlier() -> None:
    twice = lay_beside(lay_beside(made(), made("vllm", extra=1)), made("vllm"))
    assert twice == lay_beside(made(), made("vllm"))


@pytest.mark.parametrize(
    "change",
    [
        {"prompts_sha256": "cd" * 32},
        {"prompts_sha256": None},
        {"drafter_config": {}},
        {"dtype": "float32"},
    ],
)
def test_other_things_are_not_laid_side_by_side(change, tmp_path) -> None:
    with pytest.raises(DataError, match=next(iter(change))):
        lay_beside(made(**change), made("vllm"))
    save_report(made(**change), tmp_path / "acceptance.json")
    assert measured_before([tmp_path], "acceptance.json", made("vllm").provenance) is None


def test_what_was_measured_before_is_found(tmp_path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "acceptance.json").write_text("{}")
    save_report(made("vllm"), tmp_path / "alone" / "acceptance.json")
    save_report(made(), tmp_path / "run" / "acceptance.json")
    folders = [tmp_path / name for name in ("none", "old", "alone", "run")]
    assert measured_before(folders, "acceptance.json", made("vllm").provenance) == made()
