"""Real engines beside our runtime: vLLM's processes, targets and texts that both engines have, and
the comparison of drafts and counters."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.inference import LLM, SamplingParams
from draftsmith.inference.metrics import SpecDecodeCounters
from draftsmith.inference.vllm_bridge.vllm_engine import VllmError, Worker
from draftsmith.inference.vllm_python import vllm_version
from draftsmith.speculators.export import load_drafter, read_drafter_config
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from tests.support.engines import make_llm

PROMPTS = [[3 + (i * i * 7 + n) % 120 for i in range(n)] for n in (9, 4, 17, 30)]
WRITTEN = 48
SERVE = Path(__file__).parent / "programs" / "serve_in_vllm.py"


def mark_all(items: list[Any], folder: Path) -> None:
    """The tests of a folder are slow, and need an engine."""
    for item in items:
        if folder in Path(item.path).parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    path = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not path:
        pytest.skip("DRAFTSMITH_VLLM_PYTHON names no Python that has vLLM (make test-vllm)")
    return path


@pytest.fixture(scope="session")
def installed_vllm(vllm_python: str) -> str:
    """The version of vLLM that the tests run, such as 0.32.0."""
    return vllm_version(vllm_python)


@pytest.fixture(scope="session")
def serve(vllm_python: str):
    """`serve(job)`: the answer of serve_in_vllm.py to a job, in a process that most tests share;
    `alone`: in one of its own."""
    shared: list[Worker] = []

    def stop() -> None:
        while shared:
            shared.pop().stop()

    def run(job: dict[str, Any], *, alone: bool = False) -> dict[str, Any]:
        if shared and not alone:
            try:
                return shared[0].ask(job)
            except VllmError:
                stop()  # who knows what the job left behind
                raise
        worker = Worker(vllm_python, job, SERVE)
        worker.stop() if alone else shared.append(worker)
        return worker.facts

    yield run
    stop()


@pytest.fixture(scope="session")
def servable_model(tiny_model):
    """`servable_model(architecture)`: a random target with a head size that vLLM's CPU attention
    has."""

    def make(architecture: str = "llama", **overrides: Any):
        sizes = dict(hidden_size=128, intermediate_size=96, head_dim=32, vocab_size=128)
        return tiny_model(architecture, **(sizes | overrides))

    return make


@pytest.fixture(scope="session")
def own_texts():
    """`own_texts(target)`: features of the prompts and its greedy answers, to train a head on."""

    def of(target: FrozenTarget) -> list[TargetFeatures]:
        params = SamplingParams(temperature=0, max_tokens=WRITTEN)
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        outputs = make_llm(target).generate(prompts, params, use_tqdm=False)
        features = []
        for prompt, output in zip(PROMPTS, outputs):
            ids = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
            places, zeros = torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
            features.append(target.features(ids, places, zeros, places >= len(prompt)))
        return features

    return of


def wait_for(url: str, process: subprocess.Popen, log: Path, seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no server at {url}:\n{log.read_text()[-4000:]}")


class Round(NamedTuple):
    """A proposal, and what became of it."""

    written: int  # tokens of the response before it
    row: list[int]
    accepted: int


def rounds(drafts: list[list[int]], text: list[int]) -> Iterator[Round]:
    """The proposals of one response, verified against its text. The first token comes from
    prefill."""
    written = 1
    for row in drafts:
        accepted = next(
            (i for i, token in enumerate(row) if text[written + i : written + i + 1] != [token]),
            len(row),
        )
        yield Round(written, row, accepted)
        written += accepted + 1


def count(drafts: list[list[list[int]]], texts: list[list[int]]) -> SpecDecodeCounters:
    """Of these proposals, verified against these texts. A round without a draft is none, as vLLM
    counts."""
    counters = SpecDecodeCounters()
    for rows, text in zip(drafts, texts, strict=True):
        for verified in rounds(rows, text):
            if verified.row:
                counters.add(len(verified.row), verified.accepted)
    return counters


class Ours(NamedTuple):
    """What our runtime wrote and drafted. `texts` go on for a round, so that the last proposal can
    be judged."""

    texts: list[list[int]]
    drafts: list[list[list[int]]]
    counters: SpecDecodeCounters


def run_ours(llm: LLM, k: int) -> Ours:
    """The prompts, answered greedily, drafting at most `k` tokens a round; without drafts they are
    answered by the same tokens."""
    drafts: dict[str, list[list[int]]] = {}
    propose = llm.engine.proposer.propose

    def watched(requests, plan):
        proposal = propose(requests, plan)
        for request, row, drafted in zip(requests, proposal.token_ids.tolist(), proposal.counts):
            drafts.setdefault(request.request_id, []).append(row[:drafted])
        return proposal

    llm.engine.proposer.propose = watched
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]

    def completions(tokens: int, **how: bool) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        outputs = llm.generate(prompts, params, use_tqdm=False, **how)
        return [output.outputs[0] for output in outputs]

    drafted = completions(WRITTEN)
    counters = SpecDecodeCounters()
    for completion in drafted:
        counters.merge(completion.spec_decode_metrics)
    further = completions(WRITTEN + k + 1, speculate=False)
    texts, written = ([c.token_ids for c in outputs] for outputs in (further, drafted))
    assert [text[:WRITTEN] for text in texts] == written
    return Ours(texts, [drafts[str(i)] for i in range(len(PROMPTS))], counters)


def some_accepted(counters: SpecDecodeCounters) -> bool:
    """And some not, of three drafts a round."""
    return counters.num_drafts / 8 < counters.num_accepted_tokens < 3 * counters.num_drafts


def with_head(model: Any, head: Path, k: int) -> LLM:
    """Our runtime with an exported head."""
    layers = model.config.get_text_config().num_hidden_layers
    target = FrozenTarget(model, read_drafter_config(head, layers).tap_layers)
    return make_llm(target, drafter=load_drafter(head, target), num_speculative_tokens=k)


@pytest.fixture(scope="session")
def plain_in_vllm(serve):
    """`plain_in_vllm(job)`: what vLLM writes with drafting off. Each target is asked once."""
    texts: dict[str, list[list[int]]] = {}

    def text(job: dict[str, Any]) -> list[list[int]]:
        digest = hashlib.sha256(repr((job["prompts"], job["max_tokens"], job["options"])).encode())
        for file in sorted(Path(job["model"]).iterdir()):
            digest.update(file.read_bytes())
        if (key := digest.hexdigest()) not in texts:
            texts[key] = serve(job)["token_ids"]
        return texts[key]

    return text


@pytest.fixture(scope="session")
def same_as_ours(serve, plain_in_vllm):
    """`same_as_ours(target, speculative_config, llm)`: vLLM writes what it writes with drafting
    off, and our `llm` the same; every draft and every counter is the same. Returns the counters of
    what is in the texts. `repaired`: vLLM without the faults that `evaluate` repairs."""

    def check(
        target: Path,
        config: dict[str, Any],
        llm: LLM,
        engine: Any = None,
        *,
        repaired: bool = False,
    ):
        job = {"model": str(target), "prompts": PROMPTS, "max_tokens": WRITTEN}
        job["options"] = engine or {}
        drafting = {"speculative_config": config, "repaired": repaired}
        theirs = serve(job | drafting)
        ours = run_ours(llm, config["num_speculative_tokens"])
        token_ids = [text[:WRITTEN] for text in ours.texts]
        assert theirs["token_ids"] == plain_in_vllm(job)
        assert theirs["token_ids"] == token_ids
        for draft, their in zip(ours.drafts, theirs["drafts"], strict=True):
            assert their[: len(draft)] == draft  # vLLM drafts once more after the last round
        assert theirs["counters"] == count(ours.drafts, ours.texts).to_dict()  # behind the end, too
        assert ours.counters == count(ours.drafts, token_ids)
        return ours.counters

    return check
