"""Responses written at endpoints: complete, none twice, none lost, and those that this process
would have written."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from inference import LLM, http_client
from speculators.errors import DataError
from tests.faulty_proxy import FaultyProxy
from train.data.loss_mask import ConversationTokenizer
from train.data.sources import Example
from train.recipe.data_sections import RegenerateSection
from train.regeneration import endpoint, endpoint_pool
from train.regeneration.endpoint import EndpointError
from train.regeneration.record import Record
from train.regeneration.regenerate import regenerate, target_facts
from train.regeneration.store import ResponseStore

TOKENIZER = Path(__file__).resolve().parents[3] / "recipes" / "quickstart" / "target"
ENDS = list(range(0, 4096, 9))  # so many that a random model ends its turns now and then
SECTION = RegenerateSection(
    temperatures={0.0: 0.5, 1.0: 0.5}, max_new_tokens=12, batch_size=8, request_timeout_s=20
)
RECORD = Record("some/target", None, "t", None, {})


def chat(i: int) -> Example:
    """A conversation of one to four turns, some with a call of a tool, some that the user ended."""
    messages = [{"role": "system", "content": "Be brief."}] if i % 2 else []
    for turn in range(1 + i % 4):
        messages += [
            {"role": "user", "content": f"question {i}.{turn}"},
            {"role": "assistant", "content": f"the data's answer {turn}"},
        ]
    return Example("chat", f"chats:{i}", messages=tuple(messages[:-1] if i % 3 == 0 else messages))


CHATS = [chat(i) for i in range(24)]
PROMPTS = [Example("default", f"x:{i}", prompt=f"number {i} and " * (1 + i % 5)) for i in range(60)]


@pytest.fixture(scope="module")
def model(tiny_model):
    model = tiny_model("qwen3", vocab_size=4096)
    model.generation_config.eos_token_id = ENDS
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="module")
def here(model, tokenizer):
    return LLM(model, tokenizer=tokenizer, max_num_seqs=8)


@pytest.fixture
def server(serving, model, tokenizer):
    return (
        serving(LLM(model, tokenizer=tokenizer, max_num_seqs=8), served_model_name=("target",))
        + "/v1"
    )


@pytest.fixture
def write(here, tmp_path):
    """write(folder, examples, **keys of the section): the responses, in process unless there are
    endpoints."""

    def run(folder: str, examples=PROMPTS, *, llm=None, max_length=128, options=None, **keys):
        # as read from YAML, where a URL alone is an endpoint
        section = RegenerateSection.model_validate(SECTION.model_dump() | keys)
        facts = target_facts(here, "target")
        return regenerate(
            llm if section.endpoints else here,
            examples,
            ConversationTokenizer(here.get_tokenizer()),
            section,
            target_hash="t",
            folder=tmp_path / folder,
            max_length=max_length,
            facts=facts,
            record=RECORD,
            **(options or {}),
        )

    return run


def kept(folder: Path) -> tuple[list[str], dict]:
    """Keys of all lines on disk, and the record."""
    lines = [
        json.loads(line)
        for path in folder.glob("*.0*.jsonl")
        for line in path.read_text().splitlines()
    ]
    (record,) = folder.glob("????????????????.json")
    return [line["key"] for line in lines if "token_ids" in line], json.loads(record.read_text())


# ------------------------------------------------------------------ the same responses


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["last", "all"])
def test_a_server_writes_what_this_process_writes(write, server, tmp_path, turns):
    """Greedy and sampled, one turn and many; and what one wrote the other finds."""
    ours = write("here", [*PROMPTS[:6], *CHATS], turns=turns)
    theirs = write("there", [*PROMPTS[:6], *CHATS], turns=turns, endpoints=[server])
    assert theirs == ours
    assert {r.temperature for r in ours} == {0.0, 1.0} and len({r.output_ids for r in ours}) > len(
        ours
    ) / 2
    assert (
        write("here", [*PROMPTS[:6], *CHATS], turns=turns, endpoints=["http://127.0.0.1:9/v1"])
        == ours
    )
    assert write("there", [*PROMPTS[:6], *CHATS], turns=turns) == ours
    keys, record = kept(tmp_path / "there")
    assert (
        len(keys)
        == len(set(keys))
        == record["account"]["written"]
        == record["written_by"][0]["written"]
    )
    assert record["written_by"][0]["model"] == "target" and record["turns"] == turns


@pytest.mark.slow
def test_the_target_that_is_loaded_is_compared_with(
    write, server, here, tiny_model, tokenizer, serving, tmp_path
):
    write("good", endpoints=[server], llm=here)
    assert kept(tmp_path / "good")[1]["written_by"][0]["agreement"] == 1.0
    other = tiny_model("qwen3", vocab_size=4096, num_hidden_layers=2)
    other.generation_config.eos_token_id = ENDS
    wrong = serving(LLM(other, tokenizer=tokenizer), served_model_name=("target",)) + "/v1"
    with pytest.raises(
        EndpointError, match="agrees with the target loaded here in .* another model"
    ):
        write("bad", endpoints=[wrong], llm=here)
    with pytest.raises(EndpointError, match=f"{wrong}: serves target .* agrees with {server}"):
        write("bad", endpoints=[server, wrong])
    assert not list((tmp_path / "bad").glob("*.jsonl"))


def without(proxy: FaultyProxy, *names: str, routes: tuple[str, ...] = ()) -> None:
    """Leaves `names` out of answers and their choices; answers 404 on `routes`."""
    forward = proxy._forward

    def answer(path, body):
        if path in routes:
            return 404, b"{}"
        status, told = forward(path, body)
        tree = json.loads(told)
        for each in (tree, *tree.get("choices", ())):
            for name in names:
                each.pop(name, None)
        return status, json.dumps(tree).encode()

    proxy._forward = answer


@pytest.mark.slow
def test_a_server_without_token_ids_is_refused_by_name(write, server):
    proxy = FaultyProxy(server, 0.0)
    without(proxy, "token_ids")
    with pytest.raises(EndpointError, match=r"have no token_ids.* regenerate\.exchange: text"):
        write("x", endpoints=[proxy.url])
    proxy.kill()


@pytest.mark.slow
def test_text_that_is_proved_is_what_was_written(write, server, tmp_path):
    """A random model writes tokens that no tokenizer would; what is taken for proved is right all
    the same."""
    examples = [*PROMPTS[:30], *CHATS]
    ours = {(r.example, r.prompt_ids): r.output_ids for r in write("here", examples)}
    found = write("text", examples, endpoints=[server], exchange="text", max_failures=1.0)
    assert found and all(ours[r.example, r.prompt_ids] == r.output_ids for r in found)
    account = kept(tmp_path / "text")[1]["account"]
    assert account["failed"] == {"unproved_tokens": account["unproved"]} and account["unproved"] > 0
    assert account["unproved"] + account["written"] == account["wanted"] == len(ours)
    assert kept(tmp_path / "text")[1]["chat_template_of"] == "server"
    whole = write("kept", examples, endpoints=[server], exchange="text", unproved_tokens="keep")
    assert len(whole) == len(ours) and {(r.example, r.output_ids) for r in found} <= {
        (r.example, r.output_ids) for r in whole
    }


def test_a_server_that_counts_nothing_proves_nothing(write, server):
    proxy = FaultyProxy(server, 0.0)
    without(proxy, "usage", "token_ids", routes=("/version", "/tokenize"))  # as little as OpenAI's
    with pytest.raises(EndpointError, match="not one of 8 responses could be proved"):
        write("x", CHATS, endpoints=[proxy.url], exchange="text")
    with pytest.raises(EndpointError, match="no server that knows top_k"):
        write("x", CHATS, endpoints=[proxy.url], exchange="text", top_k=5)
    assert (
        len(write("x", CHATS, endpoints=[proxy.url], exchange="text", unproved_tokens="keep")) >= 20
    )
    proxy.kill()


# ------------------------------------------------------------------ turn by turn


def test_each_turn_follows_those_written_before_it(write, here):
    """Prompts are what serving would have sent: the template over the target's own earlier
    answers."""
    tokenizer = ConversationTokenizer(here.get_tokenizer())
    by_chat: dict[int, list] = {}
    for response in write("x", CHATS, turns="all"):
        by_chat.setdefault(response.example, []).append(response)
    longest = 0
    for number, responses in by_chat.items():
        messages, turns = list(CHATS[number].messages), iter(responses)
        for place, message in enumerate([*messages, {"role": "assistant"}]):
            if message["role"] != "assistant" or (response := next(turns, None)) is None:
                continue
            so_far = replace(CHATS[number], messages=tuple(messages[:place]))
            assert list(response.prompt_ids) == tokenizer.prompt_ids(so_far)
            if place < len(messages):
                text = here.get_tokenizer().decode(
                    response.output_ids[:-1], skip_special_tokens=True
                )
                messages[place] = {"role": "assistant", "content": text}
        assert next(turns, None) is None
        longest = max(longest, len(responses))
        assert all(
            r.output_ids[-1] in ENDS for r in responses[:-1]
        )  # what was cut is followed by nothing
    assert longest >= 3


def test_calls_of_tools_stay_as_they_are(write):
    call = {
        "role": "assistant",
        "content": "calling",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    user, told = {"role": "user", "content": "do it"}, {"role": "tool", "content": "42"}
    example = Example(
        "chat", "x:1", messages=(user, call, told, {"role": "assistant", "content": "so 42"})
    )
    (response,) = write("x", [example], turns="all", temperatures={0.0: 1.0})
    assert (
        write("y", [example], turns="last", temperatures={0.0: 1.0})[0].output_ids
        == response.output_ids
    )


# ------------------------------------------------------------------ trouble


@pytest.mark.slow
def test_a_fifth_fails_and_the_server_is_restarted_twice(
    write, server, here, tmp_path, monkeypatch
):
    """Complete, none twice, none lost, and not a token other than in process."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(http_client, "LONGEST_PAUSE_S", 0.2)
    ours = write("here", [*PROMPTS, *CHATS], turns="all")
    proxy = FaultyProxy(server, 0.2)
    lines = lambda: sum(
        path.read_bytes().count(b"\n") for path in (tmp_path / "there").glob("*.0*.jsonl")
    )

    def restart() -> None:
        for wanted in (15, 45):
            while lines() < wanted:
                time.sleep(0.005)
            proxy.kill()
            time.sleep(0.5)
            proxy.start()

    restarts = threading.Thread(target=restart, daemon=True)
    restarts.start()
    endpoints = [{"url": proxy.url, "max_concurrency": 12}]
    found = write(
        "there",
        [*PROMPTS, *CHATS],
        turns="all",
        endpoints=endpoints,
        request_timeout_s=6.0,
        max_attempts=30,
    )
    restarts.join(10)
    proxy.kill()
    assert found == ours
    keys, record = kept(tmp_path / "there")
    account = record["account"]
    assert len(keys) == len(set(keys)) == account["written"]
    assert account["wanted"] == account["written"] + account["reused"] + sum(
        account["left_out"].values()
    )
    assert account["failed"] == {} and not list((tmp_path / "there").glob("*.failures.jsonl"))
    assert proxy.seen["kill"] == 3 and all(
        proxy.seen[fault] for fault in ("http_500", "reset", "half_json", "aborted")
    )
    assert set(account["retries"]) >= {
        "http_500",
        "http_503",
        "connection",
        "not_an_answer",
        "cut_off",
        "timeout",
    }


@pytest.mark.slow
def test_load_goes_where_there_is_room_and_away_from_what_is_broken(
    write, server, monkeypatch, tmp_path
):
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.02)
    good, broken = FaultyProxy(server, 0.0), FaultyProxy(server, 0.0)
    forward, written = broken._forward, []

    def breaks(path, body):
        """After four responses, examination apart."""
        written.extend(
            [1] if json.loads(body or b"{}").get("max_tokens", 0) > endpoint.PROBE_TOKENS else []
        )
        return (500, b"broken") if len(written) > 4 else forward(path, body)

    broken._forward = breaks
    endpoints = [{"url": each.url, "max_concurrency": 3} for each in (good, broken)]
    found = write("x", endpoints=endpoints)
    assert found == write("here")
    first, second = kept(tmp_path / "x")[1]["written_by"]
    assert (first["written"], second["written"]) == (56, 4)
    assert second["faults"]["http_500"] >= endpoint_pool.FAULTS_IN_ROW
    good.kill()
    broken.kill()


@pytest.mark.slow
def test_an_endpoint_that_is_not_there_yet_is_waited_for(write, server, tmp_path, monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.02)
    late = FaultyProxy(server, 0.0)
    late.kill()
    said = []
    slow = FaultyProxy(server, 0.0)
    forward = slow._forward
    slow._forward = lambda *each: (time.sleep(0.1), forward(*each))[1]
    endpoints = [{"url": slow.url, "max_concurrency": 1}, {"url": late.url, "max_concurrency": 8}]

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            late.start()

    found = write("x", endpoints=endpoints, options={"say": say})
    assert found == write("here") and "not there yet" in said[0] and late.url in said[0]
    assert kept(tmp_path / "x")[1]["written_by"][1]["written"] > 10
    with pytest.raises(EndpointError, match="none of them answers"):
        write("y", endpoints=["http://127.0.0.1:9/v1"])
    slow.kill()
    late.kill()


@pytest.mark.slow
def test_patience_ends(write, server, monkeypatch, tmp_path):
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.02)
    proxy = FaultyProxy(server, 0.0)
    fate = proxy._fate
    proxy._fate = lambda path: "no_answer" if proxy.seen["ok"] > 30 else fate(path)
    endpoints = [{"url": proxy.url, "max_concurrency": 2}]
    with pytest.raises(EndpointError, match=r"no answer for .* the same command continues"):
        write("x", endpoints=endpoints, patience_s=0.5, max_attempts=100)
    written = len(kept(tmp_path / "x")[0])
    assert 0 < written < 60
    proxy._fate = fate
    assert write("x", endpoints=endpoints) == write("here")
    account = kept(tmp_path / "x")[1]["account"]
    assert (account["reused"], account["written"]) == (written, 60 - written)
    proxy.kill()


# ------------------------------------------------------------------ failures, exactly


def refusing(proxy: FaultyProxy, marked: str) -> None:
    """400 for prompts whose text holds `marked`, as a server whose limits they exceed."""
    forward, tokenizer = proxy._forward, AutoTokenizer.from_pretrained(TOKENIZER)

    def answer(path, body):
        prompt = json.loads(body or b"{}").get("prompt", "")
        if path.endswith("completions") and marked in tokenizer.decode(prompt):
            return 400, b'{"error": {"message": "too hard"}}'
        return forward(path, body)

    proxy._forward = answer


@pytest.mark.slow
def test_every_failure_is_accounted_for(write, server, tmp_path):
    proxy = FaultyProxy(server, 0.0)
    refusing(proxy, "number 5")  # 5 and 50 to 59
    with pytest.raises(
        DataError, match=r"60 responses wanted: 49 written, 0 reused, 11 failed \(http_400: 11\)"
    ):
        write("x", endpoints=[proxy.url])
    assert (
        proxy.seen["ok"] <= 3 + 8 + 60
    )  # to look and to examine; what is the request's fault is not sent again
    (path,) = (tmp_path / "x").glob("*.failures.jsonl")
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert {each["origin"] for each in listed} == {"x:5", *(f"x:{i}" for i in range(50, 60))}
    assert {(each["reason"], each["attempts"], each["endpoint"]) for each in listed} == {
        ("http_400", 1, proxy.url)
    }
    assert "too hard" in listed[0]["detail"]

    found = write("x", endpoints=[proxy.url], max_failures=0.2)  # asked again, and gone without
    assert len(found) == 49
    account = kept(tmp_path / "x")[1]["account"]
    assert (account["written"], account["reused"], account["failed"]) == (0, 49, {"http_400": 11})

    proxy._forward = FaultyProxy._forward.__get__(
        proxy
    )  # mended, but a run that goes on sees the same rows
    asked = proxy.seen["ok"]
    assert (
        write("x", endpoints=[proxy.url], max_failures=0.2) == found and proxy.seen["ok"] == asked
    )
    assert write("x", max_failures=0.2) == found  # in process, too
    whole = write("x", endpoints=[proxy.url], max_failures=0.2, options={"retry_failed": True})
    assert whole == write("here")
    proxy.kill()


def test_it_stops_early_where_there_is_no_hope(write, server, monkeypatch):
    from train.regeneration import job

    monkeypatch.setattr(job, "SURPLUS", 5)
    proxy = FaultyProxy(server, 0.0)
    refusing(proxy, "number 5")
    with pytest.raises(DataError, match=r"failed \(http_400"):
        write(
            "x", PROMPTS[50:] + PROMPTS[:50], endpoints=[{"url": proxy.url, "max_concurrency": 2}]
        )
    assert proxy.seen["ok"] < 30
    proxy.kill()


# ------------------------------------------------------------------ kills, and several at work


@pytest.mark.slow
def test_a_torn_line_is_cut_and_written_again(write, server, tmp_path):
    whole = write("whole", endpoints=[server])
    (path,) = (tmp_path / "whole").glob("*.0000.jsonl")
    content = path.read_bytes()
    for i, cut in enumerate((3, len(content) // 2, len(content) - 1)):
        folder = tmp_path / f"cut{i}"
        folder.mkdir()
        (folder / path.name).write_bytes(content[:cut])
        assert write(f"cut{i}", endpoints=[server]) == whole
        keys, _ = kept(folder)
        assert Counter(keys) == Counter(json.loads(line)["key"] for line in content.splitlines())
    (folder / path.name).write_bytes(b"nonsense\n" + content)
    with pytest.raises(DataError, match=r"0000\.jsonl:1: no response"):
        write("cut2", endpoints=[server])


@pytest.mark.slow
def test_several_processes_share_the_work_and_no_file(write, server, tmp_path):
    """Each writes its part into a shard of its own; whoever comes last finds all of it."""
    held = ResponseStore(tmp_path / "x", "0" * 16)
    held.add("a", [1])
    other = ResponseStore(tmp_path / "x", "0" * 16)
    other.add("b", [2])
    assert [path.name[-10:] for path in held.shards()] == ["0000.jsonl", "0001.jsonl"]
    with pytest.raises(ValueError, match="already"):
        held.add("a", [1])
    held.close()
    other.close()

    parts = [write("y", endpoints=[server], options={"part": (i, 3)}) for i in range(3)]
    assert [len(part) for part in parts] == [20, 20, 20]
    whole = write("y", endpoints=["http://127.0.0.1:9/v1"])
    assert whole == write("here") and sorted(r.example for part in parts for r in part) == list(
        range(60)
    )
