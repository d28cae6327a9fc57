"""A target trained jointly with its heads: what is exported is what was trained, and a killed run
ends the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.info import sketch_target
from draftsmith.train.recipe.sections import JointSection
from draftsmith.train.trainer.joint_target import JointTarget, cross_entropy
from draftsmith.train.trainer.trainer import Trainer
from tests.support.training import assert_equal, cut_off, make_recipe
from tests.support.training import make_trainer as trainer_of

TEXTS = [([5, 6, 7], [8, 9, 10, 11]), ([3, 4], [50, 60])]


def make_trainer(tiny_model, folder: Path, target: FrozenTarget | None = None, **joint) -> Trainer:
    recipe = make_recipe("medusa", joint={"r": 4, **joint})
    target = target or FrozenTarget(copy.deepcopy(tiny_model("qwen2")))
    return trainer_of(tiny_model, folder, recipe, target=target)


class Tokenizer:
    def save_pretrained(self, folder) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.mark.slow
@pytest.mark.parametrize("exported", ["merged", "adapter"])
def test_what_is_exported_is_what_was_trained(tiny_model, tmp_path, exported):
    trainer = make_trainer(tiny_model, tmp_path / "run", export=exported)
    original = FrozenTarget(tiny_model("qwen2"))
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    trainer.joint.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    trainer.run()
    before, after = trainer.joint.held_out_loss(TEXTS)
    assert before == pytest.approx(cross_entropy(original, TEXTS), rel=1e-5)
    assert (
        after == pytest.approx(cross_entropy(trainer.target, TEXTS)) and abs(after - before) > 1e-3
    )
    folder = trainer.joint.export(
        tmp_path / "target", Tokenizer(), {"before": before, "after": after}
    )
    reloaded = FrozenTarget.from_pretrained(str(folder))
    assert cross_entropy(reloaded, TEXTS) == pytest.approx(after, rel=1e-4)
    # exporting changed nothing
    assert cross_entropy(trainer.target, TEXTS) == pytest.approx(after, rel=1e-4)
    assert (folder / "adapter_config.json").exists() == (exported == "adapter")
    assert not list(tmp_path.glob(".target*"))


def test_an_adapter_of_a_revision_is_loaded_onto_that_revision(
    tiny_model, tmp_path, hub_cache, monkeypatch
):
    tiny_model("qwen2").save_pretrained(tmp_path / "v1")
    hub_cache("org/target", tmp_path / "v1", "v1")
    other = copy.deepcopy(tiny_model("qwen2"))
    with torch.no_grad():
        other.get_input_embeddings().weight.zero_()
    other.save_pretrained(tmp_path / "main")
    hub_cache("org/target", tmp_path / "main")
    target = FrozenTarget.from_pretrained("org/target@v1")
    expected = target.embed_tokens.weight.clone()
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", None)  # not asked
    JointTarget(target, JointSection(), revision="v1").adapter.save(tmp_path / "adapter")
    reloaded = FrozenTarget.from_pretrained(str(tmp_path / "adapter"))
    assert torch.equal(reloaded.embed_tokens.weight, expected)
    assert sketch_target(str(tmp_path / "adapter")).num_layers == target.num_layers


def test_a_target_that_ran_wide_is_exported_as_narrow_as_it_was(tiny_model, tmp_path, monkeypatch):
    """On a CPU without bfloat16 a bfloat16 checkpoint is trained in float32."""
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_bf16": False}
    )
    copy.deepcopy(tiny_model("qwen2")).bfloat16().save_pretrained(tmp_path / "base")
    target = FrozenTarget.from_pretrained(str(tmp_path / "base"))
    trainer = make_trainer(tiny_model, tmp_path / "run", target)
    trainer.run()
    _, after = trainer.joint.held_out_loss(TEXTS)
    folder = trainer.joint.export(tmp_path / "target", Tokenizer(), {})
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    # exporting changed nothing
    assert target.dtype == torch.float32 and target.checkpoint_dtype == torch.bfloat16
    reloaded = FrozenTarget.from_pretrained(str(folder))
    assert reloaded.dtype == torch.float32 and reloaded.checkpoint_dtype == torch.bfloat16
    assert cross_entropy(reloaded, TEXTS) == pytest.approx(after, rel=2e-3)


def test_the_targets_own_weights_do_not_move_and_the_loss_falls(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, heads_schedule="constant", head_lr_multiplier=1.0)
    frozen = {
        n: p.clone() for n, p in trainer.joint.model.named_parameters() if not p.requires_grad
    }
    history = trainer.run().history
    assert history[-1]["loss"] < history[0]["loss"]
    for name, parameter in trainer.joint.model.named_parameters():
        assert parameter.requires_grad != (name in frozen)
        assert name not in frozen or torch.equal(parameter, frozen[name])
    # B began at zero
    assert all(bool(p.detach().abs().sum() > 0) for p in trainer.joint.trainable_parameters())


def test_the_first_step_has_the_targets_mean_loss_while_the_heads_weigh_nothing(
    tiny_model, tmp_path
):
    """Of all supervised tokens of two batches, whatever their numbers."""
    recipe = make_recipe("medusa", joint={"r": 4}, gradient_accumulation_steps=2)
    target = FrozenTarget(copy.deepcopy(tiny_model("qwen2")))
    trainer = trainer_of(tiny_model, tmp_path, recipe, target=target)
    surprise = []
    for micro in trainer.step_rows.of(0):
        rows = [trainer.order[place] for place in micro.places]
        features = trainer.features.of(rows)
        # no document is supervised from its first token on
        rows_of_mask, places = features.loss_mask.nonzero(as_tuple=True)
        log_p = target.logits(features.last_hidden[rows_of_mask, places - 1]).log_softmax(-1)
        labels = features.input_ids[rows_of_mask, places]
        surprise.append(-log_p.gather(-1, labels[:, None]))
    assert len(surprise[0]) != len(surprise[1])
    record, _ = trainer.step(0.0).read(trainer.loss.depths)
    assert record["loss"] == pytest.approx(torch.cat(surprise).mean().item(), rel=1e-5)


def test_the_heads_rate_is_a_multiple_and_their_weight_grows(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, head_lr_multiplier=5.0)
    heads, adapter = trainer.optimizers[0].param_groups
    assert heads["peak_lr"] == pytest.approx(5 * adapter["peak_lr"])
    joint = trainer.joint
    assert joint.heads_weight(0.0) == 0.0 and joint.heads_weight(1.0) == pytest.approx(0.2)
    assert 0.1 < joint.heads_weight(0.5) < 0.2


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(tiny_model, tmp_path):
    whole = make_trainer(tiny_model, tmp_path / "whole")
    whole.run()
    cut_off(make_trainer(tiny_model, tmp_path / "broken"), 5)
    again = make_trainer(tiny_model, tmp_path / "broken")
    again.run()
    for part in ("drafter", "joint"):
        assert_equal(getattr(whole, part).state_dict(), getattr(again, part).state_dict())
