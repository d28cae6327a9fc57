"""Broken folders: every fault is named by its place, and one does not hide another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter, load_drafter, resolve
from draftsmith.speculators.export.inspection import Inspection, inspect_folder
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import FIVE, MASK, ONE, OWN, REDUCED, SPARK, TWO, Case, make
from tests.support.errors import raises_at
from tests.support.tokenizers import byte_level

Fields, Tensors = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Fields, Tensors], Any]
TAPS = "eagle_aux_hidden_state_layer_ids"
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": REDUCED,
    "dflash": {**TWO, **FIVE},
    "dspark": {**ONE, **SPARK},
    "peagle": {"num_depths": 4, **MASK, **OWN},
}


@pytest.fixture
def broken(tiny_model, tmp_path):
    """`broken(change, family, …)`: a folder that was changed, inspected for its target."""

    def inspect(
        change: Change | None = None,
        family: str = "eagle3",
        shape: dict[str, Any] | None = None,
        *,
        published: bool = True,
        against: Any = None,
        tokenizer: Any = None,
    ) -> Inspection:
        shape = SHAPES.get(family, {}) | (shape or {})
        taps = (1, 2, 3) if family in SHAPES else ()
        options = {"from_target": {"first": 2}} if family == "draft_model" else {}
        model = tiny_model("llama", num_hidden_layers=5)
        target, drafter = make(Case(family, shape, options, taps=taps), model)
        folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
        fields = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if published:
            fields.pop("draftsmith")
        if change is not None:
            change(fields, tensors)
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        compared = None if tokenizer else against or target
        return inspect_folder(folder, compared, tokenizer=tokenizer)

    return inspect


def places(inspected: Inspection, *, warnings: bool = False) -> set[str]:
    return {fault.where for fault in inspected.faults if fault.warning == warnings}


def without(name: str) -> Change:
    return lambda c, t: (t if name in t else c).pop(name)


def fields(**values: Any) -> Change:
    return lambda c, t: c.update(values)


def section(**values: Any) -> Change:
    """A change of `dflash_config`; None takes a field away."""

    def change(c: Fields, t: Tensors) -> None:
        merged = {**c["dflash_config"], **values}
        c["dflash_config"] = {name: value for name, value in merged.items() if value is not None}

    return change


def added(name: str, tensor: torch.Tensor) -> Change:
    return lambda c, t: t.update({name: tensor})


def stored_as(name: str, dtype: torch.dtype) -> Change:
    return lambda c, t: t.update({name: t[name].to(dtype)})


def both(*changes: Change) -> Change:
    return lambda c, t: [change(c, t) for change in changes]


def prefixed(c: Fields, t: Tensors) -> None:
    for name in list(t):
        t["model." + name] = t.pop(name)


def ids_inside_the_vocabulary(c: Fields, t: Tensors) -> None:
    t["d2t"] = torch.arange(40)
    t["t2d"] = torch.arange(c["vocab_size"]) < 40


def without_biases(c: Fields, t: Tensors) -> None:
    for name in [name for name in t if name.endswith(".bias")]:
        del t[name]


def nested(c: Fields, t: Tensors) -> None:
    c["dflash_config"] = {"markov_rank": c.pop("markov_rank"), "causal": False}


WINDOW, ROPE = {"sliding_window": 4}, {"rope_type": "default", "rope_theta": 500.0}
BOTH_CAUSAL = both(without("is_causal"), section(causal=True))
MODULE, UP = "model.mtp_layers.0.input_proj.weight", "model.layers.1.mlp.up_proj.weight"
# family -> changes, and the places of all faults that are no warnings
FAULTS: dict[str, list[tuple[Change, set[str]]]] = {
    "eagle3": [
        (without("d2t"), {"d2t"}),
        (without(TAPS), {TAPS}),
        (fields(**{TAPS: [1, 2]}), {"num_aux_hidden_states", "fc.weight"}),
        (fields(**{TAPS: [1, 2, 9]}), {"config.json"}),
        (added("fc.bias", torch.ones(32)), {"fc.bias"}),
        (fields(vocab_size=120), {"vocab_size"}),
        (prefixed, {"model."}),
        (lambda c, t: t["norm.weight"].mul_(float("nan")), {"norm.weight"}),
        (stored_as("fc.weight", torch.int8), {"fc.weight"}),
        (fields(max_position_embeddings=64), {"max_position_embeddings"}),
        (fields(rope_theta=500.0, rope_parameters=ROPE), {"rope_parameters"}),
        (fields(architectures=["LlamaForCausalLMEagle"]), {"architectures"}),
        (added("norm.weight", torch.ones(31)), {"norm.weight"}),
        (lambda c, t: t["d2t"].add_(torch.arange(40)), {"d2t"}),
        (ids_inside_the_vocabulary, {"d2t"}),
        (without("intermediate_size"), {"config.json"}),
        (fields(partial_rotary_factor=0.5), {"config.json"}),
        (fields(rope_parameters=5), {"config.json"}),
        (fields(rope_parameters={"rope_type": "su"}), {"config.json"}),
        (fields(**{TAPS: 2}), {"config.json"}),
        (fields(draftsmith="eagle3"), {"config.json"}),
        (fields(speculators_config={"proposal_methods": ["greedy"]}), {"config.json"}),
        (fields(rms_norm_eps=-1), {"config.json"}),
        (fields(rms_norm_eps=float("inf")), {"config.json"}),
        (fields(sliding_window=64), {"sliding_window"}),
        (fields(attention_bias=True), {"attention_bias"}),
        (fields(hidden_act="gelu"), {"hidden_act"}),
        (fields(logit_scale=-1.0), {"logit_scale"}),
    ],
    "peagle": [
        (without("mask_hidden"), {"mask_hidden"}),
        (fields(mask_token_id=400), {"mask_token_id"}),
    ],
    "dspark": [
        (without("confidence_head.proj.bias"), {"confidence_head.proj.bias"}),
        (fields(**{TAPS: [0, 1, 2]}), {TAPS}),
        (fields(markov_head_type="rnn"), {"config.json"}),
        (nested, {"markov_rank"}),
    ],
    "dflash": [
        (section(mask_token_id=None), {"config.json"}),
        (section(block_size=16), {"block_size"}),
        (BOTH_CAUSAL, {"is_causal"}),
        (section(sample_from_anchor=True), {"config.json"}),
    ],
    "eagle": [
        (added("fc.bias", torch.ones(32)), {"fc.bias"}),
        (fields(bias=True), {"bias"}),
    ],
    "medusa": [
        (fields(medusa_fc_bias=False), {"medusa_fc_bias"}),
        (without("blocks.0.layers.0.bias"), {"blocks.0.layers.0.bias"}),
        (without_biases, {f"blocks.{head}.layers.0.bias" for head in range(5)}),
    ],
    "mlp": [(without("speculator.proj.0.weight"), {"speculator.proj.0.weight"})],
    "mtp": [(without(MODULE), {MODULE})],
    "draft_model": [
        (without(UP), {UP}),
        (stored_as(UP, torch.int8), {UP}),
        (fields(rope_parameters=5), {"config.json"}),
        (fields(rms_norm_eps=-1.0), {"config.json"}),
        (fields(rms_norm_eps=float("inf")), {"config.json"}),
    ],
}
CASES = [(family, *fault) for family, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("family", "change", "expected"), CASES)
def test_inspect_names_the_place_of_a_fault(broken, family, change, expected) -> None:
    inspected = broken(change, family)
    assert places(inspected) == expected, inspected.faults
    assert not inspected.sound


@pytest.mark.parametrize("name", ["Eagle3Qwen3vlForCausalLM", "PeagleLlamaForCausalLM"])
def test_inspect_takes_the_names_that_vllm_takes_for_the_same_head(broken, name) -> None:
    assert broken(fields(architectures=[name])).sound


def test_load_of_integer_weights_is_refused(broken, tiny_model) -> None:
    folder = broken(stored_as("fc.weight", torch.int8), published=False).folder
    with raises_at(CheckpointError, f"drafter {folder}"):
        load_drafter(folder, FrozenTarget(tiny_model("llama", num_hidden_layers=5)))


def test_inspect_of_a_window_wants_it_switched_on(broken) -> None:
    assert not broken(fields(sliding_window=64, layer_types=["sliding_attention"])).faults
    unused = {"sliding_window": 64, "use_sliding_window": False, "layer_types": ["full_attention"]}
    assert not broken(fields(**unused)).faults
    lost = broken(without("use_sliding_window"), "dflash", WINDOW)
    assert places(lost) == {"use_sliding_window"}


@pytest.mark.parametrize("family", ["dflash", "peagle"])
def test_inspect_of_more_drafts_than_were_trained_is_a_fault(broken, family) -> None:
    def drafts(number: int) -> Change:
        return lambda c, t: c["draftsmith"].update(num_speculative_tokens=number)

    assert not broken(drafts(4), family, published=False).faults
    assert places(broken(drafts(5), family, published=False)) == {"num_speculative_tokens"}


def test_inspect_of_what_may_be_right_warns(broken) -> None:
    unsaid = both(without("is_causal"), section(causal=None))
    for shape in ({}, WINDOW):
        inspected = broken(unsaid, "dflash", shape)
        assert places(inspected, warnings=True) == {"is_causal"} and inspected.sound

    def in_sglangs_section(c, t):
        c["eagle_config"] = {TAPS: [tap - 1 for tap in c.pop(TAPS)]}

    inspected = broken(in_sglangs_section)
    assert places(inspected, warnings=True) == {f"eagle_config.{TAPS}"} and inspected.sound
    assert inspected.config.tap_layers == (1, 2, 3)


@pytest.mark.slow
def test_inspect_of_a_mask_token_that_texts_contain_is_a_fault(broken) -> None:
    tokenizer = byte_level(400, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved|>", "<|user|>"]})
    tokenizer.chat_template = "<|user|>{{ messages }}"
    reserved, user = tokenizer.convert_tokens_to_ids(["<|reserved|>", "<|user|>"])

    def is_named(token: int) -> bool:
        def change(c: Fields, t: Tensors) -> None:
            c["vocab_size"] = c["draft_vocab_size"] = 1000  # room for the tokens
            c["mask_token_id"] = token

        return "mask_token_id" in places(broken(change, "peagle", tokenizer=tokenizer))

    assert not any(map(is_named, (reserved, len(tokenizer), 999)))
    ordinary = tokenizer.convert_tokens_to_ids("a")
    assert all(map(is_named, (ordinary, tokenizer.eos_token_id, user)))


def test_inspect_names_all_of_several_faults(broken) -> None:
    def change(c, t):
        c.update(architectures=["Nothing"], num_aux_hidden_states=2, max_position_embeddings=8)
        t.pop("d2t")
        t["fc.bias"] = torch.ones(32)
        t["lm_head.weight"][0] = float("nan")

    expected = {"architectures", "num_aux_hidden_states", "max_position_embeddings"}
    assert places(broken(change)) == expected | {"d2t", "fc.bias", "lm_head.weight"}


def test_inspect_against_another_target_names_what_differs(broken, tiny_model) -> None:
    other = FrozenTarget(tiny_model("llama", hidden_size=64, num_hidden_layers=2, vocab_size=77))
    inspected = broken(None, "dflash", published=False, against=other)
    sizes = {"target_hidden_size", "vocab_size", "num_target_layers"}
    assert places(inspected) == sizes | {"tap_layers"}


def test_inspect_names_pickles_and_never_opens_them(broken, monkeypatch) -> None:
    folder = broken().folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    assert places(inspect_folder(folder)) == {"pytorch_model.bin"}


def test_inspect_takes_a_pickle_beside_the_drafter(broken) -> None:
    """Training leaves the states of its optimizer there."""
    folder = broken().folder
    (folder / "optimizer_state_dict.pt").write_bytes(b"")
    inspected = inspect_folder(folder)
    assert inspected.sound
    assert {fault.where for fault in inspected.faults} == {"optimizer_state_dict.pt"}


@pytest.mark.parametrize("path", ["runs/head/export", "./head", "/nowhere/head", "a head"])
def test_resolve_asks_the_hub_for_no_path(path, monkeypatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub")
    )
    with raises_at(CheckpointError, f"drafter {path}"):
        resolve(path)


def test_inspect_names_files_that_cannot_be_read(broken, tmp_path) -> None:
    folder = broken().folder
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    assert places(inspect_folder(folder)) == {"*.safetensors"}
    (folder / "model.safetensors").unlink()
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert places(inspect_folder(folder)) == {"*.safetensors", "config.json"}
    with pytest.raises(CheckpointError):
        inspect_folder(tmp_path / "nowhere at all")
    (folder / "config.json").write_text('{"architectures": ["Whatever"]}')
    save_file({"x": torch.ones(2)}, folder / "model.safetensors")
    inspected = inspect_folder(folder)
    assert inspected.layout is None and places(inspected) == {"config.json"}
