"""Broken folders: every fault is named by its place, and one does not hide another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter
from draftsmith.speculators.export.inspection import Inspection, inspect_folder
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.tokenizers import byte_level

Fields, Tensors = dict[str, Any], dict[str, torch.Tensor]
Change = Callable[[Fields, Tensors], Any]
TAPS = "eagle_aux_hidden_state_layer_ids"
FIVE = {"block_size": 5, "mask_token_id": 100}
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 40},
    "dflash": {"num_layers": 2, **FIVE},
    "dflash2": {"num_layers": 1, **FIVE, "conv_group_size": 8, "selector_rank": 8},
    "dspark": {"num_layers": 1, "block_size": 4, "mask_token_id": 100, "markov_rank": 8},
    "peagle": {"num_depths": 4, "mask_token_id": 100, "own_embeddings": True},
}
WITH_MASK = ("dflash", "dflash2", "dspark", "peagle")


@pytest.fixture
def broken(make_drafter, case_of, tiny_model, tmp_path):
    """`broken(change, family, …)`: a folder whose config and tensors were changed, inspected for
    its target."""

    def make(
        change: Change | None = None,
        family: str = "eagle3",
        shape: dict[str, Any] | None = None,
        *,
        published: bool = True,
        against: Any = None,
        options: dict[str, Any] | None = None,
        compared: bool = True,
        tokenizer: Any = None,
    ) -> Inspection:
        shape = SHAPES.get(family, {}) | (shape or {})
        taps = (1, 2, 3) if family in SHAPES else ()
        model = tiny_model("llama", num_hidden_layers=5)
        target, drafter = make_drafter(case_of(family, shape, options or {}, taps=taps), model)
        folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
        fields = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if published:
            fields.pop("draftsmith")
        if change is not None:
            change(fields, tensors)
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return inspect_folder(
            folder, (against or target) if compared else None, tokenizer=tokenizer
        )

    return make


def places(found: Inspection, *, warnings: bool = False) -> set[str]:
    return {fault.where for fault in found.faults if fault.warning == warnings}


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


def both(*changes: Change) -> Change:
    return lambda c, t: [change(c, t) for change in changes]


def prefixed(c: Fields, t: Tensors) -> None:
    for name in list(t):
        t["model." + name] = t.pop(name)


def with_useless_d2t(c: Fields, t: Tensors) -> None:
    c["draft_vocab_size"] = c["vocab_size"]
    t["lm_head.weight"] = torch.randn(c["vocab_size"], t["lm_head.weight"].shape[1])
    t["d2t"] = torch.zeros(c["vocab_size"], dtype=torch.long)
    t.pop("t2d")


def nested(c: Fields, t: Tensors) -> None:
    c["dflash_config"] = {"markov_rank": c.pop("markov_rank"), "causal": False}


WINDOW, ROPE = {"sliding_window": 4}, {"rope_type": "default", "rope_theta": 500.0}
BOTH_CAUSAL = both(without("is_causal"), section(causal=True))
KERNEL = "layers.0.mlp_conv.base_kernel"
MODULE = "model.mtp_layers.0.input_proj.weight"
# family -> changes, and the places of all faults that are no warnings
FAULTS: dict[str, list[tuple[Change, set[str]]]] = {
    "eagle3": [
        (without("d2t"), {"d2t"}),
        (without("norm.weight"), {"norm.weight"}),
        (without("fc.weight"), {"fc.weight"}),
        (without(TAPS), {TAPS}),
        (fields(**{TAPS: [1, 2]}), {"num_aux_hidden_states", "fc.weight"}),
        (fields(num_aux_hidden_states=2), {"num_aux_hidden_states"}),
        (fields(**{TAPS: [1, 2, 9]}), {"config.json"}),
        (added("fc.bias", torch.ones(32)), {"fc.bias"}),
        (fields(vocab_size=120), {"vocab_size"}),
        (with_useless_d2t, {"d2t"}),
        (prefixed, {"model."}),
        (lambda c, t: t["norm.weight"].mul_(float("nan")), {"norm.weight"}),
        (fields(max_position_embeddings=64), {"max_position_embeddings"}),
        (fields(rope_theta=500.0, rope_parameters=ROPE), {"rope_parameters"}),
        (fields(architectures=["LlamaForCausalLMEagle"]), {"architectures"}),
        (added("extra.weight", torch.ones(3)), {"extra.weight"}),
        (added("norm.weight", torch.ones(31)), {"norm.weight"}),
        (lambda c, t: t["d2t"].add_(torch.arange(40)), {"d2t"}),
        (lambda c, t: t["d2t"].fill_(-200), {"d2t"}),
        (lambda c, t: t["t2d"].zero_(), {"t2d"}),
        (lambda c, t: t["fc.weight"].zero_(), {"fc.weight"}),
        (without("intermediate_size"), {"config.json"}),
        (fields(partial_rotary_factor=0.5), {"config.json"}),
        (fields(sliding_window=64), {"sliding_window"}),
    ],
    "dflash2": [
        (without(KERNEL), {KERNEL}),
        (fields(architectures=["DFlashModel"]), {"architectures"}),
        (section(causal=True), {"is_causal"}),
    ],
    "peagle": [
        (without("mask_hidden"), {"mask_hidden"}),
        (fields(mask_token_id=400), {"mask_token_id"}),
    ],
    "dspark": [
        (without("confidence_head.proj.bias"), {"confidence_head.proj.bias"}),
        (fields(**{TAPS: [0, 1, 2]}), {TAPS}),
        (nested, {"markov_rank"}),
    ],
    "dflash": [
        (fields(target_hidden_size=64), {"config.json"}),
        (prefixed, {"model."}),
        (section(mask_token_id=400), {"config.json"}),
        (section(mask_token_id=None), {"config.json"}),
        (section(block_size=16), {"block_size"}),
        (BOTH_CAUSAL, {"is_causal"}),
        (section(sample_from_anchor=True), {"config.json"}),
        (section(target_layer_ids=[0, 1, 5]), {"config.json"}),
    ],
    "eagle": [
        (fields(architectures=["LlamaForCausalLMEagle"]), {"architectures"}),
        (added("fc.bias", torch.ones(32)), {"fc.bias"}),
        (added("norm.weight", torch.full((32,), 2.0)), {"norm.weight"}),
    ],
    "medusa": [(fields(medusa_fc_bias=False), {"medusa_fc_bias"})],
    "mlp": [(without("speculator.proj.0.weight"), {"speculator.proj.0.weight"})],
    "mtp": [(without(MODULE), {MODULE})],
}
CASES = [(family, *each) for family, changes in FAULTS.items() for each in changes]


@pytest.mark.parametrize(("family", "change", "expected"), CASES)
def test_faults_are_named(broken, family, change, expected) -> None:
    found = broken(change, family)
    assert places(found) == expected, found.faults
    assert not found.sound


def test_windows(broken) -> None:
    assert not broken(fields(sliding_window=64, layer_types=["sliding_attention"])).faults
    unused = {"sliding_window": 64, "use_sliding_window": False, "layer_types": ["full_attention"]}
    assert not broken(fields(**unused)).faults
    lost = broken(without("use_sliding_window"), "dflash", WINDOW)
    assert places(lost) == {"use_sliding_window"}


@pytest.mark.parametrize("family", WITH_MASK)
def test_more_drafts_than_were_trained(broken, family) -> None:
    def drafts(number: int) -> Change:
        return lambda c, t: c["draftsmith"].update(num_speculative_tokens=number)

    assert not broken(drafts(4), family, published=False).faults
    assert places(broken(drafts(5), family, published=False)) == {"num_speculative_tokens"}


def test_warnings(broken) -> None:
    """Folders that may be right are sound."""
    for change, family, shape, where in (
        (both(without("is_causal"), section(causal=None)), "dflash", {}, "is_causal"),
        (both(without("is_causal"), section(causal=None)), "dflash", WINDOW, "is_causal"),
        (lambda c, t: t["norm.weight"].fill_(1.0), "eagle3", {}, "norm.weight"),
        (fields(dtype="bfloat16"), "eagle3", {}, "dtype"),
    ):
        found = broken(change, family, shape)
        assert places(found, warnings=True) == {where} and found.sound, found.faults


def test_taps_in_eagle_config_alone_are_ambiguous(broken) -> None:
    def change(c, t):
        c["eagle_config"] = {TAPS: [tap - 1 for tap in c.pop(TAPS)]}

    found = broken(change)
    assert places(found, warnings=True) == {f"eagle_config.{TAPS}"} and found.sound
    assert found.config.tap_layers == (1, 2, 3)


@pytest.mark.parametrize("published", [True, False])
def test_a_block_drafter_for_a_deeper_target(broken, tiny_model, published) -> None:
    """Its taps are held to the target at hand, not to the number of layers in config.json."""
    shallow = FrozenTarget(tiny_model("llama", num_hidden_layers=2))
    found = broken(None, "dflash", published=published, against=shallow)
    assert places(found) == {"num_target_layers", "tap_layers"}


@pytest.mark.parametrize(
    ("family", "change", "where"),
    [
        ("eagle3", fields(rms_norm_eps=1e-3), "rms_norm_eps"),
        ("eagle3", fields(vocab_size=5000), "vocab_size"),
        ("dflash", both(fields(is_causal=True), section(causal=True)), "is_causal"),
        ("dflash", both(fields(block_size=9), section(block_size=9)), "block_size"),
    ],
)
def test_fields_that_differ_from_training(broken, family, change, where) -> None:
    """Where the folder says what was trained; no tensor tells, and no target is needed."""
    assert places(broken(change, family, published=False, compared=False)) == {where}


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_MASK)
def test_a_mask_token_that_texts_contain(broken, family) -> None:
    tokenizer = byte_level(400, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved|>", "<|user|>"]})
    tokenizer.chat_template = "<|user|>{{ messages }}"
    reserved, user = tokenizer.convert_tokens_to_ids(["<|reserved|>", "<|user|>"])

    def is_named(token: int) -> bool:
        def change(c: Fields, t: Tensors) -> None:
            c["vocab_size"] = c["draft_vocab_size"] = 1000  # room for the tokens
            (c["dflash_config"] if family in ("dflash", "dflash2") else c)["mask_token_id"] = token

        found = broken(change, family, compared=False, tokenizer=tokenizer)
        return "mask_token_id" in places(found)

    assert not any(map(is_named, (reserved, len(tokenizer), 999)))
    ordinary = tokenizer.convert_tokens_to_ids("a")
    assert all(map(is_named, (ordinary, tokenizer.eos_token_id, user)))


def test_a_sound_folder_has_no_fault(case, make_drafter, tiny_model, tmp_path) -> None:
    """Of any family, with and without a word of ours in config.json; and it is described."""
    target, drafter = make_drafter(case, tiny_model(case.architecture))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    dropped = {"fc.bias"} if case.family == "eagle" and drafter.config.fc_bias else set()
    values = {n: t.numel() for n, t in drafter.state_dict().items() if n != "target_ids"}
    for _ in range(2):
        found = inspect_folder(folder, target)
        assert places(found) == dropped, found.faults
        assert found.family == case.family and found.config == drafter.config
        assert found.parameters in (
            sum(values.values()),
            sum(p.numel() for p in drafter.parameters()),
        )
        written = json.loads((folder / "config.json").read_text())
        written.pop("draftsmith", None)
        (folder / "config.json").write_text(json.dumps(written))


def test_one_fault_does_not_hide_the_next(broken) -> None:
    def change(c, t):
        c.update(architectures=["Nothing"], num_aux_hidden_states=2, max_position_embeddings=8)
        t.pop("d2t")
        t.pop("norm.weight")
        t["fc.bias"] = torch.ones(32)
        t["lm_head.weight"][0] = float("nan")

    assert places(broken(change)) == {
        "architectures",
        "num_aux_hidden_states",
        "max_position_embeddings",
        "d2t",
        "norm.weight",
        "fc.bias",
        "lm_head.weight",
    }


def test_wrong_targets_are_told_by_their_sizes(broken, tiny_model) -> None:
    other = FrozenTarget(tiny_model("llama", hidden_size=64, num_hidden_layers=7, vocab_size=77))
    found = broken(published=False, against=other)
    assert {"target_hidden_size", "vocab_size", "num_target_layers"} <= places(found)


def test_ids_that_stay_inside_the_vocabulary_are_told_by_t2d(broken) -> None:
    def change(c, t):
        t["d2t"] = torch.arange(40)
        t["t2d"] = torch.arange(c["vocab_size"]) < 40

    assert places(broken(change)) == {"d2t"}


def test_draft_models(broken) -> None:
    options = {"from_target": {"first": 2}}
    assert not broken(None, "draft_model", options=options).faults
    name = "model.layers.1.mlp.up_proj.weight"
    assert places(broken(without(name), "draft_model", options=options)) == {name}


def test_pickles_are_named_and_never_opened(broken, monkeypatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("unpickled")

    folder = broken().folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", never)
    assert places(inspect_folder(folder)) == {"pytorch_model.bin"}


def test_files_that_cannot_be_read(broken, tmp_path) -> None:
    folder = broken().folder
    index = {"weight_map": {"a": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert places(inspect_folder(folder)) == {"gone.safetensors"}
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    assert "*.safetensors" in places(inspect_folder(folder))
    (folder / "model.safetensors").unlink()
    texts = {}
    for name, text in (("damaged", "{"), ("no object", "[]"), ("missing", None)):
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text)
        found = inspect_folder(folder)
        assert {"*.safetensors", "config.json"} <= places(found)
        texts[name] = next(f.text for f in found.faults if f.where == "config.json")
        (folder / "config.json").touch()
    assert len(set(texts.values())) == len(texts)
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_folder(tmp_path / "nowhere at all")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["Whatever"]}')
    save_file({"x": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    found = inspect_folder(tmp_path / "other")
    assert found.layout is None and places(found) == {"config.json"}
