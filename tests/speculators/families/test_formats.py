"""Formats: every family in every format it has reads back to the same drafter, and what was trained
with is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from speculators.drafter import Drafter
from speculators.errors import CheckpointError, ConfigError
from speculators.export import export_drafter, load_drafter, read_drafter_config
from speculators.export.convert import convert
from speculators.export.formats import FORMATS, LAYOUTS, formats_of
from speculators.export.inspection import inspect_folder
from speculators.registry import config_for_target, family_class
from speculators.target.frozen_target import FrozenTarget

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 50000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


def logits(target: FrozenTarget, drafter: Drafter) -> list[torch.Tensor]:
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(3))
    places = torch.arange(24)[None]
    features = target.features(
        ids, places, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    )
    with torch.no_grad():
        return [drafter.head(step.hidden, step.depth) for step in drafter.unroll(features, 3)]


def assert_same(target: FrozenTarget, folder: Path, drafter: Drafter) -> None:
    again = load_drafter(folder, target)
    expected = drafter.config.model_copy(update={"dtype": again.config.dtype})
    assert again.config == expected
    for a, b in zip(logits(target, drafter), logits(target, again), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_reads_back_to_the_same_drafter(
    any_case, make_drafter, tiny_model, tmp_path, format_
) -> None:
    """Written, read strictly, written again in vLLM's own format from that folder alone, and read
    again."""
    target, drafter = make_drafter(any_case, tiny_model(any_case.architecture))
    if format_ not in formats_of(any_case.family):
        with pytest.raises(ConfigError, match=f"this family is written as .*{'vllm'}"):
            export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format=format_)
        return
    try:
        LAYOUTS[format_, any_case.family].check(drafter.config, format_)
    except ConfigError:
        with pytest.raises(ConfigError, match=f"export format {format_}"):
            export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format=format_)
        return
    told = {"target": {"name_or_path": "org/target", "architectures": ["X"]}}
    folder = export_drafter(
        drafter, tmp_path / "head", dtype=torch.float32, format=format_, provenance=told
    )
    assert_same(target, folder, drafter)
    if any_case.family != "draft_model":
        assert_same(target, convert(folder, tmp_path / "again"), drafter)
        (tmp_path / "again" / "tokenizer.json").write_text("{}")
        third = convert(tmp_path / "again", tmp_path / "third", format=format_)
        assert_same(target, third, drafter)
        assert (third / "tokenizer.json").read_text() == "{}"
        assert (third / "config.json").read_text() == (folder / "config.json").read_text()


def test_at_least_one_case_of_every_table_is_written(all_cases, make_drafter, tiny_model) -> None:
    """The test above passes over drafters that a format refuses; no table may be left out that
    way."""
    written = set()
    for case in all_cases.values():
        _, drafter = make_drafter(case, tiny_model(case.architecture))
        for format_ in formats_of(case.family):
            try:
                LAYOUTS[format_, case.family].check(drafter.config, format_)
            except ConfigError:
                continue
            written.add((format_, case.family))
    assert written == set(LAYOUTS)


# ------------------------------------------------------------------ what each format says


def head(make_drafter, case_of, tiny_model, family: str = "eagle3", taps=(1, 2), **shape: Any):
    return make_drafter(case_of(family, shape, taps=taps), tiny_model("llama", num_hidden_layers=4))


def test_taps_are_numbered_as_each_engine_numbers_them(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    _, drafter = head(make_drafter, case_of, tiny_model)
    fields = {}
    for name in ("vllm", "sglang"):
        folder = export_drafter(drafter, tmp_path / name, dtype=torch.float32, format=name)
        fields[name] = json.loads((folder / "config.json").read_text())
    assert fields["vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert fields["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert "eagle_aux_hidden_state_layer_ids" not in fields["sglang"]


def test_sglang_zeros(make_drafter, case_of, tiny_model, tmp_path) -> None:
    """EAGLE-1's fc has a bias there, which would be random if left out."""
    target, one = head(make_drafter, case_of, tiny_model, "eagle", taps=())
    folder = export_drafter(one, tmp_path / "one", dtype=torch.float32, format="sglang")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["fc.bias"].abs().sum() == 0
    save_file(
        tensors | {"fc.bias": torch.ones_like(tensors["fc.bias"])}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"fc\.bias is not zero"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("shape", "taps", "named"),
    [
        ({"norm_before_residual": True}, (1, 2), "norm_before_residual"),
        ({"norm_before_fc": True}, (1, 2), "norm_before_fc"),
        ({"qk_norm": True}, (1, 2), "qk_norm"),
        ({"own_embeddings": True}, (1, 2), "own_embeddings"),
        ({"num_layers": 2}, (1, 2), "num_layers 2"),
        ({}, (0, 2), "tap_layers"),
        ({}, (2, 4), "tap_layers"),
    ],
)
def test_what_sglang_would_run_as_something_else_is_refused(
    make_drafter, case_of, tiny_model, tmp_path, shape, taps, named
) -> None:
    _, drafter = head(make_drafter, case_of, tiny_model, taps=taps, **shape)
    with pytest.raises(ConfigError, match=f"export format sglang: .*{named}"):
        export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format="sglang")
    assert not (tmp_path / "head").exists()


def test_sglang_cannot_tap_the_output_of_the_last_layer(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    _, drafter = head(
        make_drafter, case_of, tiny_model, "dflash", (1, 4), block_size=4, mask_token_id=100
    )
    with pytest.raises(
        ConfigError, match=r"export format sglang: tap_layers \[1, 4\].* last one, 4"
    ):
        export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format="sglang")


def test_the_speculators_format_names_its_target(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    target, drafter = head(make_drafter, case_of, tiny_model, norm_output=True, fc_norm=True)
    told = {
        "target": {"name_or_path": "org/target", "architectures": ["L"]},
        "num_speculative_tokens": 3,
    }
    folder = export_drafter(
        drafter, tmp_path / "a", dtype=torch.float32, format="speculators", provenance=told
    )
    fields = json.loads((folder / "config.json").read_text())
    own = fields["speculators_config"]
    assert own["verifier"] == {"name_or_path": "org/target", "architectures": ["L"]}
    assert own["proposal_methods"][0]["speculative_tokens"] == 3
    assert "model_type" not in fields  # which is how vLLM knows the format
    assert fields["norm_output"] is True and "norm_output" not in fields["transformer_layer_config"]
    del fields["draftsmith"]  # as other tools write it
    (folder / "config.json").write_text(json.dumps(fields))
    assert_same(target, folder, drafter)
    with pytest.raises(ConfigError, match="names the target"):
        convert(folder, tmp_path / "b", format="speculators", num_target_layers=4)


def test_the_speculators_format_takes_the_normed_residual_where_nothing_is_said(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    _, drafter = head(make_drafter, case_of, tiny_model, norm_before_residual=True)
    folder = export_drafter(drafter, tmp_path / "a", dtype=torch.float32, format="speculators")
    fields = json.loads((folder / "config.json").read_text())
    del fields["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder).norm_before_residual


BLOCK = {"num_layers": 2, "block_size": 5, "mask_token_id": 100}
SPARK = {**BLOCK, "markov_rank": 8}
CHAINS = {"num_depths": 4, "mask_token_id": 100}


WINDOW, CAUSAL = {"sliding_window": 4}, {"is_causal": True}
SELECTOR = {"conv_group_size": 8, "selector_rank": 8}


@pytest.mark.parametrize(
    ("family", "shape", "drafts"),
    [
        ("dflash", {**BLOCK, **CAUSAL}, 4),
        ("dflash", {**BLOCK, **WINDOW}, 4),
        ("dflash2", {**BLOCK, **SELECTOR, **CAUSAL, **WINDOW}, 4),
        ("dspark", {**SPARK, "draft_vocab_size": 40}, 5),
        ("dspark", {**SPARK, **CAUSAL, **WINDOW, "sample_from_anchor": False}, 4),
        ("peagle", {**CHAINS, "qk_norm": True, "norm_before_residual": True}, 4),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_the_speculators_format_of_block_drafters(
    make_drafter, case_of, tiny_model, tmp_path, family, shape, drafts
) -> None:
    """As vLLM reads it, and read back without a word of ours; the drafts of a round are those that
    were trained."""
    target, drafter = head(make_drafter, case_of, tiny_model, family, **shape)
    folder = export_drafter(drafter, tmp_path / "a", dtype=torch.float32, format="speculators")
    fields = json.loads((folder / "config.json").read_text())
    taps = fields.get(
        "eagle_aux_hidden_state_layer_ids" if family == "peagle" else "aux_hidden_state_layer_ids"
    )
    assert taps == [1, 2] and fields["mask_token_id"] == 100
    assert fields["speculators_model_type"] == fields["speculators_config"]["algorithm"] == family
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafts
    if family != "peagle":
        assert fields["sliding_window_non_causal"] is not drafter.config.is_causal
        assert fields["sample_from_anchor"] is drafter.config.sample_from_anchor
    del fields["draftsmith"]
    (folder / "config.json").write_text(json.dumps(fields))
    found = inspect_folder(folder, target)
    assert (
        found.sound and found.config is not None and found.config == read_drafter_config(folder, 4)
    )
    assert_same(target, folder, drafter)


@pytest.mark.parametrize(
    ("family", "shape", "named"),
    [
        ("dspark", {**SPARK, "is_causal": True}, "is_causal True with sliding_window None"),
        ("dspark", {**SPARK, "sliding_window": 4}, "is_causal False with sliding_window 4"),
        ("dspark", {**SPARK, "markov_head_type": "rnn"}, "markov_head_type rnn"),
        ("peagle", {**CHAINS, "fc_norm": True, "norm_output": True}, "fc_norm, norm_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_speculators_format_cannot_say_is_refused(
    make_drafter, case_of, tiny_model, tmp_path, family, shape, named
) -> None:
    _, drafter = head(make_drafter, case_of, tiny_model, family, **shape)
    with pytest.raises(ConfigError, match=f"export format speculators: .*{named}"):
        export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format="speculators")


def test_defaults_of_the_speculators_format_are_vllms(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    """Not said: a block is bidirectional and dspark's first slot predicts nothing, unlike in vLLM's
    own format."""
    shape = {**SPARK, "sample_from_anchor": False}
    _, drafter = head(make_drafter, case_of, tiny_model, "dspark", **shape)
    folder = export_drafter(drafter, tmp_path / "a", dtype=torch.float32, format="speculators")
    fields = json.loads((folder / "config.json").read_text())
    for name in ("sample_from_anchor", "sliding_window_non_causal"):
        del fields[name]
    (folder / "config.json").write_text(json.dumps(fields))
    config: Any = read_drafter_config(folder)
    assert not config.sample_from_anchor and not config.is_causal
    fields["speculators_model_type"] = "mtp"
    del fields["draftsmith"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError,
        match="speculators_model_type 'mtp'",
    ):
        read_drafter_config(folder, 4)


def test_full_layers_that_vllm_makes_causal_are_warned_of(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    """As the speculators library writes a block that it trains bidirectionally."""
    target, drafter = head(make_drafter, case_of, tiny_model, "dflash", **BLOCK, is_causal=True)
    folder = export_drafter(drafter, tmp_path / "a", dtype=torch.float32, format="speculators")
    assert not inspect_folder(folder, target).faults
    fields = json.loads((folder / "config.json").read_text())
    del fields["draftsmith"]
    (folder / "config.json").write_text(json.dumps(fields))
    (fault,) = inspect_folder(folder, target).faults
    assert fault.where == "sliding_window_non_causal" and fault.warning


# ------------------------------------------------------------------ what was trained with is kept


@pytest.mark.parametrize(
    "family, scaling, format_",
    [
        ("eagle", "linear", "vllm"),
        ("eagle", "llama3", "sglang"),
        ("eagle3", "yarn", "vllm"),
        ("eagle3", "llama3", "speculators"),
        ("eagle3", "linear", "sglang"),
        ("mtp", "llama3", "vllm"),
        ("mtp", "yarn", "sglang"),
    ],
)
def test_rotary_scaling_comes_from_the_target_and_back(
    tiny_model, tmp_path, family, scaling, format_
) -> None:
    model = tiny_model("llama", rope_parameters=dict(SCALINGS[scaling]), num_hidden_layers=4)
    target = FrozenTarget(model, [1, 2] if family == "eagle3" else [])
    config = config_for_target(target, family, tap_layers=target.tap_layers or None)
    assert {**config.rope_parameters, **SCALINGS[scaling]} == config.rope_parameters
    torch.manual_seed(0)
    drafter = family_class(family)(config).attach(target).eval()
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32, format=format_)
    assert_same(target, folder, drafter)


def test_a_field_that_was_lost_or_changed_is_named(
    make_drafter, case_of, tiny_model, tmp_path
) -> None:
    """No shape tells of these, and no engine notices."""
    target, drafter = head(make_drafter, case_of, tiny_model, head_dim=16)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "rope_parameters": {"rope_parameters": None, "rope_theta": 500.0},
        "rms_norm_eps": {"rms_norm_eps": 1e-3},
        "hidden_act": {"hidden_act": "gelu"},
        "head_dim": {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
        "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    }
    for name, change in changes.items():
        (folder / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises((CheckpointError, ConfigError), match=name):
            load_drafter(folder, target)
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    with pytest.raises(CheckpointError, match=r"dtype is bfloat16, but .* is float32"):
        load_drafter(folder, target)
    (folder / "config.json").write_text(json.dumps(fields))
    assert_same(target, folder, drafter)


@pytest.mark.parametrize("format_", ["vllm", "sglang", "speculators"])
def test_another_precision_survives_the_way_between_formats(
    make_drafter, case_of, tiny_model, tmp_path, format_
) -> None:
    _, drafter = head(make_drafter, case_of, tiny_model)
    first = export_drafter(drafter, tmp_path / "first", dtype=torch.bfloat16)
    again = convert(convert(first, tmp_path / "second", format=format_), tmp_path / "third")
    a, b = load_file(first / "model.safetensors"), load_file(again / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_transformers_keeps_a_window(make_drafter, case_of, tiny_model, tmp_path) -> None:
    """Both engines read the fields through transformers' Qwen3Config, which drops a window that is
    not switched on."""
    shape = {"block_size": 4, "mask_token_id": 100, "num_layers": 2}
    for window in (None, 8):
        _, drafter = head(
            make_drafter, case_of, tiny_model, "dflash", sliding_window=window, **shape
        )
        folder = export_drafter(drafter, tmp_path / str(window), dtype=torch.float32)
        assert (
            Qwen3Config(**json.loads((folder / "config.json").read_text())).sliding_window == window
        )
