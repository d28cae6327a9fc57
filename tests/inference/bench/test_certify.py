"""`draftsmith certify` against servers of our own: lossless ones, and ones made lossy here."""

from __future__ import annotations

import asyncio
import errno
import json

import httpx2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from draftsmith.inference.bench.certify import Completions, certify
from draftsmith.inference.bench.completions import NEUTRAL
from draftsmith.inference.engine import engine
from draftsmith.inference.server.serve_options import SAMPLING_FIELDS
from draftsmith.speculators.errors import ConfigError, DraftsmithError
from draftsmith.train.cli import app
from tests.support.completion_server import CHAIN, ChainServer
from tests.support.engines import drafting_llm
from tests.support.errors import raises_at
from tests.support.tokenizers import byte_level, byte_tokenizer, sentencepiece

PROMPTS = ["one two", "so it goes"]
TOKENIZERS = {  # one token a byte; those whose decoder strips spaces; parts of characters as tokens
    "bytes": byte_tokenizer,
    "sentencepiece": sentencepiece,
    "byte-level BPE": byte_level,
}


def call(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, [f"{one}" for one in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


# what `serve` takes from a generation_config.json, and a baseline in this process does not
OF_THE_MODEL = {"repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5, "presence_penalty": 1.0}


@pytest.fixture
def servers(serving, tiny_model, tmp_path):
    """`servers(kind)`: the options of a certification of a server that drafts by `kind`. `saved`:
    the baseline is the model's folder, else a server."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{p}"}}\n' for p in PROMPTS))

    def start(kind: str, saved: bool = False, tokenizer: str = "bytes") -> list[str]:
        decoder = TOKENIZERS[tokenizer]()
        model = tiny_model("llama", vocab_size=len(decoder), max_position_embeddings=256)
        with torch.no_grad():
            model.lm_head.weight.mul_(3.0)  # few likely tokens, as in a trained model
        options = {"tokenizer": decoder}
        url = serving(drafting_llm(kind, model, **options), sampling_defaults=OF_THE_MODEL)
        folder = tmp_path / "model"
        for part in (model, decoder) if saved else ():
            part.save_pretrained(folder)
        baseline = folder if saved else serving(drafting_llm("off", model, **options))
        out = ["--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "certificate.json"]
        return [url, "--baseline", baseline, "--max-tokens", "16", "--samples", "60", *out]

    return start


def make_lossy(monkeypatch, *, greedy: bool) -> None:
    """Where something is drafted. Of rows that are greedy: the second best token is written where
    it is nearly as good. Of the others: verified at another temperature."""
    verify = engine.verify_and_sample

    def lossy(logits, proposal, params, *rest):
        for row, drafts in enumerate(proposal.counts):
            if drafts and params[row].greedy and greedy:
                best, second = logits[row].topk(2).values.T
                near = (best - second < NEAR)[:, None] & (logits[row] == best[:, None])
                logits[row] -= 2 * NEAR * near
            elif drafts and not params[row].greedy and not greedy:
                logits[row] *= 3
        return verify(logits, proposal, params, *rest)

    monkeypatch.setattr(engine, "verify_and_sample", lossy)


NEAR = 0.3  # nats between two tokens


@pytest.mark.slow
@pytest.mark.parametrize("lossy", ["nothing", "sampled"])
def test_certify_says_whether_a_server_is_lossless(lossy, servers, tmp_path, monkeypatch):
    if lossy == "sampled":
        make_lossy(monkeypatch, greedy=False)
    code, output = call("certify", *servers("fake", saved=lossy == "nothing"))
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    expected = (0, "lossless") if lossy == "nothing" else (1, "lossy")
    assert (code, certificate["verdict"]) == expected, output
    assert certificate["greedy"]["mismatches"] == 0
    assert certificate["sampled"]["p_values"]["log_probability"] > 0
    for part in ("greedy", "sampled"):
        assert certificate[part]["num_drafts"] > 0
        assert certificate[part]["acceptance_length"] >= 1
    for line in certificate["scope"]["tested"] + certificate["scope"]["not_tested"]:
        assert line in output


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_certify_tells_near_tokens_from_ties_by_ids(tokenizer, servers, tmp_path, monkeypatch):
    """In float32, where nothing is a tie, whatever texts the tokens have."""
    make_lossy(monkeypatch, greedy=True)
    code, output = call("certify", *servers("fake", tokenizer=tokenizer), "--samples", "0")
    greedy = json.loads((tmp_path / "certificate.json").read_text())["greedy"]
    assert (code, greedy["verdict"], greedy["ties"]) == (1, "lossy", 0), output
    for difference in greedy["differences"]:
        assert difference["rounding_error"] < 1e-3 < difference["gap"] < NEAR


def test_certify_prints_what_it_cannot_save(servers, tmp_path, monkeypatch):
    """The disk fails after the work."""
    _, flag, baseline, *rest = servers("off")
    monkeypatch.setattr("draftsmith.inference.whole_file.os.replace", refuse)
    code, output = call("certify", baseline, flag, baseline, *rest, "--samples", "0")
    assert code == 2 and "undecided at temperature 0" in output
    assert "completions of both servers" in output  # as it goes on
    assert f"{tmp_path / 'certificate.json'}: no space" in output


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


def certificate(server: ChainServer, baseline: ChainServer, samples: int = 0, **options) -> dict:
    sides = (Completions(side.client(), 4) for side in (server, baseline))
    return asyncio.run(certify(*sides, ["ab", "cd"], max_tokens=6, samples=samples, **options))


def test_completions_tell_of_each_that_has_ended():
    ended = []
    server = Completions(ChainServer().client(), 4, lambda: ended.append(1))
    asyncio.run(server.complete("ab", 2, temperature=0))
    assert ended == [1]


def test_certify_asks_for_neutral_sampling_parameters():
    """Also where ties are judged and samples scored, whatever the defaults of either server."""
    server, baseline = ChainServer((0, 1), greedy=SECOND), ChainServer(noise=1.1 * GAP)
    assert certificate(server, baseline, 9)["greedy"]["ties"] > 0
    for body in [*server.bodies, *baseline.bodies]:
        assert body.keys() >= set(SAMPLING_FIELDS) and body.items() >= NEUTRAL.items()


def test_certify_without_drafts_at_a_temperature_is_undecided_there():
    """The greedy part does not vouch for the sampled one, nor the other way round."""
    for temperatures, greedy, sampled in (
        ((0, 1), "lossless", "lossless"),
        ((0,), "lossless", "undecided"),
        ((1,), "undecided", "lossless"),
    ):
        result = certificate(ChainServer(temperatures), ChainServer(), 9)
        assert result["greedy"]["verdict"] == greedy
        assert result["sampled"]["verdict"] == sampled
        whole = "lossless" if greedy == sampled else "undecided"
        assert result["verdict"] == whole
        assert [line.split()[0] for line in result["scope"]["tested"]] == [greedy, sampled]


def test_certify_of_samples_that_are_wrong_from_the_fifth_token_on_is_lossy():
    result = certificate(ChainServer((0, 1), change=repeat_from_fifth), ChainServer(), 30)
    assert (result["greedy"]["verdict"], result["sampled"]["verdict"]) == ("lossless", "lossy")


def repeat_from_fifth(choice: dict) -> dict:
    """Of samples, which are longer than the greedy texts here."""
    tokens = choice["token_ids"]
    if len(tokens) <= 6:
        return choice
    return choice | {"token_ids": [*tokens[:4], *tokens[4:5] * (len(tokens) - 4)]}


def test_certify_of_samples_that_show_nothing_is_undecided():
    """Two texts cannot differ by more than chance, whatever they are."""
    result = certificate(ChainServer((0, 1)), ChainServer(), 2)
    assert (result["greedy"]["verdict"], result["sampled"]["verdict"]) == ("lossless", "undecided")


def test_certify_of_a_server_without_counters_rests_on_the_option():
    assert certificate(ChainServer(), ChainServer())["verdict"] == "undecided"
    assumed = certificate(ChainServer(), ChainServer(), assume_drafting=True)
    assert (assumed["verdict"], assumed["sampled"]) == ("lossless", None)


SECOND = {after: int(row.argsort()[-2]) for after, row in enumerate(CHAIN)}
GAP = float(np.log(6 / 5))  # of the two most probable tokens after any other


@pytest.mark.parametrize("noise, tie", [(0.9 * GAP, False), (1.1 * GAP, True)])
def test_greedy_difference_is_a_tie_up_to_the_rounding_error(noise, tie):
    """The baseline's log-probabilities move by `noise` when it repeats a position. Behind a tie
    both go on, so each of the six tokens is judged."""
    server, baseline = ChainServer((0,), greedy=SECOND), ChainServer(noise=noise)
    greedy = certificate(server, baseline)["greedy"]
    assert greedy["verdict"] == ("lossless" if tie else "lossy")
    first = greedy["differences"][0]
    assert first["tie"] is tie and first["rounding_error"] == pytest.approx(noise)
    assert greedy["ties"] == (12 if tie else 0)
    assert greedy["mismatches"] == (0 if tie else 2)
    asked = [body["prompt"] for body in baseline.bodies if not isinstance(body["prompt"], str)]
    assert {type(token) for prompt in asked for token in prompt} == {int}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": None},
        {"prompt_token_ids": None},
        {"token_ids": []},
        {"token_ids": "abc"},
        {"logprobs": None},
        {"logprobs": {"top_logprobs": [{"a": -1.0}] * 6}},
        {"logprobs": {"top_logprobs": [{"token_id:1": -1.0}]}},
    ],
)
def test_certify_of_answers_without_ids_is_refused(change):
    faulty = ChainServer(change=lambda choice: choice | change)
    for sides in ((ChainServer((0,)), faulty), (faulty, ChainServer())):
        if "logprobs" in change and sides[0] is faulty:
            continue  # which only the baseline is asked for
        with raises_at(DraftsmithError, "http://chain/v1/completions"):
            certificate(*sides)


@pytest.mark.parametrize("answer", [{"html": "<p>A page</p>"}, {"json": {"choices": []}}])
def test_certify_of_an_answer_that_is_none_is_refused(answer, monkeypatch):
    server = ChainServer((0,))
    models = ChainServer.answer

    def answered(side: ChainServer, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST" and side is server:
            return httpx2.Response(200, **answer)
        return models(side, request)

    monkeypatch.setattr(ChainServer, "answer", answered)
    with raises_at(DraftsmithError, "http://chain/v1/completions"):
        certificate(server, ChainServer())


def test_certify_of_servers_that_tokenize_otherwise_is_refused():
    other = ChainServer((0,), change=lambda choice: choice | {"prompt_token_ids": [1]})
    with raises_at(ConfigError, "http://chain/v1/completions"):
        certificate(other, ChainServer())


def test_certify_of_a_baseline_that_drafts_is_refused(servers):
    url, flag, _, *rest = servers("ngram")
    code, output = call("certify", url, flag, url, *rest)
    assert code == 2 and "--baseline" in output
