"""Files of every suite's shape are read as conversations; what has another shape is named, never
guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from draftsmith.inference.evaluation.suites import (
    SENTINEL,
    SUITES,
    default_path,
    load_suite,
    sha256_of,
    suite_files,
)
from draftsmith.speculators.errors import ConfigError, DataError

ROWS = [  # suite, a row, its turns, its category; every shape that is known
    ("spec_bench", {"category": "qa", "turns": ["why?"], "reference": ["so"]}, ("why?",), "qa"),
    ("mt_bench", {"category": "writing", "turns": ["a", "b"]}, ("a", "b"), "writing"),
    ("mt_bench", {"category": "math", "prompt": ["a", "b"]}, ("a", "b"), "math"),
    ("gsm8k", {"question": "1+1?", "answer": "2 #### 2"}, ("1+1?",), "gsm8k"),
    ("math500", {"problem": "x?", "solution": "", "subject": "Algebra"}, ("x?",), "math500"),
    ("humaneval", {"task_id": "H/0", "prompt": "def f():", "test": ""}, ("def f():",), "humaneval"),
    ("mbpp", {"task_id": 11, "text": "Write f.", "code": ""}, ("Write f.",), "mbpp"),
    ("mbpp", {"task_id": 2, "prompt": "Write f."}, ("Write f.",), "mbpp"),
    ("speed_bench", {"category": "qa", "turns": ["a"]}, ("a",), "qa"),
    (
        "speed_bench",
        {"category": "coding", "messages": [{"role": "user", "content": "a"}]},
        ("a",),
        "coding",
    ),
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("name", "row", "turns", "category"), ROWS)
def test_a_row_of_every_suite(name, row, turns, category, tmp_path):
    path = write(tmp_path / "f.jsonl", row, row)
    first, second = load_suite(name, path)
    assert (first.turns, first.category, first.origin) == (turns, category, f"{path}:1")
    assert second.origin == f"{path}:2" and suite_files(name, path) == [path]
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert [one.turns for one in load_suite(name, tmp_path / "f.jsonl.gz")] == [turns] * 2


def test_a_group_is_its_members(tmp_path):
    rows = {name: row for name, row, *_ in ROWS}
    for name in SUITES["spec_al"].members:
        write(tmp_path / f"{name}.jsonl", rows[name])
    found = load_suite("spec_al", tmp_path)
    assert [one.category for one in found] == list(SUITES["spec_al"].members)
    assert found[-1].turns == ("a", "b") and default_path("spec_al", "here") == "here"
    assert len({sha256_of(file) for file in suite_files("spec_al", tmp_path)}) == 5
    (tmp_path / "mbpp.jsonl").unlink()
    with pytest.raises(DataError, match=r"mbpp\.jsonl"):
        load_suite("spec_al", tmp_path)


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if not suite.members])
def test_a_missing_file_says_how_to_fetch_it(name):
    with pytest.raises(DataError, match="no such file") as error:
        load_suite(name, default_path(name, "nowhere"))
    assert SUITES[name].fetch in str(error.value) and f"suites/{name}.jsonl" in SUITES[name].fetch


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("spec_bench", {"question": "a"}),
        ("spec_bench", {"turns": ["a", " "], "category": "qa"}),
        ("spec_bench", {"turns": ["a"]}),
        ("spec_bench", {"turns": ["a"], "category": "all"}),
        ("mt_bench", {"turns": ["a", 1], "category": "qa"}),
        ("gsm8k", ["a"]),
        ("speed_bench", {"turns": [f"{SENTINEL} x"], "category": "qa"}),
        ("speed_bench", {"messages": [{"role": "assistant", "content": "a"}], "category": "qa"}),
    ],
)
def test_wrong_rows_are_named(name, row, tmp_path):
    with pytest.raises(DataError, match=r"f\.jsonl:1"):
        load_suite(name, write(tmp_path / "f.jsonl", row))


def test_what_is_no_file_of_lines_is_named(tmp_path):
    (tmp_path / "f.parquet").write_bytes(b"PAR1\xff")
    with pytest.raises(ConfigError, match=r"f\.parquet"):
        load_suite("gsm8k", tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        load_suite("gsm8k", write(tmp_path / "empty.jsonl"))
    (tmp_path / "f.jsonl").write_text('{"question": "a"}\n{')
    with pytest.raises(DataError, match=r"f\.jsonl:2"):
        load_suite("gsm8k", tmp_path / "f.jsonl")
