"""Multi-token prediction: transformers' own layers, modules in targets' folders, refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_layers import MtpModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.speculators.export.convert import write_back
from draftsmith.speculators.families.mtp import Mtp, MtpConfig
from draftsmith.speculators.layers.target_layer import pack_experts
from draftsmith.speculators.registry import build_config, config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget, TargetFeatures
from draftsmith.train.pipeline.drafter_stage import make_drafter
from draftsmith.train.recipe.drafter_config import drafter_config
from tests.support.errors import raises_at
from tests.support.training import NO_ROWS, recipe_of

INDEX = "model.safetensors.index.json"
IDS = torch.tensor([[5, 9, 11, 42, 7, 90, 33, 8, 61, 20, 3]])


def module_for(target: FrozenTarget, **shape: Any) -> Mtp:
    drafter = Mtp(config_for_target(target, "mtp", **shape)).attach(target)
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter.eval()


def features(
    ids: torch.Tensor, last: torch.Tensor, taps: torch.Tensor | None = None
) -> TargetFeatures:
    slots, ones = torch.arange(ids.shape[1])[None], torch.ones_like(ids)
    return TargetFeatures(ids, slots, 0 * ones, ones.bool(), taps, last)


@pytest.fixture
def native(tiny_model, tmp_path: Path):
    """`native(architecture)`: a target's folder with a random module, in a shard of its own."""

    def make(architecture: str) -> tuple[Path, FrozenTarget, Mtp]:
        folder, model = tmp_path / "native", tiny_model(architecture)
        # what is read at position 0 is nothing either way
        model.get_input_embeddings().weight.data[IDS[0, 1]] = 0
        model.save_pretrained(folder, max_shard_size="20KB")
        hidden = "residual" if architecture == "qwen2" else "normed"
        target = FrozenTarget(model, (3,) if hidden == "residual" else ())
        drafter = module_for(target, hidden_state=hidden)
        alone = export_drafter(drafter, tmp_path / "alone", dtype=torch.float32)
        tensors = load_file(alone / "model.safetensors")
        if architecture == "deepseek_v3":  # as published, embedding and head are there again
            table, head = model.get_input_embeddings().weight, model.lm_head.weight
            tensors["model.layers.3.embed_tokens.weight"] = table.data.clone()
            tensors["model.layers.3.shared_head.head.weight"] = head.data.clone()
        save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
        fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        if architecture == "qwen2":
            fields["architectures"] = ["MiMoForCausalLM"]
        (folder / "config.json").write_text(json.dumps(fields))
        return folder, target, drafter

    return make


# ---------------------------------------------------- the maths, against transformers' own layers


def causal(T: int) -> torch.Tensor:
    return torch.full((T, T), float("-inf")).triu(1)[None, None]


@torch.no_grad()
def depth0(drafter: Mtp, seen: TargetFeatures) -> torch.Tensor:
    return next(iter(drafter.unroll(seen, 1))).hidden


@torch.no_grad()
def test_mimo_is_qwen2s_layer_between_its_norms(native) -> None:
    """[hidden; embedding] through Qwen2's own layer, position 0 blind, the final norm last."""
    folder, target, _ = native("qwen2")
    drafter, config = load_drafter(folder, target), target.model.config
    stored = load_file(folder / "mtp.safetensors")
    tensors = {name.removeprefix("model.mtp_layers.0."): x for name, x in stored.items()}
    layer = Qwen2DecoderLayer(config, 0).eval()
    missing, _ = layer.load_state_dict(tensors, strict=False)
    assert not missing
    taps, last = target(IDS)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.rms_norm(x, (32,), tensors[f"{name}.weight"], config.rms_norm_eps)

    embeds = target.embed_tokens(IDS[:, 1:])
    embeds[:, 0] = 0
    x = torch.cat([norm(taps[:, :-1], "hidden_layernorm"), norm(embeds, "token_layernorm")], -1)
    x = x @ tensors["input_proj.weight"].T
    T = x.shape[1]
    rotary = target.model.model.rotary_emb(x, torch.arange(T)[None])
    x = layer(x, attention_mask=causal(T), position_embeddings=rotary)
    expected = norm(x, "final_layernorm")
    states = depth0(drafter, features(IDS, last, taps))
    torch.testing.assert_close(states, expected[0, :-1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(drafter.head(states), target.logits(states))


@torch.no_grad()
def test_deepseek_is_what_transformers_reads_from_the_same_folder(native) -> None:
    folder, _, _ = native("deepseek_v3")
    target = FrozenTarget.from_pretrained(str(folder), dtype=torch.float32)
    drafter = load_drafter(folder, target)
    # it looks for layer 61 alone
    target.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    reference = MtpModel.from_pretrained(target.model)
    _, last = target(IDS)
    T = IDS.shape[1] - 1
    embeds, slots = target.embed_tokens(IDS[:, 1:]), torch.arange(T)[None]
    expected = reference.layers[0](
        embeds,
        last[:, :-1],
        position_embeddings=target.model.model.rotary_emb(embeds, slots),
        attention_mask=causal(T),
        position_ids=slots,
        past_key_values=None,
    )
    torch.testing.assert_close(
        depth0(drafter, features(IDS, last)), expected[0, :-1], atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_qwen3_next_is_its_own_full_attention_layer(tiny_model, tmp_path: Path) -> None:
    """[norm(embedding); norm(hidden)] through the gated attention layer with experts, then the
    norm; nothing blind. From a folder as published, beside a tensor of the target."""
    target = FrozenTarget(tiny_model("qwen3_next", decoder_sparse_step=1))
    config = target.model.config
    folder = export_drafter(module_for(target), tmp_path / "next", dtype=torch.float32)
    config.save_pretrained(folder)
    other = {"model.layers.0.input_layernorm.weight": torch.zeros(32)}
    save_file(other, folder / "model-1.safetensors")
    drafter = load_drafter(folder, target)
    tensors = load_file(folder / "model.safetensors")
    assert "mtp.layers.0.mlp.experts.3.up_proj.weight" in tensors

    config = copy.deepcopy(config)
    config.layer_types = ["full_attention"] * target.num_layers
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    layer, prefix = Qwen3NextDecoderLayer(config, 0).eval(), "mtp.layers.0."
    inside = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer.load_state_dict(pack_experts(inside))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        module = Qwen3NextRMSNorm(32, eps=config.rms_norm_eps)
        module.weight.copy_(tensors[f"mtp.{name}.weight"])
        return module(x)

    last = target(IDS)[1]
    embeds = norm(target.embed_tokens(IDS[:, 1:]), "pre_fc_norm_embedding")
    joined = torch.cat([embeds, norm(last[:, :-1], "pre_fc_norm_hidden")], -1)
    x = joined @ tensors["mtp.fc.weight"].T
    T = x.shape[1]
    rotary = Qwen3NextRotaryEmbedding(config)(x, torch.arange(T)[None])
    expected = norm(layer(x, position_embeddings=rotary, attention_mask=causal(T)), "norm")
    states = depth0(drafter, features(IDS, last))
    torch.testing.assert_close(states, expected[0, :-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "qwen3_next"])
@torch.no_grad()
def test_mtp_at_position_zero_is_blind_where_it_is_in_vllm(tiny_model, architecture) -> None:
    target = FrozenTarget(tiny_model(architecture))
    drafter, last = module_for(target), torch.randn(1, IDS.shape[1], 32)
    other = IDS.clone()
    other[0, 1] = 50
    a, b = (depth0(drafter, features(ids, last)) for ids in (IDS, other))
    assert torch.equal(a[0], b[0]) == (architecture != "qwen3_next")


# ---------------------------------------------------------------------- modules of targets


@pytest.mark.parametrize("architecture", ["qwen2", "deepseek_v3"])
def test_a_module_is_read_from_its_targets_folder_and_written_back(
    native, tmp_path: Path, architecture: str
) -> None:
    folder, target, original = native(architecture)
    config = read_drafter_config(folder)
    assert config == original.config
    drafter = load_drafter(folder, target)
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, drafter.get_parameter(name)), name
    for parameter in drafter.parameters():
        parameter.data.mul_(1.5)
    export = export_drafter(drafter, tmp_path / "export", dtype=torch.float32)
    merged = write_back(export, folder, tmp_path / "merged")

    trained = load_file(export / "model.safetensors")
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            before = load_file(file)
            changed = {name: trained[name] for name in before.keys() & trained}
            after = load_file(merged / file.name)
            torch.testing.assert_close(after, before | changed, atol=0, rtol=0)
        assert (merged / file.name).exists()
    again = FrozenTarget.from_pretrained(str(merged), tap_layers=config.tap_layers)
    torch.testing.assert_close(load_drafter(merged, again).state_dict(), drafter.state_dict())
    with raises_at(ConfigError, "export"):
        write_back(export, folder, folder)
    with raises_at(CheckpointError, f"--into {tmp_path}"):
        write_back(export, tmp_path, tmp_path / "x")


def test_init_from_target_is_the_module_of_its_folder(native) -> None:
    folder, target, original = native("qwen2")

    def recipe(**drafter: Any) -> Any:
        drafter = {"init_from": "target", **drafter}
        return recipe_of("mtp", target={"model": str(folder)}, drafter=drafter)

    config = drafter_config(recipe(), target)
    drafter = make_drafter(recipe(), config, target, NO_ROWS, None)
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, drafter.get_parameter(name)), name
    with raises_at(ConfigError, "drafter.layout"):
        drafter_config(recipe(layout="qwen3_next"), target)


def test_a_folder_with_another_module_is_refused_by_name(native) -> None:
    folder, _, _ = native("deepseek_v3")
    fields = json.loads((folder / "config.json").read_text())

    def refused(**changed: Any) -> str:
        (folder / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(CheckpointError) as error:
            read_drafter_config(folder)
        return str(error.value)

    assert "glm4_moe" in refused(model_type="glm4_moe")
    assert "model.layers.3" in refused(num_hidden_layers=7)
    save_file({"model.layers.4.enorm.weight": torch.zeros(32)}, folder / "second.safetensors")
    assert "2 multi-token-prediction modules" in refused()


def test_a_module_for_another_target_is_refused(tiny_model) -> None:
    module = Mtp(config_for_target(FrozenTarget(tiny_model("llama")), "mtp"))
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        module.attach(FrozenTarget(tiny_model("llama", num_key_value_heads=4)))
    turned = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    with raises_at(ConfigError, "drafter of family mtp"):
        config_for_target(FrozenTarget(tiny_model("phi3", rope_parameters=turned)), "mtp")
    residual = config_for_target(FrozenTarget(tiny_model("llama")), "mtp", hidden_state="residual")
    with raises_at(ConfigError, "initialise_from"):
        Mtp(residual).initialise_from(FrozenTarget(tiny_model("llama"), (1,)))
    fields = MtpConfig.for_target(FrozenTarget(tiny_model("llama"), (3,)), "mtp")
    with pytest.raises(ConfigError, match="layout"):
        build_config("here", **fields | {"layout": "deepseek_v3"})


# ---------------------------------------------------------------------- starting, and precision


@pytest.mark.parametrize(
    ("architecture", "hidden_state"),
    [("llama", "normed"), ("gemma3", "residual"), ("qwen3_next", "normed")],
)
@torch.no_grad()
def test_a_new_module_passes_the_targets_state_through(
    tiny_model, architecture: str, hidden_state: str
) -> None:
    target = FrozenTarget(tiny_model(architecture), (3,) if hidden_state == "residual" else ())
    torch.manual_seed(0)
    drafter = Mtp(config_for_target(target, "mtp", hidden_state=hidden_state)).attach(target)
    drafter.eval().initialise_from(target)
    ids = torch.randint(3, 100, (1, 40))
    taps, last = target(ids)
    states, expected = depth0(drafter, features(ids, last, taps)), last[0, :-2]
    assert torch.cosine_similarity(states, expected, dim=-1).mean() > 0.8
    assert 0.8 < float(states.norm() / expected.norm()) < 1.25


def test_frequencies_and_router_biases_stay_float32(tiny_model, tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model("deepseek_v3").to(torch.bfloat16))
    drafter = module_for(target)
    buffers = {name: b for name, b in drafter.named_buffers() if b.dtype == torch.float32}
    assert len(buffers) >= 2
    for name, buffer in buffers.items():
        if "bias" in name:
            buffer += torch.randn_like(buffer)
    again = load_drafter(export_drafter(drafter, tmp_path / "head", dtype=torch.bfloat16), target)
    assert again.input_proj.weight.dtype == torch.bfloat16
    for name, buffer in buffers.items():
        assert torch.equal(again.get_buffer(name), buffer), name
