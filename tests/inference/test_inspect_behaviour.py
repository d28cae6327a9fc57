"""Readings that no shape tells of: heads with some skill, their files mixed up, and the mix-up found by drafting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference import LLM, SamplingParams
from inference.inspect_behaviour import DRAFTS, Measured, measure_readings
from speculators.config import config_for_target
from speculators.drafter import Drafter, family_class
from speculators.errors import ConfigError
from speculators.export import export_drafter
from speculators.export.inspection import build, inspect_folder
from speculators.target import FrozenTarget

PROMPTS = [[3 + (i * i * 7 + n) % 60 for i in range(n)] for n in range(5, 17)]
TAPS = "eagle_aux_hidden_state_layer_ids"
STEPS = 60


@pytest.fixture(scope="module")
def model(tiny_model):
    made = tiny_model("llama", num_hidden_layers=5, vocab_size=64)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def texts(model) -> list[tuple[list[int], list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=48)
    llm = LLM._assemble(FrozenTarget(model))
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [(p, list(o.outputs[0].token_ids)) for p, o in zip(PROMPTS, outputs, strict=True)]


@pytest.fixture(scope="module")
def skilled(model, texts, tmp_path_factory) -> Callable[..., Path]:
    """`skilled(family, taps, **shape)`: the export of a head trained on the very texts for a few seconds."""
    made: dict[str, Path] = {}

    def train(family: str, taps: tuple[int, ...] = (), **shape: Any) -> Path:
        key = f"{family} {taps} {shape}"
        if key in made:
            return made[key]
        target, cls = FrozenTarget(model, taps), family_class(family)
        torch.manual_seed(0)
        drafter = cls(config_for_target(target, family, tap_layers=taps or None, **shape)).attach(target)
        drafter.initialise_from(target)
        if drafter.draft_to_target is not None:  # few low ids, which stay in the vocabulary when taken for offsets
            drafter.draft_to_target.copy_(_frequent(texts, drafter.config.draft_vocab_size))
        _train(target, drafter, texts)
        made[key] = export_drafter(drafter, tmp_path_factory.mktemp("head") / "head", dtype=torch.float32)
        return made[key]

    return train


def _frequent(texts, size: int) -> torch.Tensor:
    counts = torch.bincount(torch.tensor([token for _, out in texts for token in out]), minlength=64)
    return counts[: 64 - size].argsort(descending=True, stable=True)[:size].sort().values


def _train(target: FrozenTarget, drafter: Drafter, texts) -> None:
    """Cross-entropy on what the target wrote, over the depths that are measured."""
    from inference.expected import teacher_forced

    drafter.train()
    features, ids = teacher_forced(target, texts), drafter.draft_to_target
    optimizer = torch.optim.Adam(drafter.trainable_parameters(), lr=5e-3)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for step in drafter.unroll(features, DRAFTS):
            labels, hidden = features.input_ids.flatten()[step.target_index + 1], step.hidden
            if ids is not None:
                kept = torch.isin(labels, ids)
                labels, hidden = torch.searchsorted(ids, labels[kept]), hidden[kept]
            loss = loss + torch.nn.functional.cross_entropy(drafter.head(hidden, step.depth), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()


def measured(model: Any, source: Path, folder: Path, change: Callable[[dict, dict], Any] | None = None) -> Measured:
    """What drafting with a folder shows after `change` of its config and tensors."""
    fields, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    fields.pop("draftsmith")
    tensors.pop("t2d", None)
    if change is not None:
        change(fields, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    target = FrozenTarget(model)
    found = inspect_folder(folder, target)
    drafter = build(found, target)
    assert drafter is not None, found.faults
    return measure_readings(drafter, target, prompts=PROMPTS, d2t=found.tensors.get("d2t"))


def swap(*names: str) -> Callable[[dict, dict], None]:
    def change(c: dict, t: dict) -> None:
        for name in names:
            a, b = t[name].chunk(2, dim=1)
            t[name] = torch.cat([b, a], dim=1).contiguous()

    return change


def reorder_taps(c: dict, t: dict) -> None:
    a, b, d = t["fc.weight"].chunk(3, dim=1)
    t["fc.weight"] = torch.cat([d, a, b], dim=1).contiguous()


def plain_ids(c: dict, t: dict) -> None:
    t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))


QKV = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
EAGLE3 = dict(family="eagle3", taps=(1, 2, 3))
MIXED: dict[str, tuple[dict[str, Any], Callable[[dict, dict], Any], str]] = {
    "eagle3, q, k and v": (EAGLE3, swap(*QKV), "input_order"),
    "eagle3, taps of fc": (EAGLE3, reorder_taps, "tap_order"),
    "eagle3, taps from zero": (EAGLE3, lambda c, t: c.update({TAPS: [0, 1, 2]}), "tap_numbering"),
    "eagle3, taps from two": (EAGLE3, lambda c, t: c.update({TAPS: [2, 3, 4]}), "tap_numbering"),
    "eagle3, ids for offsets": (EAGLE3 | {"draft_vocab_size": 20}, plain_ids, "d2t_ids"),
    "eagle, fc": (dict(family="eagle"), swap("fc.weight"), "input_order"),
    "mtp, input_proj": (dict(family="mtp"), swap("model.mtp_layers.0.input_proj.weight"), "input_order"),
}


@pytest.mark.parametrize(("head", "change", "kind"), MIXED.values(), ids=MIXED.keys())
def test_mixed_up_tensors_are_found_by_what_they_draft(model, skilled, tmp_path, head, change, kind) -> None:
    source = skilled(**head)
    sound = measured(model, source, tmp_path / "sound")
    assert sound.as_is > 1.5 and not sound.better, sound
    found = measured(model, source, tmp_path / "mixed", change)
    assert [each for each, _ in found.better] == [kind], found
    assert found.best == pytest.approx(sound.as_is, abs=1e-6)  # the mistake undone is the head as it was
    assert found.as_is < sound.as_is - 0.2


def test_two_mistakes_are_undone_one_after_the_other(model, skilled, tmp_path) -> None:
    source = skilled(**EAGLE3)

    def change(c, t):
        swap(*QKV)(c, t)
        reorder_taps(c, t)

    found = measured(model, source, tmp_path / "mixed", change)
    assert {kind for kind, _ in found.better} == {"input_order", "tap_order"}
    assert found.best == pytest.approx(measured(model, source, tmp_path / "sound").as_is, abs=1e-6)


def test_medusa_heads_in_another_order_are_found(model, skilled, tmp_path) -> None:
    source = skilled("medusa", num_heads=3)

    def reverse(c, t):
        for name in [n for n in t if n.split(".")[1] == "0"]:
            other = name.replace(".0.", ".2.", 1)
            t[name], t[other] = t[other].clone(), t[name].clone()

    found = measured(model, source, tmp_path / "mixed", reverse)
    assert [kind for kind, _ in found.better] == ["heads"] and "reverse" in found.better[0][1]


def test_a_lost_norm_and_a_lost_switch_are_tried(model, skilled, tmp_path) -> None:
    """Whether they matter depends on the head; that they are tried does not."""
    source = skilled(**EAGLE3)
    found = measured(model, source, tmp_path / "mixed", lambda c, t: t["norm.weight"].fill_(1.0))
    assert {"norm", "switch"} <= {kind for kind, _, _ in found.readings}
    found = measured(model, source, tmp_path / "rope", lambda c, t: c.update(rope_theta=7.0, rope_parameters=None))
    assert "rope" in {kind for kind, _, _ in found.readings}


def test_a_head_without_skill_is_called_so_and_nothing_is_claimed(model, tmp_path) -> None:
    target = FrozenTarget(model, [1, 2, 3])
    torch.manual_seed(3)
    drafter = family_class("eagle3")(config_for_target(target, "eagle3", tap_layers=[1, 2, 3])).attach(target)
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter)
    found = measured(model, export_drafter(drafter, tmp_path / "a", dtype=torch.float32), tmp_path / "b")
    assert found.accepts_nothing and not found.better


def test_prompts_without_a_tokenizer(model, skilled) -> None:
    """Random tokens stand in, and it is said; words cannot."""
    target = FrozenTarget(model)
    drafter = build(inspect_folder(skilled(**EAGLE3), target), target)
    assert drafter is not None
    assert measure_readings(drafter, target).synthetic
    with pytest.raises(ConfigError, match="no tokenizer"):
        measure_readings(drafter, target, prompts=["words"])
