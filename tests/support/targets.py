"""Targets on disk as a user has them: a tiny random model with the embedded target's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.models import make_tiny_model
from tests.support.quickstart_data import DATA

TOKENIZER = DATA.parent / "target"


def save_target(folder: Path, name: str = "qwen3", **config) -> Path:
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512, "eos_token_id": 2, **config}
    make_tiny_model(name, **sizes).save_pretrained(folder)
    return copy_tokenizer(folder)


def copy_tokenizer(folder: Path) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, folder)
    return folder


def keep_two_shards(
    model: PreTrainedModel, folder: Path, *, shards: int, layers: Sequence[int] = ()
) -> Path:
    """A checkpoint whose index names `shards` files, of which the first and the last are there:
    embedding and norm lie in one, the output head and `layers` in the other."""
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, *between, last = (
        f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)
    )
    of_layers = [name for name in state if ".layers." in name]
    files = {name: between[number % len(between)] for number, name in enumerate(of_layers)}
    files |= {name: last for name in of_layers if int(name.split(".")[2]) in layers}
    files |= {"model.embed_tokens.weight": first, "model.norm.weight": first}
    files |= {"lm_head.weight": last}
    for shard in (first, last):
        tensors = {name: state[name] for name in files if files[name] == shard}
        save_file(tensors, folder / shard, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
