"""The recipes for real targets can be planned from the target's config.json alone, at its true size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train import dry_run
from train.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
REAL = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name != "quickstart")

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TARGETS: dict[str, tuple[float, dict[str, Any]]] = {  # parameters in billions, config.json
    "meta-llama/Llama-3.1-8B-Instruct": (
        8.03,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    ),
    "Qwen/Qwen3-8B": (
        8.19,
        {
            **_QWEN3,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
    ),
    "Qwen/Qwen3-30B-A3B": (
        30.53,
        {
            **_QWEN3,
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
    ),
}


def planned(path: Path, folder: Path) -> tuple[dry_run.DryRun, float]:
    """The plan of a recipe with its target's config.json written to `folder`; the target's true size."""
    billions, config = TARGETS[load_recipe(path).target.model]
    (folder / "config.json").write_text(json.dumps(config))
    return dry_run.estimate(load_recipe(path, [f"target.model={folder}"])), billions


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_real_recipe_can_be_planned(path: Path, tmp_path: Path) -> None:
    plan, billions = planned(path, tmp_path)
    assert plan.target.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert 0 < plan.trainable < plan.target.num_parameters
    assert plan.drafter.vocab_size == plan.target.vocab_size
    assert plan.recipe.name == f"{path.parent.name}/{path.stem}"
    dry_run.describe(plan.recipe)


def test_every_real_target_is_known() -> None:
    assert REAL
    assert {load_recipe(path).target.model for path in REAL} <= set(TARGETS)
