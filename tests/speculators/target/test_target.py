"""FrozenTarget says exactly what the model says, for any architecture, and refuses what it cannot
confirm."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from draftsmith.speculators.errors import CheckpointError, ConfigError, UnsupportedTarget
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.models import ARCHITECTURES, RECURRENT


def close(a, b, tolerance=1e-5):
    """Equal up to `tolerance` of the largest value."""
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()), (a - b).abs().max()


def reference(model, ids):
    """What transformers itself says: hidden_states [0..n-1], the final norm's input, last_hidden,
    logits."""
    inside = {}
    decoder = model.get_decoder()
    norm = (decoder.norm if hasattr(decoder, "norm") else decoder.ln_f).register_forward_pre_hook(
        lambda module, args: inside.update(before=args[0])
    )
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    norm.remove()
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


def test_decoding_with_a_plain_cache(tiny_model, any_architecture, ids):
    """Rows of equal length without a mask, in chunks and token by token, beyond the window."""
    model = tiny_model(any_architecture)
    _, last, _ = reference(model, ids)
    target, cache, start = FrozenTarget(model), DynamicCache(), 0
    for size in (3, 1, 4, 1, 1, 1):
        positions = torch.arange(start, start + size).expand(2, size)
        _, last_hidden = target(ids[:, start : start + size], positions, None, cache)
        close(last_hidden, last[:, start : start + size])
        start += size


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RECURRENT, "bloom", "rwkv"])
def test_packed_features_equal_each_sequence_alone(tiny_model, architecture):
    """Also where states, or attention that takes no masks, would carry one sequence into the
    next."""
    model = tiny_model(architecture, **OF_FEATURES_ALONE.get(architecture, {}))
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
            taps, last = target(ids[row : row + 1, piece])
            close(features.last_hidden[row, piece], last[0])
            close(features.taps[row, piece], taps[0])
            start += count


def test_features_ignore_autocast(tiny_model, ids):
    target = FrozenTarget(tiny_model("llama"))
    zeros, positions = torch.zeros(2, 11, dtype=torch.long), torch.arange(11).expand(2, 11)
    plain = target.features(ids, positions, zeros, zeros)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = target.features(ids, positions, zeros, zeros)
    assert torch.equal(plain.last_hidden, inside.last_hidden)


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
    with pytest.raises(ConfigError, match=r"tap_layers.*0\.\.3"):
        FrozenTarget(tiny_model("llama"), tap_layers=taps)


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
    forward = type(model.model.layers[0].conv).forward

    class Forgetful(type(model.model.layers[0].conv)):
        def forward(self, hidden_states, **kwargs):
            output = forward(self, hidden_states, **kwargs)
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None and cache.layers:
                cache.layers[self.layer_idx].conv_states[0].zero_()
            return output

    model.model.layers[0].conv.__class__ = Forgetful
    assert "cannot be rolled back" in FrozenTarget(model).decoding_refusal


def test_a_window_other_than_the_configs_is_refused(tiny_model):
    model = tiny_model("llama")
    model.config.sliding_window = 4  # Llama ignores it
    target = FrozenTarget(model)
    with pytest.raises(UnsupportedTarget, match="layer 0 is sliding_attention"):
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
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Odd
    return model


def _states_changed(make):
    """Its head is handed other states than the decoder's, as where a model divides by its width."""
    model = make("llama")

    class Halving(nn.Linear):
        def __call__(self, hidden):
            return super().__call__(hidden / 2)

    model.lm_head.__class__ = Halving
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
    """Tied heads count as present; the attention implementation is chosen by what the architecture
    has."""
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
