"""Tiny quantised checkpoints, in two schemes that transformers loads without any other library."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.bitnet import pack_weights


def save_quantised(model: PreTrainedModel, folder: Path, scheme: str) -> None:
    """`scheme` bitnet: packed ternary weights, which stay so; fp8: blocks with a scale, dequantised
    on a CPU. Embedding and output head are not quantised."""
    model.save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = state[f"{name}.weight"]
        if scheme == "bitnet":
            scale = weight.abs().mean()
            state[f"{name}.weight"] = pack_weights((weight / scale).round().clamp(-1, 1))
            state[f"{name}.weight_scale"] = (1 / scale)[None]
        else:
            scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            state[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            state[f"{name}.weight_scale_inv"] = scale[None, None]
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {
        "quant_method": scheme,
        "modules_to_not_convert": ["lm_head"],
        "activation_scheme": "dynamic",  # this and the next: of fp8
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(fields))


def quantise_head(folder: Path, *, packed: bool = False) -> None:
    """Stores the output head of a saved model in FP8. `packed`: under another name than the
    parameter's."""
    path = folder / "model.safetensors"
    state = load_file(path)
    weight = state.pop("lm_head.weight").to(torch.float8_e4m3fn)
    state["lm_head.weight_packed" if packed else "lm_head.weight"] = weight
    save_file(state, path, {"format": "pt"})
