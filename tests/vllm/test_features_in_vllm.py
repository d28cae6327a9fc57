"""Features by vLLM's hidden-state extraction, in a process of its own and at servers: those of
FrozenTarget."""

from __future__ import annotations

from pathlib import Path

import openai
import psutil
import pytest
import torch
from accelerate import Accelerator

from draftsmith.inference.progress import Stages
from draftsmith.inference.vllm_bridge.hidden_states import CONNECTORS, HiddenStates
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.features.served import features_of_states
from draftsmith.train.features.serving_args import serving_args
from draftsmith.train.features.state_servers import StateServers
from draftsmith.train.features.states_spec import StatesSpec
from draftsmith.train.features.transfers import discard
from draftsmith.train.pipeline.train_stage import train
from draftsmith.train.recipe.data_sections import EndpointSection
from draftsmith.train.recipe.endpoints import EndpointError
from draftsmith.train.recipe.sections import FeaturesSection
from draftsmith.train.trainer.step_records import ERROR, EXPECTED
from tests.support.errors import raises_at
from tests.support.quickstart_data import source as quickstart
from tests.support.training import recipe_of
from tests.support.vllm import PROMPTS

TARGET = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "target")
TAPS = (2, 8)
LONG = [3 + i * 7 % 120 for i in range(127)]
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
    ) as state_servers:
        features = state_servers.of(texts)
        again = state_servers.of(texts[:1])
        with pytest.raises(VllmError, match="maximum|longer|length"):
            state_servers.of([list(range(3, 100)) * 2])
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


@pytest.fixture(scope="module")
def served(vllm_server, tmp_path_factory):
    """(recipe, folder): a server of the embedded target runs by the command that `serving-args`
    prints for the recipe; it writes states below the folder."""
    root = tmp_path_factory.mktemp("states")
    recipe = recipe_of(
        "eagle3",
        target={"model": TARGET, "dtype": "float32"},
        data={
            "train": [quickstart("train", 12)],
            "validation": [quickstart("validation", 6)],
            "max_length": 127,
        },
        drafter={"unroll_steps": 2, "draft_vocab_size": 512, "tap_layers": list(TAPS)},
        # Muon makes 0.06 of the loss out of 1e-6 of the features within these steps, AdamW 2e-5.
        training={
            "steps": 30,
            "batch_size": 1,
            "eval_every": 30,
            "mixed_precision": "no",
            "optimizer": "adamw",
            "learning_rate": 1e-3,
        },
        evaluation={"max_tokens": 24, "num_speculative_tokens": 2},
    )
    spec = StatesSpec.of_recipe(recipe, TAPS, recipe.target.sketch())
    words = serving_args(recipe, spec, root, on_cpu=True)
    arguments = words[words.index("--dtype") :]  # the fixture has the command and the model
    server = {
        "url": vllm_server(TARGET, *arguments, PYTHONPATH=str(CONNECTORS)),
        "max_concurrency": 4,
    }
    regenerate = recipe.regenerate.model_copy(
        update={"endpoints": [EndpointSection(**server)], "max_new_tokens": 24}
    )
    features = {"engine": "vllm", "endpoints": [server], "states_dir": str(root)}
    section = FeaturesSection.model_validate(features)
    return recipe.model_copy(update={"regenerate": regenerate, "features": section}), root


@pytest.fixture
def servers(served):
    """The server, checked."""
    recipe, root = served
    target = FrozenTarget.from_pretrained(TARGET, tap_layers=TAPS, dtype="float32")
    opened = StateServers(
        recipe.features.endpoints,
        StatesSpec.of_recipe(recipe, TAPS, target),
        root=root,
        run="ds-test-0",
        unread_bytes=1e9,
        say=print,
    )
    opened.check(target)
    yield opened
    opened.close()
    assert not list(root.glob("*/*"))


def test_states_of_a_served_target_are_its_own_and_leave_no_file(servers):
    """Texts of one token and of several steps too."""
    target = FrozenTarget.from_pretrained(TARGET, tap_layers=TAPS, dtype="float32")
    texts = [*PROMPTS, LONG, [5]] * 3
    assert_those_of(target, texts, servers.of(texts), 1e-5)


def test_a_server_that_gives_states_writes_each_text_at_its_own_temperature(served, servers):
    """Nearly greedy: temperatures of other rows or of none would show."""
    _, root = served
    write = openai.OpenAI(base_url=servers.servers[0].url, api_key="none").completions.create
    for prompt in PROMPTS:
        texts = []
        for temperature in (0, 1e-3):
            fields = {"model": TARGET, "prompt": prompt, "max_tokens": 16, "seed": 1}
            answer = write(**fields, temperature=temperature)
            discard(answer.kv_transfer_params, root)
            texts.append(answer.choices[0].text)
        assert texts[0] == texts[1]


def test_a_server_without_room_for_its_states_is_reported_and_goes_on(servers):
    """The size of a file is limited, as where the folder is full."""
    unlimited = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
    serving = psutil.Process().children(recursive=True)
    try:
        for process in serving:
            process.rlimit(psutil.RLIMIT_FSIZE, (servers.spec.bytes_of(100), psutil.RLIM_INFINITY))
        with raises_at(EndpointError, servers.servers[0].url):
            list(servers.of([LONG]))
    finally:
        for process in serving:
            process.rlimit(psutil.RLIMIT_FSIZE, unlimited)
    (states,) = servers.of([LONG])
    assert len(states) == len(LONG)


def test_a_training_at_a_server_has_the_losses_of_one_in_process_and_leaves_no_file(
    served, tmp_path
):
    """The server writes the responses, too. Each route computes its own features."""
    recipe, root = served
    histories = []
    for features in (recipe.features, FeaturesSection()):
        folder = tmp_path / f"run-{len(histories)}"
        cached = recipe.regenerate.model_copy(update={"cache_dir": str(tmp_path / "responses")})
        changed = {"output_dir": str(folder), "features": features, "regenerate": cached}
        torch.manual_seed(0)
        trained = train(
            recipe.model_copy(update=changed), Accelerator(cpu=True), Stages(enabled=False)
        )
        histories.append(trained.state.history)
        assert not list(root.glob("*/*"))
    losses = [[record["loss"] for record in history] for history in histories]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    served_last, in_process_last = (history[-1] for history in histories)
    assert served_last[EXPECTED] == pytest.approx(
        in_process_last[EXPECTED], abs=in_process_last[ERROR]
    )
