"""A training whose features come from servers: no decoder here, and the weights of one that reads
the same states from the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.features.states_spec import StatesSpec
from draftsmith.train.pipeline.export_stage import Trained
from draftsmith.train.pipeline.train_stage import train
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer.step_records import EXPECTED
from tests.support.errors import raises_at
from tests.support.forked import PythonProcess
from tests.support.quickstart_data import source as quickstart
from tests.support.state_server import FakeServer, connect, listening
from tests.support.targets import copy_tokenizer, save_target
from tests.support.training import assert_equal, recipe_of

A, B = "http://a/v1", "http://b/v1"
TAPS = [1, 2, 3]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512, "eos_token_id": 2}
    folder = save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4, **sizes)
    copy_tokenizer(folder)
    return folder


def recipe_in(folder: Path, target: Path, max_length: int = 128, **features: Any) -> Recipe:
    return recipe_of(
        "eagle3",
        target={"model": str(target), "dtype": "float32"},
        output_dir=str(folder / "run"),
        data={
            "train": [quickstart("train", 6)],
            "validation": [quickstart("validation", 2)],
            "max_length": max_length,
        },
        drafter={"unroll_steps": 2, "draft_vocab_size": 256, "tap_layers": TAPS},
        regenerate={"max_new_tokens": 4},
        features={"engine": "vllm", "endpoints": [A, B], "states_dir": str(folder)} | features,
        training={"steps": 100, "batch_size": 1, "eval_every": 50, "mixed_precision": "no"},
        evaluation={"max_tokens": 4, "num_speculative_tokens": 2, "prompts": []},
    )


@pytest.fixture
def run(target_folder, tmp_path, monkeypatch):
    """run(name, **features) -> the trained head; servers A and B give the states."""
    target = FrozenTarget.from_pretrained(str(target_folder), tap_layers=[*TAPS, 4])

    def run(name: str, **features: Any) -> Trained:
        folder = tmp_path / name
        recipe = recipe_in(folder, target_folder, **features)
        label = StatesSpec.of_recipe(recipe, TAPS, target).label
        fakes = {url: FakeServer(target, folder / label) for url in (A, B)}
        connect(monkeypatch, fakes)
        run.fakes = fakes
        torch.manual_seed(0)
        return train(recipe, Accelerator(cpu=True), Stages(enabled=False))

    return run


@pytest.mark.slow
def test_states_through_a_server_and_through_the_disk_give_the_same_weights(run, tmp_path):
    served = run("served", mode="online")
    weights = {name: tensor.clone() for name, tensor in served.drafter.state_dict().items()}
    figures = [(record["loss"], record.get(EXPECTED)) for record in served.state.history]
    assert not list((tmp_path / "served").glob("*/*.safetensors*"))
    from_disk = run("disk", mode="cache", encoding="exact")
    assert_equal(from_disk.drafter.state_dict(), weights)
    again = [(record["loss"], record.get(EXPECTED)) for record in from_disk.state.history]
    assert again == figures
    assert figures[-1][1] >= 1


def test_servers_of_short_rows_have_room_for_the_text_of_a_start(target_folder, tmp_path):
    recipe = recipe_in(tmp_path, target_folder, max_length=16)
    head = TargetHead.from_pretrained(str(target_folder), tap_layers=TAPS)
    assert StatesSpec.of_recipe(recipe, TAPS, head).longest >= head.start_text().shape[1]


def test_rows_as_long_as_the_target_s_limit_are_refused(target_folder, tmp_path):
    """vLLM's answer is one token more."""
    head = TargetHead.from_pretrained(str(target_folder), tap_layers=TAPS)
    with raises_at(ConfigError, "data.max_length"):
        StatesSpec.of_recipe(recipe_in(tmp_path, target_folder, max_length=512), TAPS, head)
    StatesSpec.of_recipe(recipe_in(tmp_path, target_folder, max_length=511), TAPS, head)


@pytest.mark.slow
def test_a_training_killed_with_texts_in_flight_goes_on_to_the_same_weights(
    target_folder, tmp_path
):
    """SIGKILL at the check of the server, while held-out texts are written and while training; the
    same command goes on, and no file of states is left."""
    target = FrozenTarget.from_pretrained(str(target_folder), tap_layers=[*TAPS, 4])
    label = StatesSpec.of_recipe(recipe_in(tmp_path, target_folder), TAPS, target).label
    fake = FakeServer(target, tmp_path / "states" / label)

    def weights(name: str, kills: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Of a run, after kills at these numbers of texts."""
        path = tmp_path / f"{name}.yaml"
        changed = recipe.model_copy(update={"output_dir": str(tmp_path / name)})
        path.write_text(changed.resolved_yaml())
        for texts in kills:
            killed_at(fake, texts, path)
        with PythonProcess("-m", "draftsmith.train.cli", "train", path) as process:
            output, _ = process.communicate()
        assert process.returncode == 0, output
        assert not list(fake.folder.iterdir())
        return load_file(tmp_path / name / "export" / "model.safetensors")

    with listening(fake) as url:
        features = {"endpoints": [url], "states_dir": str(tmp_path / "states")}
        recipe = recipe_in(tmp_path, target_folder, **features)
        few = {"steps": 40, "save_every": 4, "eval_every": 20, "keep_features_gb": 0}
        training = recipe.training.model_copy(update=few)
        recipe = recipe.model_copy(update={"training": training})
        assert_equal(weights("killed", (1, 4, 30)), weights("whole", ()))


def killed_at(fake: FakeServer, texts: int, recipe: Path) -> None:
    """A training, killed once the server has so many texts, the last of which are unanswered."""
    reached = threading.Event()
    gone = threading.Event()

    def hold() -> None:
        if len(fake.asked) >= texts:
            reached.set()
            gone.wait()

    fake.asked.clear()
    fake.unread = hold
    with PythonProcess("-m", "draftsmith.train.cli", "train", recipe) as process:
        while not reached.wait(0.05):
            assert process.poll() is None, process.stdout.read()
        process.kill()
    assert list(fake.folder.iterdir())
    fake.unread = lambda: None
    gone.set()
