"""What every family owes: training and drafting are the same maths, exports reload to it, the
runtime stays lossless.

Runs over the cases of conftest.py; what is special about a family is tested in a file of its own.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from inference import SamplingParams
from inference.evaluation.expected_acceptance import expected_acceptance
from inference.kv_cache.ragged_cache import RaggedCache
from inference.sampling.sampler import probabilities
from inference.spec_decode.replay import ReplayResult
from speculators.drafter import Drafter, DraftInput
from speculators.errors import CheckpointError
from speculators.export import export_drafter, load_drafter, read_drafter_config
from speculators.registry import FAMILIES, family_class
from speculators.target.frozen_target import FrozenTarget, TargetFeatures
from speculators.vocab.draft_vocab import to_target_ids
from tests.inference.modules import make_llm
from train.data.loss_mask import TokenRow
from train.data.packing import pack
from train.recipe.recipe import recipe_class
from train.trainer.trainer import Trainer

DEPTHS = 3
World = tuple[FrozenTarget, Drafter]


def packed(lengths: list[int], vocab: int = 100) -> dict[str, torch.Tensor]:
    """One packed row of documents of these lengths, and a padded tail."""
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(3, vocab, (sum(lengths) + 3,), generator=source)
    positions = torch.cat([torch.arange(n) for n in (*lengths, 3)])
    segments = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((3,), -1)]
    )
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "segment_ids": segments[None],
        "loss_mask": (segments >= 0)[None],
    }


def read(
    drafter: Drafter, taps: torch.Tensor | None, last: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    return taps if drafter.reads_taps else None, last if drafter.reads_last_hidden else None


@torch.no_grad()
def draft_logits(
    world: World, ids: torch.Tensor, anchor: int, k: int, forced: torch.Tensor
) -> torch.Tensor:
    """Draft logits [k, V_draft] of the runtime path for slot `anchor` of one document, forcing the
    drafted tokens."""
    target, drafter = world
    taps, last = target(ids[None, : anchor + 1])
    cache, seen, first = RaggedCache(1, 64), [], drafter.first_token
    slots = anchor + 2 - first  # up to the token after the anchor's

    def sample(logits):
        seen.append(logits[0])
        return forced[len(seen) - 1][None]

    split = anchor // 2  # two calls: an append, then append and draft
    for part, depth in ((slice(0, split), 0), (slice(split, slots), k)):
        count = part.stop - part.start
        if count:
            features = read(drafter, None if taps is None else taps[:, part], last[:, part])
            next_ids = ids[None, part.start + first : part.stop + first]
            inputs = DraftInput(cache, 0, 1, next_ids, *features, [count])
            drafter.draft(inputs, depth, sample) if depth else drafter.append(inputs)
    spelt = getattr(drafter, "token_map", None)
    held = (
        slots if spelt is None else len(spelt.opening_ids) + len(spelt.spell(ids[:slots].tolist()))
    )
    assert cache.lengths[0] == held  # speculative slots are rolled back
    return torch.stack(seen)


@torch.no_grad()
def all_logits(
    drafter: Drafter, features: TargetFeatures, depths: int = DEPTHS
) -> list[torch.Tensor]:
    return [drafter.head(step.hidden, step.depth) for step in drafter.unroll(features, depths)]


@pytest.mark.slow
def test_unroll_equals_draft(any_case, make_drafter, tiny_model) -> None:
    """On the same prefix training and drafting give the same q, at every slot, depth and
    document."""
    world = make_drafter(any_case, tiny_model(any_case.architecture))
    assert_unroll_equals_draft(world, packed([9, 6]))


def assert_unroll_equals_draft(
    world: World, batch: dict[str, torch.Tensor], drafted: Any = None
) -> None:
    """`drafted`: bool [V], the tokens that the drafter can draft; None: all. Terms behind others
    are passed over."""
    target, drafter = world
    features = target.features(**batch)
    with torch.no_grad():
        steps = list(drafter.unroll(features, DEPTHS))
    logits = all_logits(drafter, features)
    counts = drafter.count_terms(features, DEPTHS)
    assert counts.tolist() == [len(step.hidden) for step in steps]
    drafter.freeze()  # as the runtime drafts
    assert [s.depth for s in steps] == list(range(DEPTHS))
    offset = compared = 0
    for length in torch.bincount(batch["segment_ids"][batch["segment_ids"] >= 0]).tolist():
        ids = batch["input_ids"][0, offset : offset + length]
        for anchor in range(length - 2):
            forced = torch.cat([ids[anchor + 2 :], torch.zeros(DEPTHS, dtype=torch.long)])
            if drafted is not None:
                forced = torch.where(drafted[forced], forced, int(drafted.nonzero()[0]))
            got = draft_logits(world, ids, anchor, DEPTHS, forced)
            for step in steps:
                where = (step.anchor_index == offset + anchor).nonzero().flatten()
                assert len(where) == (
                    anchor + step.depth + 2 < length
                )  # a term exists where its token does
                before = ids[
                    anchor + 2 : anchor + 2 + step.depth
                ]  # the drafts this one stands behind
                if len(where) and torch.equal(before, forced[: len(before)]):
                    expected = logits[step.depth][where][0].softmax(-1)
                    torch.testing.assert_close(
                        got[step.depth].softmax(-1), expected, atol=1e-5, rtol=1e-4
                    )
                    assert step.target_index[where] == offset + anchor + step.depth + 1
                    compared += step.depth > 0
        offset += length
    assert compared > 5


def test_a_unit_of_depth_matters(world: World) -> None:
    """The power of the test above: depths and slots differ from one another."""
    target, drafter = world
    first, second, *_ = all_logits(drafter, target.features(**packed([9])))
    assert not torch.allclose(first[:-1], second, atol=1e-2)
    assert not torch.allclose(first[0], first[1], atol=1e-2)


def test_ragged_rows_draft_as_alone(world: World) -> None:
    """A row's drafts do not depend on its neighbours or their lengths."""
    lengths = [5, 9, 7]
    rows = [
        torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths
    ]
    assert_ragged_rows_draft_as_alone(world, rows)


@torch.no_grad()
def assert_ragged_rows_draft_as_alone(world: World, rows: list[torch.Tensor]) -> None:
    target, drafter = world
    lengths = [len(row) for row in rows]
    drafter.freeze()

    def greedy(logits):
        return to_target_ids(logits.argmax(-1), drafter.draft_to_target)

    def run(chosen: list[int]) -> torch.Tensor:
        cache, first = RaggedCache(len(chosen), 64), drafter.first_token
        width = max(lengths[i] for i in chosen) - first
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        taps = torch.zeros(len(chosen), width, len(target.tap_layers) * target.hidden_size)
        last = torch.zeros(len(chosen), width, target.hidden_size)
        for j, i in enumerate(chosen):
            n = lengths[i] - first
            seen, last[j, :n] = (None if f is None else f[0] for f in target(rows[i][None, :n]))
            ids[j, :n] = rows[i][first:]
            if seen is not None:
                taps[j, :n] = seen
        counts = [lengths[i] - first for i in chosen]
        inputs = DraftInput(cache, 0, len(chosen), ids, *read(drafter, taps, last), counts)
        return drafter.draft(inputs, DEPTHS, greedy)

    together = run(list(range(len(rows))))
    for i in range(len(rows)):
        assert torch.equal(together[i], run([i])[0])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("taken", [1, DEPTHS])
def test_steps_that_are_closed_leave_the_appended_slots_alone(world: World, taken: int) -> None:
    """At any depth, and the next call drafts as if nothing had been drafted before."""
    target, drafter = world
    ids, first, cache = packed([9])["input_ids"], drafter.first_token, RaggedCache(1, 64)
    taps, last = target(ids[:, : 9 - first])
    features = read(drafter, taps, last)

    def inputs(start: int, stop: int) -> DraftInput:
        part = [None if f is None else f[:, start:stop] for f in features]
        return DraftInput(cache, 0, 1, ids[:, first + start : first + stop], *part, [stop - start])

    def greedy(logits: torch.Tensor) -> torch.Tensor:
        return to_target_ids(logits.argmax(-1), drafter.draft_to_target)

    drafter.append(inputs(0, 4))
    steps, token_ids = drafter.draft_steps(inputs(4, 6), DEPTHS), None
    for _ in range(taken):
        token_ids = greedy(steps.send(token_ids).logits)
    steps.close()
    held = list(cache.lengths)
    after = drafter.draft(inputs(6, 9 - first), DEPTHS, greedy)
    cache.truncate(0, 0)
    drafter.append(inputs(0, 4))
    drafter.append(inputs(4, 6))
    assert cache.lengths == held
    assert torch.equal(after, drafter.draft(inputs(6, 9 - first), DEPTHS, greedy))


# ---------------------------------------------------------------------- export


def test_export_reloads_to_the_same_outputs(world: World, tmp_path: Path) -> None:
    target, drafter = world
    export_drafter(drafter, tmp_path / "head", dtype=torch.float32, provenance={"recipe": "x"})
    again = load_drafter(tmp_path / "head", target)
    assert again.config == drafter.config
    features = target.features(**packed([9, 6]))
    for a, b in zip(all_logits(drafter, features), all_logits(again, features)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    again.train()  # products of its own for each projection again: now the very same numbers
    again.eval()
    for a, b in zip(all_logits(drafter, features), all_logits(again, features)):
        assert torch.equal(a, b)
    assert not list(tmp_path.glob(".head*"))  # nothing temporary stays


def test_public_layout_is_read_back(world: World, tmp_path: Path) -> None:
    """Without a word of ours in config.json, as other tools write it, the folder is the same
    drafter."""
    target, drafter = world
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    fields = json.loads((folder / "config.json").read_text())
    del fields["draftsmith"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert read_drafter_config(folder, target.num_layers) == drafter.config
    again, features = load_drafter(folder, target), target.features(**packed([9, 6]))
    for a, b in zip(all_logits(drafter, features), all_logits(again, features)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_every_missing_and_foreign_tensor_is_named(world: World, tmp_path: Path) -> None:
    """What vLLM swallows is refused here."""
    target, drafter = world
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    whole = {name: tensor for name, tensor in weights.items() if name not in ("t2d", "d2t")}

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_drafter(folder, target)
        return str(error.value)

    for gone in (sorted(weights.keys() - {"t2d"})[third::3] for third in range(3)):
        said = refused({name: tensor for name, tensor in weights.items() if name not in gone})
        assert [name for name in gone if f"{name} is missing" not in said] == []
    said = refused(
        weights
        | {name: torch.zeros(len(tensor) + 1, *tensor.shape[1:]) for name, tensor in whole.items()}
    )
    assert [name for name in whole if f"{name} has shape" not in said] == []
    said = refused(weights | {name: tensor * float("nan") for name, tensor in whole.items()})
    assert [name for name in whole if f"{name} holds values that are not finite" not in said] == []
    stray = next(iter(weights)).rsplit(".", 1)[0] + ".stray"
    assert f"{stray} is unexpected" in refused(weights | {stray: torch.zeros(3)})


# ---------------------------------------------------------------------- the runtime


@pytest.mark.slow
def test_greedy_text_is_the_targets(any_case, make_drafter, tiny_model) -> None:
    model = tiny_model(any_case.architecture, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    _, drafter = make_drafter(any_case, model)
    prompts = [[3 + (i * i) % 90 for i in range(n)] for n in (9, 1, 30)]
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=DEPTHS, max_num_seqs=2)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    assert llm.get_metrics().num_drafts > 0


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], written: list[int]) -> None:
    """Each of 12 tokens is the target's choice after those before it."""
    chosen = model(torch.tensor([[*prompt, *written]])).logits[0].argmax(-1).tolist()
    assert len(written) == 12 and written == chosen[len(prompt) - 1 : -1]


PROMPT, VOCAB, WRITTEN, SAMPLES = [1, 3, 2, 0], 4, 3, 800  # of 64 texts


@pytest.mark.slow
def test_sampled_text_is_distributed_as_the_targets(case, make_drafter, tiny_model) -> None:
    """χ² of the joint of the first tokens under the token rule, against the target's exact
    probabilities."""
    few = {"draft_vocab_size": 3, "mask_token_id": 3, "selector_top_k": 2}
    shape = dict(case.shape) | {name: value for name, value in few.items() if name in case.shape}
    small = replace(case, shape=shape)
    model = tiny_model(case.architecture, vocab_size=VOCAB, max_position_embeddings=64)
    _, drafter = make_drafter(small, model)
    assert_distributed_as_the_target(model, drafter)


def assert_distributed_as_the_target(model: Any, drafter: Drafter) -> None:
    """`model` has VOCAB tokens."""
    model.generation_config.eos_token_id = None
    params = SamplingParams(
        temperature=1.5, max_tokens=WRITTEN, n=SAMPLES
    )  # so that no text is rare
    llm = make_llm(
        model,
        drafter=drafter.freeze(),
        num_speculative_tokens=2,
        seed=11,
        max_num_seqs=500,
        max_num_batched_tokens=8000,
    )
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, False)
    codes = torch.tensor([o.token_ids for o in output.outputs]) @ torch.tensor([VOCAB**2, VOCAB, 1])
    observed = torch.bincount(codes, minlength=VOCAB**WRITTEN).double()
    joint = torch.ones(1, dtype=torch.float64)
    for length in range(WRITTEN):
        prefixes = [[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=length)]
        with torch.no_grad():
            logits = model(torch.tensor(prefixes)).logits[:, -1]
        joint = (joint[:, None] * probabilities(logits, params).double()).flatten()
    expected = joint * SAMPLES
    rare = expected < 5
    counts = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, expected)]
    keep = counts[1] > 0
    statistic, freedom = (
        float(((counts[0] - counts[1])[keep] ** 2 / counts[1][keep]).sum()),
        int(keep.sum()) - 1,
    )
    assert freedom > 8
    tail = torch.special.gammaincc(
        torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()
    )
    assert float(tail) > 1e-5, (statistic, freedom)
    assert llm.get_metrics().num_accepted_tokens > 45


@pytest.mark.slow
def test_expected_acceptance_is_the_measured_one(case, make_drafter, tiny_model) -> None:
    """Replay of the drafted run's own greedy text counts exactly the rounds and the accepted drafts
    of the run."""
    model = tiny_model(case.architecture, max_position_embeddings=128)
    model.generation_config.eos_token_id = None
    target, drafter = make_drafter(case, model)
    llm = make_llm(model, drafter=drafter.freeze(), num_speculative_tokens=DEPTHS, max_num_seqs=2)
    asked = [{"prompt_token_ids": [3 + (i * i) % 90 for i in range(n)]} for n in (9, 4)]
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    texts = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    replayed = sum(expected_acceptance(target, drafter, texts, 0.0, DEPTHS), ReplayResult())
    metrics = llm.get_metrics()
    measured = 1 + metrics.num_accepted_tokens / metrics.num_drafts
    assert replayed.expected_acceptance_length == pytest.approx(measured, rel=0.02)


# ---------------------------------------------------------------------- the loop


def rows(count: int = 16, vocab: int = 100) -> list[Any]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = rng.integers(3, vocab, int(rng.integers(8, 24)))
        ids[1:] = (ids[:-1] * 7 + 3) % vocab  # something to learn
        found.append(TokenRow(ids, np.arange(len(ids)) >= 3))
    return pack(found, 48)


def trainer(make, case, model: Any, folder: Path, steps: int = 4, **sections: Any) -> Trainer:
    target, drafter = make(case, model, noise=0.0)
    recipe = recipe_class(case.family).model_validate(
        {
            "name": "t",
            "family": case.family,
            "target": {"model": "tiny"},
            "data": {"train": [{"path": "chats.jsonl"}], "max_length": 48},
            "drafter": {"unroll_steps": 4, **case.options},
            "training": {
                "steps": steps,
                "batch_size": 2,
                "learning_rate": 1e-2,
                "save_every": 2,
                "mixed_precision": "no",
            },
            **sections,
        }
    )
    torch.manual_seed(0)
    drafter.initialise_from(target, recipe.drafter)
    return Trainer(
        recipe,
        target,
        drafter,
        rows(),
        accelerator=Accelerator(cpu=True),
        folder=folder,
        fingerprint="a",
    )


@pytest.mark.slow
def test_training_lowers_the_loss_and_moves_every_parameter(
    case, make_drafter, tiny_model, tmp_path: Path
) -> None:
    run = trainer(make_drafter, case, tiny_model(case.architecture), tmp_path, steps=12)
    before = {
        name: p.detach().clone() for name, p in run.drafter.named_parameters() if p.requires_grad
    }
    history = run.run().history
    assert np.mean([r["loss"] for r in history[-3:]]) < np.mean([r["loss"] for r in history[:3]])
    still = [
        name
        for name, p in run.drafter.named_parameters()
        if name in before and torch.equal(p, before[name])
    ]
    assert not still
    assert all(p.requires_grad is False for p in run.target.parameters())


@pytest.mark.slow
def test_killed_and_started_again_ends_with_the_same_weights(
    case, make_drafter, tiny_model, tmp_path: Path
) -> None:
    model = tiny_model(case.architecture)
    whole = trainer(make_drafter, case, model, tmp_path / "whole")
    whole.run()
    broken = trainer(make_drafter, case, model, tmp_path / "broken")

    def die(share: float, note: str) -> None:
        if broken.state.step == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        broken.run(die)
    again = trainer(make_drafter, case, model, tmp_path / "broken")
    again.run()
    found = again.drafter.state_dict()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, found[name]), name


def test_every_family_has_a_case(all_cases) -> None:
    assert {case.family for case in all_cases.values()} == set(FAMILIES)
    for name in FAMILIES:
        cls = family_class(name)
        assert (
            cls.reads_taps or cls.reads_last_hidden or cls.first_token == 0
        )  # tokens alone, from the first one on
