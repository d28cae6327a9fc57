"""After training: what is on disk is measured, the report lands in the run's folder, gates decide
the exit code."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from draftsmith.inference import LLM
from draftsmith.inference.bench.bench_options import BenchOptions
from draftsmith.inference.bench.load_generator import measure as bench
from draftsmith.inference.bench.load_generator import prepare
from draftsmith.inference.evaluation.engines import RuntimeEngine
from draftsmith.inference.evaluation.evaluate import EvaluationStopped
from draftsmith.inference.progress import Stages
from draftsmith.inference.report.schema import OUR_ENGINE, load_report
from draftsmith.speculators.errors import CheckpointError, ConfigError, DataError
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.pipeline.acceptance_stage import (
    Asker,
    accept,
    check_prompts,
    gate_bounds,
    measure,
    measured_suites,
    settings_of,
    workloads,
    write_report,
)
from draftsmith.train.recipe.recipe import make_recipe
from tests.support.reports import make_report
from tests.support.runs import tiny_run
from tests.support.tokenizers import chat_bytes


@pytest.fixture(scope="module")
def world(tiny_model, tmp_path_factory):
    """The folder of a run that is done, and recipes over it."""
    root = tmp_path_factory.mktemp("acceptance")
    tree = tiny_run(tiny_model, root / "target", root / "run")

    def recipe(gates: dict | None = None, **evaluation):
        changed = {"evaluation": tree["evaluation"] | evaluation, "gates": gates or {}}
        return make_recipe(tree | changed)

    return root, recipe


@pytest.mark.slow
def test_a_run_is_measured_reported_and_gated(world) -> None:
    root, recipe = world
    quiet = Stages(enabled=False)
    gates = {"lossless_mismatches": {"max": 0}, "acceptance_length": {"min": 1.0}}
    assert accept(recipe(gates), stages=quiet) == 0
    report = load_report(root / "run" / "acceptance.json")
    assert report.workloads() == ["sums", "talk", "all"] and report.temperatures() == [0, 1]
    assert len(report.gates) == 3 and report.passed
    assert report.provenance.recipe_sha256 == recipe(gates).recipe_hash()
    assert (root / "run" / "report.html").is_file()

    demanded = {"t0.acceptance_length": {"min": 2.99}}
    missed = recipe(demanded, temperatures=[0.0], lossless_check=False)
    assert accept(missed, stages=quiet) == 1
    assert not load_report(root / "run" / "acceptance.json").passed


def test_gate_of_a_temperature_holds_there_in_place_of_the_general_one(world) -> None:
    gates = {"t1.acceptance_length": {"min": 1.5}, "acceptance_length": {"min": 2.0}}
    bounds = gate_bounds(world[1](gates, temperatures=[0.0, 1.0]))
    assert {key: bound.min for key, bound in bounds.items()} == {
        "t0.acceptance_length": 2.0,
        "t1.acceptance_length": 1.5,
    }


def test_a_timed_batch_is_as_large_as_the_recipe_says(world) -> None:
    assert settings_of(world[1](timed_prompts=2, batch_size=8)).timed_prompts == 8


def test_report_that_cannot_be_written_is_printed(tmp_path) -> None:
    """All that was measured stands on the terminal before a disk is asked to take it."""
    (tmp_path / "file").write_text("kept")
    printed = io.StringIO()
    with pytest.raises(OSError):
        write_report(make_report(), tmp_path / "file", Stages(console=Console(file=printed)))
    assert "K=4" in printed.getvalue()


@pytest.mark.slow
def test_a_server_and_the_report_agree_on_a_suite(world, serving) -> None:
    """The same questions give the same counts through `bench`."""
    root, recipe = world
    rows = [{"category": "qa", "turns": ["ab"]}, {"category": "qa", "turns": ["ef"]}]
    (root / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = recipe(
        prompts=[],
        suites={"mt_bench": str(root / "question.jsonl")},
        max_tokens=12,
        repeats=0,
        temperatures=[0.0],
        lossless_check=False,
    )
    cell = measure(built, root / "run" / "export", Stages(enabled=False)).cell("all", 0)
    llm = LLM(
        str(root / "target"),
        max_num_seqs=2,
        speculative_config={
            "method": "eagle3",
            "model": str(root / "run" / "export"),
            "num_speculative_tokens": 2,
        },
    )
    asked = BenchOptions(
        base_url=(serving(llm),),
        dataset_name="mt_bench",
        dataset_path=str(root / "question.jsonl"),
        num_prompts=2,
        temperature=0,
        output_len=12,
        model="tiny",
    )
    result = bench(asked, prepare(asked))
    assert (result["completed"], cell.prompts) == (2, 2)
    assert result["spec_decode_num_drafts"] == cell.num_drafts > 0
    assert result["spec_decode_acceptance_length"] == pytest.approx(cell.acceptance_length)


def test_conversations_without_room_are_counted(world) -> None:
    root, recipe = world
    file = root / "long.jsonl"
    rows = [{"category": "x", "turns": turns} for turns in (["a", "b"], ["a", "b", "c"], ["d"])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = recipe(suites={"mt_bench": str(file)}, max_tokens=75, suite_prompts=1)
    (suite,) = measured_suites(built, settings_of(built))
    assert (suite.facts.conversations, suite.facts.conversations_in_file) == (1, 3)
    assert suite.facts.conversations_without_room == 1, "three answers of 75 tokens do not fit"
    file.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match="'x'"):
        measured_suites(built, settings_of(built))


def test_evaluation_that_is_interrupted_prints_what_it_has_measured(world) -> None:
    root, recipe = world
    built, log = recipe(temperatures=[0.0]), io.StringIO()

    class Interrupted(RuntimeEngine):
        def replayed(self, temperature: float) -> bool:  # all is written and timed
            raise KeyboardInterrupt

    stages = Stages(console=Console(file=log, width=80))
    with pytest.raises(EvaluationStopped):
        measure(built, root / "run" / "export", stages, {OUR_ENGINE: Interrupted})
    assert "no report is written" in log.getvalue()
    assert all(re.search(rf"^ *{name} ", log.getvalue(), re.MULTILINE) for name in ("sums", "talk"))


def test_prompts_end_where_the_target_goes_on(world) -> None:
    _, recipe = world
    built = recipe()
    chosen = workloads(built, settings_of(built))
    assert {name: len(prompts) for name, prompts in chosen.items()} == {"sums": 2, "talk": 2}
    for name, prompts in chosen.items():
        for text in map(chat_bytes().decode, prompts):
            assert text.startswith(f"user:{name}") and text.endswith("assistant:")
    assert workloads(built, settings_of(built)) == chosen
    long = recipe(max_tokens=250)
    with pytest.raises(DataError, match="'sums'"):
        workloads(long, settings_of(long))


def test_workloads_tokenise_each_prompt_once(world, monkeypatch) -> None:
    """A file of the user's may have thousands of long conversations."""
    _, recipe = world
    built = recipe()
    tokenised: list[str] = []
    prompt_ids = ConversationTokenizer.prompt_ids

    def counted(tokenizer: ConversationTokenizer, example: Example) -> list[int]:
        tokenised.append(example.origin)
        return prompt_ids(tokenizer, example)

    monkeypatch.setattr(ConversationTokenizer, "prompt_ids", counted)
    workloads(built, settings_of(built))
    assert tokenised and len(set(tokenised)) == len(tokenised)


def test_prompts_that_are_left_out_are_counted(world, tmp_path) -> None:
    _, recipe = world
    asker = Asker.of(recipe())
    around = len(chat_bytes()("user:<end>assistant:").input_ids)
    room = asker.limit - asker.max_tokens
    texts = ["fits", "x" * (room - around), "x" * (room - around + 1)]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(row) for row in [*rows, {"promt": "misspelt"}]]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    built = recipe(prompts=[{"path": str(file)}])
    built = built.model_copy(update={"data": built.data.model_copy(update={"on_bad_row": "drop"})})
    printed: list[str] = []
    chosen = workloads(built, settings_of(built), printed.append, tmp_path)
    assert sum(map(len, chosen.values())) == 2
    assert "1 of 4 rows left out" in printed[0] and f"{file}:4" in printed[0]
    assert (tmp_path / "bad_rows.evaluation.jsonl").is_file()
    assert printed[1].startswith("evaluation prompts: 1 left out, which leave no room")


def test_what_cannot_be_evaluated_is_known_before_the_training(world, tmp_path) -> None:
    _, recipe = world
    pooled = tmp_path / "pooled.jsonl"
    row = {"workload": "all", "messages": [{"role": "user", "content": "x"}]}
    pooled.write_text(json.dumps(row) + "\n", encoding="utf-8")
    check_prompts(recipe())
    check_prompts(recipe(prompts=[]))
    for changes, what in (
        ({"prompts": [{"path": str(pooled)}]}, "called all"),
        ({"prompts": [{"path": str(tmp_path / "nowhere.jsonl")}]}, "no such file"),
        ({"max_tokens": 250}, "too long"),
    ):
        with pytest.raises((ConfigError, DataError), match=what):
            check_prompts(recipe(**changes))


def test_without_prompts_or_an_export_nothing_is_measured(world, tmp_path) -> None:
    _, recipe = world
    assert accept(recipe(prompts=[]), stages=Stages(enabled=False)) == 0
    with pytest.raises(CheckpointError, match="export"):
        accept(recipe().model_copy(update={"output_dir": str(tmp_path)}))
