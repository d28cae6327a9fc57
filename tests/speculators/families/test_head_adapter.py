"""A LoRA on a shared head: it begins as that head, it alone is trained, and an export is a plain
head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from speculators.errors import CheckpointError, ConfigError
from speculators.export import export_drafter, load_drafter
from speculators.export.convert import redress
from tests.speculators.families.test_contract import DEPTHS, all_logits, packed
from train.recipe.recipe import make_recipe

HEADS = [
    "dflash, causal, window, reduced, qwen3",
    "dspark, gated, fill in, reduced",
    "dflash2",
    "eagle, two layers, own embeddings, biases",
    "eagle3",
    "medusa, one projection",
    "mlp, four heads, tied, scaled, gemma3",
    "peagle",
    "mtp, gemma3",
    "mtp, layer of deepseek_v3",
]


def options(family: str, shared: Path | str | None, target: str = "t", **adapter):
    tree = {
        "name": "x",
        "family": family,
        "target": {"model": target},
        "data": {"train": [{"path": "c.jsonl"}]},
    }
    given = {
        "init_from": None if shared is None else str(shared),
        "adapter": {"rank": 2, **adapter},
    }
    if family == "mlp":
        given["n_predict"] = 4
    return make_recipe({**tree, "drafter": given}).drafter


@pytest.mark.parametrize("name", HEADS)
def test_it_begins_as_the_shared_head_and_is_merged(
    name, all_cases, make_drafter, tiny_model, tmp_path: Path
) -> None:
    case = all_cases[name]
    target, head = make_drafter(case, tiny_model(case.architecture))
    shared = export_drafter(head, tmp_path / "shared", dtype=torch.float32, provenance={"step": 7})
    features, before = (
        target.features(**packed([9, 6])),
        {n: t.clone() for n, t in head.state_dict().items()},
    )
    expected = all_logits(head, features)
    head.prepare(options(case.family, shared))
    for a, b in zip(all_logits(head, features), expected, strict=True):
        assert torch.equal(a, b)
    trained = {n: p for n, p in head.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained)

    sum(head.head(s.hidden, s.depth)[:, 5].mean() for s in head.unroll(features, DEPTHS)).backward()
    assert (
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())
        or case.family == "dflash2"
    )
    for n, p in trained.items():  # the second factor of a LoRA begins as zero
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))
    adapted = all_logits(head, features)
    assert not torch.allclose(adapted[0], expected[0], atol=1e-2)
    head.adapter.save(tmp_path / "adapter")
    merged = export_drafter(head, tmp_path / "merged", dtype=torch.float32)
    kept = {n.replace(".base_layer.", "."): t for n, t in head.state_dict().items()}
    assert all(torch.equal(kept[n], t) for n, t in before.items())
    again = redress(tmp_path / "adapter", tmp_path / "again")
    assert '"step": 7' in (again / "config.json").read_text()
    for folder in (merged, again):
        for a, b in zip(all_logits(load_drafter(folder, target), features), adapted, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)
    for a, b in zip(all_logits(head.snapshot(torch.float32), features), adapted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_wrong_combinations_are_refused_by_key(
    all_cases, make_drafter, tiny_model, tmp_path: Path
) -> None:
    for shared in (None, "target"):
        with pytest.raises(
            ValidationError,
            match=r"adapter: changes a head that others share.*set it to the folder",
        ):
            options("eagle3", shared)
    with pytest.raises(ValidationError, match=r"adapter: is for heads; .* drafter\.peft"):
        options("draft_model", "org/student")
    _, head = make_drafter(all_cases["eagle3"], tiny_model("llama"))
    with pytest.raises(
        ConfigError, match=r"drafter\.adapter\.target_modules: query is no linear layer .*q_proj"
    ):
        head.prepare(options("eagle3", "org/head", target_modules=["query"]))
    head.prepare(options("eagle3", export_drafter(head, tmp_path / "head", dtype=torch.float32)))
    head.adapter.save(tmp_path / "adapter")
    other = make_drafter(all_cases["medusa"], tiny_model("llama"))[1]
    export_drafter(other, tmp_path / "head", dtype=torch.float32)  # another head under the name
    with pytest.raises(
        CheckpointError, match="the adapter does not fit|not those of its configuration"
    ):
        redress(tmp_path / "adapter", tmp_path / "out")
