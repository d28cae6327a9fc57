"""TargetHead is what a whole target says of its embedding, norm and head, read from few shards."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.speculators.errors import CheckpointError, ConfigError, QuantisedTensors
from draftsmith.speculators.families.draft_model.model import DraftModel, DraftModelOptions
from draftsmith.speculators.families.eagle3 import Eagle3
from draftsmith.speculators.registry import config_for_target
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.target_head import TargetHead
from tests.support.errors import raises_at
from tests.support.models import ARCHITECTURES, MULTIMODAL, RECURRENT, make_tiny_model
from tests.support.quantised import quantise_head, save_quantised
from tests.support.targets import keep_two_shards

OTHERS = ["gpt2", "bloom", "qwen3_moe", "stablelm"]  # of other names, and layers that give tuples
FACTS = ["num_layers", "hidden_size", "vocab_size", "dtype", "checkpoint_dtype", "tap_layers"]


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


def assert_same(head: TargetHead, whole: FrozenTarget) -> None:
    """The same to the bit."""
    states = torch.randn(2, 4, whole.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(2, 99, 7)
    states = states.to(whole.dtype)
    with torch.no_grad():
        assert torch.equal(head.embed_tokens(ids), whole.embed_tokens(ids))
        assert torch.equal(head.logits(states), whole.logits(states))
        assert torch.equal(head.head_weight, whole.head_weight)
        assert torch.equal(head.final_norm(states), whole.final_norm(states))
    assert (head.final_norm_weight is None) == (whole.final_norm_weight is None)
    if whole.final_norm_weight is not None:
        assert torch.equal(head.final_norm_weight, whole.final_norm_weight)
    for fact in FACTS:
        assert getattr(head, fact) == getattr(whole, fact), fact


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RECURRENT, *MULTIMODAL, *OTHERS])
def test_target_head_of_any_architecture_equals_the_whole_without_its_layers(
    tmp_path, architecture
):
    model = make_tiny_model(architecture)
    head = TargetHead.from_pretrained(saved(model, tmp_path), tap_layers=(1, 2))
    assert_same(head, FrozenTarget(model, tap_layers=(1, 2)))
    shared = sum(p.numel() for p in head.parameters())
    per_token = model.config.get_text_config().vocab_size + 256  # GPT-2 has a row per position too
    assert shared <= 2 * 32 * per_token + 5 * 32  # both tables, and norms
    assert not any(isinstance(m, nn.ModuleList) and len(m) for m in head.modules())


def test_target_head_opens_the_shards_of_its_tensors_alone(tmp_path):
    model = make_tiny_model("qwen3")
    folder = keep_two_shards(model, tmp_path, shards=100)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert_same(TargetHead.from_pretrained(str(folder)), FrozenTarget(model))
    with raises_at(CheckpointError, f"target {folder}"):
        FrozenTarget.from_pretrained(str(folder))


def test_target_head_of_a_repository_asks_for_the_shards_of_its_tensors_alone(hub_cache, tmp_path):
    model = make_tiny_model("qwen3")
    hub_cache("org/large", keep_two_shards(model, tmp_path / "large", shards=9), "v1")
    head = TargetHead.from_pretrained("org/large@v1")
    assert head.name_or_path == "org/large"
    assert_same(head, FrozenTarget(model))


def test_target_head_of_a_shard_that_is_not_there_says_which(tmp_path):
    folder = keep_two_shards(make_tiny_model("qwen3"), tmp_path, shards=100)
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with raises_at(CheckpointError, f"target {folder}"):
        TargetHead.from_pretrained(str(folder))


@pytest.mark.parametrize("scheme", ["bitnet", "fp8"])
def test_target_head_of_a_quantised_checkpoint_with_a_plain_head_equals_the_whole(tmp_path, scheme):
    model = make_tiny_model("qwen3")
    save_quantised(model, tmp_path, scheme)
    assert_same(TargetHead.from_pretrained(str(tmp_path)), FrozenTarget(model))


@pytest.mark.parametrize("packed", [False, True])
def test_target_head_that_is_quantised_is_refused(tmp_path, packed):
    folder = saved(make_tiny_model("qwen3"), tmp_path)
    quantise_head(tmp_path, packed=packed)
    with raises_at(QuantisedTensors, f"target {folder}"):
        TargetHead.from_pretrained(folder)


@pytest.mark.parametrize("damage", ["missing", "other shape", "torn"])
def test_target_head_of_a_damaged_checkpoint_is_refused(tmp_path, damage):
    folder = saved(make_tiny_model("qwen3"), tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    weight = state.pop("model.norm.weight")
    if damage == "other shape":
        state["model.norm.weight"] = weight[:5].clone()
    save_file(state, path, {"format": "pt"})
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:100])
    with raises_at(CheckpointError, path if damage == "torn" else f"target {folder}"):
        TargetHead.from_pretrained(folder)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gpt_oss", "gpt2"])
def test_a_student_is_cut_from_the_files_of_its_layers_as_from_the_whole(tmp_path, architecture):
    model = make_tiny_model(architecture)
    head = TargetHead.from_pretrained(saved(model, tmp_path))
    options = DraftModelOptions(from_target=[0, 2])
    shape = options.shape(DraftModel.config_class.model_fields, head)
    config = config_for_target(head, "draft_model", **shape)
    students = []
    for target in (FrozenTarget.from_pretrained(str(tmp_path)), head):
        student = DraftModel(config).attach(target)
        students.append(student.initialise_from(target, options))
    torch.testing.assert_close(*(s.state_dict() for s in students), atol=0, rtol=0)
    ends = [student.model.generation_config.eos_token_id for student in students]
    assert ends[0] == ends[1] == model.generation_config.eos_token_id


def test_a_student_opens_the_shards_of_its_layers_alone(tmp_path):
    model = make_tiny_model("qwen3", num_hidden_layers=6)
    folder = keep_two_shards(model, tmp_path, shards=5, layers=[3])
    head = TargetHead.from_pretrained(str(folder))
    options = DraftModelOptions(from_target=[3])
    shape = options.shape(DraftModel.config_class.model_fields, head)
    student = DraftModel(config_for_target(head, "draft_model", **shape)).attach(head)
    student.initialise_from(head, options)
    expected = model.model.layers[3].state_dict()
    torch.testing.assert_close(student.model.model.layers[0].state_dict(), expected, atol=0, rtol=0)


def test_a_start_that_reads_hidden_states_asks_their_source(tmp_path):
    model = make_tiny_model("qwen3")
    whole = FrozenTarget(model, tap_layers=(1, 2, 3))
    head = TargetHead.from_pretrained(saved(model, tmp_path), tap_layers=(1, 2, 3))
    config = config_for_target(whole, "eagle3", tap_layers=(1, 2, 3))
    starts = []
    for target in (whole, head):
        torch.manual_seed(0)
        drafter = Eagle3(config).attach(target)
        assert drafter.reads_start_text
        if target is head:
            with raises_at(ConfigError, f"target {tmp_path}"):
                drafter.initialise_from(target)
            head.source = whole.features
            torch.manual_seed(0)
            drafter = Eagle3(config).attach(target)
        starts.append(drafter.initialise_from(target).state_dict())
    torch.testing.assert_close(*starts, atol=0, rtol=0)
