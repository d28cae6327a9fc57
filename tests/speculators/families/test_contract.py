"""What every family owes: training and drafting are the same maths, exports reload to it, the
runtime stays lossless.

Runs over the cases of conftest.py; what is special about a family is tested in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference import SamplingParams
from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.kv_cache.ragged_cache import RaggedCache
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.drafter import DraftInput
from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter, load_drafter, read_drafter_config
from draftsmith.speculators.export.inspection import inspect_folder
from draftsmith.speculators.registry import FAMILIES
from draftsmith.speculators.vocab.draft_vocab import to_target_ids
from tests.support.contract import (
    DEPTHS,
    World,
    all_logits,
    assert_ragged_rows_draft_as_alone,
    assert_unroll_equals_draft,
    packed,
    random_rows,
    read,
    trainer,
)
from tests.support.engines import make_llm


@pytest.mark.slow
def test_unroll_equals_draft(any_case, make_drafter, tiny_model) -> None:
    """On the same prefix training and drafting give the same q, at every slot, depth and
    document."""
    world = make_drafter(any_case, tiny_model(any_case.architecture))
    assert_unroll_equals_draft(world, packed([9, 6]))


def test_a_unit_of_depth_matters(world: World) -> None:
    """The power of the test above: depths and slots differ from one another."""
    target, drafter = world
    first, second, *_ = all_logits(drafter, target.features(**packed([9])))
    assert not torch.allclose(first[:-1], second, atol=1e-2)
    assert not torch.allclose(first[0], first[1], atol=1e-2)


def test_ragged_rows_draft_as_alone(world: World) -> None:
    """A row's drafts do not depend on its neighbours or their lengths."""
    assert_ragged_rows_draft_as_alone(world, random_rows(5, 9, 7))


@pytest.mark.slow
@torch.no_grad()
def test_steps_that_are_closed_leave_the_appended_slots_alone(world: World) -> None:
    """The next call drafts as if nothing had been drafted before."""
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
    for _ in range(2):
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
    """And without a word of ours in config.json, as other tools write it; nothing is wrong with
    it."""
    target, drafter = world
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    assert not list(tmp_path.glob(".head*"))  # nothing temporary stays
    features = target.features(**packed([9, 6]))
    before = all_logits(drafter, features)
    fields = json.loads((folder / "config.json").read_text())
    for written in (fields, {name: x for name, x in fields.items() if name != "draftsmith"}):
        (folder / "config.json").write_text(json.dumps(written))
        inspected = inspect_folder(folder, target)
        assert not inspected.faults and inspected.family == drafter.config.family
        assert inspected.parameters == sum(p.numel() for p in drafter.parameters())
        assert read_drafter_config(folder, target.num_layers) == inspected.config == drafter.config
        again = load_drafter(folder, target)
        for a, b in zip(before, all_logits(again, features)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    again.train()  # products of its own for each projection again: now the very same numbers
    again.eval()
    for a, b in zip(before, all_logits(again, features)):
        assert torch.equal(a, b)


@pytest.mark.slow
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

    def unnamed(said: str, names: Iterable[str], fault: str) -> list[str]:
        return [name for name in names if f"{name} {fault}" not in said]

    for gone in (sorted(weights.keys() - {"t2d"})[third::3] for third in range(3)):
        said = refused({name: tensor for name, tensor in weights.items() if name not in gone})
        assert unnamed(said, gone, "is missing") == []
    longer = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in whole.items()}
    assert unnamed(refused(weights | longer), whole, "has shape") == []
    broken = {name: tensor * float("nan") for name, tensor in whole.items()}
    assert unnamed(refused(weights | broken), whole, "holds values that are not finite") == []
    stray = next(iter(weights)).rsplit(".", 1)[0] + ".stray"
    assert f"{stray} is unexpected" in refused(weights | {stray: torch.zeros(3)})


# ---------------------------------------------------------------------- the runtime


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


@pytest.mark.slow
def test_training_lowers_the_loss_and_moves_every_parameter(
    case, make_drafter, tiny_model, tmp_path: Path
) -> None:
    run = trainer(make_drafter, case, tiny_model(case.architecture), tmp_path, steps=12)
    trained = {name: p for name, p in run.drafter.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    losses = [record["loss"] for record in run.run().history]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert [name for name, p in trained.items() if torch.equal(p, before[name])] == []
    assert not any(p.requires_grad for p in run.target.parameters())


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
    state = again.drafter.state_dict()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_every_family_has_a_case(all_cases) -> None:
    assert {case.family for case in all_cases.values()} == set(FAMILIES)
