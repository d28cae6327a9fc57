"""Regeneration: whatever stops it, the responses are those of a run that nothing stopped."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from rich.console import Console
from transformers import AutoTokenizer

from inference import LLM
from speculators.errors import DataError
from tests.conftest import make_tiny_model
from tests.train.worlds import Scenario, in_worlds
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.pipeline.data_stage import DataStage, write_in_parts
from train.pipeline.progress import Stages
from train.recipe.data_sections import RegenerateSection, spread
from train.regeneration.conversations import TargetFacts
from train.regeneration.regenerate import regenerate

TOKENIZER = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
SECTION = RegenerateSection(temperatures={0.0: 0.25, 1.0: 0.75}, max_new_tokens=6, batch_size=2)
FACTS = TargetFacts("target", 256, 4096, ())
EXAMPLES = [
    Example("default", f"x:{i}", prompt=f"number {i} and " * (1 + i % 5)) for i in range(40)
]


@pytest.fixture(scope="module")
def llm(tiny_model):
    model = tiny_model("qwen3", vocab_size=4096, eos_token_id=None)
    return LLM(model, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER), max_num_seqs=2)


@pytest.fixture
def write(llm):
    def run(folder, examples=EXAMPLES, section=SECTION, max_length=128, **options):
        tokenizer = ConversationTokenizer(llm.get_tokenizer())
        return regenerate(
            llm,
            examples,
            tokenizer,
            section,
            facts=FACTS,
            target_hash="t",
            folder=folder,
            max_length=max_length,
            **options,
        )

    return run


def stored(folder: Path) -> list[str]:
    """The keys of all whole lines."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line)["key"] for line in lines]


def test_regenerate_killed_anywhere_asks_for_the_rest_alone(write, tmp_path):
    """The file is cut where a kill may have cut it: between lines or inside one."""
    whole = write(tmp_path / "whole")
    (path,) = (tmp_path / "whole").iterdir()
    text = path.read_text()
    second = text.index("\n", text.index("\n") + 1) + 1
    for i, cut in enumerate((10, second - 1, second, second + 25, len(text) - 5)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / path.name).write_text(text[:cut])
        kept = stored(folder)
        assert write(folder) == whole
        assert len(list(folder.iterdir())) == 2 and set(kept) < set(stored(folder))
        assert sorted(stored(folder)) == sorted(stored(tmp_path / "whole"))


def test_regenerate_stores_every_response_when_it_has_ended(write, llm, tmp_path, monkeypatch):
    """An interrupt after some steps leaves what had ended, and one report each."""
    steps, reports = 0, []
    real = llm.engine.step

    def step():
        nonlocal steps
        steps += 1
        if steps > 20:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, progress=lambda done, total, note: reports.append((done, note)))
    there = stored(tmp_path)
    assert 4 <= len(there) <= 8  # two at a time, six tokens each
    assert reports[-1][0] == len(there) and "tokens/s" in reports[-1][1]
    monkeypatch.undo()
    assert not llm.engine.has_unfinished
    assert len(write(tmp_path)) == 40 and set(there) < set(stored(tmp_path))
    assert len(stored(tmp_path)) == len(set(stored(tmp_path)))


def test_regenerate_reports_while_no_response_ends(write, tmp_path, monkeypatch):
    monkeypatch.setattr("train.regeneration.writers.REPORT_EVERY_S", 0.0)
    notes = []
    write(tmp_path, EXAMPLES[:1], progress=lambda done, total, note: notes.append((done, note)))
    assert any(done == 0 and "tokens/s" in note for done, note in notes)


def chat(*turns: str) -> Example:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return Example("chat", "c:0", messages=tuple(messages))


def test_regenerate_last_prompt_without_room_falls_back_to_an_earlier_turn(write, tmp_path):
    long = "number and " * 60
    examples = [chat("one", "two", "three", "four", long, "six"), chat("one", "two")]
    lines = []
    first, second = write(tmp_path, examples, say=lines.append)
    assert len(first.prompt_ids) < 100 and len(second.prompt_ids) < len(first.prompt_ids)
    assert "1 to an earlier turn" in lines[0] and "left out" not in "".join(lines)


def test_regenerate_says_what_is_left_out_and_what_is_cut(write, tmp_path):
    lines = []
    examples = [Example("default", "x:0", prompt="number and " * 200), *EXAMPLES[:9]]
    write(tmp_path, examples, say=lines.append)
    said = "".join(lines)
    assert "10 responses wanted" in said and "1 left out" in said
    assert "warning: 1 of 10 responses (10%)" in said and "data.max_length" in said
    assert "9 of 9 responses (100%) were cut" in said and "enable_thinking" in said


def test_regenerate_parts_have_a_file_each(write, tmp_path):
    """Processes that write at the same time lock a file each; then each reads all of them."""
    parts = [write(tmp_path, part=(i, 2)) for i in (0, 1)]
    seen = []
    whole = write(tmp_path, progress=lambda done, total, note: seen.append((done, total)))
    assert whole[0::2] == parts[0] and whole[1::2] == parts[1] and seen == [(40, 40)]


def parts_job(folder: Path, name: str, torn: bool = False) -> tuple[list, list[str]]:
    """What this world's processes write together into `name`, and the files; `torn`: after a kill
    that left half of each. In float32, where batches change nothing."""
    accelerator = Accelerator(cpu=True)
    if torn and accelerator.is_main_process:
        for path in (folder / name).iterdir():
            path.write_text(path.read_text()[: len(path.read_text()) // 2])
    accelerator.wait_for_everyone()
    model = make_tiny_model("qwen3", vocab_size=4096, eos_token_id=None)
    llm = LLM(model, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER), max_num_seqs=1)
    section = SECTION.model_copy(update={"batch_size": 1, "max_new_tokens": 2})

    def write(part: tuple[int, int]) -> list:
        tokenizer, place = ConversationTokenizer(llm.get_tokenizer()), folder / name
        return regenerate(
            llm,
            EXAMPLES[:19],
            tokenizer,
            section,
            facts=FACTS,
            target_hash="t",
            folder=place,
            max_length=128,
            part=part,
        )

    found = write_in_parts(accelerator, write)
    accelerator.wait_for_everyone()
    return found, sorted(path.name.split(".", 1)[1] for path in (folder / name).iterdir())


@pytest.mark.slow
def test_all_processes_write_what_one_would(tmp_path):
    """Each its part, after a kill too, and on another number of processes."""
    kinds = {
        "one": (1, "one", False),
        "two": (2, "two", False),
        "killed": (2, "two", True),
        "less": (1, "two", True),
    }
    scenarios = [
        Scenario(kind, processes, arguments={"name": name, "torn": torn})
        for kind, (processes, name, torn) in kinds.items()
    ]
    found = in_worlds(parts_job, scenarios, tmp_path)
    for kind, (responses, files) in found.items():
        assert responses == found["one"][0], kind
        assert files and all(name.endswith("jsonl") for name in files), kind


@pytest.mark.slow
def test_nothing_is_written_twice_and_settings_do_not_mix(write, tmp_path):
    first = write(tmp_path)
    seen = []
    assert write(tmp_path, progress=lambda done, total, note: seen.append((done, total))) == first
    assert seen == [(40, 40)]
    longer = write(tmp_path, section=SECTION.model_copy(update={"max_new_tokens": 9}))
    assert len(list(tmp_path.iterdir())) == 2 and {len(r.output_ids) for r in longer} == {9}
    assert write(tmp_path, examples=EXAMPLES[:7]) == first[:7]


def test_temperatures_have_their_shares_everywhere(write, tmp_path):
    chosen = spread(SECTION.temperatures, 40)
    assert Counter(chosen) == {0.0: 10, 1.0: 30}
    assert all(chosen[i : i + 8].count(0.0) == 2 for i in range(0, 40, 8))
    same = [Example("default", "x", prompt="equal prompts")] * 6
    greedy = {r.output_ids for r in write(tmp_path, examples=same, temperatures=[0.0] * 6)}
    sampled = {r.output_ids for r in write(tmp_path, examples=same, temperatures=[1.0] * 6)}
    assert len(greedy) == 1 and len(sampled) == 6


def test_what_does_not_fit_is_left_out_or_refused(write, tmp_path):
    long = Example("default", "long", prompt="word " * 300)
    assert len(write(tmp_path, examples=[*EXAMPLES[:2], long])) == 2
    rows = write(tmp_path, examples=EXAMPLES[:8], max_length=20)
    assert all(len(r.prompt_ids) + len(r.output_ids) <= 20 for r in rows)
    with pytest.raises(DataError, match=r"raise data\.max_length"):
        write(tmp_path, examples=[long])


def test_a_log_shows_tokens_per_second_and_the_time_left(write, tmp_path, monkeypatch):
    """Before the first response has ended, and after; what was found is not counted as written."""
    monkeypatch.setattr("train.pipeline.progress.LINE_EVERY", 0.0)
    monkeypatch.setattr("train.regeneration.writers.REPORT_EVERY_S", 0.0)
    log = io.StringIO()
    stages = Stages(1, console=Console(file=log, width=200))
    with stages.stage("regenerate", 40) as advance:
        write(tmp_path, progress=lambda done, total, note: advance(done, note, total=total))
    lines = [line for line in log.getvalue().splitlines() if "tokens/s" in line]
    assert "0/40" in lines[0] and "at most" in lines[0] and "min left" in lines[0]
    assert any(" s left" in line and "at most" not in line for line in lines[1:])
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr("train.pipeline.progress.time.monotonic", lambda: next(clock))
    advance = Stages(1, console=Console(file=(log := io.StringIO())))._advance(
        SimpleNamespace(tasks=[SimpleNamespace(id=0, total=40)], update=lambda *_, **__: None), "x"
    )
    advance(20)
    advance(30)
    assert "30/40, 10 s left" in log.getvalue()


def test_prompts_of_on_policy_texts_that_are_left_out_are_said(llm):
    lines = []
    stage = SimpleNamespace(
        llm=llm,
        recipe=SimpleNamespace(data=SimpleNamespace(max_length=64)),
        tokenizer=ConversationTokenizer(llm.get_tokenizer()),
        stages=SimpleNamespace(say=lines.append),
        _prompted=[*EXAMPLES[:4], Example("default", "long", prompt="word " * 300)],
    )
    assert len(DataStage.prompts(stage)) == 4
    assert "warning: 1 of 5 prompts" in lines[0] and "data.max_length" in lines[0]
