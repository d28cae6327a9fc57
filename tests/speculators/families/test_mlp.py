"""The MLP speculator: the published recurrence, tied tensors in every form they come in, and no
more drafts than heads.

What every family owes is in test_contract.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.train.recipe.drafter_config import drafter_config, sketch_drafter
from tests.support import cases
from tests.support.cases import Case
from tests.support.contract import draft_logits
from tests.support.engines import make_llm
from tests.support.training import recipe_of

SHAPES: dict[str, dict[str, Any]] = {
    "one head": {"n_predict": 1},
    "narrow, scaled": {"n_predict": 2, "inner_dim": 20, "scale_input": True},
    "tied": {"n_predict": 4, "inner_dim": 40, "tie_weights": True},
}


@pytest.fixture
def make(tiny_model):
    return lambda **shape: cases.make(Case("mlp", shape), tiny_model("llama"))


def every_copy(tensors: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of tied heads holds if nobody left the copies out."""
    copies = dict(tensors)
    for i in range(1, heads):
        for part in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            copies["speculator." + part.format(i)] = tensors["speculator." + part.format(0)].clone()
        if i > 1:
            copies[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone()
    return copies


def published(
    tensors: dict[str, torch.Tensor], heads: int, scale: bool, state: torch.Tensor, ids: list[int]
) -> list:
    """Logits of each head from a checkpoint's tensors, by the paper's formula: state [H], ids the n
    tokens read."""
    norm = lambda x: x / (x.square().mean() + 1e-6).sqrt()
    weight = 0.5 ** (0.5 / heads)
    state = norm(state) / math.sqrt(2) if scale else state
    logits = []
    for i in range(heads):
        tensor = lambda name, i=i: tensors[f"speculator.{name.replace('.', f'.{i}.')}"]
        embeds = tensor("emb.weight")[ids[i]]
        z = embeds * math.sqrt(1 - weight**2) * math.sqrt(len(embeds) / 2)
        mixed = norm(tensor("proj.weight") @ state * weight + z)
        state = gelu(mixed * tensor("ln.weight") + tensor("ln.bias"))
        logits.append(tensor("head.weight") @ state)
    return logits


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_export_under_the_published_formula_gives_the_drafted_logits(
    make, tmp_path: Path, shape
) -> None:
    target, drafter = make(**shape)
    heads, scale = shape.get("n_predict", 3), shape.get("scale_input", False)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    if shape.get("tie_weights"):
        tensors = every_copy(tensors, heads)
    ids, forced = torch.tensor([5, 9, 20, 31, 7]), torch.tensor([11, 3, 8, 6])[:heads]
    drafted = draft_logits((target, drafter), ids, 3, heads, forced)
    state = target(ids[None, :-1])[1][0, 3]
    expected = published(tensors, heads, scale, state, [7, *forced.tolist()])
    torch.testing.assert_close(drafted, torch.stack(expected), atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- checkpoints


def test_tied_tensors_load_from_one_copy_or_all(make, tmp_path: Path) -> None:
    shape = SHAPES["tied"]
    target, drafter = make(**shape)
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    del fields["draftsmith"]
    (folder / "config.json").write_text(json.dumps(fields))
    one = load_file(folder / "model.safetensors")
    parts = ("emb.0.weight", "head.0.weight", "ln.0.bias", "ln.0.weight")
    parts += ("proj.0.weight", "proj.1.weight")
    assert sorted(one) == [f"speculator.{name}" for name in parts]
    renamed = lambda name: name.replace("emb.0", "emb.3").replace("proj.1", "proj.2")
    last = {renamed(name): tensor for name, tensor in one.items()}
    for tensors in (one, every_copy(one, 4), last):
        save_file(tensors, folder / "model.safetensors")
        assert read_drafter_config(folder, target.num_layers) == drafter.config
        again = load_drafter(folder, target).state_dict()
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again[name], tensor)


def test_copies_that_differ_are_refused(make, tmp_path: Path) -> None:
    target, drafter = make(**SHAPES["tied"])
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    whole = every_copy(load_file(folder / "model.safetensors"), 4)
    for name in ("speculator.emb.2.weight", "speculator.proj.3.weight"):
        save_file(whole | {name: whole[name] + 1}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            load_drafter(folder, target)
    stray = {"speculator.emb.4.weight": whole["speculator.emb.0.weight"].clone()}
    save_file(whole | stray, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"speculator\.emb\.4\.weight is unexpected"):
        load_drafter(folder, target)  # there are four heads, 0 to 3


def test_published_fields_are_understood(make, tmp_path: Path) -> None:
    target, drafter = make()
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"inner_dim": 0, "top_k_tokens_per_head": [5, 4, 3], "torch_dtype": "float32"}
    del fields["draftsmith"], fields["dtype"], fields["tie_weights"], fields["scale_input"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder, target.num_layers) == drafter.config
    with pytest.raises(CheckpointError, match="number of target layers"):
        read_drafter_config(folder)


# ---------------------------------------------------------------------- no more drafts than heads


def test_more_drafts_than_heads_are_refused(make) -> None:
    target, drafter = make(n_predict=2)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 3, .* 2 tokens in a round"):
        make_llm(target, drafter=drafter, num_speculative_tokens=3)
    recipe = recipe_of("mlp", drafter={"n_predict": 2})
    with pytest.raises(ConfigError, match="evaluation.num_speculative_tokens is 3"):
        sketch_drafter(recipe, drafter_config(recipe, target))


def test_all_heads_are_trained_unless_asked_otherwise() -> None:
    def depths(**drafter: Any) -> int:
        return recipe_of("mlp", drafter=drafter).drafter.unroll_steps

    assert (depths(), depths(n_predict=5), depths(n_predict=5, unroll_steps=2)) == (3, 5, 2)
    with pytest.raises(ValueError, match=r"unroll_steps \(4\) is above n_predict \(3\)"):
        depths(unroll_steps=4)
    with pytest.raises(ValueError, match="n_predict: say how many"):
        depths(init_from="somewhere")
