"""A log is read as it was written: in the order of time, a sample of every slice, and not a line
that is torn or wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.traffic_log.reader import read_counters, read_log
from draftsmith.inference.traffic_log.records import (
    LoggedCounters,
    LoggedExchange,
    LogHeader,
    from_line,
    to_line,
)
from draftsmith.speculators.errors import DataError

FULL = LoggedExchange(
    time=1000.25,
    model="tiny",
    messages=[{"role": "user", "content": "häl\nlo\u2028"}],
    chat_template_kwargs={"tools": [{"type": "function"}]},
    prompt_token_ids=[1, 2],
    text="x",
    token_ids=[3, 0],
    finish_reason="stop",
    sampling={"temperature": 0.5, "stop": ["a"], "seed": 7},
    spec_decode=SpecDecodeCounters(2, 6, 3, [2, 1, 0]),
    key=0.125,
)


def exchange(time: float, key: float = 0.5) -> LoggedExchange:
    return replace(FULL, time=time, key=key)


def write(path: Path, header: LogHeader, *records, tail: bytes = b"") -> None:
    path.write_bytes(b"".join(map(to_line, (header, *records))) + tail)


def header(start: int, seconds: int = 60, most: int | None = None) -> LogHeader:
    return LogHeader("exchanges", start, seconds, most)


def test_line_of_an_exchange_holds_all_of_it():
    line = to_line(FULL)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    read = from_line(LoggedExchange, line, "here")
    assert read == FULL and read.key == FULL.key


def test_read_log_goes_on_where_a_file_is_removed_meanwhile(tmp_path):
    """As the oldest ones are, by the writer or by hand."""
    for start in (0, 60, 120, 180):
        write(tmp_path / f"{start}.jsonl", header(start), exchange(start + 5))
    log = read_log(tmp_path)
    times = [next(log).time]
    (tmp_path / "180.jsonl").unlink()
    assert times + [one.time for one in log] == [5, 65, 125]


def test_read_log_over_files_is_in_the_order_of_time(tmp_path):
    """Also where slices of another length overlap, and files are named as they come."""
    write(tmp_path / "b.jsonl", header(0), exchange(50), exchange(3))
    write(tmp_path / "a.jsonl", header(60), exchange(70), exchange(60))
    write(tmp_path / "c.jsonl", header(0, 120), exchange(100), exchange(4), exchange(65))
    assert [one.time for one in read_log(tmp_path)] == [3, 4, 50, 60, 65, 70, 100]
    assert [one.time for one in read_log(tmp_path, since=50, until=65)] == [50, 60]


def test_read_log_keeps_the_smallest_keys_of_a_slice_over_its_files(tmp_path):
    write(tmp_path / "a.jsonl", header(0, most=2), exchange(1, 0.5), exchange(2, 0.1))
    write(tmp_path / "b.jsonl", header(0, most=2), exchange(3, 0.9), exchange(4, 0.2))
    write(tmp_path / "c.jsonl", header(60, most=2), exchange(60, 0.99))
    assert [one.time for one in read_log(tmp_path)] == [2, 4, 60]
    assert [one.time for one in read_log(tmp_path, since=3)] == [4, 60]


def test_read_log_leaves_out_half_a_line_at_the_end_of_a_file(tmp_path):
    half = to_line(exchange(2))[:-9]
    write(tmp_path / "a.jsonl", header(0), exchange(1), tail=half)
    (tmp_path / "b.jsonl").write_bytes(to_line(header(0))[:5])
    torn: list[Path] = []
    assert [one.time for one in read_log(tmp_path, torn=torn)] == [1]
    assert sorted(torn) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


@pytest.mark.parametrize(
    "line", [b"{}\n", b"half a li\n", to_line(FULL).replace(b'"tiny"', b"3"), b'{"version": 2}\n']
)
def test_read_log_with_a_wrong_line_names_file_and_line(tmp_path, line):
    write(tmp_path / "a.jsonl", header(0), exchange(1), tail=line + to_line(exchange(2)))
    with pytest.raises(DataError) as error:
        list(read_log(tmp_path))
    assert error.value.where == f"{tmp_path / 'a.jsonl'}:3"
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(DataError) as error:
        list(read_log(tmp_path))
    assert error.value.where == f"{tmp_path / 'a.jsonl'}:1"


def test_read_log_without_a_log_names_the_folder(tmp_path):
    with pytest.raises(DataError) as error:
        list(read_log(tmp_path / "none"))
    assert error.value.where == f"{tmp_path / 'none'}"


def test_read_counters_reads_them_alone(tmp_path):
    counted = LoggedCounters(70, 60, SpecDecodeCounters(4, 12, 6, [4, 2, 0]))
    write(tmp_path / "a.jsonl", header(0), exchange(1))
    write(tmp_path / "b.jsonl", LogHeader("counters", 60, 60), counted)
    assert list(read_counters(tmp_path)) == [counted]
    assert list(read_log(tmp_path)) == [exchange(1)]
