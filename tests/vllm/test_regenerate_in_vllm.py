"""Responses written by real vLLM servers: greedy ones are those of this process, in float32;
sampled ones repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import end_of_sequence_ids
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.recipe.data_sections import RegenerateSection
from draftsmith.train.recipe.endpoints import EndpointError
from draftsmith.train.regeneration.conversations import TargetFacts
from draftsmith.train.regeneration.regenerate import regenerate
from draftsmith.train.regeneration.store import Record

TARGET = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target"
ASKED = (
    "What is 3 + 4?",
    "Name a colour.",
    "Write a haiku.",
    "Say it again, please.",
    "And in other words?",
)


def chat(i: int) -> Example:
    """One to three questions; the answers of the data are in nobody's way."""
    messages: list[dict[str, str]] = []
    for n in range(1 + i % 3):
        messages.append({"role": "user", "content": ASKED[(i + n) % 5]})
        messages.append({"role": "assistant", "content": "as in the data"})
    return Example("chat", f"chats:{i}", messages=tuple(messages))


@pytest.fixture(scope="module")
def own_llm():
    return LLM(str(TARGET), dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="module")
def server(vllm_server) -> str:
    return vllm_server(str(TARGET), "--max-model-len", "512")


@pytest.fixture
def write(own_llm, tmp_path):
    def run(folder: str, *, llm=None, max_length=256, **keys):
        section = RegenerateSection.model_validate({"max_new_tokens": 24, "turns": "all"} | keys)
        target, tokenizer = own_llm.engine.target, own_llm.get_tokenizer()
        end = tuple(end_of_sequence_ids(target, tokenizer))
        return regenerate(
            llm if section.endpoints else own_llm,
            [chat(i) for i in range(9)],
            ConversationTokenizer(tokenizer),
            section,
            facts=TargetFacts(str(TARGET), 1024, target.vocab_size, end),
            target_hash="t",
            folder=tmp_path / folder,
            max_length=max_length,
            record=Record(tmp_path / folder, {}),
            say=run.lines.append,
        )

    run.lines = []
    return run


def record_of(folder: Path) -> dict:
    (record,) = json.loads((folder / "regeneration.json").read_text()).values()
    return record


def test_greedy_responses_are_those_of_this_process(write, server, own_llm, tmp_path):
    ours = write("here", temperatures={0.0: 1.0})
    assert write("there", temperatures={0.0: 1.0}, endpoints=[server], llm=own_llm) == ours
    assert record_of(tmp_path / "there")["written_by"].keys() == {"vllm"}
    assert not any("warning" in line and "token ids" in line for line in write.lines)


def test_a_seed_repeats_its_response(write, server):
    first = write("first", temperatures={1.0: 1.0}, endpoints=[server])
    slower = [{"url": server, "max_concurrency": 3}]
    again = write("again", temperatures={1.0: 1.0}, endpoints=slower)
    assert again == first and first != write("here", temperatures={1.0: 1.0})


def test_too_short_a_server_is_refused(server, write):
    with pytest.raises(EndpointError, match="--max-model-len 1024"):
        write("x", endpoints=[server], max_length=1024)
