"""EAGLE-1's maths, noise, HASS's detached states, its start, and heads from elsewhere."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.speculators.families.eagle import Eagle, EagleOptions
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from tests.support import cases
from tests.support.cases import Case
from tests.support.contract import packed

SERVE = Path(__file__).resolve().parents[3] / "docs" / "serve.md"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make(model, **shape) -> tuple[FrozenTarget, Eagle]:
    return cases.make(Case("eagle", shape, noise=0.12), model)


def features_of(target: FrozenTarget, rows: int = 2, tokens: int = 24) -> TargetFeatures:
    return target.features(**packed(*[[tokens]] * rows))


def options(**fields) -> EagleOptions:
    return EagleOptions.model_validate(fields)


# ---------------------------------------------------------------------- the maths


@torch.no_grad()
def test_depth_0_is_transformers_layer_without_its_first_norm(tiny_model):
    model = tiny_model("llama", rope_parameters=LLAMA3_ROPE)
    target, drafter = make(model)
    f = features_of(target, rows=1)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(drafter.layers[0].state_dict(), strict=True)
    embeds = model.model.embed_tokens(f.input_ids[:, 1:])
    x = torch.cat([embeds, f.last_hidden[:, :-1]], -1) @ drafter.fc.weight.T
    T = x.shape[1]
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None]
    expected = layer(
        x,
        attention_mask=mask,
        position_embeddings=LlamaRotaryEmbedding(config)(x, f.position_ids[:, :-1]),
    )
    (step,) = drafter.unroll(f, 1)
    expected = expected[0, step.anchor_index]
    torch.testing.assert_close(step.hidden, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(drafter.head(step.hidden), model.lm_head(step.hidden))


# ---------------------------------------------------------------------- how it is trained


def first_states(drafter: Eagle, f: TargetFeatures) -> torch.Tensor:
    seen = []
    drafter.first_state = lambda taps, last: seen.append(last.detach().float()) or last
    try:
        list(drafter.unroll(f, 1))
    finally:
        del drafter.first_state
    return seen[0]


def test_noise_is_uniform_and_for_training_only(tiny_model):
    target, drafter = make(tiny_model("llama"))
    f = features_of(target, rows=4, tokens=64)
    drafter.prepare_training(options(feature_noise=0.1))
    assert torch.equal(first_states(drafter.eval(), f), f.last_hidden)
    before = f.last_hidden.clone()
    noise = (first_states(drafter.train(), f) - f.last_hidden)[:, :64]
    assert torch.equal(f.last_hidden, before)  # what the loss compares with stays exact
    reach = 0.1 * 512 / 64
    assert noise.abs().max() <= reach * 1.0001 and noise.abs().max() > 0.99 * reach
    assert noise.mean().abs() < 0.02 * reach and abs(noise.std() / reach - 3**-0.5) < 0.02
    again = (first_states(drafter, f) - f.last_hidden)[:, :64]
    assert not torch.allclose(noise, again)
    drafter.prepare_training(options(feature_noise=0.0))
    assert torch.equal(first_states(drafter, f), f.last_hidden)


def test_noise_leaves_the_gradient_of_the_states(tiny_model):
    """A target that is trained jointly with its head learns from it."""
    target, drafter = make(tiny_model("llama"))
    drafter.prepare_training(options(feature_noise=0.1)).train()
    states = features_of(target).last_hidden.clone().requires_grad_()
    (step,) = drafter.unroll(replace(features_of(target), last_hidden=states), 1)
    (gradient,) = torch.autograd.grad(step.hidden.sum(), states)
    assert gradient.abs().max() > 0


def gradient_through_the_chain(drafter: Eagle, f: TargetFeatures) -> torch.Tensor:
    """Of depth 1 with respect to the target's states, through depth 0: attention is silent."""
    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    f = replace(f, last_hidden=f.last_hidden.clone().requires_grad_())
    *_, last = drafter.unroll(f, 2)
    return torch.autograd.grad(
        last.hidden.sum(), f.last_hidden, allow_unused=True, materialize_grads=True
    )[0]


def test_detached_depths_pass_values_but_no_gradient(tiny_model):
    target, drafter = make(tiny_model("llama"))
    f = features_of(target)

    def states(detach: bool) -> list[torch.Tensor]:
        drafter.prepare_training(options(detach=detach))
        return [step.hidden.detach() for step in drafter.unroll(f, 3)]

    torch.testing.assert_close(states(False), states(True), atol=0, rtol=0)
    assert not gradient_through_the_chain(drafter, f).any()
    drafter.prepare_training(options(detach=False))
    assert gradient_through_the_chain(drafter, f).any()


# ---------------------------------------------------------------------- the start


@torch.no_grad()
def test_passing_through_starts_as_the_targets_last_word(tiny_model):
    target, drafter = make(tiny_model("gemma3"), own_embeddings=True)
    drafter.initialise_from(target, options(init="pass_through"))
    f = features_of(target)
    (step,) = drafter.unroll(f, 1)
    passed = f.last_hidden.flatten(0, 1)[step.anchor_index]
    assert torch.nn.functional.cosine_similarity(step.hidden, passed, dim=-1).mean() > 0.8
    # scaled, in Gemma
    assert torch.equal(drafter.embed_tokens(f.input_ids), target.embed_tokens(f.input_ids))


# ---------------------------------------------------------------------- heads from elsewhere


def published(folder: Path, drop: tuple[str, ...] = (), **fields) -> dict:
    config = json.loads((folder / "config.json").read_text())
    for name in ("draftsmith", "head_dim", "bias", "dtype", "attention_bias", "mlp_bias", *drop):
        config.pop(name, None)
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_an_eagle_head_keeps_its_rotation_in_either_spelling(tiny_model, tmp_path):
    target, drafter = make(tiny_model("llama", rope_parameters=LLAMA3_ROPE))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    old = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    published(folder, drop=("rope_parameters",), rope_theta=500000.0, rope_scaling=old)
    again = load_drafter(folder, target)
    assert again.config.rope_parameters == drafter.config.rope_parameters == LLAMA3_ROPE
    f = features_of(target, tokens=100)  # beyond original_max_position_embeddings
    with torch.no_grad():
        for a, b in zip(drafter.unroll(f, 2), again.unroll(f, 2)):
            torch.testing.assert_close(a.hidden, b.hidden, atol=1e-5, rtol=1e-4)


def test_published_heads_with_a_bias_and_embeddings_are_read(tiny_model, tmp_path):
    """They draft as they are; config.json need not say what the names of the tensors say. Training
    goes on without the bias, which vLLM drops."""
    target, drafter = make(tiny_model("llama"), fc_bias=True, own_embeddings=True)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    assert "bias" not in json.loads((folder / "config.json").read_text())
    published(folder, bias=True)
    again = load_drafter(folder, target)
    assert again.config.fc_bias and again.config.own_embeddings and not again.config.attention_bias
    assert torch.equal(again.fc.bias, drafter.fc.bias)
    again.requires_grad_(True).prepare_training(options())
    assert not again.fc.bias.any() and not again.fc.bias.requires_grad


def test_heads_of_the_two_families_are_told_apart(tiny_model, tmp_path):
    target, drafter = make(tiny_model("llama"))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    published(folder)
    assert read_drafter_config(folder, target.num_layers).family == "eagle"
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.hidden_norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    assert read_drafter_config(folder, target.num_layers).family == "eagle3"


def test_documented_lines_make_sglang_s_token_map_of_an_export(tiny_model, tmp_path, monkeypatch):
    """SGLang reads it as tensors and plain values alone, and makes a tensor of ids of it."""
    _, drafter = make(tiny_model("llama"), draft_vocab_size=40)
    drafter.target_ids.copy_(torch.arange(3, 43) * 2)
    export_drafter(drafter, tmp_path / "OUT", dtype=torch.float32, format="sglang")
    (lines,) = re.findall(r"```python\n(d2t = .*?)```", SERVE.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(lines, {"torch": torch, "safetensors": safetensors})
    ids = torch.tensor(torch.load("token_map.pt", weights_only=True), dtype=torch.int64)
    assert torch.equal(ids, drafter.target_ids)
