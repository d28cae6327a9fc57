"""A training whose objective and layers are compiled, as a GPU does: what it learns is what an
eager one does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from draftsmith.speculators.target import frozen_target
from draftsmith.train.trainer import parallel, trainer
from tests.support.fused_kernels import compiled_on_a_cpu
from tests.support.models import make_tiny_model
from tests.support.training import make_recipe, make_trainer, weights


def losses_and_weights(folder, layers, **training):
    """Of three steps of an EAGLE-3 head; rows and their terms differ from step to step."""
    drafter = {"unroll_steps": 3, "draft_vocab_size": 60, "tap_layers": [1, 2, 3]}
    drafter |= {"num_layers": layers}
    recipe = make_recipe("eagle3", drafter=drafter, steps=3, save_every=3, **training)
    trained = make_trainer(make_tiny_model, folder, recipe)
    trained.loss.chunk_size = 50  # so that chunks differ in their rows
    state = trained.run()
    return [record["loss"] for record in state.history], weights(trained)


def sharded(monkeypatch):
    """FSDP2 in a world of one process."""
    monkeypatch.setattr(parallel, "wants_shards", lambda accelerator: True)


def replicated(monkeypatch):
    """DDP in a world of one process."""
    monkeypatch.setattr(trainer, "make_replica", parallel.Replicated)


@pytest.mark.slow
def test_a_compiled_training_learns_what_an_eager_one_does(tmp_path, monkeypatch):
    """Where layers are computed again in the backward pass, too."""
    how = {"layers": 2, "activation_checkpointing": True}
    losses, expected = losses_and_weights(tmp_path / "eager", **how)
    with compiled_on_a_cpu(monkeypatch) as graphs:
        compiled, learned = losses_and_weights(tmp_path / "compiled", **how)
    assert compiled == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(learned, expected, rtol=1e-3, atol=1e-3)
    # 8 of the objective at most, 8 of what lies before and after the attention of either layer
    assert len(graphs) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("world", [sharded, replicated])
def test_compiled_layers_learn_the_same_sharded_and_replicated(tmp_path, monkeypatch, world):
    losses, expected = losses_and_weights(tmp_path / "eager", layers=1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    world(monkeypatch)
    try:
        with compiled_on_a_cpu(monkeypatch, parts=["layers"]) as graphs:
            compiled, learned = losses_and_weights(tmp_path / "compiled", layers=1)
    finally:
        torch.distributed.destroy_process_group()
    assert compiled == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(learned, expected, rtol=1e-3, atol=1e-3)
    assert 0 < len(graphs) <= 8


def test_draft_model_whose_layers_are_computed_again_learns_the_same(tmp_path, monkeypatch):
    """Of rows without masks, whose texts the layers find in what surrounds a forward: a backward
    pass comes later, and on a GPU from another thread."""
    monkeypatch.setattr(frozen_target, "LONG_ROW", 8)
    learned = {}
    for again in (False, True):
        drafter = {"from_target": {"last": 1}}
        recipe = make_recipe(
            "draft_model", drafter=drafter, steps=2, save_every=2, activation_checkpointing=again
        )
        trained = make_trainer(make_tiny_model, tmp_path / str(again), recipe)
        if again:
            in_another_thread(monkeypatch)
        trained.run()
        learned[again] = weights(trained)
    torch.testing.assert_close(learned[True], learned[False])


def in_another_thread(monkeypatch) -> None:
    """Backward passes run there, as those of a GPU do."""
    backward = torch.Tensor.backward

    def run(tensor: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(backward, tensor).result()

    monkeypatch.setattr(torch.Tensor, "backward", run)
