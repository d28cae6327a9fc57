"""Responses written by real vLLM servers: greedy ones are those of this process, in float32;
sampled ones repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference import LLM
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.recipe.data_sections import RegenerateSection
from train.regeneration.endpoint import EndpointError
from train.regeneration.record import Record
from train.regeneration.regenerate import regenerate, target_facts

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
    turns = [
        (
            {"role": "user", "content": ASKED[(i + n) % 5]},
            {"role": "assistant", "content": "as in the data"},
        )
        for n in range(1 + i % 3)
    ]
    return Example(
        "chat", f"chats:{i}", messages=tuple(message for turn in turns for message in turn)
    )


@pytest.fixture(scope="module")
def here():
    return LLM(str(TARGET), dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="module")
def server(vllm_server) -> str:
    return vllm_server(str(TARGET), "--max-model-len", "512")


@pytest.fixture
def write(here, tmp_path):
    def run(folder: str, *, llm=None, max_length=256, **keys):
        section = RegenerateSection.model_validate({"max_new_tokens": 24, "turns": "all"} | keys)
        facts = target_facts(here, str(TARGET))
        return regenerate(
            llm if section.endpoints else here,
            [chat(i) for i in range(9)],
            ConversationTokenizer(here.get_tokenizer()),
            section,
            target_hash="t",
            folder=tmp_path / folder,
            max_length=max_length,
            facts=facts,
            record=Record(str(TARGET), None, "t", None, {}),
        )

    return run


def record_of(folder: Path) -> dict:
    (path,) = folder.glob("????????????????.json")
    return json.loads(path.read_text())


def test_greedy_responses_are_those_of_this_process(write, server, here, tmp_path):
    ours = write("here", temperatures=0.0)
    assert write("there", temperatures=0.0, endpoints=[server], llm=here) == ours
    record = record_of(tmp_path / "there")
    assert (
        record["written_by"][0]["agreement"] == 1.0
        and record["written_by"][0]["version"][0].isdigit()
    )
    assert record["account"]["failed"] == {} and record["account"]["written"] + record["account"][
        "reused"
    ] == len(ours)


def test_a_seed_repeats_its_response(write, server):
    first = write("first", temperatures=1.0, endpoints=[server])
    again = write("again", temperatures=1.0, endpoints=[{"url": server, "max_concurrency": 3}])
    assert again == first and first != write("here", temperatures=1.0)


def test_text_is_proved_to_be_the_tokens(write, server, tmp_path):
    """Through the server's own chat template, which is the target's here."""
    ours = write("here", temperatures=0.0)
    assert (
        write("text", temperatures=0.0, endpoints=[server], exchange="text", unproved_tokens="keep")
        == ours
    )
    assert record_of(tmp_path / "text")["account"]["unproved"] == 0


def test_too_short_a_server_is_refused(server, write):
    with pytest.raises(EndpointError, match=r"serves up to 512 tokens, .* --max-model-len 1024"):
        write("x", endpoints=[server], max_length=1024)
