"""Formats: every family in each of its formats reads back, with what it was trained with."""

from __future__ import annotations

import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.speculators.export.convert import convert
from draftsmith.speculators.export.formats import LAYOUTS, formats_of
from draftsmith.speculators.export.inspection import inspect_folder
from draftsmith.speculators.target.frozen_target import FrozenTarget
from tests.support.cases import BASE, CASES, CAUSAL, FIVE, MASK, TWO, Case, make, world_of
from tests.support.contract import all_logits, packed
from tests.support.errors import raises_at

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}


def assert_same(target: FrozenTarget, folder: Path, drafter: Drafter) -> None:
    again = load_drafter(folder, target)
    expected = drafter.config.model_copy(update={"dtype": again.config.dtype})
    assert again.config == expected
    features = target.features(**packed([24]))
    torch.testing.assert_close(
        all_logits(again, features), all_logits(drafter, features), atol=1e-5, rtol=1e-4
    )


TARGET = {"target": {"name_or_path": "org/target", "architectures": ["L"]}}


def allowed(drafter: Drafter) -> list[str]:
    accepted = []
    for name in formats_of(drafter.config.family):
        with suppress(ConfigError):
            LAYOUTS[name, drafter.config.family].check(drafter.config, name)
            accepted.append(name)
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_formats_read_back_to_the_same_drafter(name, tmp_path) -> None:
    """Written, read strictly, with and without a word of ours, written again in vLLM's own format
    from that folder alone, and read again."""
    target, drafter = world_of(name)
    for format_ in allowed(drafter):
        folder, config = tmp_path / format_, tmp_path / format_ / "config.json"
        export_drafter(drafter, folder, dtype=torch.float32, format=format_, provenance=TARGET)
        written = config.read_text()
        foreign = {key: x for key, x in json.loads(written).items() if key != "draftsmith"}
        plain = format_ == "speculators" or (format_ == "vllm" and name in BASE.values())
        for text in (json.dumps(foreign), written) if plain else (written,):
            config.write_text(text)
            inspected = inspect_folder(folder, target)
            assert inspected.config == drafter.config
            if plain:
                assert {f.where for f in inspected.faults} <= {"target"}  # whose name is made up
                assert inspected.parameters == sum(p.numel() for p in drafter.parameters())
            assert_same(target, folder, drafter)
        if drafter.config.family == "draft_model":
            continue
        again = convert(folder, tmp_path / "again")
        assert_same(target, again, drafter)
        (again / "tokenizer.json").write_text("{}")
        third = convert(again, tmp_path / "third", format=format_)
        assert_same(target, third, drafter)
        assert (third / "tokenizer.json").read_text() == "{}"
        assert (third / "config.json").read_text() == written


@pytest.mark.slow
def test_formats_have_a_case_for_every_table() -> None:
    """The test above passes over drafters that a format refuses, but over no table."""
    drafters = [world_of(name)[1] for name in CASES]
    assert {(name, d.config.family) for d in drafters for name in allowed(d)} == set(LAYOUTS)


# ------------------------------------------------------------------ what each format says

TAPS = "eagle_aux_hidden_state_layer_ids"
BLOCK, CHAINS, WINDOW = {**TWO, **FIVE}, {"num_depths": 4, **MASK}, {"sliding_window": 4}
SPARK = {**BLOCK, "markov_rank": 8}


class Written(NamedTuple):
    """A drafter for a target of four layers, and its export."""

    target: FrozenTarget
    drafter: Any
    folder: Path
    fields: dict[str, Any]  # of config.json

    def rewrite(self, **changed: Any) -> None:
        """Other fields, as other tools write them, without a word of ours; None takes one away."""
        fields = self.fields | {"draftsmith": None} | changed
        kept = {name: value for name, value in fields.items() if value is not None}
        (self.folder / "config.json").write_text(json.dumps(kept))


@pytest.fixture
def written(tiny_model, tmp_path):
    """`written(format, family, taps, target, **shape)`: an export; `target`: its fields."""

    def write(
        format_: str, family: str = "eagle3", taps=(1, 2), of: Any = None, **shape: Any
    ) -> Written:
        model = tiny_model("llama", num_hidden_layers=4, **(of or {}))
        target, drafter = make(Case(family, shape, taps=taps, noise=0.12), model)
        folder = tmp_path / format_
        export_drafter(drafter, folder, dtype=torch.float32, format=format_, provenance=TARGET)
        return Written(target, drafter, folder, json.loads((folder / "config.json").read_text()))

    return write


def test_taps_are_numbered_as_each_engine_numbers_them(written) -> None:
    fields = {name: written(name).fields for name in ("vllm", "sglang")}
    assert fields["vllm"][TAPS] == [1, 2] and TAPS not in fields["sglang"]
    assert fields["sglang"]["eagle_config"][TAPS] == [0, 1]


def test_vllm_is_told_which_layers_a_head_has(written) -> None:
    fields = written("vllm", qk_norm=True, num_layers=2, sliding_window=4).fields
    assert fields["architectures"] == ["Qwen3ForCausalLM"]
    assert fields["layer_types"] == ["sliding_attention"] * 2


def test_sglang_zeros(written) -> None:
    """EAGLE-1's fc has a bias there, which would be random if left out."""
    one = written("sglang", "eagle", ())
    tensors = load_file(one.folder / "model.safetensors")
    assert tensors["fc.bias"].abs().sum() == 0
    save_file(tensors | {"fc.bias": torch.ones(32)}, one.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.bias is not zero"):
        load_drafter(one.folder, one.target)


@pytest.mark.parametrize(
    ("format_", "family", "shape", "taps", "named"),
    [
        ("sglang", "eagle3", {"norm_before_residual": True}, (1, 2), "norm_before_residual"),
        ("sglang", "eagle3", {"own_embeddings": True}, (1, 2), "own_embeddings"),
        ("sglang", "eagle3", {"sliding_window": 4}, (1, 2), "sliding_window"),
        ("sglang", "eagle3", {}, (0, 2), "tap_layers"),
        ("sglang", "dflash", BLOCK, (1, 4), "tap_layers"),
        ("transformers", "dflash", {**BLOCK, "draft_vocab_size": 40}, (1, 2), "vocabulary"),
        ("speculators", "dspark", {**SPARK, **CAUSAL}, (1, 2), "is_causal"),
        ("speculators", "peagle", {**CHAINS, "fc_norm": True}, (1, 2), "fc_norm"),
    ],
)
def test_what_an_engine_would_run_as_something_else_is_refused(
    written, tmp_path, format_, family, shape, taps, named
) -> None:
    with pytest.raises(ConfigError, match=f"export format {format_}: .*{named}"):
        written(format_, family, taps, **shape)
    assert not (tmp_path / format_).exists()


def test_the_speculators_format_names_its_target(written, tmp_path) -> None:
    export = written("speculators", norm_output=True, fc_norm=True)
    verifier = export.fields["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["L"]}
    assert "model_type" not in export.fields  # which is how vLLM knows the format
    export.rewrite()
    with raises_at(ConfigError, "export format speculators"):
        convert(export.folder, tmp_path / "b", format="speculators", num_target_layers=4)


@pytest.mark.parametrize(
    ("family", "shape", "drafts"),
    [("dflash", {**BLOCK, **CAUSAL, **WINDOW}, 4), ("dspark", SPARK, 5), ("peagle", CHAINS, 4)],
)
def test_the_speculators_format_of_block_drafters(written, family, shape, drafts) -> None:
    export = written("speculators", family, **shape)
    fields, section = export.fields, export.fields["speculators_config"]
    assert fields[TAPS if family == "peagle" else "aux_hidden_state_layer_ids"] == [1, 2]
    assert fields["mask_token_id"] == 100
    assert fields["speculators_model_type"] == section["algorithm"] == family
    assert section["proposal_methods"][0]["speculative_tokens"] == drafts
    if family != "peagle":
        assert fields["sliding_window_non_causal"] is not export.drafter.config.is_causal
        assert fields["sample_from_anchor"] is export.drafter.config.sample_from_anchor


def test_defaults_of_the_speculators_format_are_vllms(written) -> None:
    """Not said: EAGLE-3's residual is normed, a block is bidirectional and dspark's first slot
    predicts nothing, unlike in vLLM's own format."""
    plain = written("speculators", norm_before_residual=True)
    plain.rewrite(norm_before_residual=None)
    assert read_drafter_config(plain.folder, 4).norm_before_residual
    export = written("speculators", "dspark", **SPARK, sample_from_anchor=False)
    export.rewrite(sample_from_anchor=None, sliding_window_non_causal=None)
    config: Any = read_drafter_config(export.folder, 4)
    assert not config.sample_from_anchor and not config.is_causal
    export.rewrite(speculators_model_type="mtp")
    with pytest.raises(CheckpointError, match="speculators_model_type 'mtp'"):
        read_drafter_config(export.folder, 4)


def test_full_layers_that_vllm_makes_causal_are_warned_of(written) -> None:
    export = written("speculators", "dflash", **BLOCK, **CAUSAL)
    assert not inspect_folder(export.folder).faults
    export.rewrite()
    (fault,) = inspect_folder(export.folder, num_target_layers=4).faults
    assert fault.where == "sliding_window_non_causal" and fault.warning


# ------------------------------------------------------------------ what was trained with is kept


@pytest.mark.parametrize(
    "family, format_",
    [("eagle", "sglang"), ("eagle3", "vllm"), ("eagle3", "speculators"), ("mtp", "vllm")],
)
def test_rotary_scaling_comes_from_the_target_and_back(written, family, format_) -> None:
    taps = (1, 2) if family == "eagle3" else ()
    export = written(format_, family, taps, {"rope_parameters": YARN})
    rope = export.drafter.config.rope_parameters
    assert {**rope, **YARN} == rope
    assert_same(export.target, export.folder, export.drafter)


def test_another_precision_survives_the_way_between_formats(written, tmp_path) -> None:
    first = convert(written("vllm").folder, tmp_path / "first", dtype="bfloat16")
    again = convert(convert(first, tmp_path / "second", format="speculators"), tmp_path / "third")
    a, b = (load_file(folder / "model.safetensors") for folder in (first, again))
    assert b["fc.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("window", [None, 8])
def test_transformers_keeps_a_window(written, window) -> None:
    fields = written("vllm", "dflash", **BLOCK, sliding_window=window).fields
    assert Qwen3Config(**fields).sliding_window == window


def test_an_export_is_readable_by_other_users(tmp_path):
    """A server may run as another user than the training."""
    _, drafter = world_of(BASE["eagle3"])
    folder = export_drafter(drafter, tmp_path / "export", dtype=torch.float32)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert modes == {0o644}
