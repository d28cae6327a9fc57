"""scripts/bench_gpu.py: the work that it sets beside its times is the work that is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from scripts import bench_gpu, measuring, roofline

ROWS, LENGTH = 2, 32


LINEAR = {torch.ops.aten.mm, torch.ops.aten.addmm}


class Products(TorchDispatchMode):
    """Counts the FLOPs of products of matrices, by torch's own formulas. (FlopCounterMode follows
    modules, which gradients with respect to weights alone do not allow.)"""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.linear = 0  # of these, without attention, whose form differs from device to device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operation = func._overloadpacket
        if operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif operation in flop_registry:
            flops = flop_registry[operation](*args, **(kwargs or {}), out_val=out)
            self.flops += flops
            self.linear += flops if operation in LINEAR else 0
        return out


class CountedPhases(bench_gpu.Phases):
    """FLOPs by phase in place of seconds."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with Products() as products:
            yield
        self.spent[name] += products.linear


@pytest.mark.slow
@pytest.mark.parametrize("family", bench_gpu.TINY.heads)
def test_flops_of_a_step_by_shapes_are_those_that_are_counted(family, tmp_path, monkeypatch):
    """Those of attention apart; the ends of rows have no terms, hence the tolerance."""
    monkeypatch.setattr(roofline, "attention_flops", lambda pairs, width: 0)
    shapes = bench_gpu.TINY
    model = measuring.random_target(shapes.config, "cpu", shapes.dtype)
    model.config.save_pretrained(tmp_path)
    recipe = bench_gpu.recipe_for(family, shapes, ROWS, LENGTH, tmp_path)
    rows = bench_gpu.random_rows(model.vocab_size, LENGTH)
    trainer = measuring.make_trainer(recipe, model, rows, Accelerator(cpu=True), tmp_path)
    trainer.step(0.0)  # which probes once what the models can do
    phases = CountedPhases("cpu")
    phases.watch(trainer)
    _, counted = bench_gpu.timed_step(trainer, phases, "cpu")
    shape = bench_gpu.step_shape(family, shapes.heads[family], ROWS, LENGTH)
    work = bench_gpu.step_work(family, trainer, model.config, shape, itemsize=4)
    for phase in ("target", "head", "objective"):
        assert counted[phase] == pytest.approx(work[phase].flops, rel=0.12), phase
    assert counted["optimizer"] == work["optimizer"].flops == 0
    assert work["optimizer"].bytes == 28 * sum(p.numel() for p in trainer.parameters)


def test_attention_flops_are_those_that_are_counted():
    query = torch.randn(2, 4, 16, 8)
    with Products() as products:
        scaled_dot_product_attention(query, query, query)
    assert products.flops == roofline.attention_flops(2 * 16 * 16, 4 * 8)
    assert roofline.causal_pairs(2, 16) == 2 * sum(range(1, 17))


def test_bytes_of_a_round_are_the_weights_that_are_read_and_the_keys_and_values():
    shapes = bench_gpu.TINY
    model = measuring.random_target(shapes.config, "cpu", shapes.dtype)
    read = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    keys = 2 * 4 * 2 * 16 * 4 * 10  # keys and values, layers, heads, head_dim, bytes, tokens
    assert roofline.round_bytes(model, 10, 4) == read + keys
    head = torch.nn.Linear(8, 8, bias=False)
    assert roofline.round_bytes(model, 10, 4, head, 3) == read + keys + 3 * head.weight.nbytes


def test_bound_is_arithmetic_or_memory():
    rates = roofline.Rates(flops=100.0, bandwidth=10.0)
    assert roofline.Work(200.0, 10.0).seconds(rates) == 2.0
    assert roofline.Work(200.0, 50.0).seconds(rates) == 5.0


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("too large"), "out of memory"),
        (RuntimeError("no kernel\nfor [/this]"), "no kernel for \\[/this]"),
    ],
)
def test_step_that_fails_is_a_row_that_says_so(error, said):
    def work():
        raise error

    result = {"head": "mtp", "rows": "8 × 4,096", **bench_gpu.with_fault(work)}
    cells = bench_gpu.training_cells(result)
    assert len(cells) == len(bench_gpu.COLUMNS) and cells[2] == said


def test_file_has_the_steps_before_one_that_ends_the_process(tmp_path: Path, monkeypatch):
    def steps(*_):
        yield {"head": "eagle3", "rows": "1 × 64", "fault": "out of memory"}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "training_steps", steps)
    file = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        bench_gpu.main(device="cpu", repeats=1, json_file=file)
    assert [step["head"] for step in json.loads(file.read_text())["training"]] == ["eagle3"]


def test_phases_of_a_step_and_its_waits_are_its_time():
    phases = bench_gpu.Phases("cpu")
    phases.spent |= {"target": 1.0, "drafter": 3.0, "objective": 2.0, "optimizer": 0.5, "data": 0.1}
    parts = phases.read(5.0)
    assert parts == {"target": 1, "head": 1, "objective": 2, "optimizer": 0.5, "waits": 0.5}
    assert not phases.spent


@pytest.mark.slow
def test_bench_runs_on_a_cpu_and_its_tables_are_rows(tmp_path: Path):
    file = tmp_path / "gpu.json"
    bench_gpu.main(device="cpu", head=["eagle3", "dflash"], repeats=1, json_file=file)
    tree = json.loads(file.read_text())
    steps = tree["training"]
    assert [s["head"] for s in steps] == ["eagle3"] * 2 + ["dflash"] * 2
    for step in steps:
        assert set(step["bounds"]) == set(bench_gpu.PHASES)
        assert step["peak"] >= 0 < step["plan"]
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=0.05)
        assert len(bench_gpu.training_cells(step)) == len(bench_gpu.COLUMNS)
    ways = [(run["rounds"], run["drafting"]) for run in tree["decoding"]]
    assert ways == [(how, on) for how in ("eager", "compiled") for on in (False, True)]
    rates = SimpleNamespace(**tree["rates"])
    assert all(len(bench_gpu.decoding_cells(run, rates)) == 5 for run in tree["decoding"])
