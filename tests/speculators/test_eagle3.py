"""EAGLE-3: training and drafting are the same maths; what is exported reloads to the same outputs."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.cache import RaggedCache
from speculators.config import config_for_target, default_tap_layers
from speculators.errors import CheckpointError, ConfigError
from speculators.export import export_drafter, load_drafter, read_drafter_config
from speculators.families.eagle3 import Eagle3
from speculators.target import FrozenTarget

VARIANTS = {
    "plain": {},
    "reduced": {"draft_vocab_size": 40},
    "two layers": {"num_layers": 2},
    "3.1 fc_norm": {"fc_norm": True, "norm_output": True},
    "3.1 norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "qk_norm": {"qk_norm": True},
    "own embeddings": {"own_embeddings": True},
    "four taps": {"tap_layers": [0, 1, 2, 3]},
}
TARGETS = ["llama", "qwen3", "gemma3"]


def make(tiny_model, variant: dict, architecture: str = "llama") -> tuple[FrozenTarget, Eagle3]:
    variant = dict(variant)
    taps = variant.pop("tap_layers", [1, 2, 3])
    target = FrozenTarget(tiny_model(architecture), taps)
    config = config_for_target(target, "eagle3", tap_layers=taps, **variant)
    torch.manual_seed(1)
    drafter = Eagle3(config).attach(target)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if config.reduced_vocabulary:
        drafter.target_ids.copy_(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return target, drafter.eval()


def packed(lengths: list[int], vocab: int = 100) -> dict[str, torch.Tensor]:
    """One packed row of documents of these lengths, and a padded tail."""
    torch.manual_seed(2)
    ids = torch.randint(3, vocab, (sum(lengths) + 3,))
    positions = torch.cat([torch.arange(n) for n in (*lengths, 3)])
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((3,), -1)])
    mask = segments >= 0
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "segment_ids": segments[None],
        "loss_mask": mask[None],
    }


@torch.no_grad()
def draft_logits(target, drafter, ids: torch.Tensor, anchor: int, k: int, forced: torch.Tensor) -> torch.Tensor:
    """Draft logits [k, V_draft] of the runtime path for slot `anchor` of one document, forcing the drafted tokens."""
    taps, last = target(ids[None, : anchor + 1])
    cache, seen = RaggedCache(1, 64), []

    def sample(logits):
        seen.append(logits[0])
        return forced[len(seen) - 1][None]

    split = anchor // 2  # two calls: an append, then append and draft
    if split:
        drafter.draft(cache, 0, 1, ids[None, 1 : split + 1], taps[:, :split], last[:, :split], [split], 0, sample)
    rest = slice(split, anchor + 1)
    drafter.draft(
        cache, 0, 1, ids[None, split + 1 : anchor + 2], taps[:, rest], last[:, rest], [anchor + 1 - split], k, sample
    )
    assert cache.lengths[0] == anchor + 1  # speculative slots are rolled back
    return torch.stack(seen)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("architecture", TARGETS)
def test_unroll_equals_draft(tiny_model, variant, architecture):
    """On the same prefix training and drafting give the same q, at every slot, depth and document."""
    target, drafter = make(tiny_model, variant, architecture)
    batch, depths = packed([9, 6]), 4
    features = target.features(**batch)
    with torch.no_grad():
        steps = list(drafter.unroll(features, depths))
        logits = [drafter.head(step.hidden) for step in steps]
    drafter.freeze()  # as the runtime drafts
    assert [s.depth for s in steps] == list(range(depths))
    offset = 0
    for length in (9, 6):
        ids = batch["input_ids"][0, offset : offset + length]
        for anchor in range(length - 2):
            forced = torch.cat([ids[anchor + 2 :], torch.zeros(depths, dtype=torch.long)])
            got = draft_logits(target, drafter, ids, anchor, depths, forced)
            for step in steps:
                where = (step.anchor_index == offset + anchor).nonzero().flatten()
                assert len(where) == (anchor + step.depth + 2 < length)  # a term exists where its token does
                if len(where):
                    expected = logits[step.depth][where][0].softmax(-1)
                    torch.testing.assert_close(got[step.depth].softmax(-1), expected, atol=1e-5, rtol=1e-4)
                    assert step.target_index[where] == offset + anchor + step.depth + 1
        offset += length


@torch.no_grad()
def test_ragged_rows_draft_as_alone(tiny_model):
    """A row's drafts do not depend on its neighbours or their lengths."""
    target, drafter = make(tiny_model, VARIANTS["reduced"])
    lengths, k = [5, 9, 7], 3
    rows = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]

    def greedy(logits):
        return drafter.draft_to_target[logits.argmax(-1)]

    def run(chosen: list[int]) -> torch.Tensor:
        cache, width = RaggedCache(len(chosen), 64), max(lengths[i] for i in chosen) - 1
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        taps = torch.zeros(len(chosen), width, len(target.tap_layers) * target.hidden_size)
        for j, i in enumerate(chosen):
            n = lengths[i] - 1
            ids[j, :n], taps[j, :n] = rows[i][1:], target(rows[i][None, :-1])[0][0]
        return drafter.draft(cache, 0, len(chosen), ids, taps, None, [lengths[i] - 1 for i in chosen], k, greedy)

    together = run([0, 1, 2])
    for i in range(3):
        assert torch.equal(together[i], run([i])[0])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_export_reloads_to_the_same_outputs(tiny_model, tmp_path, variant):
    target, drafter = make(tiny_model, variant)
    export_drafter(drafter, tmp_path / "head", dtype=torch.float32, provenance={"recipe": "x"})
    again = load_drafter(tmp_path / "head", target)
    assert again.config == drafter.config
    features = target.features(**packed([9, 6]))
    with torch.no_grad():
        for a, b in zip(drafter.unroll(features, 3), again.unroll(features, 3)):
            torch.testing.assert_close(drafter.head(a.hidden), again.head(b.hidden), atol=1e-5, rtol=1e-4)
        again.train()  # products of its own for each projection again: now the very same numbers
        for a, b in zip(drafter.unroll(features, 3), again.unroll(features, 3)):
            assert torch.equal(drafter.head(a.hidden), again.head(b.hidden))
    assert not list(tmp_path.glob(".head*"))  # nothing temporary stays


def test_strict_reload_names_every_fault(tiny_model, tmp_path):
    """What vLLM swallows is refused here, by name."""
    target, drafter = make(tiny_model, VARIANTS["reduced"])
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")

    def broken(change) -> str:
        tensors = dict(weights)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_drafter(folder, target)
        return str(error.value)

    assert "norm.weight is missing" in broken(lambda t: t.pop("norm.weight"))
    assert "d2t is missing" in broken(lambda t: t.pop("d2t"))
    assert "fc.bias is unexpected" in broken(lambda t: t.update({"fc.bias": torch.zeros(3)}))
    assert "expected [40, 32]" in broken(lambda t: t.update({"lm_head.weight": torch.zeros(41, 32)}))
    assert "offsets" in broken(lambda t: t.update({"d2t": t["d2t"] + torch.arange(40)}))
    assert "not finite" in broken(lambda t: t.update({"norm.weight": torch.full((32,), float("nan"))}))
    both = broken(lambda t: (t.pop("norm.weight"), t.pop("fc.weight")))
    assert "fc.weight is missing" in both and "norm.weight is missing" in both


def test_wrong_target_pickles_and_foreign_folders_are_refused(tiny_model, tmp_path):
    target, drafter = make(tiny_model, {})
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    other = FrozenTarget(tiny_model("llama", vocab_size=77), [1, 2, 3])
    with pytest.raises(ConfigError, match="vocab_size is 101"):
        load_drafter(folder, other)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_drafter(folder, target)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "nowhere at all", target)


def test_failed_export_leaves_the_old_one(tiny_model, tmp_path, monkeypatch):
    _, drafter = make(tiny_model, {})
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr("speculators.export.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_drafter(drafter, folder, dtype=torch.float32)
    assert (folder / "model.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_published_heads_without_our_fields_are_read(tiny_model, tmp_path):
    """Public EAGLE-3 heads name no tap layers: the convention [2, n/2, n-3] of the paper's code is used."""
    _, drafter = make(tiny_model, {"tap_layers": default_tap_layers(3)})
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    for field in ("draftsmith", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "rope_parameters"):
        fields.pop(field)
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder, 3).tap_layers == tuple(default_tap_layers(3))
    assert default_tap_layers(32) == [2, 16, 29] and default_tap_layers(16) == [2, 8, 13]


def test_long_rows_recompute_to_the_same_gradient(tiny_model, monkeypatch):
    """Chunked attention with recomputation changes nothing but memory."""
    target, drafter = make(tiny_model, VARIANTS["reduced"])
    features = target.features(**packed([40, 25]))

    def gradients() -> list[torch.Tensor]:
        drafter.zero_grad()
        sum(drafter.head(s.hidden).float().logsumexp(-1).sum() for s in drafter.unroll(features, 3)).backward()
        return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]

    whole = gradients()
    monkeypatch.setattr("speculators.attention.RECOMPUTE_FROM", 8)
    monkeypatch.setattr("speculators.attention.unrolled_attention.__defaults__", (8,))
    for a, b in zip(whole, gradients()):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
