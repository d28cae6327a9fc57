"""Targets on disk as a user has them: a tiny random model with the embedded target's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.quickstart_data import DATA
from tests.support.models import make_tiny_model

TOKENIZER = DATA.parent / "target"


def save_target(folder: Path, name: str = "qwen3", **config) -> Path:
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512, "eos_token_id": 2, **config}
    make_tiny_model(name, **sizes).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, folder)
    return folder
