"""The card of every family: metadata that is valid YAML, commands for the engines that load it, and
no figure that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from draftsmith.inference.report.build import lay_beside
from draftsmith.inference.report.model_card import (
    CardFacts,
    evaluation_results,
    model_card,
    serving,
    unmeasured,
)
from draftsmith.inference.report.schema import AcceptanceReport
from draftsmith.inference.report.table import CARD, row
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import CASES
from tests.support.reports import bare_report, both_engines, with_suites


def facts_of(tiny_model, name: str, **changes) -> CardFacts:
    case = CASES[name]
    target = FrozenTarget(tiny_model(case.architecture), case.taps)
    options = family_class(case.family).options.model_validate(case.options)
    shape = options.shape(family_class(case.family).config_class.model_fields, target) | case.shape
    config = config_for_target(
        target, case.family, **{"tap_layers": case.taps, **shape} if case.taps else shape
    )
    return CardFacts("org/head", config, {}, 3, "the-target", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_family_has_a_card(tiny_model, name):
    facts = facts_of(tiny_model, name)
    text = model_card(facts, None)
    data = ModelCard(text).data.to_dict()
    engines = {engine.partition(",")[0].lower() for engine, _, _ in serving(facts)}
    assert {"speculative-decoding", facts.config.family} <= set(data["tags"])
    assert engines - {"draftsmith"} == set(data["tags"]) & {"vllm", "sglang"}
    assert "model-index" not in data and "base_model" not in data and "license" not in data
    assert "Nothing: no acceptance report" in text and "Not stated" in text


def test_sglang_is_named_where_it_reads_the_same_taps(tiny_model):
    facts = facts_of(tiny_model, "eagle3")
    assert "SGLang" not in [engine for engine, _, _ in serving(facts)]
    inside = facts.config.model_copy(update={"num_target_layers": 6, "tap_layers": (1, 2, 4)})
    named = replace(facts, config=inside, fields={"draftsmith": {"format": "sglang"}})
    assert [engine for engine, _, _ in serving(named)] == ["SGLang", "Draftsmith"]


def test_the_index_has_what_was_measured_and_no_more(tiny_model, report: AcceptanceReport):
    facts = facts_of(tiny_model, "eagle3", base_model="org/target")
    found = {
        (r.dataset_type, r.dataset_args["temperature"], r.metric_type): r.metric_value
        for r in evaluation_results(report)
    }
    own = [cell for cell in report.results if cell.method == report.provenance.drafter_method]
    assert {key[:2] for key in found} == {(cell.workload, cell.temperature) for cell in own}
    for cell in own:
        assert found[cell.workload, cell.temperature, "acceptance_length"] == pytest.approx(
            cell.acceptance_length, abs=1e-4
        )
    text = model_card(facts, report)
    assert len(ModelCard(text).data.eval_results) == len(found)
    assert "3 bounds" in text and "2 are met" in text


def test_the_table_has_the_rows_of_the_terminal(tiny_model, report: AcceptanceReport):
    both = with_suites(report, "spec_bench", "mt_bench")
    text = model_card(facts_of(tiny_model, "eagle3"), both)
    for part in (report, both.of_suite("mt_bench")):
        for cell in part.own_cells():
            line = row(cell)
            name = f"**{line['workload']}**" if cell.workload == "all" else line["workload"]
            assert f"| {' | '.join([name, *(line[column] for column in CARD[1:])])} |" in text
    assert "### spec_bench" in text and both.suites[1].files[0].sha256 in text
    assert "enable_thinking: False" in text
    kinds = {result.dataset_type for result in evaluation_results(both)}
    assert {"spec_bench/all", "mt_bench/summarization", "chat"} <= kinds


def test_what_a_bare_report_lacks_is_named(tiny_model):
    bare = bare_report()
    text = model_card(facts_of(tiny_model, "eagle3"), bare)
    assert {result.metric_type for result in evaluation_results(bare)} == {"acceptance_length"}
    assert "silent" not in {
        result.dataset_type for result in evaluation_results(bare)
    }  # it never drafted
    said = " ".join(unmeasured(bare))
    assert "Speedup:" in said and "Equality of outputs" in said
    assert all(line in text for line in unmeasured(bare)) and "nan" not in text.lower()


def test_another_engine_is_named_with_its_figure(report: AcceptanceReport):
    both = lay_beside(*both_engines(report))
    said = " ".join(unmeasured(both))
    figure = both.cell("all", 0.0, "vllm").acceptance_length
    assert (
        f"in vllm the acceptance length over all workloads was {figure:.2f} at temperature 0"
        in said
    )
    assert "vLLM and SGLang" not in said
