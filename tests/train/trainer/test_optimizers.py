"""Which parameters an optimizer gets, and at which rate."""

from __future__ import annotations

import pytest
import torch

from draftsmith.train.trainer import optimizers
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


@pytest.mark.parametrize(("has_bfloat16", "tolerance"), [(True, 1e-5), (False, 2e-3)])
def test_muon_steps_as_torchs_does(has_bfloat16, tolerance, monkeypatch):
    """Where no step is left out; in its precision, which is bfloat16 within a step, or in float32
    where a CPU has no instructions for that. Matrices of one shape, which are stepped together,
    included."""
    monkeypatch.setattr(optimizers, "multiplies_bfloat16", lambda device: has_bfloat16)
    torch.manual_seed(0)
    shapes = ((4, 8), (8, 4), (4, 8), (64, 32), (4, 8), (64, 32))
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    theirs, ours = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    both = [torch.optim.Muon(theirs, **settings), Muon(ours, **settings)]
    for _ in range(3):
        for pair in zip(theirs, ours, strict=True):
            gradient = torch.randn(pair[0].shape)
            for weight in pair:
                weight.grad = gradient.clone()
        set_found_inf(both[1], torch.tensor(True))
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def test_muon_leaves_matrices_of_one_shape_as_they_are_where_a_gradient_is_not_finite():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    muon = Muon(weights, lr=0.02, momentum=0.95, weight_decay=0.1)
    for finite in (True, False):
        for weight in weights:
            weight.grad = torch.randn(4, 8)
        if not finite:
            weights[1].grad[0, 0] = torch.nan
        before = [w.detach().clone() for w in weights]
        momenta = [state["momentum_buffer"].clone() for state in muon.state.values()]
        set_found_inf(muon, torch.tensor(finite))
        muon.step()
        changed = [not torch.equal(w, old) for w, old in zip(weights, before, strict=True)]
        assert changed == [finite] * 3
    after = [state["momentum_buffer"] for state in muon.state.values()]
    torch.testing.assert_close(after, momenta, atol=1e-6, rtol=1e-6)


def test_muon_steps_small_matrices_of_one_shape_together(monkeypatch):
    monkeypatch.setattr(optimizers, "BATCH", 64)
    matrices = [torch.zeros(shape) for shape in ((4, 8), (8, 4), (4, 8), (4, 8), (16, 16))]
    batches = [[list(p.shape) for p in batch] for batch in optimizers.in_batches(matrices)]
    assert batches == [[[4, 8], [4, 8]], [[8, 4]], [[4, 8]], [[16, 16]]]


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
