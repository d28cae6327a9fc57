"""A drafter of a folder takes the place of a running one, by vLLM's endpoints: all of it, or, if it
does not fit, nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference.vllm_bridge.hidden_states import CONNECTORS
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.vllm import PROMPTS, WRITTEN, count, run_ours, with_head
from tests.support.vllm_heads import FITTED, trained

# a server that answers 500 closes the connection
CLIENT = httpx2.Client(timeout=120, headers={"Connection": "close"})
TAPS = (1, 2, 3)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def heads(servable_model, own_texts, tmp_path_factory) -> Path:
    """A `target`, and drafters of it: `old`, `new`, `torn`, which lacks a tensor, and `taps`, which
    reads other layers."""
    root = tmp_path_factory.mktemp("heads")
    model = servable_model("llama")
    model.save_pretrained(root / "target")
    target = FrozenTarget(model, TAPS)
    for name, options in {"old": {}, "new": {"init": "least_squares"}}.items():
        shape = {"draft_vocab_size": 96, **FITTED}
        drafter = trained("eagle3", target, own_texts(target), shape, options)
        export_drafter(drafter, root / name, dtype=torch.float32)
    shutil.copytree(root / "new", root / "torn")
    tensors = load_file(root / "torn" / "model.safetensors")
    tensors.pop("norm.weight")
    save_file(tensors, root / "torn" / "model.safetensors")
    shutil.copytree(root / "new", root / "taps")
    config = json.loads((root / "taps" / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (root / "taps" / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def url(vllm_server, heads) -> str:
    """Of a server that drafts with `old`, from a folder in which another head lies afterwards."""
    shutil.copytree(heads / "old", heads / "export")
    drafting = {"method": "eagle3", "model": str(heads / "export"), "num_speculative_tokens": 3}
    address = vllm_server(
        str(heads / "target"),
        "--skip-tokenizer-init",
        "--worker-extension-cls",
        "drafter_folder.Extension",
        "--weight-transfer-config",
        '{"backend": "folder"}',
        "--speculative-config",
        json.dumps(drafting),
        PYTHONPATH=str(CONNECTORS),
        VLLM_SERVER_DEV_MODE="1",
    )
    shutil.rmtree(heads / "export")
    shutil.copytree(heads / "taps", heads / "export")
    return address


def post(url: str, route: str, **body: object) -> httpx2.Response:
    return CLIENT.post(f"{url}/{route}", json=body)


def update(url: str, folder: Path, start: str = "start_draft_weight_update") -> list[int]:
    """As docs/fresh.md has it: the status of each call."""
    answers = [
        CLIENT.post(f"{url}/pause?mode=keep"),
        CLIENT.post(f"{url}/{start}"),
        post(url, "update_weights", update_info={"folder": str(folder)}),
        CLIENT.post(f"{url}/finish_weight_update"),
        CLIENT.post(f"{url}/resume"),
    ]
    return [answer.status_code for answer in answers]


def drafted(url: str, model: str) -> tuple[list[list[int]], int]:
    """What the server writes, and the drafts that it accepts for it."""
    before = accepted(url)
    asked = {"model": model, "prompt": PROMPTS, "max_tokens": WRITTEN, "temperature": 0}
    answer = post(url, "v1/completions", **asked, ignore_eos=True, return_token_ids=True)
    texts = [choice["token_ids"] for choice in answer.json()["choices"]]
    return texts, accepted(url) - before


def accepted(url: str) -> int:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(ACCEPTED))


def test_drafter_is_replaced_whole_or_not_at_all(url, heads, servable_model):
    expected = {}
    for name in ("old", "new"):
        ours = run_ours(with_head(servable_model("llama"), heads / name, 3), 3)
        texts = [text[:WRITTEN] for text in ours.texts]
        expected[name] = texts, count(ours.drafts, ours.texts).num_accepted_tokens
    assert expected["old"] != expected["new"]
    model = str(heads / "target")
    assert drafted(url, model) == expected["old"]
    assert update(url, heads / "new") == [200] * 5
    assert drafted(url, model) == expected["new"]
    for unfit in ("torn", "taps", "export", "nowhere"):
        assert update(url, heads / unfit)[2] >= 400, unfit
        assert drafted(url, model) == expected["new"], unfit
    assert update(url, heads / "old", start="start_weight_update")[1] >= 400
    assert update(url, heads / "old") == [200] * 5
    assert drafted(url, model) == expected["old"]
