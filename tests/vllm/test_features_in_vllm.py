"""Features by vLLM's hidden-state extraction: those of FrozenTarget."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.vllm_bridge.hidden_states import HiddenStates
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.pipeline.features_stage import features_of_states
from tests.vllm.conftest import PROMPTS

# long texts come in parts
ENGINE = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 64}


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
        features = it.of(texts)
        again = it.of(texts[:1])
        with pytest.raises(VllmError, match="maximum|longer|length"):
            it.of([list(range(3, 100)) * 2])
    for ids, states in zip(texts, features):
        taps, last_hidden = features_of_states(target, states)
        expected = target(torch.tensor([ids]))
        for own, theirs in zip(expected, (taps, last_hidden), strict=True):
            error = (own[0] - theirs).norm(dim=-1) / own[0].norm(dim=-1)
            assert error.max() < 1e-4
    torch.testing.assert_close(again[0], features[0], atol=1e-3, rtol=1e-4)
