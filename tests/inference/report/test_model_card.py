"""The card of every family: metadata that is valid YAML, commands for the engines that load it, and
no figure that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from draftsmith.inference.report.build import lay_beside
from draftsmith.inference.report.model_card import CardFacts, model_card, serving, unmeasured
from draftsmith.inference.report.schema import AcceptanceReport
from draftsmith.inference.report.table import report_tables
from draftsmith.speculators.registry import config_for_target, family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import CASES
from tests.support.reports import bare_report, in_engine, with_suite


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
    assert "base_model" not in data and "license" not in data
    assert "Nothing: no acceptance report" in text and "Not stated" in text


def test_sglang_is_named_where_it_reads_the_same_taps(tiny_model):
    facts = facts_of(tiny_model, "eagle3")
    assert "SGLang" not in [engine for engine, _, _ in serving(facts)]
    inside = facts.config.model_copy(update={"num_target_layers": 6, "tap_layers": (1, 2, 4)})
    named = replace(facts, config=inside, fields={"draftsmith": {"format": "sglang"}})
    assert [engine for engine, _, _ in serving(named)] == ["SGLang", "Draftsmith"]


def test_card_has_what_was_measured_and_no_more(tiny_model, report: AcceptanceReport):
    """In tables, which are those of the terminal; suites too."""
    both = with_suite(report, "spec_bench")
    text = model_card(facts_of(tiny_model, "eagle3", base_model="org/target"), both)
    for part in (report, both.of_suite("spec_bench")):
        assert report_tables(part) in text
    assert "### spec_bench" in text and both.suites[0].sha256 in text
    assert "that are met:\n2 of 3." in text and "enable_thinking: False" in text


def test_what_a_bare_report_lacks_is_named(tiny_model):
    bare = bare_report()
    text = model_card(facts_of(tiny_model, "eagle3"), bare)
    assert all(line in text for line in unmeasured(bare)) and "nan" not in text.lower()
    assert "Speedup:" in text and "Equality of outputs" in text


def test_another_engine_is_named_with_its_figure(report: AcceptanceReport):
    both = lay_beside(in_engine(report), in_engine(report, "vllm"))
    lines = " ".join(unmeasured(both))
    length = both.cell("all", 0.0, "vllm").acceptance_length
    assert f"in vllm: {length:.2f} at temperature 0" in lines and "vLLM and SGLang" not in lines
