"""The recipes for real targets can be planned from the target's config.json alone, at its true
size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.train.planner.devices import find_device
from draftsmith.train.planner.plan import make_plan
from draftsmith.train.recipe.load import load_recipe
from draftsmith.train.recipe.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
REAL = sorted(
    path
    for path in RECIPES.glob("*/*.yaml")
    if path.parent.name not in ("quickstart", "accelerate", "smollm2-135m-instruct")
)

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
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


TARGETS: dict[str, tuple[float, dict[str, Any]]] = {  # parameters in billions, config.json
    "meta-llama/Llama-3.1-8B-Instruct": (
        8.03,
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rope_scaling": _llama3(8.0),
            "tie_word_embeddings": False,
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
STUDENTS: dict[str, tuple[float, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": (
        0.60,
        {
            **_QWEN3,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
}


def local_recipe(path: Path, folder: Path, *overrides: str) -> Recipe:
    recipe = load_recipe(path)
    named = {"target.model": (recipe.target.model, TARGETS)}
    if recipe.drafter.init_from in STUDENTS:
        named["drafter.init_from"] = (recipe.drafter.init_from, STUDENTS)
    local = []
    for key, (name, known) in named.items():
        (folder / key).mkdir()
        (folder / key / "config.json").write_text(json.dumps(known[name][1]))
        local.append(f"{key}={folder / key}")
    return load_recipe(path, [*local, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_real_recipe_fits_the_devices_that_it_names(path: Path, tmp_path: Path) -> None:
    """By the plan that its first lines name, as it is launched; from config.json alone."""
    text = path.read_text()
    gpu, count = re.search(
        rf"#   draftsmith plan {path.relative_to(RECIPES.parent)} --gpu (\S+) --count (\d+)\n", text
    ).groups()
    plan = make_plan(local_recipe(path, tmp_path), find_device(gpu), int(count))
    assert plan.fits
    first = plan.stages[0]
    assert first.target.num_parameters / 1e9 == pytest.approx(
        TARGETS[load_recipe(path).target.model][0], abs=0.01
    )
    assert 0 < first.trainable < first.target.num_parameters
