"""FrozenTarget says what the model says, for any architecture, or refuses it."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.target import frozen_target, packed_attention
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.probe import norm_scale
from tests.support.contract import packed
from tests.support.errors import raises_at
from tests.support.models import ARCHITECTURES, RECURRENT


def close(a, b, tolerance=1e-5):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()), (a - b).abs().max()


def reference(model, ids):
    """transformers' hidden_states [0..n-1], the final norm's input, last_hidden, logits."""
    inside = {}
    decoder = model.get_decoder()
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.ln_f
    hook = norm.register_forward_pre_hook(lambda module, args: inside.update(before=args[0]))
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    return [*out.hidden_states[:-1], inside["before"]], out.hidden_states[-1], out.logits


OF_FEATURES_ALONE = {"bloom": dict(n_head=4), "rwkv": dict(attention_hidden_size=32)}


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


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RECURRENT, "bloom", "rwkv"])
def test_packed_features_equal_each_sequence_alone(tiny_model, architecture):
    model = tiny_model(architecture, **OF_FEATURES_ALONE.get(architecture, {}))
    target = FrozenTarget(model, tap_layers=[1, 3])
    lengths = [7, 9], [5, 1, 6]
    rows = packed(*lengths)
    features = target.features(**rows)
    assert features.taps.shape == (2, 19, 64) and features.last_hidden.isfinite().all()
    for row, counts in enumerate(lengths):
        for start, count in zip(accumulate([0, *counts]), counts):
            piece = slice(start, start + count)
            taps, last = target(rows["input_ids"][row : row + 1, piece])
            close(features.last_hidden[row, piece], last[0])
            close(features.taps[row, piece], taps[0])


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_features_of_long_rows_are_the_same_without_masks_of_their_length(
    tiny_model, architecture, monkeypatch
):
    """Of targets that attend by sdpa, within a window, with soft caps and with sinks."""
    target = FrozenTarget(tiny_model(architecture), tap_layers=[1, 3])
    rows = packed([50, 69], [119])
    T = rows["input_ids"].shape[1]
    expected = target.features(**rows)
    monkeypatch.setattr(frozen_target, "LONG_ROW", 8)
    monkeypatch.setattr(packed_attention, "WINDOW_BLOCK", 16)
    monkeypatch.setattr(packed_attention, "MOST_SCORES", 8 * 4 * T)
    with Shapes() as shapes:
        features = target.features(**rows)
    assert not [shape for shape in shapes.seen if len(shape) > 1 and min(shape[-2:]) >= T]
    text = rows["segment_ids"] >= 0
    close(features.last_hidden[text], expected.last_hidden[text], 1e-4)
    close(features.taps[text], expected.taps[text], 1e-4)


def test_features_ignore_autocast(tiny_model):
    target = FrozenTarget(tiny_model("llama"))
    plain = target.features(**packed([11]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = target.features(**packed([11]))
    assert torch.equal(plain.last_hidden, inside.last_hidden)


NORMS = ["qwen3", "gemma3", "qwen3_next", "cohere2", "gpt2"]  # as it is, 1 + weight twice, layer


@pytest.mark.parametrize("name", NORMS)
def test_final_norm_weight_is_the_scale_that_the_norm_applies(tiny_model, name):
    target = FrozenTarget(tiny_model(name))
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(1)) * 10
    states -= states.mean(-1, keepdim=True)  # for layer norms
    bias = target.final_norm(torch.zeros(32))
    size = states.square().mean(-1, keepdim=True).sqrt()
    close(target.final_norm(states) - bias, states / size * target.final_norm_weight)


def test_norm_scale_of_what_keeps_sizes_is_none():
    where = dict(dtype=torch.float32, device=torch.device("cpu"))
    assert norm_scale(torch.nn.Identity(), 31, **where) is None
    weight = torch.rand(31) + 0.5
    norm = torch.nn.RMSNorm(31)
    norm.weight.data = weight
    close(norm_scale(norm, 31, **where), weight)


def test_the_model_is_left_as_it_was(tiny_model, ids):
    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model = tiny_model("gemma3")
    before, hooked = reference(model, ids)[2], hooks()
    target = FrozenTarget(model, tap_layers=[0, 1, 3]).train()
    assert not target.training and not model.training
    assert torch.equal(reference(model, ids)[2], before)
    close(target.embed_tokens(ids), target(ids)[0][..., :32])  # with its scale
    target.close()
    assert hooks() == hooked


@pytest.mark.parametrize("taps", [[4], [1, 1]])
def test_taps_out_of_range_or_twice(tiny_model, taps):
    model = tiny_model("llama")
    model.config._name_or_path = "tiny"
    with raises_at(ConfigError, "target tiny"):
        FrozenTarget(model, tap_layers=taps)


@pytest.mark.parametrize(
    ("name", "states", "stepwise"), [("lfm2", (1, 0, 1), False), ("mamba", (1, 1, 1), True)]
)
def test_recurrent_layers_are_found_by_what_they_give_a_cache(tiny_model, name, states, stepwise):
    target = FrozenTarget(tiny_model(name))
    assert target.supports_rollback and target.recurrent.stepwise == stepwise
    assert target.recurrent.num_states == states and len(target.recurrent.mixers) == sum(states)


@pytest.mark.parametrize(
    ("name", "why"),
    [("rwkv", "outside of transformers' cache"), ("bloom", "a mask prepared outside")],
)
def test_a_target_that_gives_features_alone_says_why(tiny_model, ids, name, why):
    target = FrozenTarget(tiny_model(name, **OF_FEATURES_ALONE[name]))
    assert not target.supports_rollback
    with pytest.raises(UnsupportedTarget, match=why):
        target(ids, attention_mask=torch.ones(2, 1, 11, 11, dtype=torch.bool))


def test_states_that_are_not_where_they_are_rolled_back_are_noticed(tiny_model):
    """The power of the probe: a convolution that forgets the tokens before a chunk."""
    model = tiny_model("lfm2")

    def forget(conv, args, kwargs, output) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.layers:
            cache.layers[conv.layer_idx].conv_states[0].zero_()

    model.model.layers[0].conv.register_forward_hook(forget, with_kwargs=True)
    assert "cannot be rolled back" in FrozenTarget(model).decoding_refusal


def test_a_window_other_than_the_configs_is_refused(tiny_model):
    model = tiny_model("llama")
    model.config.sliding_window = 4  # Llama ignores it
    target = FrozenTarget(model)
    with raises_at(UnsupportedTarget, "decoding"):
        target.require_rollback("decoding")


def _encoder_decoder(make):
    sizes = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    return AutoModelForSeq2SeqLM.from_config(config)


def _soft_cap(make):
    model = make("gemma2")
    model.config._attn_implementation = "sdpa"
    return model


def _odd_logits(make):
    model = make("llama")
    model.register_forward_hook(lambda *call: setattr(call[-1], "logits", 1.5 * call[-1].logits))
    return model


def _states_changed(make):
    model = make("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
    return model


@pytest.mark.parametrize(
    "model, why",
    [
        (_encoder_decoder, "encoder-decoder"),
        (_soft_cap, "attn_logit_softcapping"),
        (_odd_logits, "soft cap"),
        (_states_changed, "between its decoder and its output head"),
        (lambda make: make("bert-generation"), "later tokens"),
    ],
)
def test_what_cannot_be_confirmed_is_refused(tiny_model, model, why):
    with pytest.raises(UnsupportedTarget, match=why):
        FrozenTarget(model(tiny_model))


def test_a_sliding_cache_is_refused(tiny_model, ids):
    target = FrozenTarget(tiny_model("mistral"))
    with pytest.raises(ConfigError, match="past_key_values"):
        target(ids, past_key_values=DynamicCache(config=target.config))


@pytest.mark.parametrize(("name", "attention"), [("qwen2", "sdpa"), ("gemma2", "eager")])
def test_loading(tiny_model, tmp_path, name, attention, ids):
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    target = FrozenTarget.from_pretrained(str(tmp_path), tap_layers=[1], dtype=torch.float32)
    assert target.config._attn_implementation == attention
    close(target.logits(target(ids)[1]), reference(model, ids)[2])


def test_incomplete_weights_are_refused(tiny_model, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        FrozenTarget.from_pretrained(str(tmp_path))


def test_a_wrong_path_and_a_wrong_attention_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        FrozenTarget.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="flash_attention_2"):
        FrozenTarget.from_pretrained("x", attn_implementation="flash_attention_2")


def test_a_class_that_takes_itself_for_its_decoder(tiny_model):
    model = tiny_model("llama")
    model.get_decoder = lambda: model
    assert FrozenTarget(model).decoder is model.model
