"""Recipes for real targets say what they would do, from a config.json of the target's true size and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train import dry_run
from train.recipe import load_recipe
from train.run import run

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
REAL = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "quickstart")

_QWEN3 = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TARGETS: dict[str, tuple[dict[str, Any], float]] = {  # repository: config.json, parameters in units of 10^9
    "meta-llama/Llama-3.1-8B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
        8.03,
    ),
    "Qwen/Qwen3-8B": (
        _QWEN3
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        8.19,
    ),
    "Qwen/Qwen3-30B-A3B": (
        _QWEN3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        30.5,
    ),
}


@pytest.fixture(scope="module")
def target_folders(tmp_path_factory) -> dict[str, Path]:
    """Repository -> a folder with its config.json."""
    folders = {}
    for name, (config, _) in TARGETS.items():
        folders[name] = tmp_path_factory.mktemp(name.replace("/", "-"))
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_dry_run_of_a_real_target(path, target_folders, capsys):
    recipe = load_recipe(path)
    assert recipe.name == f"{path.parent.name}/{path.stem}"
    overrides = [f"target.model={target_folders[recipe.target.model]}"]
    assert run(path, overrides, dry_run=True) == 0
    assert recipe.name in capsys.readouterr().out
    plan = dry_run.estimate(load_recipe(path, overrides))
    config, billions = TARGETS[recipe.target.model]
    assert plan.target.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert plan.drafter.target_hidden_size == config["hidden_size"] and plan.drafter.vocab_size == config["vocab_size"]
    assert 0 < plan.trainable < 0.5 * plan.target.num_parameters
    assert recipe.gates["lossless_mismatches"].max == 0


def test_every_real_target_is_used():
    assert {load_recipe(path).target.model for path in REAL} == set(TARGETS)
