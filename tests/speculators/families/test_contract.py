"""What every family owes: training and drafting are the same maths, the runtime stays
lossless. Exports are in test_formats.py.

Runs over the cases of tests/support; what is special about a family is tested in a file of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference import SamplingParams
from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.spec_decode.replay import ReplayResult
from draftsmith.speculators.errors import CheckpointError
from draftsmith.speculators.export import export_drafter, load_drafter
from draftsmith.speculators.registry import FAMILIES
from draftsmith.speculators.vocab.draft_vocab import to_target_ids
from draftsmith.train.trainer.trainer import Trainer
from tests.support.cases import BASE, CASES, World, make, world_of
from tests.support.contract import (
    DEPTHS,
    all_logits,
    assert_ragged_rows_draft_as_alone,
    assert_unroll_equals_draft,
    draft_input,
    draft_logits,
    packed,
    part,
    random_rows,
    trainer_of,
)
from tests.support.device_emulation import DEVICE
from tests.support.engines import make_llm
from tests.support.training import assert_equal, cut_off, make_rows, weights
from tests.support.wide_products import WideProducts


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_unroll_equals_draft(name) -> None:
    assert_unroll_equals_draft(world_of(name), packed([9, 6]))


def test_a_unit_of_depth_matters(world: World) -> None:
    """The power of the test above: depths and slots differ from one another."""
    target, drafter = world
    first, second, *_ = all_logits(drafter, target.features(**packed([9])))
    assert not torch.allclose(first[:-1], second, atol=1e-2)
    assert not torch.allclose(first[0], first[1], atol=1e-2)


def test_ragged_rows_draft_as_alone(world: World) -> None:
    assert_ragged_rows_draft_as_alone(world, random_rows(5, 9, 7))


@pytest.mark.parametrize("name", [name for name in CASES if "window" in name])
def test_slots_around_a_window_are_read_at_once_as_one_after_the_other(name) -> None:
    """The window may end in the piece that begins the text."""
    world = world_of(name)
    (ids,) = packed([12])["input_ids"][:, :12]
    for anchor in range(1, 9):
        at_once, later = (
            draft_logits(world, ids, anchor, 1, ids[anchor + 2 :], split) for split in (0, anchor)
        )
        torch.testing.assert_close(at_once.softmax(-1), later.softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_steps_that_are_closed_leave_the_appended_slots_alone(world: World) -> None:
    drafter, (text,) = world[1], random_rows(9)
    inputs = draft_input(world, [text])
    (slots,) = inputs.counts
    greedy = lambda logits: to_target_ids(logits.argmax(-1), drafter.draft_to_target)
    drafter.append(part(inputs, 0, 4))
    steps, token_ids = drafter.draft_steps(part(inputs, 4, 6), DEPTHS), None
    for _ in range(2):
        token_ids = greedy(steps.send(token_ids).logits)
    steps.close()
    held = list(inputs.cache.lengths)
    after = drafter.draft(part(inputs, 6, slots), DEPTHS, greedy)
    inputs.cache.truncate(0, 0)
    drafter.append(part(inputs, 0, 4))
    drafter.append(part(inputs, 4, 6))
    assert inputs.cache.lengths == held
    assert torch.equal(after, drafter.draft(part(inputs, 6, slots), DEPTHS, greedy))


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE.values())
def test_unroll_in_bfloat16_on_a_device_is_that_in_float32_rounded(claimed_gpu, name) -> None:
    """Of the target and of the head; no product is in float32."""
    target, drafter = world_of(name)
    batch = packed([9, 6])
    exact = target.features(**batch)
    exact_logits = all_logits(drafter, exact)
    target.to(torch.bfloat16).to(DEVICE)
    drafter.to(torch.bfloat16).to(DEVICE)
    with WideProducts() as wide:
        features = target.features(**{key: x.to(DEVICE) for key, x in batch.items()})
        logits = all_logits(drafter, features)
    assert wide.products > 10 and wide.shapes == []
    assert features.last_hidden.dtype == torch.bfloat16
    assert_rounded(features.last_hidden, exact.last_hidden)
    if exact.taps is not None:
        assert features.taps.dtype == torch.bfloat16
        assert_rounded(features.taps, exact.taps)
    for rounded, whole in zip(logits, exact_logits, strict=True):
        assert_rounded(rounded, whole)


def assert_rounded(rounded: torch.Tensor, exact: torch.Tensor) -> None:
    """bfloat16 has eight bits: a product of each layer is off by 0.4 %, and all of them by less
    than a tenth. Tokens that no selector chose are at -inf."""
    assert rounded.device == DEVICE
    actual = rounded.cpu().float()
    both = actual.isfinite() & exact.isfinite()
    assert both.sum() > 0.95 * exact.isfinite().sum()
    assert (actual - exact)[both].norm() < 0.1 * exact[both].norm()


# ---------------------------------------------------------------------- export


def test_a_thawed_drafter_gives_the_numbers_of_before(world: World) -> None:
    target, drafter = world
    features = target.features(**packed([9, 6]))
    before = all_logits(drafter, features)
    drafter.freeze().train().eval()
    for a, b in zip(before, all_logits(drafter, features)):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_every_missing_and_foreign_tensor_is_named(world: World, tmp_path: Path) -> None:
    target, drafter = world
    folder = export_drafter(drafter, tmp_path / "head", dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_drafter(folder, target)
        return str(error.value)

    stray = next(iter(stored)).rsplit(".", 1)[0] + ".stray"
    for third in range(3):  # the others say how the drafter is made
        gone = sorted(stored.keys() - {"t2d"})[third::3]
        left = {name: tensor for name, tensor in stored.items() if name not in gone}
        message = refused(left | {stray: torch.zeros(3)})
        assert f"{stray} is unexpected" in message
        assert all(f"{name} is missing" in message for name in gone)
    whole = {name: tensor for name, tensor in stored.items() if name not in ("t2d", "d2t")}
    message = refused(stored | {name: torch.cat([x, x[:1]]) for name, x in whole.items()})
    assert all(f"{name} has shape" in message for name in whole)
    message = refused(stored | {name: x * float("nan") for name, x in whole.items()})
    assert all(f"{name} holds values that are not finite" in message for name in whole)


# ---------------------------------------------------------------------- the runtime


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE.values())
def test_expected_acceptance_is_the_measured_one(name, tiny_model) -> None:
    model = tiny_model(CASES[name].architecture, max_position_embeddings=128)
    target, drafter = make(CASES[name], model)
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
@pytest.mark.parametrize("name", BASE.values())
def test_killed_and_started_again_ends_with_the_same_weights(
    name, tiny_model, tmp_path: Path
) -> None:
    def trainer(folder: str) -> Trainer:
        training = {"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "save_every": 2}
        training["preset"] = "published"
        model = tiny_model(CASES[name].architecture)
        return trainer_of(CASES[name], model, tmp_path / folder, make_rows(16), training=training)

    whole = trainer("whole")
    whole.run()
    cut_off(trainer("broken"), 3)
    again = trainer("broken")
    again.run()
    assert_equal(weights(whole), weights(again))


def test_every_family_has_a_case() -> None:
    assert set(BASE) == set(FAMILIES)
