"""A log that is written is the sample that it says, within its limits, and whole after a kill."""

from __future__ import annotations

import random
import signal
import stat
from pathlib import Path

import pytest

from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.reader import read_counters, read_log
from draftsmith.inference.traffic_log.records import LoggedCounters, LoggedExchange
from draftsmith.inference.traffic_log.writer import DAY_S, LogWriter
from draftsmith.speculators.errors import ConfigError
from tests.support.disks import full_disk
from tests.support.errors import raises_at
from tests.support.forked import PythonProcess

NOW = 1_800_000_000.0  # the beginning of an hour
KILLED = """
import itertools, sys
from pathlib import Path
from draftsmith.inference.traffic_log.log_options import LogOptions
from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.inference.traffic_log.writer import LogWriter
writer = LogWriter(Path(sys.argv[1]), LogOptions(log_samples=10**6))
for i in itertools.count():
    writer.write(LoggedExchange(1.8e9 + i / 1000, "tiny", prompt="x" * 5000, token_ids=[i]))
    print(i, flush=True)
"""


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """clock.now: the time of day for the writer."""

    class Clock:
        now = NOW

        def time(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("draftsmith.inference.traffic_log.writer.time", clock)
    return clock


def writer(folder: Path, **options) -> LogWriter:
    return LogWriter(folder, LogOptions(**options))


def exchange(time: float = NOW, key: float = 0.5, text: str = "") -> LoggedExchange:
    return LoggedExchange(time=time, model="tiny", prompt="p", text=text, key=key)


def test_sample_over_restarts_and_writers_is_the_smallest_keys_of_each_slice(tmp_path):
    rng = random.Random(0)
    exchanges = [exchange(NOW + rng.random() * 120, rng.random(), f"{i}") for i in range(600)]
    writers = [writer(tmp_path, log_samples=20, log_slice_s=60) for _ in range(2)]
    for i, one in enumerate(exchanges):
        if i == 300:  # killed, and started again
            writers[0] = writer(tmp_path, log_samples=20, log_slice_s=60)
        writers[i % 2].write(one)
    expected = []
    for slice_ in (0, 1):
        inside = [one for one in exchanges if (one.time - NOW) // 60 == slice_]
        expected += sorted(inside, key=lambda one: one.key)[:20]
    assert list(read_log(tmp_path)) == sorted(expected, key=lambda one: one.time)
    lines = sum(path.read_bytes().count(b"\n") for path in tmp_path.iterdir())
    assert lines < 400  # and not all of them


def test_wants_is_false_for_what_write_leaves_out(tmp_path):
    log = writer(tmp_path, log_samples=2)
    for key in (0.5, 0.3, 0.4):
        assert log.wants(NOW, key) and log.write(exchange(key=key))
    assert not log.wants(NOW, 0.45) and not log.write(exchange(key=0.45))
    assert log.wants(NOW, 0.2) and log.wants(NOW + 3600, 0.45)


def test_samples_of_slices_that_are_long_over_are_forgotten(tmp_path, clock):
    """The writer of a server that runs for years holds those of some hours."""
    log = writer(tmp_path, log_samples=1)
    log.write(exchange(key=0.1))
    clock.now = NOW + 2 * 3600
    log.remove_old()
    assert not log.wants(NOW, 0.2)  # an exchange may be late
    clock.now += 1
    log.remove_old()
    assert log.wants(NOW, 0.2)


def test_files_are_for_their_owner_alone(tmp_path):
    log = writer(tmp_path / "log")
    log.write(exchange())
    log.write(LoggedCounters(NOW, 60, SpecDecodeCounters(1)))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log").iterdir()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert len(list(read_log(tmp_path / "log"))) == len(list(read_counters(tmp_path / "log"))) == 1


def test_old_files_are_removed_by_days_and_bytes_and_others_stay(tmp_path, clock):
    (tmp_path / "notes.jsonl").write_text("mine")
    log = writer(tmp_path, log_max_days=2, log_max_bytes=1024**2)
    log.write(exchange())
    clock.now = NOW + 2 * DAY_S + 3601
    log.remove_old()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]
    (tmp_path / "notes.jsonl").unlink()
    text = "x" * 100_000
    for _ in range(30):
        clock.now += 3600
        log.write(exchange(clock.now, text=text))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1024**2
    kept = [one.time for one in read_log(tmp_path)]
    assert len(kept) >= 9 and kept[-1] == clock.now and kept[0] == kept[-1] - 3600 * (len(kept) - 1)


def test_files_of_a_clock_that_was_ahead_make_room(tmp_path, clock):
    log = writer(tmp_path, log_max_bytes=1024**2)
    clock.now = NOW + 10 * DAY_S
    log.write(exchange(clock.now, text="x" * 900_000))
    clock.now = NOW
    log = writer(tmp_path, log_max_bytes=1024**2)
    log.write(exchange(clock.now, text="x" * 500_000))
    assert [one.time for one in read_log(tmp_path)] == [NOW]


def test_slice_that_has_all_bytes_takes_no_more(tmp_path):
    log = writer(tmp_path, log_max_bytes=1024**2)
    log.write(exchange(text="x" * 600_000))
    with pytest.raises(OSError, match="log-max-bytes"):
        log.write(exchange(text="x" * 600_000))
    log.write(exchange())
    assert len(list(read_log(tmp_path))) == 2


def test_write_on_a_full_disk_leaves_no_half_line(tmp_path):
    log = writer(tmp_path)
    with full_disk(), pytest.raises(OSError):
        log.write(exchange(text="x" * 200))
    log.write(exchange(text="after"))
    assert [one.text for one in read_log(tmp_path)] == ["after"]


def test_log_that_was_deleted_is_begun_anew(tmp_path):
    log = writer(tmp_path / "log")
    log.write(exchange(text="before"))
    for path in (tmp_path / "log").iterdir():
        path.unlink()
    (tmp_path / "log").rmdir()
    log.write(exchange(text="after"))
    assert [one.text for one in read_log(tmp_path / "log")] == ["after"]


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        writer(tmp_path / "file")
    assert error.value.where == f"{tmp_path / 'file'}"


@pytest.mark.parametrize("mode", [0o500, 0o600])
def test_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch, mode):
    """By its owner, who is not root here: root may write all."""

    def access(path: Path, asked: int) -> bool:
        return path.stat().st_mode >> 6 & asked == asked

    monkeypatch.setattr("draftsmith.inference.traffic_log.writer.os.access", access)
    writer(tmp_path)
    tmp_path.chmod(mode)
    with raises_at(ConfigError, f"{tmp_path}"):
        writer(tmp_path)


@pytest.mark.integration
def test_killed_writer_has_lost_nothing(tmp_path):
    """Of what was written; the line in whose writing it was killed may be there by half."""
    process = PythonProcess("-c", KILLED, tmp_path)
    written = [int(process.stdout.readline()) for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    torn: list[Path] = []
    read = [one.token_ids[0] for one in read_log(tmp_path, torn=torn)]
    assert read[:200] == written and read == list(range(len(read))) and len(torn) <= 1
    LogWriter(tmp_path, LogOptions()).write(exchange(NOW + 3000))
    assert len(list(read_log(tmp_path))) == len(read) + 1
