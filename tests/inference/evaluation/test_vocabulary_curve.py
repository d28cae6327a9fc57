"""Sizes of a draft vocabulary: what is measured at each of them, and which one is chosen."""

from __future__ import annotations

import json
import math

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine import round_costs
from draftsmith.inference.engine.round_costs import RoundSeconds, time_round
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config
from draftsmith.inference.evaluation import side_by_side, vocabulary_curve
from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.evaluation.side_by_side import compare_methods
from draftsmith.inference.evaluation.vocabulary_curve import (
    LoadedSizes,
    RoundPrice,
    VocabularySize,
    fastest,
    measure_prices,
    sizes_to_try,
)
from draftsmith.inference.model_runner.model_runner import ModelRunner
from draftsmith.inference.spec_decode.proposers.head import HeadProposer
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.engines import byte_tokenizer
from tests.support.errors import raises_at

K = 3
SIZES = [200, 128, 64, 32]
PROMPTS = [Prompt(None, [65 + i, 66, 67, 68]) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def counted(folders, tmp_path_factory) -> tuple[str, str]:
    """The target, and its head, which was supervised most on tokens of large ids."""
    target = FrozenTarget.from_pretrained(folders[0], tap_layers=[1, 2, 3])
    drafter = load_drafter(folders[1], target)
    drafter.token_counts = torch.arange(target.vocab_size)
    folder = tmp_path_factory.mktemp("counted") / "drafter"
    return folders[0], str(export_drafter(drafter, folder, dtype=torch.float32))


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(vocabulary_curve, "SMALLEST", 32)


def config_of(drafter: str, **options) -> dict:
    return {"method": "eagle3", "model": drafter, "num_speculative_tokens": K, **options}


def sizes_of(counted: tuple[str, str], **options) -> LoadedSizes:
    target = FrozenTarget.from_pretrained(counted[0])
    return LoadedSizes(
        target, byte_tokenizer(), parse_speculative_config(config_of(counted[1], **options))
    )


def proposed(llm: LLM) -> list[int]:
    return llm.engine.proposer._drafter.draft_to_target.tolist()


def test_sizes_are_all_tokens_and_the_powers_of_two_below():
    assert sizes_to_try(200) == SIZES
    assert sizes_to_try(128) == [128, 64, 32]  # once
    assert sizes_to_try(31) == [31]


def test_fastest_writes_most_for_what_its_rounds_cost_and_is_the_larger_of_equals():
    def point(size: int, tau: float, whole: float) -> VocabularySize:
        return VocabularySize(size, 1.0, tau, RoundPrice(0.5, whole))

    curve = [point(400, 3.0, 2.0), point(200, 2.9, 1.5), point(100, 2.0, 1.4)]
    assert fastest(curve).size == 200
    assert fastest([point(300, 2.9, 1.52), *curve]).size == 200
    assert fastest([point(300, 2.9, 1.51), *curve]).size == 300  # no more than noise parts them


def test_price_is_of_the_least_times_in_plain_steps(counted, monkeypatch):
    """Of two sweeps the first is slow at one size and the second at all others."""
    slow = iter([1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 2.0, 2.0])

    def seconds(engine, rows):
        times = next(slow)
        size = engine.proposer._drafter.config.draft_vocab_size
        assert rows == 2 and engine.proposer.num_speculative_tokens == K
        return RoundSeconds(0.1 * times, 0.15 * times, 0.001 * size * times)

    monkeypatch.setattr(vocabulary_curve, "time_round", seconds)
    sizes = sizes_of(counted)
    prices = measure_prices(sizes.drafters, sizes.target, K, 2)
    assert list(prices) == SIZES
    for size, price in prices.items():
        assert math.isclose(price.drafts, 0.01 * size)
        assert math.isclose(price.whole, 1.5 + price.drafts)


def test_round_is_timed_at_one_token_and_at_all_drafts(counted, monkeypatch):
    """Each of its parts takes as many seconds as it was given tokens."""
    monkeypatch.setattr(round_costs, "_least_seconds", lambda parts: {p: parts[p]() for p in parts})
    monkeypatch.setattr(ModelRunner, "rehearse", lambda runner, rows, tokens: rows * tokens)
    monkeypatch.setattr(HeadProposer, "rehearse", lambda proposer, rows, depth: len(rows) * depth)
    llm = LLM(counted[0], speculative_config=config_of(counted[1]), max_num_seqs=2)
    assert time_round(llm.engine, 2) == RoundSeconds(2, 2 * (K + 1), 2 * K)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_curve_is_of_the_drafter_that_is_loaded_at_each_size(counted, temperature):
    target, drafter = counted
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    written = LLM(target).generate([{"prompt_token_ids": p.token_ids} for p in PROMPTS], params)
    texts = [(text.prompt_token_ids, text.outputs[0].token_ids) for text in written]
    outputs = [token for _, output in texts for token in output]
    prices = {size: RoundPrice(0.1, 1.2) for size in SIZES}
    curve = sizes_of(counted).curve(prices, texts, temperature, K)
    assert [point.size for point in curve] == SIZES
    for point in curve:
        llm = LLM(target, speculative_config=config_of(drafter, draft_vocab_size=point.size))
        loaded = llm.engine.proposer._drafter
        inside = sum(token in proposed(llm) for token in outputs)
        assert math.isclose(point.coverage, inside / len(outputs), rel_tol=1e-6)
        results = expected_acceptance(llm.engine.target, loaded, texts, temperature, K)
        expected = sum(results, ReplayResult()).expected_acceptance_length
        assert math.isclose(point.acceptance_length, expected)
    assert curve[0].coverage > curve[-1].coverage  # the sizes differ in what they cover


def test_first_ids_of_a_list_are_the_sizes_where_one_is_given(counted, monkeypatch):
    # the head does not propose the token that does
    monkeypatch.setattr(vocabulary_curve, "end_of_sequence_ids", lambda *_: frozenset())
    target = FrozenTarget.from_pretrained(counted[0], tap_layers=[1, 2, 3])
    ids = load_drafter(counted[1], target).draft_to_target.flip(0)[:61].tolist()
    sizes = sizes_of(counted, draft_token_ids=ids)
    assert sizes.sizes == [61, 32]
    kept = [drafter.draft_to_target.tolist() for drafter in sizes.drafters()]
    assert kept == [sorted(ids), sorted(ids[:32])]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_eagle_topk": 2, "speculative_num_steps": 2},
        {"enable_adaptive_verification": True},
        {"num_speculative_tokens_per_batch_size": [[1, 8, 2]]},
        {"draft_sample_method": "greedy"},
    ],
)
def test_rounds_that_no_replay_foresees_are_refused(counted, options):
    with raises_at(ConfigError, "--draft-vocab"):
        sizes_of(counted, **options)


def test_drafter_without_counts_is_refused_before_any_text_is_written(folders, monkeypatch):
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: pytest.fail("a text was written"))
    with raises_at(ConfigError, "draft_vocab_size"):
        compared(folders, None)


def compared(folders: tuple[str, str], saved) -> bool:
    return compare_methods(
        folders[0],
        {"head": config_of(folders[1])},
        lambda tokenizer: PROMPTS,
        GREEDY,
        repeats=1,
        title="target",
        saved=saved,
        arguments={},
        choose_vocabulary=["head"],
    )


@pytest.mark.slow
def test_drafter_runs_at_the_fastest_size_and_the_curve_is_saved(
    counted, tmp_path, monkeypatch, capsys
):
    """Drafts of 64 tokens cost next to nothing here."""
    prices = {size: RoundPrice(9.0, 10.0) for size in SIZES} | {64: RoundPrice(0.0, 0.1)}
    monkeypatch.setattr(side_by_side, "measure_prices", lambda *_: prices)
    run = side_by_side.SideBySide.run
    drafting = []

    def spied(engines, *arguments):
        drafting.extend(proposed(engines.llms["head"]))
        return run(engines, *arguments)

    monkeypatch.setattr(side_by_side.SideBySide, "run", spied)
    saved = tmp_path / "results.json"
    assert compared(counted, saved)  # the text is the default's
    assert len(drafting) == 64
    curve = json.loads(saved.read_text())["head"]["draft_vocabularies"]
    assert [point["size"] for point in curve] == SIZES
    assert max(curve, key=lambda point: point["gain"])["size"] == 64
    printed = capsys.readouterr().out
    assert "chosen" in printed and "coverage" in printed
