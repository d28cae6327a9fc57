"""Another drafter for a running server: nobody's answer changes, nobody is dropped, and what does not fit changes
nothing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch

from inference import SamplingParams
from speculators.export import export_drafter

CLIENT = httpx2.Client(timeout=60)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tiny_model, byte_tokenizer):
    model = tiny_model("qwen3", vocab_size=len(byte_tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def heads(model, tiny_eagle3, tmp_path_factory):
    """Two exports that read different states of the target."""
    folder = tmp_path_factory.mktemp("heads")
    for name, taps in (("a", (1, 2)), ("b", (0, 1, 2))):
        export_drafter(tiny_eagle3(model, taps), folder / name, dtype=torch.float32)
    return folder


def swap(url: str, config, **more):
    return CLIENT.post(f"{url}/drafter", json={"speculative_config": config} | more)


def head(path, k: int = 3) -> dict:
    return {"model": str(path), "num_speculative_tokens": k}


def counters(url: str, prefix: str) -> dict[str, float]:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix)}


def test_requests_in_flight_go_on(serving, drafting_llm, model, heads):
    """Drafters come and go while eight clients are answered: every answer is the target's own, to its last token."""
    offline = drafting_llm("off", model)
    prompts = [f"{'tell ' * (i % 4)}{i}" for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=120)
    expected = [output.outputs[0].text for output in offline.generate(prompts, params, False)]
    url = serving(drafting_llm("ngram", model, max_num_seqs=4), enable_drafter_swap=True)
    done = threading.Event()
    again = []

    def swapping() -> None:
        configs = [head(heads / "a"), None, head(heads / "b", 2), NGRAM]
        while not done.is_set():
            for config in configs:
                answer = swap(url, config)
                assert answer.status_code == 200, answer.text
                again.append(answer.json()["requests_computed_again"])

    def ask(prompt: str) -> str:
        asked = {"prompt": prompt, "temperature": 0, "max_tokens": 120}
        answer = CLIENT.post(f"{url}/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(9) as pool:
        swaps = pool.submit(swapping)
        texts = list(pool.map(ask, prompts))
        done.set()
        swaps.result(60)
    assert texts == expected
    assert len(again) >= 4 and max(again) > 0
    by_drafter = counters(url, "draftsmith:spec_decode_num_draft_tokens_total")
    assert sum(by_drafter.values()) == sum(counters(url, "vllm:spec_decode_num_draft_tokens_total").values()) > 0
    assert sum(value > 0 for value in by_drafter.values()) >= 2
    assert counters(url, "vllm:generation_tokens_total").popitem()[1] == 24 * 120


def test_a_stream_goes_on_through_a_swap(serving, drafting_llm, model, heads):
    """Nothing is written twice or lost."""
    url = serving(drafting_llm("ngram", model), enable_drafter_swap=True)
    asked = {"prompt": "once", "temperature": 1, "seed": 4, "max_tokens": 200, "stream": True, "return_token_ids": True}
    tokens = 0
    with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        for line in answer.iter_lines():
            if "token_ids" in line:
                if tokens == 0:
                    assert swap(url, head(heads / "a")).json()["requests_computed_again"] == 1
                tokens += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
    assert tokens == 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "nowhere/at-all-x", "method": "eagle3", "num_speculative_tokens": 3}, "nowhere"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 3, "unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(config, message, serving, drafting_llm, model):
    llm = drafting_llm("ngram", model)
    url = serving(llm, enable_drafter_swap=True)
    engine = llm.engine
    answer = swap(url, config)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "speculative_config" and llm.engine is engine


def test_a_drafter_of_another_target_is_refused(serving, drafting_llm, model, tiny_model, tiny_eagle3, tmp_path):
    """And leaves nothing behind in the model."""
    other = tiny_model("qwen3", vocab_size=model.config.vocab_size, hidden_size=64, max_position_embeddings=256)
    export_drafter(tiny_eagle3(other, (1, 2)), tmp_path / "other", dtype=torch.float32)
    llm = drafting_llm("ngram", model)
    url = serving(llm, enable_drafter_swap=True)
    hooks = hooks_of(model)
    answer = swap(url, head(tmp_path / "other"))
    assert answer.status_code == 400 and "target_hidden_size" in answer.json()["error"]["message"]
    assert hooks_of(model) == hooks
    torch.save(torch.zeros(1), tmp_path / "other" / "model.safetensors")
    assert swap(url, head(tmp_path / "other")).status_code == 400 and hooks_of(model) == hooks


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_of_former_targets_are_gone(serving, drafting_llm, model, heads):
    url = serving(drafting_llm("ngram", model), enable_drafter_swap=True)
    before = hooks_of(model)
    for _ in range(3):
        for name, taps in (("a", 2), ("b", 3)):
            answer = swap(url, head(heads / name), name=name).json()
            assert answer["name"] == name and answer["method"] == "eagle3" and hooks_of(model) == before + taps
    assert swap(url, None).json()["name"] is None and hooks_of(model) == before


def test_it_is_off_unless_asked_for_and_needs_the_key(serving, drafting_llm, model):
    assert swap(serving(drafting_llm("ngram", model)), NGRAM).status_code == 404
    url = serving(drafting_llm("ngram", model), enable_drafter_swap=True, api_keys=("secret",))
    assert swap(url, NGRAM).status_code == 401


def test_a_limit_of_memory_holds_for_the_new_drafter(serving, drafting_llm, model, heads):
    """A head has keys and values of its own: requests that fitted without it and would not with it keep it out."""
    llm = drafting_llm("off", model)
    llm.generate("x", SamplingParams(temperature=0, max_tokens=2), False)
    per_token = llm.engine._cache.bytes() // (llm.engine._cache.rows * llm.engine._cache.capacity)
    llm = drafting_llm("ngram", model, kv_cache_memory_bytes=per_token * 230)
    url = serving(llm, enable_drafter_swap=True)
    asked = {"prompt": "once", "temperature": 0, "max_tokens": 210, "stream": True}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = swap(url, head(heads / "a"))
        rest = list(lines)
    assert refused.status_code == 400 and "kv_cache_memory_bytes" in refused.json()["error"]["message"]
    assert "data: [DONE]" in rest and '"finish_reason":"length"' in "".join(rest)
    assert swap(url, head(heads / "a")).status_code == 200
