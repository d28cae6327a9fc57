"""`draftsmith certify` against servers of our own: lossless ones, and ones made lossy here."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
import torch

from draftsmith.inference.bench import certify
from draftsmith.inference.bench.certify import Text, homogeneity
from draftsmith.inference.engine import engine
from tests.support.engines import drafting_llm
from tests.train.test_cli import call

PROMPTS = ["one two", "so it goes"]


@pytest.fixture
def servers(serving, tiny_model, byte_tokenizer, tmp_path):
    """`servers(kind)`: the options of a certification of a server that drafts by `kind`. `saved`:
    the baseline is the model's folder, else a server."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{p}"}}\n' for p in PROMPTS))

    def start(kind: str, saved: bool = False) -> list[str]:
        model = tiny_model("llama", vocab_size=320, max_position_embeddings=256)
        with torch.no_grad():
            model.lm_head.weight.mul_(3.0)  # few likely tokens, as in a trained model
        url, folder = serving(drafting_llm(kind, model)), tmp_path / "model"
        for part in (model, byte_tokenizer) if saved else ():
            part.save_pretrained(folder)
        baseline = folder if saved else serving(drafting_llm("off", model))
        out = ["--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "certificate.json"]
        return [url, "--baseline", baseline, "--max-tokens", "16", "--samples", "60", *out]

    return start


def make_lossy(monkeypatch, *, greedy: bool) -> None:
    """Of rows that are greedy: drafts are favoured. Of the others: verified at another
    temperature."""
    verify = engine.verify_and_sample

    def lossy(logits, proposal, params, *rest):
        for row, drafts in enumerate(proposal.token_ids.tolist()):
            drafts = drafts[: proposal.counts[row]]
            if drafts and params[row].greedy and greedy:
                logits[row, range(len(drafts)), drafts] += 8
            elif drafts and not params[row].greedy and not greedy:
                logits[row] *= 3
        return verify(logits, proposal, params, *rest)

    monkeypatch.setattr(engine, "verify_and_sample", lossy)


@pytest.mark.slow
@pytest.mark.parametrize("lossy", ["nothing", "greedy", "sampled"])
def test_certify_says_whether_a_server_is_lossless(lossy, servers, tmp_path, monkeypatch):
    if lossy != "nothing":
        make_lossy(monkeypatch, greedy=lossy == "greedy")
    samples = ("--samples", "0") if lossy == "greedy" else ()
    code, output = call("certify", *servers("fake", saved=lossy == "nothing"), *samples)
    assert code in (0, 1), output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    expected = (0, "lossless") if lossy == "nothing" else (1, "lossy")
    assert (code, certificate["verdict"]) == expected, output
    assert bool(certificate["greedy"]["mismatches"]) == (lossy == "greedy")
    assert len(certificate["sampled"]["tests"]) == (0 if samples else 6)
    assert certificate["num_drafts"] > 0
    assert certificate["acceptance_length"] >= 1


def test_certify_of_a_server_that_shows_no_drafts_is_undecided(servers, tmp_path):
    _, flag, baseline, *rest = servers("off")
    line = ("certify", baseline, flag, baseline, *rest, "--samples", "0")
    code, output = call(*line)
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert (code, certificate["verdict"]) == (3, "undecided"), output
    assert not certificate["sampled"]["tested"]
    code, output = call(*line, "--assume-drafting")
    assert code == 0 and "at temperature 0" in output


def text(words: str) -> Text:
    return Text(words.split(), [])


class Written:
    """A server that writes these texts, whatever it is asked."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def greedy(self, prompts: list[str], max_tokens: int) -> list[Text]:
        return [text(self.texts.pop(0)) for _ in prompts]


def test_differences_behind_a_tie_are_found(monkeypatch):
    """The first difference is judged a tie, so both go on, and differ for good."""
    verdicts = iter([{"tie": True}, {"tie": False}])

    async def judge(*_):
        return next(verdicts)

    monkeypatch.setattr(certify, "_judge", judge)

    async def found() -> list[dict]:
        given = (Written("c d e"), Written("c d f"), "p", text("a b b"), text("a c c"), 8)
        return [one async for one in certify._differences(*given)]

    assert asyncio.run(found()) == [{"position": 1, "tie": True}, {"position": 4, "tie": False}]


def test_certify_of_a_baseline_that_drafts_is_refused(servers):
    url, flag, _, *rest = servers("ngram")
    code, output = call("certify", url, flag, url, *rest)
    assert code == 2 and "--baseline" in output


def test_rare_tokens_are_pooled_in_the_test_of_two_samples():
    drawn, expected = Counter(a=40, b=30, c=30), Counter(a=25, b=45, c=30)
    test = homogeneity(drawn, expected)
    assert test["degrees"] == 2 and test["p_value"] < 0.05
    singles = Counter({str(i): 1 for i in range(20)})
    assert homogeneity(drawn + singles, expected + singles)["degrees"] == 3
    assert homogeneity(singles, singles) == {"chi2": 0.0, "degrees": 0, "p_value": 1.0}
