"""FrozenTarget says exactly what the model says, for any architecture, and refuses what it cannot confirm."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from speculators.target.frozen_target import FrozenTarget


def close(a, b, tolerance=1e-5):
    """Equal up to `tolerance` of the largest value."""
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()), (a - b).abs().max()


def reference(model, ids):
    """What transformers itself says: hidden_states [0..n-1], the final norm's input, last_hidden, logits."""
    inside = {}
    decoder = model.get_decoder()
    norm = (decoder.norm if hasattr(decoder, "norm") else decoder.ln_f).register_forward_pre_hook(
        lambda module, args: inside.update(before=args[0])
    )
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    norm.remove()
    return [*out.hidden_states[:-1], inside["before"]], out.hidden_states[-1], out.logits


@pytest.fixture
def ids():
    return torch.randint(3, 101, (2, 11), generator=torch.Generator().manual_seed(1))


def test_taps_last_hidden_and_logits_are_the_models_own(tiny_model, any_architecture, ids):
    model = tiny_model(any_architecture)
    hidden, last, logits = reference(model, ids)
    target = FrozenTarget(model, tap_layers=[3, 0, 2])
    taps, last_hidden = target(ids)
    assert target.tap_layers == (0, 2, 3) and target.num_layers == 3 and target.vocab_size == 101
    close(taps, torch.cat([hidden[0], hidden[2], hidden[3]], dim=-1))
    close(last_hidden, last)
    close(target.logits(last_hidden), logits)
    assert not taps.requires_grad and not any(p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_explicit_causal_mask_changes_nothing(tiny_model, any_architecture, ids, attention):
    if any_architecture in ("gpt_oss", "gemma2") and attention == "sdpa":
        pytest.skip("attention sinks and soft caps: eager only")
    model = tiny_model(any_architecture)
    _, last, _ = reference(model, ids)
    model.set_attn_implementation(attention)
    target = FrozenTarget(model)
    positions = torch.arange(11).expand(2, 11)
    mask = positions[:, None, None, :] <= positions[:, None, :, None]  # [2, 1, 11, 11]
    for explicit in (mask, None):
        taps, last_hidden = target(ids, positions, explicit)
        assert taps is None
        close(last_hidden, last)


def test_decoding_with_a_plain_cache(tiny_model, any_architecture, ids):
    """None as mask is enough for rows of equal length, in chunks and token by token, beyond the sliding window."""
    model = tiny_model(any_architecture)
    _, last, _ = reference(model, ids)
    target, cache, start = FrozenTarget(model), DynamicCache(), 0
    for size in (3, 1, 4, 1, 1, 1):
        positions = torch.arange(start, start + size).expand(2, size)
        _, last_hidden = target(ids[:, start : start + size], positions, None, cache)
        close(last_hidden, last[:, start : start + size])
        start += size


def test_packed_features_equal_each_sequence_alone(tiny_model, any_architecture):
    model = tiny_model(any_architecture)
    target = FrozenTarget(model, tap_layers=[1, 3])
    generator = torch.Generator().manual_seed(2)
    lengths = [[7, 9, 0], [5, 1, 6]]  # the rest of the 18 columns is padding
    ids = torch.randint(3, 101, (2, 18), generator=generator)
    segments, positions = torch.full((2, 18), -1), torch.zeros(2, 18, dtype=torch.long)
    for row, counts in enumerate(lengths):
        start = 0
        for segment, count in enumerate(counts):
            segments[row, start : start + count] = segment
            positions[row, start : start + count] = torch.arange(count)
            start += count
    features = target.features(ids, positions, segments, segments >= 0)
    assert features.taps.shape == (2, 18, 64) and features.last_hidden.isfinite().all()
    for row, counts in enumerate(lengths):
        start = 0
        for count in filter(None, counts):
            piece = slice(start, start + count)
            hidden, last, _ = reference(model, ids[row : row + 1, piece])
            close(features.last_hidden[row, piece], last[0])
            close(features.taps[row, piece], torch.cat([hidden[1], hidden[3]], dim=-1)[0])
            start += count


def test_right_padding_needs_no_mask(tiny_model, ids):
    target = FrozenTarget(tiny_model("qwen3_sliding"))
    segments = torch.zeros(2, 11, dtype=torch.long)
    segments[0, 6:] = -1
    positions = torch.arange(11).expand(2, 11)
    features = target.features(ids, positions, segments, segments >= 0)
    _, last, _ = reference(target.model, ids[:1, :6])
    close(features.last_hidden[0, :6], last[0])


def test_features_ignore_autocast(tiny_model, ids):
    target = FrozenTarget(tiny_model("llama"))
    zeros, positions = torch.zeros(2, 11, dtype=torch.long), torch.arange(11).expand(2, 11)
    plain = target.features(ids, positions, zeros, zeros)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = target.features(ids, positions, zeros, zeros)
    assert torch.equal(plain.last_hidden, inside.last_hidden)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral", "gpt_oss", "granite"])
def test_bfloat16(tiny_model, name, ids):
    target = FrozenTarget(tiny_model(name).to(torch.bfloat16), tap_layers=[1])
    with torch.no_grad():
        logits = target.model(ids, use_cache=False).logits
    taps, last_hidden = target(ids)
    assert taps.dtype == target.dtype == torch.bfloat16
    assert torch.equal(target.logits(last_hidden), logits)


def test_the_model_is_left_as_it_was(tiny_model, ids):
    model = tiny_model("gemma3")
    before, hooks = (
        reference(model, ids)[2],
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    )
    target = FrozenTarget(model, tap_layers=[0, 1, 3]).train()
    assert not target.training and not model.training
    assert torch.equal(reference(model, ids)[2], before)
    target.close()
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert {name.split(".")[0] for name, _ in target.named_parameters()} == {"model"}


def test_the_embedding_keeps_its_scale(tiny_model, ids):
    target = FrozenTarget(tiny_model("gemma3"), tap_layers=[0])
    close(target.embed_tokens(ids), target(ids)[0])


@pytest.mark.parametrize("taps", [[4], [-1], [1.0], [0, 9]])
def test_taps_out_of_range(tiny_model, taps):
    with pytest.raises(ConfigError, match=r"0\.\.3"):
        FrozenTarget(tiny_model("llama"), tap_layers=taps)


def test_taps_twice(tiny_model):
    with pytest.raises(ConfigError, match="twice"):
        FrozenTarget(tiny_model("llama"), tap_layers=[1, 1])


def test_recurrent_state_is_refused():
    config = AutoConfig.for_model(
        "mamba", vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0
    )
    with pytest.raises(UnsupportedTarget, match="rolled back"):
        FrozenTarget(AutoModelForCausalLM.from_config(config))


def test_hybrid_layers_are_refused():
    config = AutoConfig.for_model(
        "lfm2", vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedTarget, match="conv.*rolled back"):
        FrozenTarget(AutoModelForCausalLM.from_config(config))


def test_encoder_decoders_are_refused():
    config = AutoConfig.for_model(
        "t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedTarget, match="encoder-decoder"):
        FrozenTarget(AutoModelForSeq2SeqLM.from_config(config))


def test_a_window_other_than_the_configs_is_refused(tiny_model):
    model = tiny_model("llama")
    model.config.sliding_window = 4  # Llama ignores it
    with pytest.raises(UnsupportedTarget, match="layer 0 is sliding_attention.*keys it may see"):
        FrozenTarget(model)


def test_a_soft_cap_that_sdpa_would_leave_out_is_refused(tiny_model):
    model = tiny_model("gemma2")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedTarget, match="attn_logit_softcapping.*eager"):
        FrozenTarget(model)


def test_alibi_is_refused():
    config = AutoConfig.for_model("bloom", vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(UnsupportedTarget):
        FrozenTarget(AutoModelForCausalLM.from_config(config))


def test_an_unknown_treatment_of_logits_is_refused(tiny_model):
    model = tiny_model("llama")
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Odd
    with pytest.raises(UnsupportedTarget, match="known scale or soft cap"):
        FrozenTarget(model)


def test_hidden_states_changed_before_the_head_are_refused(tiny_model):
    model = tiny_model("llama")

    class Halving(nn.Linear):
        """An output head that is handed other states than the decoder's, as where a model divides by its width."""

        def __call__(self, hidden):
            return super().__call__(hidden / 2)

    model.lm_head.__class__ = Halving
    with pytest.raises(UnsupportedTarget, match="changed between its decoder and its output head"):
        FrozenTarget(model)


def test_a_sliding_cache_is_refused(tiny_model, ids):
    target = FrozenTarget(tiny_model("mistral"))
    with pytest.raises(ConfigError, match="drops positions"):
        target(ids, past_key_values=DynamicCache(config=target.config))


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "gemma2"])
def test_loading(tiny_model, tmp_path, name, ids):
    """Tied heads count as present; the attention implementation is chosen by what the architecture has."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    target = FrozenTarget.from_pretrained(str(tmp_path), tap_layers=[1], dtype=torch.float32)
    assert target.config._attn_implementation == ("sdpa" if name == "qwen2" else "eager")
    assert target.name_or_path == str(tmp_path)
    close(target.logits(target(ids)[1]), reference(model, ids)[2])


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_incomplete_weights_are_refused(tiny_model, tmp_path, damage):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    if damage == "missing":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        FrozenTarget.from_pretrained(str(tmp_path))


def test_a_wrong_path_and_a_wrong_attention_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        FrozenTarget.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="flash_attention_2"):
        FrozenTarget.from_pretrained("x", attn_implementation="flash_attention_2")
