"""Which parameters an optimizer gets, and that its state is kept whole."""

from __future__ import annotations

import pytest
import torch

from draftsmith.train.trainer.optimizers import (
    Together,
    implementation,
    load_optimizer_state,
    optimizer_state,
)
from tests.train.trainer.test_loop import make_recipe, make_trainer, weights

MUON = {"optimizer": "muon", "keep_features_gb": 1.0}


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON))
    assert isinstance(trainer.optimizer, Together)
    muon, adam = trainer.optimizer.optimizers
    by_id = {id(p): name for name, p in trainer.drafter.named_parameters()}
    of_muon = {by_id[id(p)] for p in muon.param_groups[0]["params"]}
    of_adam = {by_id[id(p)] for p in adam.param_groups[0]["params"]}
    assert "fc.weight" in of_muon and "layers.0.mlp.up_proj.weight" in of_muon
    assert "lm_head.weight" in of_adam and "norm.weight" in of_adam
    assert not of_muon & of_adam and of_muon | of_adam == set(by_id.values())


def test_every_group_follows_the_schedule_from_its_own_peak(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON, warmup_ratio=0.0))
    trainer.step(0.5)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    t = trainer.recipe.training
    assert rates == [0.5 * t.muon_learning_rate, 0.5 * t.learning_rate]


def test_muon_moves_a_matrix_equally_in_all_directions(tiny_model, tmp_path):
    """What it is chosen for: the singular values of an update are alike, those of the gradient are
    not."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON, warmup_ratio=0.0))
    before = trainer.drafter.fc.weight.detach().clone()
    trainer.step(0.0)
    values = torch.linalg.svdvals((trainer.drafter.fc.weight.detach() - before).float())
    assert values[0] / values[len(values) // 2] < 3


@pytest.mark.slow
def test_adamw_is_fused_and_goes_on_from_states_that_were_not(tiny_model, tmp_path):
    """To the same weights, but for rounding; the options of the optimizer that made the states stay
    behind."""
    recipe, found = make_recipe(steps=6), []
    for fused in (True, False):
        trainer = make_trainer(tiny_model, tmp_path / str(fused), recipe)
        assert all(group["fused"] for group in trainer.optimizer.param_groups)
        if not fused:
            for group in trainer.optimizer.param_groups:
                group["fused"] = None
        for _ in range(3):
            trainer.step(0.2)
        saved = optimizer_state(trainer.modules(), trainer.optimizer)
        again = make_trainer(tiny_model, tmp_path / f"{fused}, again", recipe)
        load_optimizer_state(again.modules(), again.optimizer, saved)
        again.drafter.load_state_dict(trainer.drafter.state_dict())
        again.state.step = 3
        again.step(0.5)
        assert all(group["fused"] for group in again.optimizer.param_groups)
        found.append(weights(again))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_adamw_is_not_fused_where_torch_cannot():
    parameters = [torch.nn.Parameter(torch.zeros(2, device="meta"))]
    assert implementation(parameters) == {"foreach": True}
    assert implementation([torch.nn.Parameter(torch.zeros(2))]) == {"fused": True}
