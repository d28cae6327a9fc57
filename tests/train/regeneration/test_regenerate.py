"""Regeneration: whatever stops it, the responses are those of a run that nothing stopped."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoTokenizer

from draftsmith.inference import LLM
from draftsmith.speculators.errors import DataError
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.pipeline.data_stage import write_in_parts
from draftsmith.train.recipe.data_sections import RegenerateSection, deal_temperatures
from draftsmith.train.regeneration.conversations import TargetFacts
from draftsmith.train.regeneration.regenerate import regenerate
from draftsmith.train.regeneration.store import Response, ResponseStore, TokenIds
from tests.support.disks import full_disk
from tests.support.errors import raises_at
from tests.support.models import make_tiny_model
from tests.support.worlds import Scenario, in_worlds

TOKENIZER = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
SECTION = RegenerateSection(temperatures={0.0: 0.25, 1.0: 0.75}, max_new_tokens=6, batch_size=2)
FACTS = TargetFacts("target", 256, 4096, ())
EXAMPLES = [
    Example("default", f"x:{i}", prompt=f"number {i} and " * (1 + i % 5)) for i in range(40)
]


def make_llm(rows: int = 2) -> LLM:
    model = make_tiny_model("qwen3", vocab_size=4096, eos_token_id=None)
    return LLM(model, tokenizer=AutoTokenizer.from_pretrained(TOKENIZER), max_num_seqs=rows)


def write_with(llm: LLM, folder: Path, examples=EXAMPLES, section=SECTION, **options):
    return regenerate(
        llm,
        examples,
        ConversationTokenizer(llm.get_tokenizer()),
        section,
        facts=FACTS,
        target_hash="t",
        folder=folder,
        **{"max_length": 128, **options},
    )


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@pytest.fixture
def write(llm):
    return lambda folder, *arguments, **options: write_with(llm, folder, *arguments, **options)


def stored(folder: Path) -> list[str]:
    """The keys of all whole lines."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line)["key"] for line in lines]


def chat(*turns: str) -> Example:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return Example("chat", "c:0", messages=tuple(messages))


def test_last_prompt_without_room_falls_back_to_an_earlier_turn(write, tmp_path):
    long = "number and " * 60
    examples = [chat("one", "two", "three", "four", long, "six"), chat("one", "two")]
    lines = []
    first, second = write(tmp_path, examples, say=lines.append)
    assert len(first.prompt_ids) < 100 and len(second.prompt_ids) < len(first.prompt_ids)
    assert "1 to an earlier turn" in lines[0] and "left out" not in "".join(lines)


@pytest.mark.parametrize(
    "template, kwargs, advised",
    [
        ("{{ messages }}", {}, False),
        ("{{ enable_thinking }}", {}, True),
        ("{{ enable_thinking }}", {"enable_thinking": True}, True),
        ("{{ enable_thinking }}", {"enable_thinking": False}, False),
    ],
)
def test_cut_responses_are_blamed_on_thoughts_where_the_template_can_turn_them_off(
    llm, template, kwargs, advised, tmp_path
):
    lines = list[str]()
    regenerate(
        llm,
        EXAMPLES[:2],
        ConversationTokenizer(llm.get_tokenizer(), chat_template=template, template_kwargs=kwargs),
        SECTION,
        facts=FACTS,
        target_hash="t",
        folder=tmp_path,
        max_length=128,
        say=lines.append,
    )
    assert ["enable_thinking" in line for line in lines if "cut" in line] == [advised]


def test_what_is_left_out_and_what_is_cut_is_reported(write, tmp_path):
    lines = []
    long = Example("default", "x:0", prompt="number and " * 200)
    write(tmp_path, [long, *EXAMPLES[:9]], say=lines.append)
    text = "".join(lines)
    assert "10 responses:" in text and "1 left out" in text and "9 of 9 responses" in text
    rows = write(tmp_path, EXAMPLES[:8], max_length=20)
    assert max(len(r.prompt_ids) + len(r.output_ids) for r in rows) <= 20
    with raises_at(DataError, "data.max_length"):
        write(tmp_path, [long])


def parts_job(
    folder: Path, name: str, torn: bool = False, apart: bool = False
) -> tuple[list, list[str]]:
    """What this world's processes write together into `name`, and the files; `torn`: after a kill
    that left half of each; `apart`: each into a folder of its own, of which the last one's is told.
    In float32, where batches change nothing."""
    accelerator = Accelerator(cpu=True)
    if apart:
        name += f"-{accelerator.process_index}"
    if torn and accelerator.is_main_process:
        for path in (folder / name).iterdir():
            path.write_text(path.read_text()[: len(path.read_text()) // 2])
    accelerator.wait_for_everyone()
    section = SECTION.model_copy(update={"batch_size": 1, "max_new_tokens": 2})
    llm, options = make_llm(1), {"examples": EXAMPLES[:19], "section": section}
    responses = write_in_parts(
        accelerator,
        folder / name,
        lambda part: write_with(llm, folder / name, part=part, **options),
    )()
    accelerator.wait_for_everyone()
    files = sorted(path.name.split(".", 1)[1] for path in (folder / name).iterdir())
    *_, last = gather_object([(responses, files)])
    return last


@pytest.mark.slow
def test_all_processes_write_what_one_would(tmp_path):
    """Each its part, after a kill too, and on another number of processes."""
    kinds = {
        "one": (1, "one", False),
        "two": (2, "two", False),
        "killed": (2, "two", True),
        "less": (1, "two", True),
        "apart": (2, "apart", False),
    }
    scenarios = [
        Scenario(kind, processes, arguments={"name": name, "torn": torn, "apart": kind == "apart"})
        for kind, (processes, name, torn) in kinds.items()
    ]
    results = in_worlds(parts_job, scenarios, tmp_path)
    for kind, (responses, files) in results.items():
        assert responses == results["one"][0], kind
        assert files and all(name.endswith("jsonl") for name in files), kind


def test_responses_at_rest_take_a_few_bytes_per_token(tmp_path):
    """Those of a data set are in memory at once, a billion tokens and more."""
    ids = np.random.default_rng(0).integers(1000, 150_000, (20, 1000))
    store = ResponseStore(tmp_path, "n")
    for number, row in enumerate(ids.tolist()):
        store.add(str(number), row, "here")
    tracemalloc.start()
    try:
        known = ResponseStore(tmp_path, "n").known
        responses = [Response.of("w", [], known[str(i)].unpacked(), 0.0) for i in range(len(ids))]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [list(response.output_ids) for response in responses] == ids.tolist()
    assert held < 10 * ids.size  # 4 in the store and 4 here


def test_store_without_room_names_its_file_and_keeps_what_it_has(tmp_path):
    store = ResponseStore(tmp_path, "n")
    store.add("a", [1], "here")
    with full_disk(), pytest.raises(OSError) as error:
        store.add("b", [1] * 100, "here")
    assert [error.value.filename] == [str(path) for path in tmp_path.iterdir()]
    assert ResponseStore(tmp_path, "n").known == {"a": TokenIds.of([1])}


def test_nothing_is_written_twice_and_settings_do_not_mix(write, tmp_path):
    parts = [write(tmp_path, part=(i, 2)) for i in (0, 1)]
    seen = []
    first = write(tmp_path, progress=lambda done, note, total: seen.append((done, total)))
    assert seen == [(40, 40)] and (first[0::2], first[1::2]) == tuple(parts)
    longer = write(tmp_path, section=SECTION.model_copy(update={"max_new_tokens": 9}))
    assert len(list(tmp_path.iterdir())) == 3 and {len(r.output_ids) for r in longer} == {9}
    assert write(tmp_path, examples=EXAMPLES[:7]) == first[:7]


def test_writing_that_is_stopped_says_what_it_has_kept(write, tmp_path):
    def stop(done: float, note: str = "", total: float | None = None) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    lines = []
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, progress=stop, say=lines.append)
    kept = int(re.search(r"(\d+) responses written", lines[-1])[1])
    stored = [line for file in tmp_path.glob("*.jsonl") for line in file.open()]
    assert kept == len(stored) >= 3


def test_progress_of_writing_counts_the_tokens_of_responses_under_way(write, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.train.regeneration.writers.REPORT_EVERY_S", 0.0)
    notes = list[tuple[float, str]]()

    def progress(done: float, note: str = "", total: float | None = None) -> None:
        notes.append((done, note))

    responses = write(tmp_path, EXAMPLES[:2], progress=progress)
    assert any("tokens/s" in note for done, note in notes if done == 0)
    tokens = sum(len(response.output_ids) for response in responses)
    assert notes[-1][1].startswith(f"{tokens} tokens, ")


def test_temperatures_have_their_shares_everywhere(write, tmp_path):
    chosen = deal_temperatures(SECTION.temperatures, 40)
    assert Counter(chosen) == {0.0: 10, 1.0: 30}
    assert all(chosen[i : i + 8].count(0.0) == 2 for i in range(0, 40, 8))
    same = [Example("default", "x", prompt="equal prompts")] * 6
    greedy = {r.output_ids for r in write(tmp_path, examples=same, temperatures=[0.0] * 6)}
    sampled = {r.output_ids for r in write(tmp_path, examples=same, temperatures=[1.0] * 6)}
    assert len(greedy) == 1 and len(sampled) == 6
