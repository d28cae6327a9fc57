"""Rows on disk are those in memory, whoever has made them; what is not whole is not read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from transformers import AutoTokenizer

from draftsmith.inference.progress import Stages
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data import tokenising
from draftsmith.train.data.arrow_tables import ABANDONED_S, facts_of, remove_abandoned
from draftsmith.train.data.bad_rows import BadRows
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import pack, prepare_rows
from draftsmith.train.data.prompt_tables import Prompts, save_prompts
from draftsmith.train.data.row_tables import PackedRows, save_rows
from draftsmith.train.data.tokenising import (
    WORTH_A_PROCESS,
    examples_address,
    process_count,
    prompts_of,
)
from draftsmith.train.pipeline.data_stage import DataStage
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import yaml_text
from draftsmith.train.trainer.checkpoint import hash_rows
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import TOKENIZER, save_target
from tests.support.training import make_rows


def chat(number: int, **answer: str) -> Example:
    messages = [
        {"role": "user", "content": f"Count to {number}, and explain each step."},
        {"role": "assistant", "content": "one, two, " * number, **answer},
    ]
    return Example(f"w{number % 2}", f"c:{number}", messages=tuple(messages))


@pytest.fixture(scope="module")
def converter() -> ConversationTokenizer:
    return ConversationTokenizer(AutoTokenizer.from_pretrained(TOKENIZER))


@pytest.fixture
def examples() -> list[Example]:
    """Whole ones, one with thoughts that the template does not show, one whose answer is cut away,
    and one that is cut."""
    without = Example("w", "t:1", prompt="one, two, " * 200, completion="three")
    cut = Example("w", "t:2", prompt="one, two, ", completion="three, four, " * 200)
    return [*map(chat, range(1, 9)), chat(9, reasoning="a secret"), without, cut]


@pytest.mark.slow
def test_prepare_rows_several_processes_make_the_rows_of_one(converter, examples, tmp_path):
    def prepared(num_proc: int) -> tuple:
        bad = BadRows()
        bad.read = len(examples)
        scratch = tmp_path / f"{num_proc}" / "rows"  # of a new run, which is not there yet
        rows, statistics = prepare_rows(
            examples, converter, max_length=80, bad=bad, num_proc=num_proc, scratch=scratch
        )
        assert not list(scratch.glob("*"))
        workloads = [row.workload for row in rows]
        return hash_rows(pack(rows, 80)), workloads, statistics, bad.reasons

    one = prepared(1)
    assert prepared(2) == one
    assert list(one[-1]) == ["c:9"] and one[2].truncated and one[2].dropped_cut


def test_process_count_small_data_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(tokenising, "_cores", lambda: 8)
    counts = (1, WORTH_A_PROCESS, 3 * WORTH_A_PROCESS, 10**7)
    assert [process_count(None, count) for count in counts] == [1, 1, 3, 8]
    assert process_count(4, 3) == 3


def test_examples_address_sees_all_that_tokens_depend_on(converter, examples):
    def of(examples: list[Example] = examples, settings: int = 1, **changed) -> str:
        facts = {"chat_template": None, "template_kwargs": {}, "reasoning": "keep"} | changed
        tokenizer = ConversationTokenizer(converter.tokenizer, **facts)
        return examples_address(examples, tokenizer, settings)

    others = [
        of(examples[::-1]),
        of(examples[:-1]),
        of(settings=2),
        of(chat_template="{{ messages }}"),
        of(template_kwargs={"enable_thinking": False}),
        of(reasoning="drop"),
    ]
    assert of() == of(list(examples)) and len({of(), *others}) == len(others) + 1


# ------------------------------------------------------------------------------------------ on disk


def test_packed_rows_are_views_of_what_was_saved(tmp_path):
    rows, path = make_rows(1500), tmp_path / "rows.arrow"
    save_rows(path, iter(rows), {"counted": 3})
    mapped = PackedRows(path)
    assert facts_of(path) == {"counted": 3}
    assert len(mapped) == len(rows) > 256 and hash_rows(mapped) == hash_rows(rows)
    assert (mapped[-1].position_ids == rows[-1].position_ids).all()
    assert [row.workloads for row in mapped[3:5]] == [row.workloads for row in rows[3:5]]
    assert not mapped[0].input_ids.flags.owndata and not mapped[0].input_ids.flags.writeable
    with pytest.raises(IndexError):
        mapped[len(rows)]


def test_prompts_are_those_that_were_saved(converter, tmp_path):
    examples = [chat(3), Example("w", "x", messages=({"role": "assistant", "content": "a"},))]
    examples += [chat(5), chat(4)]
    bad = BadRows()
    bad.read = len(examples)
    path = tmp_path / "prompts.arrow"
    save_prompts(path, prompts_of(examples, converter, bad), {})
    prompts = Prompts(path)
    assert prompts.examples.tolist() == [0, 2, 3]
    assert list(prompts) == [tuple(converter.prompt_ids(examples[i])) for i in (0, 2, 3)]
    chosen = prompts.at([2, 0, 2])
    assert list(chosen) == [prompts[2], prompts[0], prompts[2]]
    assert chosen.lengths.tolist() == list(map(len, chosen))


def test_facts_of_a_table_that_is_not_whole_are_none(tmp_path):
    rows, path = make_rows(1500), tmp_path / "rows.arrow"
    assert facts_of(path) is None
    save_rows(path, rows, {})
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-9] + b"x" + whole[-8:], b""):
        path.write_bytes(damaged)
        assert facts_of(path) is None
    path.write_bytes(whole)
    assert facts_of(path) == {}
    path.with_suffix(".json").unlink()
    assert facts_of(path) is None


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path):
    rows, path = make_rows(1500), tmp_path / "rows.arrow"

    def killed():
        yield from rows[:300]
        os._exit(9)

    child = os.fork()
    if not child:
        save_rows(path, killed(), {})
    os.waitpid(child, 0)
    left = list(tmp_path.iterdir())
    assert facts_of(path) is None and path not in left and len(left) == 1
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == left  # it may be another's that is at work
    os.utime(left[0], (0, left[0].stat().st_mtime - ABANDONED_S))
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- of a run


@pytest.fixture
def data_stage(tmp_path):
    """A function that begins the data of a run, as at each of its starts."""
    tree = {
        "name": "rows",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(save_target(tmp_path / "target"))},
        "data": {
            "train": [quickstart("train", 6)],
            "validation": [quickstart("validation", 2)],
            "max_length": 256,
        },
        "regenerate": {"max_new_tokens": 3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(tree))

    def start(*overrides: str) -> DataStage:
        recipe = load_recipe(path, overrides)
        target = FrozenTarget.from_pretrained(recipe.target.model)
        tokenizer = recipe.target.load_tokenizer()
        return DataStage(recipe, target, tokenizer, Accelerator(cpu=True), Stages(enabled=False))

    return start


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_data_stage_a_second_start_tokenises_nothing(data_stage, enabled, monkeypatch):
    """And the first one nothing twice."""
    asked: list[str] = []
    for name in ("rows", "prompt_ids"):
        whole = getattr(ConversationTokenizer, name)

        def counted(self, example, *, whole=whole, **options):
            asked.append(f"{whole.__name__} {example.origin}")
            return whole(self, example, **options)

        monkeypatch.setattr(ConversationTokenizer, name, counted)

    def prepared() -> tuple:
        stage = data_stage(f"regenerate.enabled={str(enabled).lower()}")
        rows, held_out, prompts = stage.training_rows(), stage.held_out(), stage.prompts()
        return hash_rows(rows, prompts), held_out

    first = prepared()
    assert asked and len(set(asked)) == len(asked)
    asked.clear()
    assert prepared() == first and not asked


@pytest.mark.slow
def test_data_stage_rows_are_those_of_the_examples(data_stage):
    stage = data_stage("regenerate.enabled=false")
    rows = stage.training_rows()
    expected, _ = prepare_rows(stage._examples, stage.tokenizer, max_length=256, bad=BadRows())
    assert hash_rows(rows) == hash_rows(pack(expected, 256))
    path: Path = next(stage.rows_folder.glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-100])
    assert hash_rows(data_stage("regenerate.enabled=false").training_rows()) == hash_rows(rows)
    assert np.all(rows[0].segment_ids >= 0)
