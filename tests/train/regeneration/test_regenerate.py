"""Regeneration: whatever stops it, the responses are those of a run that nothing stopped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from inference import LLM
from speculators.errors import DataError
from tests.conftest import make_tiny_model
from tests.train.worlds import Scenario, in_worlds
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.pipeline.data_stage import write_in_parts
from train.recipe.data_sections import RegenerateSection
from train.regeneration.regenerate import regenerate, temperatures_of
from train.regeneration.store import CHUNK_END

TOKENIZER = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
SECTION = RegenerateSection(temperatures={0.0: 0.25, 1.0: 0.75}, max_new_tokens=6, batch_size=2)
EXAMPLES = [
    Example("default", f"x:{i}", prompt=f"number {i} and " * (1 + i % 5)) for i in range(40)
]


@pytest.fixture(scope="module")
def llm(tiny_model):
    model = tiny_model("qwen3", vocab_size=4096, eos_token_id=None).to(torch.bfloat16)
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
            target_hash="t",
            folder=folder,
            max_length=max_length,
            **options,
        )

    return run


@pytest.mark.slow
def test_a_kill_anywhere_changes_no_response(write, tmp_path):
    """The file is cut where a kill may have cut it: between chunks, inside a line, or before the
    first chunk ended."""
    whole = write(tmp_path / "whole")
    (path,) = (tmp_path / "whole").iterdir()
    text = path.read_text()
    second = text.index(CHUNK_END) + len(CHUNK_END) + 1
    assert text.count(CHUNK_END) == 3  # 40 responses, 8 batches of 2 in a chunk
    for i, cut in enumerate((10, second - 1, second, second + 25, len(text) - 5)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / path.name).write_text(text[:cut])
        assert write(folder) == whole
        assert (folder / path.name).read_text() == text


def test_parts_are_written_side_by_side(write, tmp_path):
    """Each process has a file of its own, also one that is in the middle of a chunk when another
    starts or ends."""
    for i in (1, 0):
        write(tmp_path, part=(i, 2))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".", 1)[1] for name in files] == ["0-of-2.jsonl", "1-of-2.jsonl"]
    second = tmp_path / files[1]
    half = second.read_text() + '{"key": "k", "tok'
    second.write_text(half)  # its process is still at it
    parts = [write(tmp_path, part=(0, 2)), write(tmp_path)[1::2]]
    assert second.read_text() == half and sorted(path.name for path in tmp_path.iterdir()) == files
    seen = []  # all of it is there
    whole = write(tmp_path, progress=lambda done, total, note: seen.append((done, total)))
    assert whole[0::2] == parts[0] and whole[1::2] == parts[1] and seen == [(40, 40)]
    write(tmp_path, part=(1, 2))
    assert second.read_text() == half[: half.rindex("\n") + 1]  # what its own kill tore is cut off


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
    parts = ["0-of-2.jsonl", "1-of-2.jsonl"]
    files = {"one": ["jsonl"], "two": parts, "killed": parts, "less": [*parts, "jsonl"]}
    for kind, (responses, written) in found.items():
        assert responses == found["one"][0] and written == files[kind], kind


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
    chosen = temperatures_of(SECTION.temperatures, 40)
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
