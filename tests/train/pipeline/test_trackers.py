"""Trackers: curves, costs and hyperparameters arrive, a run goes on under its id, the report is
attached at the end."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from inference.report.html import write_html
from inference.report.schema import save_report
from speculators.errors import ConfigError
from tests.inference.report.test_report import make_report
from tests.train.trainer.test_loop import make_recipe, make_rows, make_trainer
from train.pipeline import trackers
from train.recipe.recipe import recipe_class
from train.trainer.telemetry import PHASES, Telemetry

COSTS = {
    "step_seconds",
    "tokens_per_second",
    "valid_tokens_per_second",
    "supervised_tokens_per_second",
    "memory_gib",
}
COSTS |= {f"time/{name}" for name in (*PHASES, "other")}
CURVES = {"loss", "grad_norm", "learning_rate", "acceptance_rate/0", "in_loop_acceptance_length"}
FIGURES = {"acceptance/t0.acceptance_length", "acceptance/t0/all", "acceptance/t1/all"}


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """run(name, steps): trains for so many steps with a tracker; the report is attached where
    `report`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def start(name: str, steps: int, *, report: bool = False) -> Path:
        tree = make_recipe(steps=8).model_dump(mode="json")
        recipe = recipe_class().model_validate(
            tree | {"trackers": [name], "output_dir": str(tmp_path / "run")}
        )
        folder = Path(recipe.output_dir)
        folder.mkdir(exist_ok=True)
        accelerator = Accelerator(cpu=True, log_with=[name], project_dir=recipe.output_dir)
        trackers.start(recipe, accelerator)
        trainer = make_trainer(tiny_model, folder / "checkpoints", make_recipe(steps=8))
        trainer.accelerator = accelerator

        def stop(share: float, note: str) -> None:
            if trainer.state.step == steps:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            trainer.run(stop)
        if report:
            made = make_report()
            save_report(made, folder / "acceptance.json")
            write_html(made, folder / "report.html")
            trackers.attach_report(recipe, accelerator, trainer.state.step)
        accelerator.end_training()
        return folder

    return start


# ------------------------------------------------------------------ wandb


def records(path: Path) -> Iterator:
    """Of wandb's own log: blocks of 32 KiB, chunks in them (checksum, length, kind) as LevelDB's,
    protobuf inside."""
    from wandb.proto import wandb_internal_pb2

    content, at, held = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0:
            break
        held, at = held + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            held = b""
            yield record


def whole(path: Path, seconds: float = 60) -> list:
    """All records. wandb writes them in a process of its own, which may still be at it when
    `finish` has returned."""
    until = time.monotonic() + seconds
    while True:
        found = list(records(path))
        if (
            any(each.WhichOneof("record_type") == "exit" for each in found)
            or time.monotonic() > until
        ):
            return found
        time.sleep(0.05)


@pytest.mark.slow
def test_wandb_offline(run):
    pytest.importorskip("wandb")
    run("wandb", 4)
    folder = run("wandb", 8, report=True)
    logs = sorted(
        (folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    )
    (name,) = {path.stem for path in logs}  # under one id, which `wandb sync` joins
    assert (
        len(logs) == 2
        and name == f"run-{json.loads((folder / 'trackers.json').read_text())['run']}"
    )
    first, second = (whole(path) for path in logs)

    def history(found) -> list[dict]:
        rows = [r.history.item for r in found if r.WhichOneof("record_type") == "history"]
        return [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row}
            for row in rows
        ]

    curves = [row for row in (*history(first), *history(second)) if "loss" in row]
    assert [row["_step"] for row in curves] == list(range(1, 9))
    assert all((CURVES | COSTS) <= row.keys() for row in curves)
    config = {item.key: item.value_json for r in first for item in r.config.update}
    assert json.loads(config["training.learning_rate"]) == 0.01 and "recipe_hash" in config
    summary = {i.key or "/".join(i.nested_key) for r in second for i in r.summary.update}
    assert summary >= FIGURES
    (artifact,) = [
        r.request.log_artifact.artifact for r in second if r.request.HasField("log_artifact")
    ] or [r.artifact for r in second if r.WhichOneof("record_type") == "artifact"]
    assert {entry.path for entry in artifact.manifest.contents} == {
        "acceptance.json",
        "report.html",
    }
    assert any((folder / "wandb").glob("offline-run-*/files/media/html/acceptance/report*.html"))


# ------------------------------------------------------------------ tensorboard, trackio


@pytest.mark.slow
def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard", 4)
    folder = run("tensorboard", 8, report=True)
    events = EventAccumulator(
        str(folder / "draftsmith"), size_guidance={"tensors": 0, "images": 0}
    ).Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= CURVES | COSTS | FIGURES
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    shares = [
        sum(events.Scalars(f"time/{name}")[i].value for name in (*PHASES, "other"))
        for i in range(8)
    ]
    assert shares == pytest.approx([1.0] * 8, abs=1e-5)
    text = events.Tensors("acceptance/report/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| **all** | 0 | {make_report().cell('all', 0).acceptance_length:.2f} |" in text


def test_trackio(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    run("trackio", 4)
    run("trackio", 8, report=True)
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs("draftsmith")
    rows = [row for row in SQLiteStorage.get_logs("draftsmith", found.name) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all((CURVES | COSTS) <= row.keys() for row in rows)
    (last,) = [
        row
        for row in SQLiteStorage.get_logs("draftsmith", found.name)
        if "acceptance/report" in row
    ]
    assert last.keys() >= FIGURES and found.config["training.learning_rate"] == 0.01


def test_a_tracker_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    tree = make_recipe().model_dump(mode="json") | {"trackers": ["trackio"]}
    with pytest.raises(
        ConfigError, match=r"trackio is not installed; pip install 'draftsmith\[trackio\]'"
    ):
        trackers.require(recipe_class().model_validate(tree))


# ------------------------------------------------------------------ what a step cost


def test_tokens_are_counted_for_what_they_are(monkeypatch):
    """All slots, those that are no padding, those with a loss; over all processes."""
    rows = make_rows(4)
    from train.data.packing import collate

    telemetry, clock = Telemetry(torch.device("cpu")), [0.0]
    monkeypatch.setattr("train.trainer.telemetry.time.perf_counter", lambda: clock[0])
    telemetry.begin()
    batch = collate(rows, length=64)
    counts = telemetry.saw([SimpleNamespace(**batch)])
    for name, seconds in {"data": 1.0, "target": 4.0, "drafter": 2.0, "optimizer": 0.5}.items():
        with telemetry.phase(name):
            clock[0] += seconds
    clock[0] = 10.0
    found = telemetry.finish((2 * counts).tolist(), 1)
    real, supervised = sum(len(row) for row in rows), sum(int(row.loss_mask.sum()) for row in rows)
    assert found["tokens_per_second"] == 2 * len(rows) * 64 / 10
    assert (found["valid_tokens_per_second"], found["supervised_tokens_per_second"]) == (
        real / 5,
        supervised / 5,
    )
    assert [found[f"time/{name}"] for name in (*PHASES, "other")] == pytest.approx(
        [0.1, 0.4, 0.2, 0.05, 0.25]
    )
    assert found["memory_gib"] > 0.05
