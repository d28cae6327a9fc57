"""POST /v1/drafter: what begins later is drafted by the new head, what runs ends with its own, and
a folder that does not fit changes nothing."""

from __future__ import annotations

import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.engine.engine import Engine
from draftsmith.inference.entrypoints.llm import engine_with_drafter
from draftsmith.inference.server import app
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.errors import raises_at

CLIENT = httpx2.Client(timeout=60, headers={"Authorization": "Bearer k"})
REQUEST = {
    "prompt": "x",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "per_request_spec_decode_metrics": "detailed",
}


@pytest.fixture(scope="module")
def heads(folders, tmp_path_factory) -> Path:
    """Drafters of one target: `old`, `new`, which drafts other tokens, and `taps`, which reads
    other layers. And folders that are none: `torn` lacks a tensor, `empty` all, and `away` leads
    out of the folder."""
    root = tmp_path_factory.mktemp("heads")
    target, head = folders
    shutil.copytree(head, root / "old")
    shutil.copytree(head, root / "torn")
    tensors = load_file(root / "torn" / "model.safetensors")
    tensors.pop("norm.weight")
    save_file(tensors, root / "torn" / "model.safetensors")
    (root / "empty").mkdir()
    (root / "away").symlink_to(head)
    drafter = load_drafter(head, FrozenTarget.from_pretrained(target, tap_layers=[1, 2, 3]))
    with torch.no_grad():
        drafter.lm_head.weight.mul_(-1)
    export_drafter(drafter, root / "new", dtype=torch.float32)
    others = FrozenTarget.from_pretrained(target, tap_layers=[0, 1])
    config = config_for_target(others, "eagle3", tap_layers=[0, 1], draft_vocab_size=200)
    export_drafter(Eagle3(config).attach(others), root / "taps", dtype=torch.float32)
    return root


def load(folders, head: Path, **options) -> LLM:
    drafting = {"model": str(head), "num_speculative_tokens": 3}
    return LLM(folders[0], speculative_config=drafting, max_model_len=128, **options)


@pytest.fixture
def url(serving, folders, heads) -> str:
    """Of a server that drafts with `old`."""
    return serving(load(folders, heads / "old"), api_key=("k",), drafters_dir=heads)


def complete(url: str) -> dict:
    answer = CLIENT.post(f"{url}/v1/completions", json=REQUEST)
    assert answer.status_code == 200, answer.text
    return answer.json()


def accepted(answer: dict) -> list[int]:
    """Drafts, round by round."""
    return answer["metrics"]["speculative_decoding"]["per_step_accepted"]


def replace(url: str, model: object):
    return CLIENT.post(f"{url}/v1/drafter", json={"model": model})


def wait_until(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.01)


def hold_up(server, rounds: int) -> list[int]:
    """After so many rounds its engine waits for something to be asked of its thread, once. Returns
    the list of its rounds, which grows."""
    engine, done = server.llm.engine, []
    step = engine.step

    def held_step():
        done.append(1)
        if len(done) == rounds:
            wait_until(lambda: server.engine._calls)
        return step()

    engine.step = held_step
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new", "taps"])
def test_drafter_is_replaced_running_request_ends_with_its_own(serving, url, folders, heads, name):
    """And what comes later has the rounds that the new head has alone; the text is the target's."""
    server = serving.server(url)
    expected = {}
    for head in ("old", name):
        alone = serving(load(folders, heads / head))
        expected[head] = accepted(complete(alone))
    assert expected["old"] != expected[name]
    rounds = hold_up(server, 4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, url)
        wait_until(lambda: len(rounds) == 4)
        answer = replace(url, name)
        late = complete(url)
        early = running.result()
    assert answer.json() == {"model": str(heads / name), "num_speculative_tokens": 3}
    assert accepted(early) == expected["old"]
    assert accepted(late) == expected[name]
    assert early["choices"][0]["text"] == late["choices"][0]["text"]
    drafts = sum(map(len, expected.values()))
    assert f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {drafts}.0' in (
        CLIENT.get(f"{url}/metrics").text
    )


def test_drafter_is_replaced_the_old_one_is_freed_with_its_last_request(serving, url):
    server = serving.server(url)
    old = weakref.ref(server.llm.engine.proposer)
    weights = weakref.ref(server.llm.engine.proposer._drafter)
    target = weakref.ref(server.llm.engine.target)
    rounds = hold_up(server, 4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, url)
        wait_until(lambda: len(rounds) == 4)
        assert replace(url, "taps").status_code == 200
        running.result()
    complete(url)
    wait_until(lambda: old() is None and weights() is None and target() is None)


@pytest.mark.parametrize(
    "model, message",
    [
        ("torn", "norm.weight is missing"),
        ("empty", "config.json"),
        ("nowhere", "is no folder below --drafters-dir"),
        ("away", "is no folder below --drafters-dir"),
        ("..", "is no folder below --drafters-dir"),
        (".", "is no folder below --drafters-dir"),
        ("/", "is no folder below --drafters-dir"),
        ("a\0b", "is no folder below --drafters-dir"),
        (5, "model"),
        (None, "model"),
    ],
)
def test_folder_that_is_no_fitting_drafter_is_refused_and_the_old_one_goes_on(
    serving, url, model, message
):
    server = serving.server(url)
    engine = server.llm.engine
    answer = replace(url, model)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert server.llm.engine is engine
    assert sum(accepted(complete(url))) > 0


def test_two_at_a_time_are_refused(serving, url, monkeypatch):
    begun, works = [], app.engine_with_drafter

    def slow(*arguments):
        begun.append(1)
        wait_until(lambda: len(refused) == 1)
        return works(*arguments)

    refused: list = []
    monkeypatch.setattr(app, "engine_with_drafter", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(replace, url, "new")
        wait_until(lambda: begun)
        refused.append(replace(url, "new"))
        assert (first.result().status_code, refused[0].status_code) == (200, 409)
    assert replace(url, "old").status_code == 200


def test_folder_that_is_replaced_while_it_is_read_is_refused(serving, url, heads, monkeypatch):
    """A head of two exports would be half of each."""
    shutil.copytree(heads / "new", heads / "moving")
    works = app.engine_with_drafter.__globals__["load_drafter_for"]

    def moves(*arguments):
        shutil.move(heads / "moving", heads / "moved")
        shutil.copytree(heads / "old", heads / "moving")
        return works(*arguments)

    monkeypatch.setitem(app.engine_with_drafter.__globals__, "load_drafter_for", moves)
    answer = replace(url, "moving")
    assert answer.status_code == 400 and "was replaced while it was read" in answer.text


def test_engine_that_would_run_eager_beside_a_compiled_one_is_refused(folders, heads, monkeypatch):
    llm = load(folders, heads / "old")
    monkeypatch.setattr(Engine, "compiles", property(lambda engine: engine is llm.engine))
    with raises_at(ConfigError, f"drafter {heads / 'new'}"):
        engine_with_drafter(llm, heads / "new")


@pytest.mark.slow
def test_new_drafter_is_warm_before_its_first_request(folders, heads):
    """No text has a round that is compiled anew, whatever its length and the rows beside it."""
    torch._dynamo.reset()
    counters.clear()
    traced = {"mode": 3, "backend": "eager"}  # all of compiling but the code generator
    llm = load(folders, heads / "old", compilation_config=traced, max_num_seqs=2)
    llm.warm_up()
    before = counters["stats"]["unique_graphs"]
    llm.engine = engine_with_drafter(llm, heads / "new")
    warm = counters["stats"]["unique_graphs"]
    assert warm > before and llm.get_metrics().num_drafts == 0
    for prompts in ([[7]], [[9] * 60, [5, 6, 7]]):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (60, 9)]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, params[: len(prompts)], use_tqdm=False)
    assert llm.get_metrics().num_drafts > 0
    assert counters["stats"]["unique_graphs"] == warm


def test_route_is_off_by_default_and_asks_for_the_key(serving, folders, heads, url):
    llm = load(folders, heads / "old")
    assert replace(serving(llm, api_key=("k",)), "new").status_code == 404
    answer = httpx2.post(f"{url}/v1/drafter", json={"model": "new"})
    assert answer.status_code == 401


def test_server_without_a_drafter_has_none_to_replace(serving, folders, heads):
    url = serving(LLM(folders[0]), api_key=("k",), drafters_dir=heads)
    answer = replace(url, "new")
    assert answer.status_code == 400 and "speculative_config" in answer.text
