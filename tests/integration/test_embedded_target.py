"""The target that the repository carries is as able as its card says, and drafted for without
loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference import LLM, SamplingParams
from tests.support.quickstart_data import rows

TARGET = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target"


@pytest.fixture(scope="module")
def llm():
    drafting = {"method": "ngram", "num_speculative_tokens": 4}
    return LLM(str(TARGET), dtype="float32", speculative_config=drafting, max_num_seqs=8)


@pytest.mark.slow
def test_answers_are_right_end_and_are_the_same_with_drafts(llm):
    """Prompts that training has not seen. The card's rates are of more prompts; this is a floor."""
    asked = rows("test", 20, workloads=("math", "json", "table"))
    params = SamplingParams(temperature=0, max_tokens=320)
    chats = [row["messages"][:-1] for row in asked]
    drafted = llm.chat(chats, params, use_tqdm=False)
    plain = llm.chat(chats, params, use_tqdm=False, speculate=False)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.outputs[0].finish_reason == "stop" for o in plain) >= 19
    right = [is_right(row, o.outputs[0].text) for row, o in zip(asked, plain)]
    assert sum(right) >= 17  # 85 %


def is_right(row: dict[str, Any], answer: str) -> bool:
    """The last number, the JSON object, or the last bold part of the answer is the expected one."""
    if row["workload"] == "json":
        body = answer.strip().removeprefix("```json").removesuffix("```")
        return body.strip().startswith("{") and json.loads(body) == row["expected"]
    pattern = r"answer is (-?\d+)" if row["workload"] == "math" else r"\*\*(.+?)\*\*"
    answers = re.findall(pattern, answer)
    return bool(answers) and answers[-1] == str(row["expected"])
