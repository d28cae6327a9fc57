"""The quickstart's conversations: right answers pass, wrong ones fail, splits never meet, the files
are its own."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo_target.answers import is_right
from scripts.demo_target.corpus import (
    CHECKABLE,
    FILES,
    WORKLOADS,
    Conversation,
    bucket,
    conversations,
    prompts,
)
from tests.quickstart_data import DATA

ROOT = Path(__file__).parents[1]
SPLITS = ("train", "validation", "test")


def check(conversation: Conversation, answer: str) -> bool:
    return is_right(conversation.workload, conversation.expected, answer)


def committed(split: str) -> list[dict]:
    """The rows of a file beside the quickstart's recipes."""
    return [
        json.loads(line)
        for line in gzip.decompress((DATA / f"{split}.jsonl.gz").read_bytes()).splitlines()
    ]


def corrupted(workload: str, answer: str) -> str:
    """The answer with one plain mistake."""
    if workload == "math":
        head, _, number = answer.rpartition("answer is ")
        return f"{head}answer is {int(number.rstrip('.')) + 1}."
    if workload == "python":
        return re.sub(r"return .*", "return 99", answer)
    if workload == "json":
        return answer.replace(",", "", 1)
    if workload == "table":
        return answer.replace("**", "**x", 1)
    return answer[:-3] + "x" + answer[-2:]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_reference_answer_is_right(workload):
    for conversation in conversations("train", 300, workloads=[workload]):
        assert check(conversation, conversation.messages[-1]["content"]), conversation


@pytest.mark.parametrize("workload", CHECKABLE)
def test_a_mistake_is_found(workload):
    for conversation in conversations("train", 300, workloads=[workload]):
        answer = corrupted(workload, conversation.messages[-1]["content"])
        assert not check(conversation, answer), answer
        assert not check(conversation, "")


@pytest.mark.parametrize("answer", ["", "  ", "And then", "..."])
def test_unfinished_chat_is_found(answer):
    conversation = next(conversations("train", 1, workloads=["chat"]))
    assert not check(conversation, answer)


@pytest.mark.parametrize(
    "body",
    [
        "for x in iter(int, 1):\n        pass",
        "while True:\n        pass",
        "import os",
        "return items.__class__",
        "return 9 ** 999",
        "for x in items:\n        items += items",
        "for x in range(999):\n        b = 9 + b * b",
    ],
)
def test_a_python_answer_cannot_run_away(body):
    conversation = next(conversations("train", 1, workloads=["python"]))
    name = conversation.expected["name"]
    assert not check(
        conversation,
        f"```python\ndef {name}(items, b=0):\n    {body}\n\nassert {name}([1], 1) == 1\n```",
    )


@pytest.mark.slow
def test_splits_share_no_message_that_stands_alone():
    seen = {
        s: {
            next(m["content"] for m in c.messages if m["role"] == "user")
            for c in conversations(s, 1000)
        }
        for s in SPLITS
    }
    for left, right in itertools.combinations(SPLITS, 2):
        assert not seen[left] & seen[right]
    assert all(bucket(message) < 94 for message in seen["train"])
    assert all(bucket(message) >= 97 for message in seen["test"])


def test_a_test_prompt_occurs_in_no_training_conversation():
    told = {
        m["content"]
        for c in conversations("train", 3000)
        for m in c.messages
        if m["role"] == "user"
    }
    for messages, _ in prompts("test", 300):
        first = next(m["content"] for m in messages if m["role"] == "user")
        assert first not in told


def test_the_same_seed_gives_the_same_conversations_in_another_process():
    code = "import json; from scripts.demo_target.corpus import conversations as c\n"
    code += "print(json.dumps([x.messages for x in c('train', 60, 7)]))"
    other = json.loads(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    )
    assert other == [c.messages for c in conversations("train", 60, 7)]
    assert other != [c.messages for c in conversations("train", 60, 8)]


def test_workloads_take_turns_and_conversations_end_with_the_assistant():
    found = list(conversations("train", 60))
    assert [c.workload for c in found] == list(WORKLOADS) * 10
    for c in found:
        roles = [m["role"] for m in c.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert json.loads(json.dumps(c.expected)) == c.expected


def test_shares_of_system_prompts_and_of_several_turns():
    found = list(conversations("train", 3000))
    system = sum(c.messages[0]["role"] == "system" for c in found) / len(found)
    several = sum(sum(m["role"] == "user" for m in c.messages) > 1 for c in found) / len(found)
    assert 0.45 < system < 0.55
    assert 0.30 < several < 0.40


@pytest.mark.parametrize("split", SPLITS)
def test_the_committed_files_are_what_the_generator_writes(split):
    rows = committed(split)
    assert len(rows) == sum(count for _, count in FILES[split])
    for seed, count in FILES[split]:
        part, rows = rows[:count], rows[count:]
        assert part[:300] == [made.row() for made in conversations(split, min(count, 300), seed)]


@pytest.mark.parametrize("split", SPLITS)
def test_the_committed_answers_are_right(split):
    for row in committed(split):
        assert ("expected" in row) == (row["workload"] in CHECKABLE)
        assert is_right(row["workload"], row.get("expected"), row["messages"][-1]["content"]), row


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="split"):
        next(conversations("dev", 1))
    with pytest.raises(ValueError, match="workloads"):
        next(conversations("train", 1, workloads=["poetry"]))
