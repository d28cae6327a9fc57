"""Features by vLLM's hidden-state extraction: those of FrozenTarget, and the same cache and
training from either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator

from draftsmith.inference.vllm_bridge.engine import VllmError
from draftsmith.inference.vllm_bridge.hidden_states import HiddenStates
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import pack
from draftsmith.train.features.cache import missing
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.pipeline.data_stage import TargetHashes, TrainingData
from draftsmith.train.pipeline.features_stage import features_of_states, fill, open_cache
from draftsmith.train.pipeline.progress import Stages
from draftsmith.train.trainer.trainer import Trainer
from tests.train.trainer.test_loop import make_recipe
from tests.vllm.conftest import PROMPTS

ENGINE = {
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 64,
}  # long texts come in parts


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def saved(request, servable_model, tmp_path_factory):
    model, folder = servable_model(request.param), tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return model, folder


def test_states_are_those_of_the_target(saved, vllm_python):
    """The taps and, once the final norm is applied here, the last hidden state; also of a text
    longer than a step."""
    model, folder = saved
    target = FrozenTarget(model, (1, 2))
    texts = [*PROMPTS, [3 + i * 7 % 120 for i in range(150)], [5]]
    with HiddenStates(
        str(folder), (1, 2, 3), longest=150, dtype="float32", python=vllm_python, options=ENGINE
    ) as it:
        found = it.of(texts)
        again = it.of(texts[:1])
        with pytest.raises(VllmError, match="maximum|longer|length"):
            it.of([list(range(3, 100)) * 2])
    for ids, states in zip(texts, found):
        taps, last_hidden = features_of_states(target, states)
        expected = target(torch.tensor([ids]))
        for mine, theirs in zip(expected, (taps, last_hidden), strict=True):
            error = (mine[0] - theirs).norm(dim=-1) / mine[0].norm(dim=-1)
            assert error.max() < 1e-4
    torch.testing.assert_close(again[0], found[0], atol=1e-3, rtol=1e-4)


def test_training_from_either_is_the_same_training(saved, vllm_python, tmp_path, monkeypatch):
    """The stage writes what vLLM says to the cache; the losses of the first steps are those of
    online features."""
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", vllm_python)
    model, folder = saved
    target, rng = FrozenTarget(model, (1, 2, 3)), np.random.default_rng(0)
    rows = pack(
        [TokenRow(rng.integers(3, 120, n), np.arange(n) >= 3) for n in rng.integers(8, 24, 12)], 48
    )
    recipe = make_recipe(steps=3)
    tree = yaml.safe_load(recipe.resolved_yaml())
    tree["target"]["model"] = str(folder)
    tree["features"] = {
        "mode": "cache",
        "encoding": "exact",
        "dir": str(tmp_path),
        "engine": "vllm",
        "vllm_options": ENGINE,
    }
    recipe = type(recipe).model_validate(tree)
    tokenizer: Any = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=dict))
    data = TrainingData(rows, [], {}, tokenizer, TargetHashes("w", "c", "t"))
    stages = Stages(enabled=False)
    fill(recipe, target, rows, open_cache(recipe, target, data).scan(), stages)
    cache = open_cache(recipe, target, data).scan()
    assert not missing(cache, rows) and cache.key.engine == "vllm"
    losses = []
    for source in (None, cache):
        torch.manual_seed(0)
        drafter = Eagle3(
            config_for_target(target, "eagle3", tap_layers=[1, 2, 3], draft_vocab_size=60)
        ).attach(target)
        drafter.initialise_from(target)
        trainer = Trainer(
            recipe,
            target,
            drafter,
            rows,
            accelerator=Accelerator(cpu=True),
            folder=tmp_path / str(len(losses)),
            features=RowFeatures(target, rows, cache=source),
        )
        losses.append([record["loss"] for record in trainer.run().history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
