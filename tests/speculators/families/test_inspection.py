"""Broken folders: every fault is named, one does not hide another, and what vLLM makes of it is
said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import CheckpointError
from speculators.export import export_drafter
from speculators.export.faults import CRASHES, HARMLESS, KINDS, REFUSES, SWALLOWS
from speculators.export.inspection import BLOCKS, Inspection, inspect_folder
from speculators.target.frozen_target import FrozenTarget
from tests.speculators.vocab.test_token_map import byte_level

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]
TAPS = "eagle_aux_hidden_state_layer_ids"


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
        shape = {"draft_vocab_size": 40} if shape is None and family == "eagle3" else shape or {}
        taps = (1, 2, 3) if family in ("eagle3", "peagle", *BLOCKS) else ()
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


def kinds(found: Inspection) -> set[str]:
    return {each.kind for each in found.faults}


def assert_names(found: Inspection, kind: str, vllm: str, words: str) -> None:
    """The fault is there, once, with these words; nothing else is, but warnings."""
    mine = [each for each in found.faults if each.kind == kind]
    assert [each.kind for each in found.faults if not each.warning] == [kind], found.faults
    assert words in mine[0].what and mine[0].vllm == vllm, mine
    assert not found.sound and mine[0].todo


def rename(t: dict[str, torch.Tensor]) -> None:
    for name in list(t):
        t["model." + name] = t.pop(name)


def full(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    """The whole vocabulary, and a d2t of zeros left behind."""
    c["draft_vocab_size"] = c["vocab_size"]
    t["lm_head.weight"] = torch.randn(c["vocab_size"], t["lm_head.weight"].shape[1])
    t["d2t"] = torch.zeros(c["vocab_size"], dtype=torch.long)
    t.pop("t2d")


EAGLE3: dict[str, tuple[Change, str, str, str]] = {  # change -> kind, what vLLM does, words
    "no d2t": (lambda c, t: t.pop("d2t"), "missing_d2t", SWALLOWS, "d2t is missing"),
    "no norm": (lambda c, t: t.pop("norm.weight"), "missing_norm", SWALLOWS, "norm.weight"),
    "no hidden_norm": (
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        "missing_norm",
        SWALLOWS,
        "hidden_norm",
    ),
    "no fc": (lambda c, t: t.pop("fc.weight"), "missing_tensor", SWALLOWS, "fc.weight"),
    "no taps": (lambda c, t: c.pop(TAPS), "missing_taps", SWALLOWS, TAPS),
    "taps of another number": (
        lambda c, t: c.update({TAPS: [1, 2]}),
        "tap_count",
        REFUSES,
        "2 tap ids",
    ),
    "count of taps": (
        lambda c, t: c.update(num_aux_hidden_states=2),
        "tap_count",
        REFUSES,
        "states is 2",
    ),
    "taps beyond": (
        lambda c, t: c.update({TAPS: [1, 2, 9]}),
        "taps_out_of_range",
        CRASHES,
        "[9] outside 0..5",
    ),
    "a bias": (
        lambda c, t: t.update({"fc.bias": torch.ones(32)}),
        "dropped_bias",
        SWALLOWS,
        "fc.bias",
    ),
    "another vocabulary": (
        lambda c, t: c.update(vocab_size=120),
        "wrong_vocabulary",
        CRASHES,
        "120",
    ),
    "d2t of the whole vocabulary": (full, "zero_d2t", REFUSES, "d2t"),
    "prefix": (lambda c, t: rename(t), "prefix", REFUSES, "model."),
    "no head": (lambda c, t: t.pop("lm_head.weight"), "missing_lm_head", SWALLOWS, "lm_head"),
    "NaN": (
        lambda c, t: t["norm.weight"].mul_(float("nan")),
        "not_finite",
        SWALLOWS,
        "norm.weight",
    ),
    "infinite": (
        lambda c, t: t["fc.weight"].view(-1)[:1].fill_(float("inf")),
        "not_finite",
        SWALLOWS,
        "fc.weight",
    ),
    "few positions": (
        lambda c, t: c.update(max_position_embeddings=64),
        "short_positions",
        SWALLOWS,
        "64",
    ),
    "rope": (
        lambda c, t: c.update(
            rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
        "rope",
        SWALLOWS,
        "rope_theta 500.0, the target's 10000.0",
    ),
    "rope scaling": (
        lambda c, t: c.update(
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        ),
        "rope",
        SWALLOWS,
        "factor 2.0",
    ),
    "architecture": (
        lambda c, t: c.update(architectures=["LlamaForCausalLMEagle"]),
        "architecture",
        REFUSES,
        "CausalLMEagle",
    ),
    "a stray tensor": (
        lambda c, t: t.update({"extra.weight": torch.ones(3)}),
        "unexpected_tensor",
        REFUSES,
        "extra",
    ),
    "a shape": (
        lambda c, t: t.update({"norm.weight": torch.ones(31)}),
        "shape",
        REFUSES,
        "norm.weight has shape",
    ),
    "ids for offsets": (
        lambda c, t: t["d2t"].add_(torch.arange(40)),
        "d2t_ids",
        SWALLOWS,
        "offsets",
    ),
    "zeros": (lambda c, t: t["fc.weight"].zero_(), "all_zero", SWALLOWS, "fc.weight"),
    "a missing field": (
        lambda c, t: c.pop("intermediate_size"),
        "field",
        REFUSES,
        "intermediate_size",
    ),
    "partial rotation": (
        lambda c, t: c.update(partial_rotary_factor=0.5),
        "field",
        REFUSES,
        "partial_rotary_factor",
    ),
    "head_dim": (lambda c, t: c.update(head_dim=16), "shape", REFUSES, "q_proj"),
}


@pytest.mark.parametrize(("change", "kind", "vllm", "words"), EAGLE3.values(), ids=EAGLE3.keys())
def test_every_fault_of_an_eagle3_folder_is_named(broken, change, kind, vllm, words) -> None:
    found = broken(change)
    if kind == "shape" and words == "q_proj":
        assert {"shape"} == {each.kind for each in found.faults} and any(
            words in each.what for each in found.faults
        )
        return
    assert_names(found, kind, vllm, words)


SHAPES: dict[str, dict[str, Any]] = {
    "dflash": {"num_layers": 2, "block_size": 5, "mask_token_id": 100},
    "dflash2": {
        "num_layers": 1,
        "block_size": 5,
        "mask_token_id": 100,
        "conv_group_size": 8,
        "selector_rank": 8,
    },
    "dspark": {"num_layers": 1, "block_size": 4, "mask_token_id": 100, "markov_rank": 8},
    "peagle": {"num_depths": 4, "mask_token_id": 100, "own_embeddings": True},
}


def test_a_window_that_vllm_would_not_give_is_named(broken) -> None:
    found = broken(lambda c, t: c.update(sliding_window=64))
    assert_names(found, "window_ignored", SWALLOWS, "sliding_window is 64")
    assert not broken(
        lambda c, t: c.update(sliding_window=64, layer_types=["sliding_attention"])
    ).faults
    unused = {"sliding_window": 64, "use_sliding_window": False, "layer_types": ["full_attention"]}
    assert not broken(lambda c, t: c.update(unused)).faults


WINDOW = {**SHAPES["dflash"], "sliding_window": 4}
REDUCED = {**SHAPES["dspark"], "draft_vocab_size": 40}


def section(**values: Any) -> Change:
    """A change of `dflash_config`; None takes a field away."""

    def change(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
        c["dflash_config"] = {
            k: v for k, v in {**c["dflash_config"], **values}.items() if v is not None
        }

    return change


def both(*changes: Change) -> Change:
    return lambda c, t: [change(c, t) for change in changes]


def nested(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    c["dflash_config"] = {name: c.pop(name) for name in ("markov_rank", "block_size")} | {
        "causal": False
    }


def no_is_causal(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    c.pop("is_causal")


# family, its shape if another one, change -> kind, what vLLM and SGLang do, words
BLOCK: dict[str, tuple[str, dict[str, Any] | None, Change, str, str, str | None, str]] = {
    "no fc": (
        "dflash",
        None,
        lambda c, t: t.pop("fc.weight"),
        "missing_tensor",
        SWALLOWS,
        SWALLOWS,
        "fc.weight",
    ),
    "no hidden_norm": (
        "dspark",
        None,
        lambda c, t: t.pop("hidden_norm.weight"),
        "missing_norm",
        SWALLOWS,
        SWALLOWS,
        "hidden_norm",
    ),
    "no convolution": (
        "dflash2",
        None,
        lambda c, t: t.pop("layers.0.mlp_conv.base_kernel"),
        "missing_tensor",
        SWALLOWS,
        SWALLOWS,
        "mlp_conv",
    ),
    "no mask_hidden": (
        "peagle",
        None,
        lambda c, t: t.pop("mask_hidden"),
        "missing_mask_hidden",
        REFUSES,
        None,
        "mask_hidden",
    ),
    "no confidence": (
        "dspark",
        None,
        lambda c, t: [t.pop(n) for n in list(t) if "confidence" in n],
        "missing_confidence",
        SWALLOWS,
        REFUSES,
        "confidence_head.proj",
    ),
    "no d2t": (
        "dspark",
        REDUCED,
        lambda c, t: t.pop("d2t"),
        "missing_d2t",
        REFUSES,
        SWALLOWS,
        "d2t",
    ),
    "no head": (
        "dspark",
        REDUCED,
        lambda c, t: t.pop("lm_head.weight"),
        "missing_lm_head",
        REFUSES,
        SWALLOWS,
        "lm_head",
    ),
    "another width": (
        "dflash",
        None,
        lambda c, t: c.update(target_hidden_size=64),
        "other_width",
        HARMLESS,
        REFUSES,
        "64",
    ),
    "prefix": ("dflash", None, lambda c, t: rename(t), "prefix", REFUSES, HARMLESS, "model."),
    "architecture": (
        "dflash2",
        None,
        lambda c, t: c.update(architectures=["DFlashModel"]),
        "architecture",
        REFUSES,
        REFUSES,
        "DFlash2DraftModel",
    ),
    "mask beyond": (
        "dflash",
        None,
        section(mask_token_id=400),
        "mask_token_range",
        CRASHES,
        REFUSES,
        "400",
    ),
    "mask beyond, at the top": (
        "dspark",
        None,
        lambda c, t: c.update(mask_token_id=400),
        "mask_token_range",
        CRASHES,
        REFUSES,
        "400",
    ),
    "mask beyond, of chains": (
        "peagle",
        None,
        lambda c, t: c.update(mask_token_id=-1),
        "mask_token_range",
        CRASHES,
        None,
        "-1",
    ),
    "no mask": (
        "dflash",
        None,
        section(mask_token_id=None),
        "field",
        REFUSES,
        None,
        "mask_token_id",
    ),
    "blocks": ("dflash", None, section(block_size=16), "block_size", SWALLOWS, SWALLOWS, "16"),
    "causal below alone": (
        "dflash",
        None,
        both(no_is_causal, section(causal=True)),
        "causal_disagrees",
        SWALLOWS,
        SWALLOWS,
        "is_causal",
    ),
    "causal twice": (
        "dflash2",
        None,
        section(causal=True),
        "causal_disagrees",
        SWALLOWS,
        SWALLOWS,
        "causal True",
    ),
    "another layout": (
        "dflash",
        None,
        section(sample_from_anchor=True),
        "slot_layout",
        REFUSES,
        SWALLOWS,
        "_anchor",
    ),
    "a window lost": (
        "dflash",
        WINDOW,
        lambda c, t: c.pop("use_sliding_window"),
        "window_dropped",
        REFUSES,
        REFUSES,
        "window is 4",
    ),
    "taps beyond": (
        "dflash",
        None,
        section(target_layer_ids=[0, 1, 5]),
        "taps_out_of_range",
        CRASHES,
        CRASHES,
        "[5]",
    ),
    "taps twice": (
        "dspark",
        None,
        lambda c, t: c.update({TAPS: [0, 1, 2]}),
        "tap_ids_disagree",
        SWALLOWS,
        SWALLOWS,
        "[0, 1, 2]",
    ),
    "below dflash_config": (
        "dspark",
        None,
        nested,
        "nested_fields",
        REFUSES,
        REFUSES,
        "markov_rank",
    ),
    "few positions": (
        "dflash",
        None,
        lambda c, t: c.update(max_position_embeddings=64),
        "short_positions",
        SWALLOWS,
        SWALLOWS,
        "64",
    ),
    "rope": (
        "dspark",
        None,
        lambda c, t: c.update(
            rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
        "rope",
        SWALLOWS,
        SWALLOWS,
        "500.0",
    ),
    "a vocabulary of its own for a selector": (
        "dflash2",
        None,
        lambda c, t: c.update(draft_vocab_size=40),
        "field",
        REFUSES,
        None,
        "draft_vocab_size",
    ),
}


@pytest.mark.parametrize(
    ("family", "shape", "change", "kind", "vllm", "sglang", "words"), BLOCK.values(), ids=BLOCK
)
def test_every_fault_of_a_block_drafter_is_named(
    broken, family, shape, change, kind, vllm, sglang, words
) -> None:
    found = broken(change, family, shape or SHAPES[family])
    if kind == "missing_confidence":  # a weight and a bias
        assert kinds(found) == {kind} and {each.vllm for each in found.faults} == {vllm}
    else:
        assert_names(found, kind, vllm, words)
    assert {each.sglang for each in found.faults if not each.warning} == {sglang}


@pytest.mark.parametrize("family", SHAPES)
def test_more_drafts_than_were_trained(broken, family) -> None:
    def drafts(number: int) -> Change:
        return lambda c, t: c["draftsmith"].update(num_speculative_tokens=number)

    assert kinds(broken(drafts(4), family, SHAPES[family], published=False)) == set()
    found = broken(drafts(5), family, SHAPES[family], published=False)
    assert_names(found, "too_many_drafts", SWALLOWS, "5 drafts per round; 4 were trained")


def test_a_mask_that_is_not_said_and_what_sglang_does_not_serve_are_only_warned_of(broken) -> None:
    found = broken(both(no_is_causal, section(causal=None)), "dflash", SHAPES["dflash"])
    assert (
        kinds(found) == {"causal_implied"}
        and found.sound
        and "bidirectional" in found.faults[0].what
    )
    found = broken(both(no_is_causal, section(causal=None)), "dflash", WINDOW)
    assert kinds(found) == {"causal_implied"} and "causal" in found.faults[0].what
    found = broken(section(target_layer_ids=[0, 1, 4]), "dflash", SHAPES["dflash"])
    assert kinds(found) == {"late_taps"} and found.sound
    assert kinds(broken(None, "dspark", REDUCED)) == {"reduced_vocabulary"}


@pytest.mark.parametrize("published", [True, False])
def test_a_block_drafter_for_a_deeper_target(broken, tiny_model, published) -> None:
    """Its taps are held to the target at hand, not to the number of layers in config.json."""
    shallow = FrozenTarget(tiny_model("llama", num_hidden_layers=3))
    late = broken(None, "dflash", SHAPES["dflash"], published=published, against=shallow)
    assert kinds(late) == {"wrong_depth", "late_taps"}
    beyond = broken(
        section(target_layer_ids=[0, 1, 4]), "dflash", SHAPES["dflash"], against=shallow
    )
    assert kinds(beyond) == {"wrong_depth", "taps_out_of_range"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_causal", True), ("block_size", 9), ("sliding_window", 4)],
    ids=lambda v: str(v),
)
def test_a_block_that_was_trained_otherwise_is_named(broken, field, value) -> None:
    """Where the folder says what was trained; no tensor tells."""
    window = (
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
        if field == "sliding_window"
        else {}
    )
    name = {"is_causal": "causal"}.get(field, field)
    change = both(
        lambda c, t: c.update({field: value, **window}),
        section(**({} if window else {name: value})),
    )
    assert_names(
        broken(change, "dflash", SHAPES["dflash"], published=False),
        "changed_field",
        SWALLOWS,
        field,
    )


@pytest.mark.parametrize("family", SHAPES)
def test_a_mask_token_that_texts_contain(broken, family) -> None:
    tokenizer = byte_level(400, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved|>", "<|user|>"]})
    tokenizer.chat_template = "<|user|>{{ messages }}"
    reserved, user = tokenizer.convert_tokens_to_ids(["<|reserved|>", "<|user|>"])

    def kinds_with(token: int) -> set[str]:
        def change(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
            c["vocab_size"] = c["draft_vocab_size"] = 1000
            (c["dflash_config"] if family in ("dflash", "dflash2") else c)["mask_token_id"] = token

        found = broken(change, family, SHAPES[family], compared=False, tokenizer=tokenizer)
        return kinds(found) - {"shape"}  # the vocabulary grew, to have room

    for token in (reserved, len(tokenizer), 999):
        assert kinds_with(token) == set()
    for token in (tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id, user):
        assert kinds_with(token) == {"mask_token_in_text"}


def test_a_sound_folder_has_no_fault(case, make_drafter, tiny_model, tmp_path) -> None:
    """Of any family, with and without a word of ours in config.json; and what it is is told."""
    target, drafter = make_drafter(case, tiny_model(case.architecture))
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    dropped = (
        {"dropped_bias"}
        if getattr(drafter.config, "fc_bias", False) and case.family == "eagle"
        else set()
    )
    for _ in range(2):
        found = inspect_folder(folder, target)
        assert {each.kind for each in found.faults if not each.warning} == dropped, found.faults
        assert found.family == case.family and found.config == drafter.config
        values = {
            name: t.numel() for name, t in drafter.state_dict().items() if name != "target_ids"
        }
        assert found.parameters in (
            sum(values.values()),
            sum(p.numel() for p in drafter.parameters()),
        )
        fields = json.loads((folder / "config.json").read_text())
        fields.pop("draftsmith", None)
        (folder / "config.json").write_text(json.dumps(fields))


def test_one_fault_does_not_hide_the_next(broken) -> None:
    def change(c, t):
        c.update(architectures=["Nothing"], num_aux_hidden_states=2, max_position_embeddings=8)
        c.pop(TAPS)
        t.pop("d2t")
        t.pop("norm.weight")
        t["fc.bias"] = torch.ones(32)
        t["lm_head.weight"][0] = float("nan")

    expected = {
        "architecture",
        "tap_count",
        "missing_taps",
        "missing_d2t",
        "missing_norm",
        "dropped_bias",
    }
    assert kinds(broken(change)) == expected | {"not_finite", "short_positions"}


def test_wrong_targets_are_told_by_their_sizes(broken, tiny_model) -> None:
    other = FrozenTarget(tiny_model("llama", hidden_size=64, num_hidden_layers=7, vocab_size=77))
    found = broken(published=False, against=other)
    assert {"wrong_width", "wrong_vocabulary", "wrong_depth"} <= kinds(found)


def test_a_drafter_of_another_hidden_size_is_named(broken) -> None:
    def change(c, t):
        c.update(target_hidden_size=16)
        t["fc.weight"] = t["fc.weight"][:, :48].contiguous()
        t["embed_tokens.weight"] = torch.randn(c["vocab_size"], 32)

    assert_names(broken(change), "wrong_width", CRASHES, "16 wide")


def test_what_was_trained_with_is_compared_where_the_folder_says_it(broken) -> None:
    found = broken(lambda c, t: c.update(rms_norm_eps=1e-3), published=False)
    assert_names(found, "changed_field", SWALLOWS, "rms_norm_eps is 0.001")


def test_d2t_that_t2d_contradicts(broken) -> None:
    """Ids that stay inside the vocabulary when taken for offsets are found out by t2d."""

    def change(c, t):
        ids = torch.arange(40)
        t["d2t"] = ids.clone()
        t["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)

    assert_names(broken(change), "d2t_ids", SWALLOWS, "t2d")
    assert kinds(broken(lambda c, t: t["t2d"].zero_())) == {"t2d_disagrees"}
    assert kinds(broken(lambda c, t: t["d2t"].fill_(-200))) == {"d2t_invalid"}


def test_norms_of_ones_and_other_precisions_are_only_warned_of(broken) -> None:
    found = broken(lambda c, t: t["norm.weight"].fill_(1.0))
    assert kinds(found) == {"norm_ones"} and found.sound
    found = broken(lambda c, t: c.update(dtype="bfloat16"))
    assert kinds(found) == {"other_dtype"} and found.sound


def test_taps_in_eagle_config_alone_are_ambiguous(broken) -> None:
    def change(c, t):
        c["eagle_config"] = {TAPS: [tap - 1 for tap in c.pop(TAPS)]}

    found = broken(change)
    assert kinds(found) == {"ambiguous_taps"} and found.config.tap_layers == (1, 2, 3)


@pytest.mark.parametrize("family", ["eagle", "medusa", "mlp", "mtp"])
def test_other_families(broken, family) -> None:
    weights = broken(None, family)
    assert kinds(weights) == set()
    name = next(name for name in weights.headers if "norm" not in name)
    verdict = {"eagle": SWALLOWS, "mlp": SWALLOWS, "medusa": REFUSES, "mtp": REFUSES}[family]
    assert_names(
        broken(lambda c, t: t.pop(name), family), "missing_tensor", verdict, f"{name} is missing"
    )


def test_eagle_heads(broken) -> None:
    assert_names(
        broken(lambda c, t: c.update(architectures=["LlamaForCausalLMEagle"]), "eagle"),
        "architecture",
        REFUSES,
        "Eagle",
    )
    assert_names(
        broken(lambda c, t: t.update({"fc.bias": torch.ones(32)}), "eagle"),
        "dropped_bias",
        SWALLOWS,
        "fc.bias",
    )
    assert_names(
        broken(lambda c, t: t.update({"norm.weight": torch.full((32,), 2.0)}), "eagle"),
        "unexpected_tensor",
        REFUSES,
        "norm.weight",
    )


def test_medusa_heads(broken) -> None:
    found = broken(lambda c, t: c.update(medusa_fc_bias=False), "medusa", {"num_heads": 2})
    assert_names(found, "medusa_bias", SWALLOWS, "medusa_fc_bias")
    found = broken(lambda c, t: c.update(num_heads=3), "medusa", {"num_heads": 2})
    assert {"missing_tensor"} == kinds(found)


def test_draft_models(broken) -> None:
    options = {"from_target": {"first": 2}}
    assert kinds(broken(None, "draft_model", options=options)) == set()
    name = "model.layers.1.mlp.up_proj.weight"
    assert_names(
        broken(lambda c, t: t.pop(name), "draft_model", options=options),
        "missing_tensor",
        REFUSES,
        name,
    )


def test_pickles_are_named_and_never_opened(broken, monkeypatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("unpickled")

    folder = broken().folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", never)
    found = inspect_folder(folder)
    assert_names(found, "pickled_weights", SWALLOWS, "pytorch_model.bin")


def test_files_that_cannot_be_read(broken, tmp_path) -> None:
    folder = broken().folder
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    assert kinds(inspect_folder(folder)) == {"missing_file"}
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    assert "damaged_file" in kinds(inspect_folder(folder))
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text("{")
    assert {"no_weights", "damaged_config"} <= kinds(inspect_folder(folder))
    (folder / "config.json").unlink()
    assert {"no_weights", "no_config"} <= kinds(inspect_folder(folder))
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_folder(tmp_path / "nowhere at all")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["Whatever"]}')
    save_file({"x": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    assert kinds(inspect_folder(tmp_path / "other")) == {"unknown_drafter"}


def test_without_a_target_the_files_alone_are_looked_at(broken) -> None:
    found = broken(lambda c, t: t.pop("d2t"), compared=False)
    assert_names(found, "missing_d2t", SWALLOWS, "d2t is missing")


def test_the_table_of_faults_is_whole() -> None:
    for kind, entry in KINDS.items():
        assert (
            entry.meaning and entry.todo and entry.vllm in (REFUSES, CRASHES, SWALLOWS, HARMLESS)
        ), kind
        assert entry.then or entry.vllm == HARMLESS, kind
