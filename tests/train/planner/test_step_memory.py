"""The memory that a plan states of a training step, held against bytes that are counted."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.train.losses.chunked import Sizes
from draftsmith.train.planner.plan import StagePlan, make_stage
from draftsmith.train.recipe.recipe import make_recipe
from tests.support.real_recipes import PUBLISHED
from tests.support.step_memory import act_as_gpu, count

# Of a middle width: what a formula leaves out is small beside it.
TARGET = PUBLISHED["Qwen/Qwen3-8B"]["config"] | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_window_layers": 8,
}
TARGET.pop("layer_types", None)
SIZES = Sizes(rows=128, bytes=1 << 30, fewest=32, block_bytes=16 * 4 * 2048)

BLOCK = {"num_layers": 2, "mask_token_id": 3, "anchors_per_row": 32}
FAMILIES = {
    "eagle": {"unroll_steps": 2},
    "eagle3": {"unroll_steps": 3, "draft_vocab_size": 1024},
    "medusa": {"num_heads": 3, "unroll_steps": 3},
    "mlp": {"n_predict": 3, "unroll_steps": 3},
    "mtp": {"unroll_steps": 2},
    "draft_model": {"from_target": {"first": 2}},
    "peagle": {"num_depths": 4, "mask_token_id": 3, "draft_vocab_size": 1024},
    "dflash": BLOCK | {"block_size": 8},
    "dflash2": BLOCK | {"block_size": 4},
    "dspark": BLOCK | {"block_size": 4, "markov_rank": 64},
}


def planned(folder, family: str) -> StagePlan:
    (folder / "config.json").write_text(json.dumps(TARGET))
    sections = {
        "name": "middle",
        "family": family,
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder)},
        "drafter": FAMILIES[family],
        "data": {"train": [{"name": "org/chats"}], "max_length": 128},
        "training": {"steps": 10, "batch_size": 2},
        "evaluation": {"num_speculative_tokens": 1},
    }
    return make_stage(make_recipe(sections), device=torch.device("cuda"))


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_of_a_step_is_what_is_counted(family, tmp_path, monkeypatch):
    """As on a GPU, in bfloat16, one operation at a time."""
    act_as_gpu(monkeypatch, SIZES)
    stage = planned(tmp_path, family)
    counted = count(stage)
    memory = stage.memory
    kept = memory["activations"] + memory["weights as products read them"]
    heads = 4 * sum(p.numel() for p in stage.head.head_parameters())  # their gradients
    peak = kept + memory["loss, a chunk at a time"] + heads
    assert counted.gradients == memory["gradients"]
    # a product with no gradient of its input keeps no weight
    assert 0.85 * memory["activations"] < counted.kept < 1.15 * kept
    assert 0.85 < counted.peak / peak < 1.2
