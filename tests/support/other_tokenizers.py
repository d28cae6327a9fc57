"""Draft models of another tokenizer than their target, in memory and as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.vocab.token_map import TokenMap
from tests.support.cases import OPT, World, student
from tests.support.tokenizers import byte_level, sentencepiece

# target tokens spelt by nothing, by two draft tokens
NOTHING = 6
TWO = 2


def made_up_map(vocab: int, draft_vocab: int, opening: list[int]) -> TokenMap:
    """Target ids 6, 13, … are spelt by nothing, 2, 5, … by two draft tokens; the rest is shared."""
    place = torch.randperm(draft_vocab, generator=torch.Generator().manual_seed(3)).tolist()
    shared = {}
    spellings = []
    for id in range(vocab):
        if id % 7 == NOTHING:
            spellings.append([])
        elif id % 3 == TWO:
            spellings.append([place[-1 - id % 3], place[(5 * id) % draft_vocab]])
        else:
            shared[id] = place[len(shared)]
            spellings.append([shared[id]])
    return TokenMap(
        target_ids=torch.tensor(list(shared)),
        draft_ids=torch.tensor(list(shared.values())),
        spelling_ids=torch.tensor([id for spelling in spellings for id in spelling]),
        spelling_offsets=torch.tensor([0] + [len(spelling) for spelling in spellings]).cumsum(0),
        opening_ids=torch.tensor(opening, dtype=torch.long),
    )


def other_tokens(model: Any, draft_vocab: int, opening: list[int], **config: Any) -> World:
    target = FrozenTarget(model)
    config = {**OPT, "vocab_size": draft_vocab, **config}
    drafter = student(target, 0.1, config={"model_type": "opt", **config})
    drafter.token_map = made_up_map(target.vocab_size, draft_vocab, opening)
    drafter.config = drafter.config.model_copy(update={"other_tokenizer": True})
    return target, drafter


def save(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target_folder(tiny_model, tmp_path_factory) -> str:
    model = tiny_model("llama", vocab_size=408)
    return save(tmp_path_factory.mktemp("target"), model, byte_level(400))


@pytest.fixture(scope="module")
def draft_folder(tiny_model, tmp_path_factory) -> str:
    tokenizer = sentencepiece(bos=True)
    model = tiny_model("llama", vocab_size=len(tokenizer) + 2, num_hidden_layers=1)
    return save(tmp_path_factory.mktemp("draft"), model, tokenizer)


def drafting(folder: str | Path, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, **options}
