"""Which parameters an optimizer gets, and at which rate."""

from __future__ import annotations

import torch

from draftsmith.train.trainer.optimizers import Muon, param_groups, set_found_inf
from tests.support.training import make_recipe, make_trainer

MUON = {"optimizer": "muon", "keep_features_gb": 1.0}


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON))
    muon, adam = trainer.optimizers
    by_id = {id(p): name for name, p in trainer.drafter.named_parameters()}
    of_muon = {by_id[id(p)] for p in muon.param_groups[0]["params"]}
    of_adam = {by_id[id(p)] for p in adam.param_groups[0]["params"]}
    assert "fc.weight" in of_muon and "layers.0.mlp.up_proj.weight" in of_muon
    assert "lm_head.weight" in of_adam and "norm.weight" in of_adam
    assert not of_muon & of_adam and of_muon | of_adam == set(by_id.values())


def test_muon_leaves_rows_and_columns_to_adamw(tiny_model, tmp_path):
    """Such as the confidence head of DSpark, [1, D]."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe("dspark", **MUON))
    rows = {p for p in trainer.parameters if p.ndim == 2 and min(p.shape) == 1}
    muon, adam = trainer.optimizers
    assert rows and rows <= set(adam.param_groups[0]["params"])
    assert not rows & set(muon.param_groups[0]["params"])


def test_muon_steps_as_torchs_does():
    """Where no step is left out; in its precision, which is bfloat16 within a step."""
    torch.manual_seed(0)
    for shape in ((4, 8), (8, 4), (64, 32)):
        weights = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
        settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
        optimizers = [torch.optim.Muon(weights[:1], **settings), Muon(weights[1:], **settings)]
        for _ in range(3):
            gradient = torch.randn(shape)
            for weight in weights:
                weight.grad = gradient.clone()
            set_found_inf(optimizers[1], torch.tensor(True))
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=0)


def test_every_group_follows_the_schedule_from_its_own_peak(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON, warmup_ratio=0.0))
    trainer.step(0.5)
    rates = [group["lr"] for group in param_groups(trainer.optimizers)]
    t = trainer.training
    assert rates == [0.5 * t.muon_learning_rate, 0.5 * t.learning_rate]


def test_muon_moves_a_matrix_equally_in_all_directions(tiny_model, tmp_path):
    """What it is chosen for: the singular values of an update are alike, those of the gradient are
    not."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(**MUON, warmup_ratio=0.0))
    before = trainer.drafter.fc.weight.detach().clone()
    trainer.step(0.0)
    values = torch.linalg.svdvals((trainer.drafter.fc.weight.detach() - before).float())
    assert values[0] / values[len(values) // 2] < 3
