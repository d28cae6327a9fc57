"""Trackers: curves, costs and hyperparameters arrive, a run goes on under its id, the report is
attached at the end."""

from __future__ import annotations

import contextlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker

from draftsmith.inference.report.schema import save_report
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.pipeline import trackers
from draftsmith.train.pipeline.run import make_accelerator
from draftsmith.train.recipe.recipe import recipe_class
from draftsmith.train.trainer.telemetry import PHASES
from tests.support.errors import raises_at
from tests.support.reports import make_report
from tests.support.training import make_recipe, make_trainer, recipe_of

COSTS = {"step_seconds", "tokens_per_second", "supervised_tokens_per_second", "memory_gib"}
COSTS |= {f"time/{name}" for name in PHASES}
CURVES = {"loss", "grad_norm", "learning_rate", "acceptance_rate/0", "in_loop_acceptance_length"}
FIGURES = {"acceptance/t0.acceptance_length", "acceptance/t0/all", "acceptance/t1/all"}


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """run(name, steps): trains for so many steps with a tracker; the report is logged where
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
        trackers.log_recipe(recipe, accelerator)
        trainer = make_trainer(tiny_model, folder / "checkpoints", make_recipe(steps=8))
        trainer.accelerator = accelerator

        def stop(share: float, note: str) -> None:
            if trainer.state.step == steps:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            trainer.run(stop)
        if report:
            save_report(make_report(), folder / "acceptance.json")
            trackers.log_report(recipe, accelerator, trainer.state.step)
        accelerator.end_training()
        return folder

    return start


@pytest.mark.slow
def test_wandb_goes_on_under_one_id(run):
    pytest.importorskip("wandb")
    run("wandb", 4)
    folder = run("wandb", 8, report=True)
    logs = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    known = json.loads((folder / "trackers.json").read_text())["run"]
    assert [path.stem for path in logs] == [f"run-{known}"] * 2  # which `wandb sync` joins


def test_recipe_arrives_as_it_is_trained_key_by_key_or_as_text():
    held = {name: {} for name in ("wandb", "trackio", "tensorboard")}
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = [
        SimpleNamespace(name=name, store_init_configuration=config.update)
        for name, config in held.items()
    ]
    recipe = recipe_of(
        "eagle3",
        regenerate={"endpoints": ["http://me:secret@gpu1:8000/v1"]},
        training={"preset": "auto", "steps": None, "epochs": 2},
    )
    trained = recipe.training_for(40)
    trackers.log_recipe(recipe, accelerator)
    trackers.log_training("", trained, accelerator)
    for config in (held["wandb"], held["trackio"]):
        assert config["family"] == "eagle3"
        assert config["training"]["learning_rate"] == trained.learning_rate is not None
        assert config["regenerate"]["endpoints"][0]["url"] == "http://***@gpu1:8000/v1"
    text = held["tensorboard"].pop("recipe")
    assert "family: eagle3" in text and "secret" not in text
    assert held["tensorboard"] == {"recipe_hash": recipe.recipe_hash()}


@pytest.mark.slow
def test_curves_costs_and_the_report_arrive(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard", 4)
    folder = run("tensorboard", 8, report=True)
    events = EventAccumulator(str(folder / "draftsmith"), size_guidance={"tensors": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= CURVES | COSTS | FIGURES
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    shares = [sum(events.Scalars(f"time/{name}")[i].value for name in PHASES) for i in range(8)]
    assert all(0 < share <= 1 for share in shares)
    (page,) = events.Tensors("acceptance/report/text_summary")
    assert str(folder / "report.html").encode() in page.tensor_proto.string_val[0]


class Stubborn(TensorBoardTracker):
    """A tracker of a service that cannot be reached, or is lost at a call."""

    lost_at = ""

    def start(self) -> None:
        self._fail("start")

    def store_init_configuration(self, values: dict) -> None:
        self._fail("configure")

    def log(self, values: dict, step: int | None = None, **options: object) -> None:
        self._fail("log")

    def finish(self) -> None:
        self._fail("finish")

    def _fail(self, call: str) -> None:
        if call == self.lost_at:
            raise ConnectionResetError("Connection lost")


@pytest.mark.parametrize("lost_at", ["start", "configure", "log", "finish"])
def test_tracker_that_is_lost_ends_no_run_that_has_begun(tmp_path, monkeypatch, capsys, lost_at):
    monkeypatch.setattr(Stubborn, "lost_at", lost_at)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Stubborn)
    recipe = recipe_of("eagle3", trackers=["tensorboard"], output_dir=str(tmp_path))
    accelerator = make_accelerator(recipe)
    expected = raises_at(ConfigError, "trackers") if lost_at == "start" else nullcontext()
    with expected:
        trackers.start(recipe, accelerator)
        trackers.log_recipe(recipe, accelerator)
        accelerator.log({"loss": 1.0}, step=1)
        assert len(accelerator.trackers) == (lost_at == "finish")
        accelerator.end_training()
    assert ("Connection lost" in capsys.readouterr().err) == (lost_at != "start")
