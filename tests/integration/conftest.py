"""A tiny random target and a recipe for it: what whole jobs begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.traffic_log.records import LoggedExchange
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.recipe.recipe import yaml_text
from tests.support.quickstart_data import source as quickstart
from tests.support.targets import save_target

COUNT = 160  # of logged answers


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    """A random model of 4 layers with the embedded target's tokenizer, saved as a user's would
    be."""
    return save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture
def recipe(tiny_target, tmp_path):
    source = quickstart("train", 12)
    content = {
        "name": "tiny",
        "output_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_target)},
        "drafter": {"unroll_steps": 3, "draft_vocab_size": 256, "tap_layers": [1, 2, 3]},
        "data": {
            "train": [source, quickstart("code-train", 3)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "regenerate": {"max_new_tokens": 12, "batch_size": 8},
        "training": {"steps": 4, "batch_size": 2, "eval_every": 2},
        "evaluation": {
            "prompts": [quickstart("test", 3)],
            "prompts_per_workload": 1,
            "max_tokens": 8,
            "repeats": 1,
            "num_speculative_tokens": 2,
        },
        "trackers": ["tensorboard"],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(content))
    return path


@pytest.fixture(scope="module")
def exchanges(tiny_target) -> list[LoggedExchange]:
    """Answers of the target, a minute apart."""
    chats = [[{"role": "user", "content": f"How many are {i} and {i + 7}?"}] for i in range(COUNT)]
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=i) for i in range(COUNT)]
    outputs = LLM(str(tiny_target), max_num_seqs=32).chat(chats, params, use_tqdm=False)
    return [
        LoggedExchange(
            time=60.0 * i,
            model=tiny_target.name,
            messages=chats[i],
            prompt_token_ids=list(output.prompt_token_ids),
            text=output.outputs[0].text,
            token_ids=list(output.outputs[0].token_ids),
            finish_reason=output.outputs[0].finish_reason,
            sampling={"temperature": 1.0},
        )
        for i, output in enumerate(outputs)
    ]


@pytest.fixture
def run(tmp_path, tiny_target) -> Path:
    """A run's folder with a random head."""
    target = FrozenTarget.from_pretrained(str(tiny_target), tap_layers=[1, 2, 3])
    torch.manual_seed(1)
    shape = {"tap_layers": [1, 2, 3], "draft_vocab_size": 256}
    drafter = Eagle3(config_for_target(target, "eagle3", **shape)).attach(target)
    drafter.initialise_from(target)
    folder = tmp_path / "run"
    export_drafter(drafter, folder / "export", dtype=torch.float32)
    return folder
