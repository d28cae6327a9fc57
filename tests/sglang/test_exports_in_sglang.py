"""Exports of trained heads in real SGLang. Its arithmetic on a CPU is a little coarser than
float32: drafts may differ where the two largest logits are closer than some 0.005, as in none of
these."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from draftsmith.speculators.export import read_drafter_config
from draftsmith.speculators.export.serving_commands import serving
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.vllm import PROMPTS, WRITTEN
from tests.support.vllm_heads import BLOCK, trained

TAPS = (1, 2, 3)
READS_TAPS = ("eagle3", "dflash", "dflash2", "dspark")
ONE = {"num_layers": 1, **BLOCK}
OLDER = {"norm_before_fc": True, "num_layers": 2}
NEWER = {"fc_norm": True, "norm_output": True}
CASES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    # family, target, shape, drafts per round
    "eagle": ("eagle", "qwen2", {}, 3),
    "eagle3": ("eagle3", "llama", {}, 3),
    "eagle3, reduced vocabulary, qwen3": ("eagle3", "qwen3", {"draft_vocab_size": 96}, 3),
    "eagle3, norm_before_fc, two layers": ("eagle3", "llama", OLDER, 3),
    "eagle3, 3.1": ("eagle3", "llama", NEWER, 3),
    "mtp": ("mtp", "qwen2", {}, 3),
    "dflash, three layers": ("dflash", "llama", {"num_layers": 3, **BLOCK}, 3),
    "dflash, blocks cut short": ("dflash", "qwen3", ONE, 2),
    "dflash2": ("dflash2", "qwen3", ONE, 3),
    "dspark": ("dspark", "qwen3", ONE, 4),
    "dspark, blocks cut short": ("dspark", "qwen3", ONE, 3),
}


@pytest.mark.parametrize(("family", "architecture", "shape", "tokens"), CASES.values(), ids=CASES)
def test_sglang_drafts_the_same(
    servable_model, own_texts, same_in_sglang, family, architecture, shape, tokens
) -> None:
    model = servable_model(architecture, num_hidden_layers=4)
    target = FrozenTarget(model, TAPS if family in READS_TAPS else ())
    options = {"unroll_steps": 3} if family == "eagle" else {}
    drafter = trained(family, target, own_texts(target), shape, options)
    assert same_in_sglang(model, drafter, tokens).num_accepted_tokens > 0


def rounds(model: Any, prompt: list[int], text: list[int], *, leave_out: int) -> int:
    """In which a draft model writes a text by three drafts each, where it never reads the first
    `leave_out` tokens."""
    written = [*prompt, *text]
    place, count = len(prompt) + 1, 0
    while place < len(written):
        seen = written[:place]
        for _ in range(3):
            logits = model(torch.tensor([seen[leave_out:]])).logits
            seen.append(int(logits[0, -1].argmax()))
        drafts = zip(seen[place:], written[place:])
        accepted = next((i for i, (draft, token) in enumerate(drafts) if draft != token), 3)
        place, count = place + accepted + 1, count + 1
    return count


@torch.inference_mode()
def test_a_draft_model_reads_texts_without_their_first_token(servable_model, serve, tmp_path):
    model = servable_model("llama", num_hidden_layers=4)
    draft = deepcopy(model)
    torch.manual_seed(0)
    for weight in draft.parameters():
        weight.add_(torch.randn_like(weight) * weight.std() * 0.05)
    model.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    config = read_drafter_config(tmp_path / "draft", 4)
    how = {"folder": str(tmp_path / "draft"), "tokens": 3, "config": config}
    _, command, _ = serving("draft_model", **how)
    job = {"model": str(tmp_path / "target"), "prompts": PROMPTS, "max_tokens": WRITTEN}
    theirs = serve(job | {"flags": command.options})
    pairs = list(zip(PROMPTS, theirs["token_ids"]))
    assert theirs["rounds"] == [rounds(draft, *pair, leave_out=1) for pair in pairs]
    assert sum(theirs["rounds"]) > sum(rounds(draft, *pair, leave_out=0) for pair in pairs)
