"""Draft models trained by adapters of peft: what moves, what is exported, and who can load it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import (
    export_drafter,
    load_drafter,
    load_weights,
    read_drafter_config,
)
from draftsmith.speculators.families.draft_model.model import DraftModel
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.trainer.trainer import Trainer
from tests.speculators.families.draft_model.test_draft_model import drafted, recipe
from tests.support.contract import (
    all_logits,
    assert_unroll_equals_draft,
    packed,
    rows,
)

IDS = torch.tensor([[5, 9, 11, 42, 7, 90, 33, 8, 61, 20, 3]])
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4}
SCALED = {"lora_alpha": 16, "use_rslora": True, "target_modules": PROJECTIONS}
TABLES = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
WHOLE = {"target_modules": PROJECTIONS, "modules_to_save": ["norm", "lm_head"]}
IA3 = {"target_modules": PROJECTIONS, "feedforward_modules": ["down_proj"]}
PEFT: dict[str, dict[str, Any]] = {
    "lora, all linear": {**LORA, "target_modules": "all-linear"},
    "lora, a list": {**LORA, **SCALED, "peft_type": "lora"},
    "lora, embeddings and head": {**LORA, **TABLES},
    "lora, a module trained whole": {**LORA, **WHOLE},
    "dora": {**LORA, "use_dora": True, "target_modules": "all-linear"},
    "ia3": {"peft_type": "IA3", **IA3},
    "oft": {"peft_type": "OFT", "oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]},
}
any_peft = pytest.mark.parametrize("peft", PEFT.values(), ids=PEFT.keys())


@pytest.fixture(scope="module")
def target(tiny_model) -> FrozenTarget:
    return FrozenTarget(tiny_model("llama"))


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", num_hidden_layers=2, hidden_size=16, head_dim=8).save_pretrained(folder)
    return str(folder)


def trainer(
    target: FrozenTarget, base: str, peft: dict | None, folder: Path, steps: int = 4, **options: Any
) -> Trainer:
    training = {
        "steps": steps,
        "batch_size": 2,
        "learning_rate": 3e-2,
        "save_every": 2,
        "mixed_precision": "no",
    }
    data = {"train": [{"path": "chats.jsonl"}], "max_length": 48}
    chosen = recipe({"init_from": base, "peft": peft, **options}, training=training, data=data)
    drafter = DraftModel(read_drafter_config(base)).attach(target)
    load_weights(drafter, Path(base))
    torch.manual_seed(0)
    return Trainer(
        chosen,
        target,
        drafter,
        rows(),
        accelerator=Accelerator(cpu=True),
        folder=folder,
        fingerprint="a",
    )


def trained(
    target: FrozenTarget, base: str, peft: dict | None, folder: Path, **options: Any
) -> DraftModel:
    run = trainer(target, base, peft, folder, **options)
    history = run.run().history
    assert history[-1]["loss"] < history[0]["loss"]
    return run.drafter.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.slow
@any_peft
def test_an_adapter_is_trained_drafts_and_is_exported_merged(
    target, base, peft, tmp_path: Path
) -> None:
    """It alone moves; merged for drafting and back; the export is a plain model, for transformers
    and for us, and exporting changes nothing."""
    original = AutoModelForCausalLM.from_pretrained(base).state_dict()
    drafter = trained(target, base, peft, tmp_path / "run")
    kept = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in drafter.model.state_dict().items()
    }
    for name, tensor in original.items():
        assert torch.equal(kept[name], tensor), name
    with drafter.adapter.peft.disable_adapter():
        before = logits(drafter.model)
    expected = logits(drafter.model)
    assert not torch.allclose(expected, before, atol=1e-2)

    for name in ("once", "twice"):
        folder = export_drafter(drafter, tmp_path / name, dtype=torch.float32)
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and not (folder / "adapter_config.json").exists()
    torch.testing.assert_close(logits(plain), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(drafter.model), expected)
    again = load_drafter(folder, target)
    torch.testing.assert_close(logits(again.model), logits(plain))
    assert again.config == read_drafter_config(base)

    features = target.features(**packed([9, 6]))
    unmerged = all_logits(drafter, features)
    assert_unroll_equals_draft((target, drafter), packed([9, 6]))
    drafted(target.model, drafter)
    drafter.train().eval()
    for a, b in zip(unmerged, all_logits(drafter, features)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_killed_and_started_again_ends_with_the_same_weights(target, base, tmp_path: Path) -> None:
    peft = PEFT["lora, a module trained whole"]
    whole = trainer(target, base, peft, tmp_path / "whole")
    whole.run()
    broken = trainer(target, base, peft, tmp_path / "broken")

    def die(share: float, note: str) -> None:
        if broken.state.step == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        broken.run(die)
    again = trainer(target, base, peft, tmp_path / "broken")
    again.run()
    found = again.drafter.state_dict()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, found[name]), name


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "peft, message",
    [
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, "PROMPT_TUNING.*virtual tokens"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}, "PREFIX_TUNING.*virtual tokens"),
        ({"r": 8}, "peft_type is None; expected one that .*LORA"),
        ({"peft_type": "LORAX"}, "LORAX.*expected one that .*LORA"),
        ({"peft_type": "LORA", "rank": 8}, "does not take this LORA configuration.*rank"),
        ({"peft_type": "LORA", "r": 8, "task_type": "SEQ_CLS"}, "task_type"),
        (
            {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": ["up_proj"]},
            "subset",
        ),
    ],
)
def test_what_is_no_adapter_of_layers_is_refused_in_the_recipe(peft, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe({"init_from": "x", "peft": peft})


@pytest.mark.parametrize(
    "peft",
    [{"peft_type": "LORA", "r": 0}, {"peft_type": "LORA", "target_modules": ["no_such_layer"]}],
    ids=["rank 0", "no such layer"],
)
def test_an_adapter_that_does_not_fit_is_refused(target, base, peft, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="peft"):
        trainer(target, base, peft, tmp_path)


def test_an_adapter_folder_of_someone_elses_says_what_it_is(target, base, tmp_path: Path) -> None:
    """peft's own folder, with a config.json and weights beside it."""
    drafter = trained(target, base, PEFT["dora"], tmp_path / "run")
    drafter.adapter.save(tmp_path / "adapter")
    shutil.copy(Path(base) / "config.json", tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="this is an adapter"):
        load_drafter(tmp_path / "adapter", target)
