"""Another drafter for a running server: nobody's answer changes, nobody is dropped, and what does
not fit changes nothing."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch

from inference import LLM, SamplingParams
from inference.requests.request import Request
from inference.sampling.sampler import make_generator
from inference.spec_decode.proposers.ab_split import Arm, SplitProposer
from inference.spec_decode.proposers.ngram import NgramProposer
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
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(prefix)
    }


def slowly(llm):
    """With rounds that take a while, so that there is time to swap."""
    llm.engine.on_round = lambda *_: time.sleep(0.01)
    return llm


@pytest.mark.slow
def test_requests_in_flight_go_on(serving, drafting_llm, model, heads):
    """Drafters come and go while eight clients are answered: every answer is the target's own, to
    its last token."""
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
    assert (
        sum(by_drafter.values())
        == sum(counters(url, "vllm:spec_decode_num_draft_tokens_total").values())
        > 0
    )
    assert sum(value > 0 for value in by_drafter.values()) >= 2
    assert counters(url, "vllm:generation_tokens_total").popitem()[1] == 24 * 120


@pytest.mark.slow
def test_a_stream_goes_on_through_a_swap(serving, drafting_llm, model, heads):
    """Nothing is written twice or lost."""
    url = serving(slowly(drafting_llm("ngram", model)), enable_drafter_swap=True)
    asked = {
        "prompt": "once",
        "ignore_eos": True,
        "temperature": 1,
        "seed": 4,
        "max_tokens": 200,
        "stream": True,
        "return_token_ids": True,
    }
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
        (NGRAM | {"rejection_sample_method": "lossy:typical"}, "does not preserve"),
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


def test_a_drafter_of_another_target_is_refused(
    serving, drafting_llm, model, tiny_model, tiny_eagle3, tmp_path
):
    """And leaves nothing behind in the model."""
    other = tiny_model(
        "qwen3", vocab_size=model.config.vocab_size, hidden_size=64, max_position_embeddings=256
    )
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
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_hooks_of_former_targets_are_gone(serving, drafting_llm, model, heads):
    url = serving(drafting_llm("ngram", model), enable_drafter_swap=True)
    before = hooks_of(model)
    for _ in range(3):
        for name, taps in (("a", 2), ("b", 3)):
            (card,) = swap(url, head(heads / name), name=name).json()["drafters"]
            assert card == {
                "name": name,
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "share": 1.0,
            }
            assert hooks_of(model) == before + taps
    assert swap(url, None).json()["drafters"][0]["method"] is None and hooks_of(model) == before


def test_it_is_off_unless_asked_for_and_needs_the_key(serving, drafting_llm, model):
    assert swap(serving(drafting_llm("ngram", model)), NGRAM).status_code == 404
    url = serving(drafting_llm("ngram", model), enable_drafter_swap=True, api_key=("secret",))
    assert swap(url, NGRAM).status_code == 401


@pytest.mark.slow
def test_a_limit_of_memory_holds_for_the_new_drafter(serving, drafting_llm, model, heads):
    """A head has keys and values of its own: requests that fitted without it and would not with it
    keep it out."""
    llm = drafting_llm("off", model)
    llm.generate("x", SamplingParams(temperature=0, max_tokens=2), False)
    per_token = llm.engine.rows.cache.bytes() // (
        llm.engine.rows.cache.rows * llm.engine.rows.cache.capacity
    )
    llm = slowly(drafting_llm("ngram", model, kv_cache_memory_bytes=per_token * 230))
    url = serving(llm, enable_drafter_swap=True)
    asked = {"prompt": "once", "temperature": 0, "max_tokens": 210, "stream": True}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        refused = swap(url, head(heads / "a"))
        rest = list(lines)
    assert (
        refused.status_code == 400 and "kv_cache_memory_bytes" in refused.json()["error"]["message"]
    )
    assert "data: [DONE]" in rest and '"finish_reason":"length"' in "".join(rest)
    assert swap(url, head(heads / "a")).status_code == 200


def compare(url: str, *drafters: dict):
    return CLIENT.post(f"{url}/drafter", json={"drafters": list(drafters)})


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafters_side_by_side(temperature, serving, drafting_llm, model, heads):
    """Two heads that read different states, a matcher and no drafter share the traffic: each is
    counted by itself, as it would be alone, and nobody's greedy answer changes."""
    url = serving(drafting_llm("ngram", model, max_num_seqs=4), enable_drafter_swap=True)
    names = {"a": head(heads / "a"), "b": head(heads / "b", 2), "matcher": NGRAM, "nobody": None}
    answer = compare(
        url, *({"name": name, "speculative_config": config} for name, config in names.items())
    )
    assert answer.status_code == 200, answer.text
    assert [card["share"] for card in answer.json()["drafters"]] == [0.25] * 4
    prompts = [f"{'tell me and ' * (3 + i % 4)}{i}" for i in range(24)]
    asked = {
        "max_tokens": 40,
        "temperature": temperature,
        "ignore_eos": True,
        "per_request_spec_decode_metrics": "summary",
    }

    def ask(number: int) -> dict:
        answer = CLIENT.post(
            f"{url}/v1/completions", json=asked | {"prompt": prompts[number], "seed": number}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    assert all(each["usage"]["completion_tokens"] == 40 for each in answers)
    if temperature == 0:
        params = SamplingParams(temperature=0, max_tokens=40)
        expected = drafting_llm("off", model).generate(prompts, params, False)
        assert [each["choices"][0]["text"] for each in answers] == [
            each.outputs[0].text for each in expected
        ]
    drafted = by_drafter(url, "num_draft_tokens")
    assert set(drafted) == {"initial", "a", "b", "matcher"} and drafted["initial"] == 0
    assert all(drafted[name] > 0 for name in ("a", "b", "matcher"))
    told = [each["metrics"]["speculative_decoding"]["num_draft_tokens"] for each in answers]
    assert sum(drafted.values()) == sum(told) and 0 in told  # somebody was drafted for by nobody
    rounds = by_drafter(url, "num_drafts")
    assert drafted["b"] <= 2 * rounds["b"] and drafted["a"] > 2 * rounds["a"]
    totals = counters(url, "vllm:spec_decode_num_accepted_tokens_total")
    assert sum(totals.values()) == sum(by_drafter(url, "num_accepted_tokens").values())


def by_drafter(url: str, name: str) -> dict[str, float]:
    found = counters(url, f"draftsmith:spec_decode_{name}_total")
    return {key.split('drafter="')[1].split('"')[0]: value for key, value in found.items()}


@pytest.mark.slow
def test_side_by_side_they_draft_what_they_draft_alone(
    drafting_llm, model, heads, serving, byte_tokenizer
):
    """Of greedy requests every drafter accepts as much as it does on a server of its own, reused
    prefixes included."""
    prompts = [
        "a long beginning that all of them share, and then " + text
        for text in "one two three four".split()
    ] * 3
    asked = {"prompt": prompts, "max_tokens": 30, "temperature": 0}
    params = SamplingParams(temperature=0, max_tokens=30)
    configs = {"a": head(heads / "a"), "b": head(heads / "b")}
    url = serving(drafting_llm("off", model, max_num_seqs=3), enable_drafter_swap=True)
    choices = [{"name": name, "speculative_config": config} for name, config in configs.items()]
    assert compare(url, *choices).status_code == 200
    server = serving.server(url)
    split = server.llm.engine.proposer
    first = server.llm._num_prompts
    assert CLIENT.post(f"{url}/v1/completions", json=asked).status_code == 200
    owners = [split.arm(_Named(str(first + i))).name for i in range(len(prompts))]
    assert set(owners) == {"a", "b"}
    for name, config in configs.items():
        alone = LLM(
            model, byte_tokenizer, speculative_config=config | {"method": "eagle3"}, max_num_seqs=3
        )
        mine = [prompt for prompt, owner in zip(prompts, owners, strict=True) if owner == name]
        alone.generate(mine, params, False)
        expected = alone.get_metrics()
        assert by_drafter(url, "num_drafts")[name] == expected.num_drafts > 0
        assert by_drafter(url, "num_accepted_tokens")[name] == expected.num_accepted_tokens


def test_what_was_drawn_stays_what_it_was_drawn_from(stub_proposer):
    """Side by side, a row's drafts and q are its own drafter's; drafts that were not drawn are
    certain."""
    drawn, matched = stub_proposer("sampled", 3, 9), NgramProposer(2, 1, 2)
    split = SplitProposer([Arm("drawn", drawn), Arm("matched", matched)], 9)
    requests = [
        Request(
            str(i),
            0,
            [1, 2, 1, 2, 1],
            SamplingParams(seed=i),
            generator=make_generator(i),
            max_model_len=99,
        )
        for i in range(12)
    ]
    for row in range(12):
        split.reset(row)
    proposal = split.propose(requests, [3] * 12)
    names = [split.arm(request).name for request in requests]
    assert set(names) == {"drawn", "matched"} and proposal.counts == [
        3 if n == "drawn" else 2 for n in names
    ]
    for row, name in enumerate(names):
        requests[row].generator = make_generator(row)
        alone = drawn.propose([requests[row]], [3])
        if name == "drawn":
            assert proposal.token_ids[row].tolist() == alone.token_ids[0].tolist()
            assert torch.equal(proposal.q[row], alone.q[0])
        else:
            assert proposal.token_ids[row, :2].tolist() == [2, 1]
            assert proposal.q[row, [0, 1], [2, 1]].tolist() == [1, 1] and proposal.q[row].sum() == 2


class _Named:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def test_shares():
    """Of many requests each arm gets its share, and a request's arm does not change."""
    arms = [Arm("a", NgramProposer(3, 1, 2), 3), Arm("b", NgramProposer(3, 1, 2), 1)]
    split, twin = SplitProposer(arms, 9), SplitProposer(arms, 9)
    named = [_Named(str(i)) for i in range(4000)]
    owners = [split.arm(each).name for each in named]
    assert owners == [twin.arm(each).name for each in named]
    assert abs(owners.count("a") - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ([{"speculative_config": NGRAM}, {"speculative_config": NGRAM}], "same name"),
        (
            [{"speculative_config": None}, {"speculative_config": None, "name": "x"}],
            "none of them drafts",
        ),
        ([{"speculative_config": NGRAM}, {"speculative_config": {"method": "lookahead"}}], "trees"),
        ([{"speculative_config": NGRAM}], "drafters"),
        ([{"speculative_config": NGRAM}, {"speculative_config": None, "share": 0}], "share"),
    ],
)
def test_what_cannot_be_compared_is_refused(drafters, message, serving, drafting_llm, model):
    llm = drafting_llm("ngram", model)
    url, engine = serving(llm, enable_drafter_swap=True), llm.engine
    answer = compare(url, *drafters)
    assert answer.status_code == 400 and message in answer.text and llm.engine is engine
