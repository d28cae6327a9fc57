"""Features by vLLM's hidden-state extraction, in a process of its own and at servers: those of
FrozenTarget."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch

from draftsmith.inference.vllm_bridge.hidden_states import CONNECTORS, HiddenStates
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.served import features_of_states
from draftsmith.train.features.serving_args import serving_args
from draftsmith.train.features.state_servers import StateServers
from draftsmith.train.features.states_spec import StatesSpec
from draftsmith.train.recipe.data_sections import EndpointSection
from draftsmith.train.recipe.recipe import Recipe
from tests.vllm.conftest import PROMPTS

TARGET = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target")
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
    assert_those_of(target, texts, features, 1e-4)
    torch.testing.assert_close(again[0], features[0], atol=1e-3, rtol=1e-4)


def assert_those_of(target, texts, features, tolerance) -> None:
    """By the relative error of each token's taps and last hidden state."""
    for ids, states in zip(texts, features, strict=True):
        taps, last_hidden = features_of_states(target, states)
        expected = target(torch.tensor([ids]))
        for ours, theirs in zip(expected, (taps, last_hidden), strict=True):
            error = (ours[0] - theirs).norm(dim=-1) / ours[0].norm(dim=-1)
            assert error.max() < tolerance


def test_states_of_a_served_target_are_its_own_and_leave_no_file(vllm_server, tmp_path):
    """By the command that `serving-args` prints; texts of one token and of several steps too."""
    target = FrozenTarget.from_pretrained(TARGET, tap_layers=(2, 8), dtype="float32")
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "family": "eagle3",
            "target": {"model": TARGET},
            "data": {"train": [{"path": "x.jsonl"}], "max_length": 127},
            "training": {"steps": 1},
        }
    )
    spec = StatesSpec.of_recipe(recipe, target.tap_layers, target)
    _, _, _, *arguments = serving_args(recipe, spec, tmp_path, on_cpu=True)
    url = vllm_server(TARGET, *arguments, PYTHONPATH=str(CONNECTORS))
    texts = [*PROMPTS, [3 + i * 7 % 120 for i in range(127)], [5]] * 3
    servers = StateServers(
        [EndpointSection(url=url, max_concurrency=4)],
        spec,
        root=tmp_path,
        run="ds-test-0",
        unread_bytes=1e9,
        say=print,
    )
    servers.check(target)
    assert_those_of(target, texts, servers.of(texts), 1e-5)
    servers.close()
    assert not list(tmp_path.glob("*/*"))
    write = openai.OpenAI(base_url=f"{url}/v1", api_key="none").completions.create
    for prompt in PROMPTS:  # nearly greedy: temperatures of other rows or of none would show
        fields = {"model": TARGET, "prompt": prompt, "max_tokens": 16, "seed": 1}
        greedy, sampled = (write(**fields, temperature=t).choices[0].text for t in (0, 1e-3))
        assert sampled == greedy
