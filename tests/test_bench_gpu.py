"""scripts/bench_gpu.py: the work that it sets beside its times is the work that is done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from scripts import bench, bench_gpu, measuring, roofline

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


PIECES = {
    "training eagle3 2 × 128": ("training", {"head": "eagle3", "rows": "2 × 128"}),
    "decoding compiled": ("decoding", {"rounds": "compiled"}),
    "training mtp 2 × 128": ("training", {"head": "mtp", "rows": "2 × 128"}),
}


def measured(
    tree: dict[str, Any], faults: dict[str, BaseException], names: Iterable[str] = PIECES
) -> list[str]:
    """Measures what `tree` lacks of these pieces, which are done at once or fail; the keys of those
    that were tried."""
    tried = []

    def work(key: str) -> list[dict[str, Any]]:
        tried.append(key)
        if key in faults:
            raise faults[key]
        return [{}]

    pieces = [bench_gpu.Piece(*PIECES[key], partial(work, key)) for key in names]
    with suppress(KeyboardInterrupt):
        list(bench_gpu.measure(pieces, tree, "cpu", print))
    return tried


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("too large"), "out of memory"),
        (RuntimeError("no kernel\nfor [/this]"), "no kernel for \\[/this]"),
    ],
)
def test_piece_that_fails_is_a_row_that_says_so(error, said):
    tree = {"training": [], "decoding": [], "rates": {"flops": 1.0, "bandwidth": 1.0}}
    faults = dict.fromkeys(PIECES, error)
    assert measured(tree, faults) == list(PIECES)
    assert {result["fault"] for result in tree["training"] + tree["decoding"]} == {said}
    rows = bench.gpu(tree)
    assert len(rows) == 5 and {len(row) for row in rows} == {len(bench_gpu.COLUMNS)}
    del tree["decoding"]  # as of a start that was cut
    assert bench.gpu(tree) == rows[:3]


def test_start_goes_on_where_the_last_was_cut_and_tries_what_failed_at_last():
    first, second, third = PIECES
    tree = {"training": [], "decoding": []}
    faults = {first: RuntimeError("no kernel"), third: KeyboardInterrupt()}
    assert measured(tree, faults) == [first, second, third]
    assert measured(tree, {}) == [third, first]
    assert measured(tree, {}) == []
    assert sorted(x["piece"] for x in tree["training"]) == sorted((first, third))
    assert not any("fault" in x for x in tree["training"])


def test_pieces_begin_with_a_step_and_decoding():
    rates = roofline.Rates(1.0, 1.0)
    for shapes in (bench_gpu.LARGE, bench_gpu.TINY):
        pieces = bench_gpu.all_pieces(shapes.heads, None, shapes, "cpu", 1, rates)
        assert [piece.kind for piece in pieces[:4]] == ["training", *["decoding"] * 2, "training"]
        assert len({piece.key for piece in pieces}) == len(shapes.heads) * len(shapes.steps) + 2


def test_device_that_an_error_has_ended_ends_the_start_behind_its_row(monkeypatch):
    tree = {"training": [], "decoding": []}
    monkeypatch.setattr(bench_gpu, "works_still", lambda device: False)
    with pytest.raises(SystemExit, match="start it again"):
        measured(tree, {key: RuntimeError("illegal address") for key in PIECES})
    assert [x["fault"] for x in tree["training"]] == ["illegal address"]
    monkeypatch.undo()
    assert measured(tree, {}) == [*list(PIECES)[1:], next(iter(PIECES))]


def test_phases_of_a_step_and_its_waits_are_its_time():
    phases = bench_gpu.Phases("cpu")
    phases.spent |= {"target": 1.0, "drafter": 3.0, "objective": 2.0, "optimizer": 0.5, "data": 0.1}
    parts = phases.read(5.0)
    assert parts == {"target": 1, "head": 1, "objective": 2, "optimizer": 0.5, "waits": 0.5}
    assert not phases.spent


@pytest.mark.slow
def test_bench_runs_on_a_cpu_goes_on_and_its_tables_are_rows(tmp_path: Path, monkeypatch):
    file = tmp_path / "gpu.json"
    steps = bench_gpu.timed_step
    counted = []

    def cut(*arguments):
        counted.append(arguments)
        layers = arguments[0].target.model.modules()
        assert sum(len(layer._forward_hooks) for layer in layers) <= 3  # a head's own taps
        if len(counted) == 4:  # a head's first shape has three
            raise KeyboardInterrupt
        return steps(*arguments)

    monkeypatch.setattr(bench_gpu, "timed_step", cut)
    with pytest.raises(KeyboardInterrupt):
        bench_gpu.main(device="cpu", head=["eagle3", "dflash"], repeats=1, json_file=file)
    tree = json.loads(file.read_text())
    assert len(tree["training"]) == 1
    ways = [(run["rounds"], run["drafting"]) for run in tree["decoding"]]
    assert ways == [(how, on) for how in ("compiled", "eager") for on in (False, True)]
    bench_gpu.main(device="cpu", head=["eagle3", "dflash"], repeats=1, json_file=file)
    assert len(counted) == 4 + 3 * 3
    earlier, tree = tree, json.loads(file.read_text())
    assert tree["training"][:1] == earlier["training"]
    assert tree["decoding"] == earlier["decoding"] and tree["rates"] == earlier["rates"]
    assert [s["head"] for s in tree["training"]] == ["eagle3", "dflash"] * 2
    for step in tree["training"]:
        assert set(step["bounds"]) == set(bench_gpu.PHASES)
        assert step["peak"] >= 0 < step["plan"]
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=0.05)
    rows = bench.gpu(tree)
    assert len(rows) == 1 + 4 + 1 + 4
    assert {len(row) for row in rows} == {len(bench_gpu.COLUMNS)}


def test_file_of_another_commit_or_machine_begins_anew(tmp_path: Path):
    file = tmp_path / "gpu.json"
    tree = {"machine": "a", "about": "b", "commit": "c", "training": []}
    earlier = tree | {"training": [{"piece": "x"}]}
    measuring.save_json(file, earlier)
    assert bench_gpu.begun(file, tree) == earlier
    for name in ("machine", "about", "commit"):
        assert bench_gpu.begun(file, tree | {name: "other"})["training"] == []
