"""Responses written at servers: those that the target would write, none asked for twice, and what
becomes of them where servers fail."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from draftsmith.inference import LLM
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.features.transfers import ResponseStates
from draftsmith.train.recipe.data_sections import RegenerateSection
from draftsmith.train.recipe.endpoints import EndpointError
from draftsmith.train.regeneration import servers
from draftsmith.train.regeneration.conversations import TargetFacts
from draftsmith.train.regeneration.regenerate import regenerate
from draftsmith.train.regeneration.store import Record, ResponseStore, TokenIds
from tests.support.errors import raises_at

TARGET = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
VOCAB, ENDS = 4096, tuple(range(0, 4096, 9))  # so many that turns end now and then
SECTION = RegenerateSection(temperatures={0.0: 0.5, 1.0: 0.5}, max_new_tokens=12, batch_size=8)
A, B = "http://a/v1", "http://b/v1"


def chat(i: int, turns: int) -> Example:
    messages = [{"role": "system", "content": "Be brief."}] if i % 2 else []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {i}.{turn}"},
            {"role": "assistant", "content": f"the data's answer {turn}"},
        ]
    return Example("chat", f"chats:{i}", messages=tuple(messages[:-1] if i % 3 == 0 else messages))


EXAMPLES = [chat(i, 1 + i % 3) for i in range(24)] + [
    Example("default", f"x:{i}", prompt=f"number {i} and " * (1 + i % 5)) for i in range(12)
]


def continuation(prompt: list[int], fields: dict, model: str = "") -> list[int]:
    """What the pretended model writes: each token follows from those before it."""
    written: list[int] = []
    while len(written) < fields["max_tokens"] and not (written and written[-1] in ENDS):
        seed = f"{model}/{fields.get('seed')}/{[*prompt, *written]}"
        written.append(random.Random(seed).randrange(VOCAB))
    return written


class FakeServer:
    """Answers as vLLM does. `fail(request, body)` may answer in its place; `prompts`: all asked."""

    def __init__(self, tokenizer, model: str = "", by_tokens: bool = True) -> None:
        self.tokenizer, self.model, self.by_tokens = tokenizer, model, by_tokens
        self.prompts, self.reads = [], None
        self.fail = lambda request, body: None
        self.leaves = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        if (answer := self.fail(request, body)) is not None:
            return answer
        if request.url.path == "/v1/models":
            card = {"id": "target", "object": "model", "created": 0, "owned_by": "fake"}
            return httpx.Response(200, json={"object": "list", "data": [card]})
        prompt = body.get("prompt", body.get("messages"))
        self.prompts.append(prompt)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        ids = prompt if isinstance(body.get("prompt"), list) else self.tokenizer(text).input_ids
        written = continuation(ids, body, self.model)
        stopped = written[-1] in ENDS
        choice = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        shown = self.tokenizer.decode(written[: len(written) - stopped])
        choice |= {"text": shown, "message": {"role": "assistant", "content": shown}}
        if self.by_tokens:
            choice |= {"token_ids": written, "prompt_token_ids": self.reads or ids}
        answer = {"id": "1", "object": "x", "created": 0, "model": "target", "choices": [choice]}
        if self.leaves is not None:
            path = self.leaves(request.headers["X-Request-Id"])
            answer["kv_transfer_params"] = {"hidden_states_path": path}
        return httpx.Response(200, json=answer)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def fakes(tokenizer, monkeypatch):
    """Two servers, at A and B."""
    by_url = {A: FakeServer(tokenizer), B: FakeServer(tokenizer)}
    real = openai.AsyncOpenAI

    def client(base_url, **options):
        http = httpx.AsyncClient(transport=httpx.MockTransport(by_url[base_url]))
        return real(base_url=base_url, http_client=http, **options)

    monkeypatch.setattr(servers.openai, "AsyncOpenAI", client)
    monkeypatch.setattr(servers, "RETRIES", 0)
    return by_url


@pytest.fixture
def write(tokenizer, tmp_path):
    """write(*addresses, **keys of the section) -> responses; `lines`: what was said."""

    def run(*urls: str, examples=EXAMPLES, folder="x", llm=None, unread=None, **keys):
        section = RegenerateSection.model_validate(
            SECTION.model_dump()
            | {"endpoints": [{"url": url, "max_concurrency": 4} for url in urls]}
            | keys
        )
        return regenerate(
            llm,
            examples,
            ConversationTokenizer(tokenizer),
            section,
            target_hash="t",
            folder=tmp_path / folder,
            max_length=128,
            facts=TargetFacts("target", 256, VOCAB, ENDS),
            say=run.lines.append,
            record=Record(tmp_path, {"target_hash": "t"}),
            unread=unread,
        )

    run.lines = []
    return run


def is_expected(responses) -> bool:
    """Greedy responses are the pretended model's."""
    greedy = [response for response in responses if response.temperature == 0]
    written = [
        continuation(list(r.prompt_ids), {"max_tokens": len(r.output_ids), "seed": None})
        for r in greedy
    ]
    return bool(greedy) and written == [list(response.output_ids) for response in greedy]


def test_servers_share_the_responses_and_none_is_asked_for_twice(write, fakes, tmp_path):
    responses = write(A, B)
    assert is_expected(responses)
    asked = [tuple(prompt) for fake in fakes.values() for prompt in fake.prompts]
    assert min(len(fake.prompts) for fake in fakes.values()) >= 9 + 4
    assert len(asked) > len(responses) >= 36
    for fake in fakes.values():
        fake.prompts.clear()
    assert write(A) == responses and not fakes[A].prompts  # all are stored
    (record,) = json.loads((tmp_path / "regeneration.json").read_text()).values()
    assert record["written_by"]["fake"] <= len(responses) and record["target_hash"] == "t"
    assert "http" not in json.dumps(record)


def test_a_server_that_fails_is_dropped_and_its_requests_go_to_the_others(write, fakes):
    def fail(request, body):
        return httpx.Response(500) if len(fakes[B].prompts) >= 12 else None

    fakes[B].fail = fail
    responses = write(A, B)
    assert len(responses) == 36 and is_expected(responses)
    assert sum("left out from now on: http://b/v1" in line for line in write.lines) == 1


@pytest.mark.parametrize("answer", [None, {"choices": [{"index": 0, "finish_reason": "abort"}]}])
def test_a_run_stops_when_no_server_is_left_and_the_same_command_goes_on(
    write, fakes, answer, tmp_path
):
    """No connection, half an answer: what was written before is kept."""

    def fail(request, body):
        if len(fakes[A].prompts) < 12:
            return None
        if answer is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=answer)

    fakes[A].fail = fail
    with raises_at(EndpointError, "regenerate.endpoints"):
        write(A)
    (path,) = (tmp_path / "x").glob("*.jsonl")
    stored = len(path.read_text().splitlines())
    assert stored == 12 - 1 - 4  # the check's probes are the others
    fakes[A].fail = lambda request, body: None
    assert len(write(A)) == 36
    assert len(fakes[A].prompts) == 12 + 1 + 4 + 36 - stored


def test_what_a_server_refuses_is_left_out_and_said(write, fakes):
    def fail(request, body):
        long = len(body.get("prompt", "")) > 60
        return httpx.Response(400, json={"error": {"message": "too hard"}}) if long else None

    fakes[A].fail = fail
    responses = write(A)
    output = "".join(write.lines)
    assert 0 < len(responses) < 36
    assert f"{36 - len(responses)} left out" in output and "too hard" in output


def test_a_server_of_another_model_is_refused(write, fakes, tokenizer):
    fakes[B] = FakeServer(tokenizer, model="another")
    with pytest.raises(EndpointError, match=f"{B}: .* another model"):
        write(A, B)
    fakes[B].model, fakes[B].reads = "", [1, 2, 3]
    with pytest.raises(EndpointError, match=f"{B}: .* tokenizer"):
        write(A, B)
    cards = [{"id": i, "object": "model", "created": 0, "owned_by": "x"} for i in ("c", "d")]
    answer = httpx.Response(200, json={"object": "list", "data": cards})
    fakes[A].fail = lambda request, body: answer if request.method == "GET" else None
    with pytest.raises(EndpointError, match="c, d"):
        write(A)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        write(endpoints=[{"url": A, "api_key_env": "NO_SUCH_KEY"}])


def test_without_token_ids_text_is_tokenised_again_with_a_warning(write, fakes, tokenizer):
    fakes[A].by_tokens = False
    responses = write(A, temperatures={0.0: 1.0})
    assert "warning: http://a/v1 returns no token ids" in "".join(write.lines)
    response = responses[-1]  # of a text prompt
    text = EXAMPLES[-1].prompt
    ids = continuation(tokenizer(text).input_ids, {"max_tokens": 12, "seed": None} | {"seed": 0})
    assert len(responses) == 36 and response.prompt_ids == tuple(tokenizer(text).input_ids)
    assert ids and any(isinstance(prompt[0], dict) for prompt in fakes[A].prompts)
    with pytest.raises(EndpointError, match="top_k"):
        write(A, top_k=5)


def test_each_turn_follows_those_written_before_it(write, fakes, tokenizer):
    """Prompts are what serving would have sent: the template over the target's own answers."""
    by_chat: dict[int, list] = {}
    for response in write(A, turns="all", examples=EXAMPLES[:24]):
        by_chat.setdefault(response.example, []).append(response)
    assert max(map(len, by_chat.values())) >= 2
    for responses in by_chat.values():
        for before, after in pairwise(responses):
            answer = tokenizer.decode(before.output_ids[:-1], skip_special_tokens=True)
            assert before.output_ids[-1] in ENDS and answer in tokenizer.decode(after.prompt_ids)


def test_processes_share_no_file_and_nonsense_is_named(tmp_path):
    first, second = (ResponseStore(tmp_path, "n") for _ in range(2))
    for store, key in ((first, "a"), (second, "b")):
        store.add(key, [1], "e")
        store.close()
    path, _ = tmp_path.iterdir()
    assert ResponseStore(tmp_path, "n").known == dict.fromkeys("ab", TokenIds.of([1]))
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match=r"n\..*\.jsonl:1"):
        ResponseStore(tmp_path, "n")


@pytest.mark.slow
def test_a_server_writes_what_this_process_writes(write, serving, tiny_model, tokenizer):
    """Greedy and sampled, turn by turn; a server of another model differs from the loaded one."""
    model, other = (tiny_model("qwen3", vocab_size=VOCAB, num_hidden_layers=n) for n in (3, 2))
    model.generation_config.eos_token_id = other.generation_config.eos_token_id = list(ENDS)
    own_llm, wrong = (LLM(source, tokenizer=tokenizer, max_num_seqs=8) for source in (model, other))
    options = {"turns": "all", "llm": own_llm}
    server_model = LLM(model, tokenizer=tokenizer, max_num_seqs=8)
    url = serving(server_model, served_model_name=("target",)) + "/v1"
    responses = write(url, folder="there", **options)
    assert responses == write(folder="here", **options)
    assert {r.temperature for r in responses} == {0.0, 1.0}
    with pytest.raises(EndpointError, match="another model"):
        write(serving(wrong, served_model_name=("target",)), folder="wrong", **options)


def test_hidden_states_of_responses_are_removed_and_no_other_file(write, fakes, tmp_path):
    """A server that extracts states leaves those of every request, some while they are written."""
    root = tmp_path / "states"
    root.mkdir()
    numbers = itertools.count()
    writing = []

    def leave(name: str) -> str:
        path = root / f"{next(numbers)}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        writing.append(threading.Timer(0.01, lambda: (path.write_bytes(b"x"), os.close(lock))))
        writing[-1].start()
        return str(path)

    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x")
    states = ResponseStates(root, "run")
    states.discard({"hidden_states_path": str(other)})
    fakes[A].leaves = leave
    write(A, examples=EXAMPLES[:6], unread=states)
    for timer in writing:
        timer.join()
    assert next(numbers) > 5
    assert not list(root.iterdir())
    assert other.exists()


def test_states_of_responses_that_had_no_answer_are_removed_and_no_other_run_s(
    write, fakes, tmp_path
):
    """Those of a start that was killed, and of a server that was, between its file and its
    answer."""
    folder = tmp_path / "states" / "layers"
    folder.mkdir(parents=True)
    for run in ("r0", "r1"):
        (folder / f"cmpl-{run}-7-0-ab.safetensors").touch()
    died = []

    def die(request, body) -> httpx.Response | None:
        if request.url.path == "/v1/models":
            return None
        name = request.headers["X-Request-Id"]
        died.append(folder / f"cmpl-{name}-0-ab.safetensors.lock")
        died[-1].touch()
        return httpx.Response(500)

    fakes[A].fail = die
    responses = write(A, B, unread=ResponseStates(folder.parent, "r0"))
    assert died and is_expected(responses)
    assert [path.name for path in folder.iterdir()] == ["cmpl-r1-7-0-ab.safetensors"]
