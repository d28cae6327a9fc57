"""Files of every suite's shape are read as conversations; what has another shape is named, never
guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from draftsmith.inference.evaluation.suites import SENTINEL, SUITES, default_path, load_suite
from draftsmith.speculators.errors import ConfigError, DataError
from tests.support.errors import raises_at

ROWS = [  # suite, a row, its turns, its category; every shape that is known
    ("mt_bench", {"category": "writing", "turns": ["a", "b"]}, ("a", "b"), "writing"),
    ("mt_bench", {"category": "math", "prompt": ["a", "b"]}, ("a", "b"), "math"),
    ("gsm8k", {"question": "1+1?", "answer": "2 #### 2"}, ("1+1?",), "gsm8k"),
    ("speed_bench", {"category": "c", "messages": [{"role": "user", "content": "a"}]}, ("a",), "c"),
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("name", "row", "turns", "category"), ROWS)
def test_a_row_of_every_suite(name, row, turns, category, tmp_path):
    path = write(tmp_path / "f.jsonl", row, row)
    first, second = load_suite(name, path)
    assert (first.turns, first.category, first.origin) == (turns, category, f"{path}:1")
    assert second.origin == f"{path}:2"


@pytest.mark.parametrize("character", "\u2028\u2029\x85")
def test_json_line_with_a_line_separator_in_a_text_is_one_line(character, tmp_path):
    row = json.dumps({"question": f"a{character}b"}, ensure_ascii=False)
    (tmp_path / "f.jsonl").write_text(f"{row}\r\n{row}\n", encoding="utf-8", newline="")
    first, second = load_suite("gsm8k", tmp_path / "f.jsonl")
    assert first.turns == second.turns == (f"a{character}b",)
    assert second.origin == f"{tmp_path / 'f.jsonl'}:2"


def test_byte_order_mark_of_other_programs_is_left_out(tmp_path):
    (tmp_path / "f.jsonl").write_text('{"question": "a"}\n', encoding="utf-8-sig")
    assert load_suite("gsm8k", tmp_path / "f.jsonl")[0].turns == ("a",)


def test_compressed_file_is_read(tmp_path):
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a"}\n'))
    assert load_suite("gsm8k", tmp_path / "f.jsonl.gz")[0].turns == ("a",)


@pytest.mark.parametrize("name", SUITES)
def test_a_missing_file_says_how_to_fetch_it(name):
    with pytest.raises(DataError) as error:
        load_suite(name, "nowhere.jsonl")
    assert SUITES[name].fetch in str(error.value) and default_path(name) in SUITES[name].fetch


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("spec_bench", {"turns": ["a", " "], "category": "qa"}),
        ("spec_bench", {"turns": ["a"], "category": "all"}),
        ("gsm8k", ["a"]),
        ("speed_bench", {"turns": [f"{SENTINEL} x"], "category": "qa"}),
        ("speed_bench", {"messages": [{"role": "assistant", "content": "a"}], "category": "qa"}),
    ],
)
def test_wrong_rows_are_named(name, row, tmp_path):
    path = write(tmp_path / "f.jsonl", row)
    with raises_at(DataError, f"{path}:1"):
        load_suite(name, path)


def test_what_is_no_file_of_lines_is_named(tmp_path):
    (tmp_path / "f.parquet").write_bytes(b"PAR1\xff")
    with pytest.raises(ConfigError, match=r"f\.parquet"):
        load_suite("gsm8k", tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        load_suite("gsm8k", write(tmp_path / "empty.jsonl"))
    (tmp_path / "f.jsonl").write_text('{"question": "a"}\n{')
    with pytest.raises(DataError, match=r"f\.jsonl:2"):
        load_suite("gsm8k", tmp_path / "f.jsonl")
