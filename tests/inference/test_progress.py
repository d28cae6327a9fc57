"""The progress of a command: a line now and then, nothing twice, and a stop in order."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from draftsmith.inference.console import supervised
from draftsmith.inference.progress import LINE_EVERY, SILENCE, Heartbeat, Stages, counted

BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # read when the library is imported


class Log:
    """A log without a terminal, whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.buffer = io.StringIO()
        self.console = Console(file=self.buffer, width=200)
        self.heartbeat = Heartbeat(lambda: self.now)
        self.stages = Stages(console=self.console, heartbeat=self.heartbeat)

    def after(self, seconds: float) -> None:
        """The heartbeat beats after this time."""
        self.now += seconds
        self.heartbeat.beat()

    @property
    def lines(self) -> list[str]:
        return self.buffer.getvalue().splitlines()


def test_heartbeat_after_silence_names_the_innermost_activity_and_its_seconds() -> None:
    log = Log()
    log.after(2 * SILENCE)  # nothing works
    with log.heartbeat.activity("draftsmith try", log.console):
        log.after(SILENCE - 1)
        assert not log.lines
        log.after(1)
        with log.stages.stage("load") as advance:
            advance(3, "shard [3]")
            log.after(SILENCE)
        log.after(SILENCE)
    assert log.lines == [
        f"… still draftsmith try ({SILENCE:.0f} s)",
        "load",
        f"… still load: 3, shard [3] ({SILENCE:.0f} s)",
        f"load: {SILENCE:.1f} s",
        f"… still draftsmith try ({3 * SILENCE:.0f} s)",
    ]


def test_heartbeat_of_a_long_activity_has_a_line_within_20_seconds() -> None:
    """As docs/training.md says; the thread beats once a second, or a little later."""
    log = Log()
    with log.heartbeat.activity("load", log.console):
        for _ in range(17):
            log.after(1.1)
    assert log.lines


def test_heartbeat_is_silent_beside_other_lines() -> None:
    log = Log()
    with log.heartbeat.activity("train", log.console):
        for print_line in (lambda: log.stages.say("loss 1"), log.heartbeat.heard):
            log.after(SILENCE - 1)
            print_line()
        log.after(SILENCE - 1)
        with log.heartbeat.activity("serve", log.console, shown=True):
            log.after(9 * SILENCE)
    assert log.lines == ["loss 1"]


def test_stage_elsewhere_than_on_a_terminal_prints_lines_now_and_then() -> None:
    log = Log()
    with log.stages.stage("train", 1) as advance:
        for _ in range(4):
            log.now += LINE_EVERY / 2
            advance(log.now / (3 * LINE_EVERY), "loss 1")
    assert [line.replace(", loss", ",loss").split(",")[0] for line in log.lines] == [
        "train",
        "train: 33 %",
        "train: 67 %",
        f"train: {2 * LINE_EVERY:.1f} s",
    ]
    assert "s left" in log.lines[1] and log.lines[1].endswith("loss 1")


def test_stage_never_exceeds_its_whole() -> None:
    for total, line in ((1, "train: 100 %"), (20, "train: 20/20")):
        log = Log()
        with log.stages.stage("train", total) as advance:
            log.now += LINE_EVERY
            advance(2.2 * total)
        assert line in log.lines


def test_stage_on_a_terminal_is_one_bar_and_the_heartbeat_silent() -> None:
    log = Log()
    log.console = Console(file=log.buffer, width=200, force_terminal=True, color_system=None)
    stages = Stages(console=log.console, heartbeat=log.heartbeat)
    with stages.stage("train", 20) as advance:
        advance(7, "loss 1")
        log.after(9 * SILENCE)
    assert "7/20" in log.buffer.getvalue() and "still" not in log.buffer.getvalue()


def test_stages_of_other_processes_print_nothing() -> None:
    log = Log()
    quiet = Stages(enabled=False, console=log.console, heartbeat=log.heartbeat)
    with quiet.stage("train", 20) as advance:
        advance(7, "loss 1")
        quiet.say("loss 1")
        log.after(9 * SILENCE)
    assert not log.lines


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT interrupts, as at a terminal. A shell that starts a job in the background has it
    ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_that_is_stopped_ends_in_order(
    number: int, code: int, capsys, interrupts: None
) -> None:
    before, kept = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as stop, supervised("try"):
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            kept.append("results")
    assert (stop.value.code, kept) == (code, ["results"])
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_command_without_a_terminal_has_no_bars_of_transformers(monkeypatch) -> None:
    """Each would be one long line of a log. Whoever names the variable decides."""
    monkeypatch.setenv(BARS, "0")
    with supervised("try"):
        assert os.environ[BARS] == "0"
    monkeypatch.delenv(BARS)
    with supervised("try"):
        assert os.environ[BARS] == "1"


def test_command_says_a_line_before_it_imports_torch() -> None:
    code = (
        "import sys, typing\n"
        "from draftsmith.train.cli import app\n"
        "class Importing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise SystemExit('torch')\n"
        "sys.meta_path.insert(0, Importing())\n"
        "app(['try', '--model', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["draftsmith try: importing PyTorch", "torch"]


def test_counted_of_one_is_singular():
    assert counted(1, "prompt") == "1 prompt"
    assert counted(0, "prompt") == "0 prompts"
    assert counted(1200, "pass", "passes") == "1,200 passes"
