"""The plan: counts are what torch counts, bytes what is allocated and written, and advice that is
given holds."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from inference.kv_cache.ragged_cache import RaggedCache
from speculators.export import export_drafter
from speculators.registry import family_class
from speculators.target.frozen_target import FrozenTarget
from tests.quickstart_data import source as quickstart
from tests.train.recipe.test_real_recipes import RECIPES, planned
from tests.train.test_cli import TOKENIZER, call, refused
from train.data.sources import load_sources
from train.planner import devices as hardware
from train.planner import rehearsal
from train.planner.devices import DEVICES, Device, Product, Range, Work, find_device
from train.planner.memory import checkpoint_bytes, disk, state_bytes, training_memory
from train.planner.outline import Outline, outline
from train.planner.phases import phases, suite_turns
from train.planner.plan import make_plan
from train.planner.token_counts import TokenCount, assumed
from train.recipe.load import load_recipe
from train.recipe.recipe import make_recipe
from train.recipe.sections import EvaluationSection
from train.trainer import checkpoint
from train.trainer.optimizers import make_optimizer, optimizers_in
from train.trainer.trainer import Trainer

FAMILIES = {
    "eagle": {"unroll_steps": 2},
    "eagle3": {"unroll_steps": 3, "draft_vocab_size": 64},
    "medusa": {"num_heads": 3, "unroll_steps": 3},
    "mlp": {"n_predict": 3, "unroll_steps": 3},
    "mtp": {"unroll_steps": 3},
    "draft_model": {"from_target": {"first": 2}},
    "peagle": {"num_depths": 4, "mask_token_id": 3, "draft_vocab_size": 64},
    "dflash": {"num_layers": 2, "block_size": 4, "mask_token_id": 3},
    "dflash2": {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "conv_group_size": 8},
    "dspark": {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "markov_rank": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model) -> Path:
    """A tiny target with a tokenizer."""
    import shutil

    path = tmp_path_factory.mktemp("target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, path)
    tiny_model(
        "qwen3", vocab_size=4096, max_position_embeddings=512, eos_token_id=2, head_dim=8
    ).save_pretrained(path)
    return path


def tree(folder: Path, family: str = "eagle3", **training) -> dict:
    return {
        "name": "tiny",
        "family": family,
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder)},
        "drafter": FAMILIES[family],
        "data": {
            "train": [quickstart("train", 30)],
            "validation": [quickstart("validation", 6)],
            "max_length": 256,
        },
        "training": {"steps": 10, "batch_size": 2} | training,
        "evaluation": {"num_speculative_tokens": 2},
    }


def made(outlined: Outline, folder: Path, family: str):
    """The drafter with weights, ready to train, and its target."""
    target = FrozenTarget.from_pretrained(str(folder), tap_layers=outlined.drafter.tap_layers)
    drafter = family_class(family)(outlined.drafter).attach(target)
    drafter.initialise_from(target, outlined.recipe.drafter)
    return drafter.prepare_training(outlined.recipe.drafter), target


ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)  # of which torch has no formula
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = flop_registry | {
    ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1],
    BACKWARD: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g.shape, q.shape, k.shape, v.shape
    ),
}


class Measured(TorchDispatchMode):
    """Operations of what really runs inside, and bytes of the tensors that are made there, at their
    peak. (torch's FlopCounterMode follows modules too, and cannot follow `autograd.grad` inside of
    a forward.)"""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.now, self.peak = 0, 0, 0
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        self.known = {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if formula := FORMULAS.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for t in tree_leaves(out):
            if (
                isinstance(t, torch.Tensor)
                and (key := t.untyped_storage()._cdata) not in self.known
            ):
                self.known.add(key)
                self.now += (size := t.untyped_storage().nbytes())
                weakref.finalize(t.untyped_storage(), self.gone, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_memory_is_the_step(family, folder, tmp_path):
    """The rehearsal has the operations and the peak of memory that torch counts in the step itself,
    with weights."""
    plan = outline(make_recipe(tree(folder, family, mixed_precision="no")), device="cpu")
    drafter, target = made(plan, folder, family)
    trainer = Trainer(
        plan.recipe,
        target,
        drafter,
        rehearsal.packed_rows(plan, 2),
        accelerator=Accelerator(cpu=True),
        folder=tmp_path,
    )
    trainer.chunk_size = plan.chunk_size
    trainer.module.train()
    if family == "draft_model":
        drafter.runner  # noqa: B018 (its probes would be counted)
    counted = rehearsal.step(plan, 2)
    with Measured() as real:
        features = replace(trainer.features.of(range(2)), seeds=trainer.step_rows.seeds(range(2)))
    assert counted["features"].work.flops == real.flops
    with Measured() as real:
        trainer._micro_step(features, torch.ones_like(trainer.depth_weights))
    assert (counted["drafter"].work + counted["loss"].work).flops == real.flops
    peak = max(counted[name].peak for name in ("drafter", "loss")) - counted["features"].kept
    assert peak == pytest.approx(real.peak, rel=0.1)


@pytest.mark.slow
def test_a_target_without_memory_is_the_target(any_architecture, tiny_model, tmp_path):
    """Packed rows and rounds over a cache have the operations that the model itself has, whatever
    its masks are."""
    tiny_model(any_architecture).save_pretrained(tmp_path)
    whole = tree(tmp_path, "medusa", mixed_precision="no")
    plan = outline(
        make_recipe(whole | {"data": whole["data"] | {"max_length": 24}}),
        counted=([], []),
        device="cpu",
    )
    target = FrozenTarget.from_pretrained(str(tmp_path))
    ids, segments = torch.ones(2, 24, dtype=torch.long), torch.arange(24).expand(2, 24) // 12
    plan.sources.append(TokenCount("", examples=4, rows=4, tokens=48, supervised=24))
    with Measured() as real:
        target.features(ids, segments * 0 + torch.arange(12).repeat(2), segments, segments >= 0)
    assert rehearsal.step(plan, 2)["features"].work.flops == real.flops > 0
    cache = RaggedCache(2, 2 * 21)
    cache.lengths[:] = [20, 19]
    with torch.no_grad(), Measured() as real:
        mask, places = cache.mask(0, 2, 1), cache.position_ids(0, 2, 1)
        target.logits(target(ids[:, :1], places, mask, cache.view(0, 2, 1))[1])
    counted, held = rehearsal.decode(plan, 2, 20, target.dtype)
    assert (counted.work.flops, held) == (real.flops, cache.bytes())


def test_active_parameters_of_a_mixture(tmp_path):
    """Qwen3-30B-A3B: 3.3 billion active with both embeddings, by its model card; a batch reads
    nearly all of them."""
    plan, _ = planned(RECIPES / "qwen3-30b-a3b" / "eagle3.yaml", tmp_path)
    t = plan.target
    one = rehearsal.prefill(plan, 1, 1, t.dtype).work
    embeddings = 2 * t.vocab_size * t.hidden_size
    assert (one.flops / 2 + embeddings) / 1e9 == pytest.approx(3.35, abs=0.05)
    many = rehearsal.prefill(plan, 8, 256, t.dtype).work
    moved = lambda work: sum(p.moved * n for p, n in work.products.items()) / 2e9
    assert moved(one) == pytest.approx(2.73, abs=0.1)
    assert moved(many) > 30.53 - embeddings / 1e9


# ------------------------------------------------------------------ bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, optimizer", [("eagle3", "adamw"), *((family, "muon") for family in FAMILIES)]
)
def test_exact_bytes(family, optimizer, folder, tmp_path):
    """Weights, gradients, optimizer states, the tensors of a checkpoint and of an export."""
    plan = outline(make_recipe(tree(folder, family, optimizer=optimizer)))
    drafter, target = made(plan, folder, family)
    assert plan.target.num_parameters * plan.target.dtype.itemsize == sum(
        p.nbytes for p in target.parameters()
    )
    parameters = drafter.trainable_parameters()
    made_optimizer = make_optimizer(drafter, plan.recipe.training)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    made_optimizer.step()
    assert sum(p.grad.nbytes for p in parameters) == 4 * plan.trainable
    states = [
        t
        for optimizer_part in optimizers_in(made_optimizer)
        for values in optimizer_part.state.values()
        for t in values.values()
        if torch.is_tensor(t)
    ]
    kept = rehearsal.update(plan)[1]
    assert kept == sum(t.nbytes for t in states)
    checkpoint.save_best(tmp_path, drafter)
    assert state_bytes(plan.head) == tensor_bytes(tmp_path / "best" / "drafter.safetensors")
    assert checkpoint_bytes(plan) == state_bytes(plan.head) + kept
    exported = export_drafter(drafter, tmp_path / "export", dtype=plan.target.dtype)
    written = sum(tensor_bytes(path) for path in exported.glob("*.safetensors"))
    assert disk(plan)["export"] == pytest.approx(written, rel=0.01)


def tensor_bytes(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118


# ------------------------------------------------------------------ time


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Outline:
    """Qwen3-8B with an EAGLE-3 head on 20,000 conversations."""
    plan, _ = planned(RECIPES / "qwen3-8b" / "eagle3.yaml", tmp_path_factory.mktemp("real"))
    sources = [
        assumed(c, s, plan.recipe, 20_000, None)
        for c, s in zip(plan.sources, plan.recipe.data.train)
    ]
    return replace(plan, sources=sources, device=torch.device("cuda"), known={})


def seconds(plan: Outline, device: str = "h100", count: int = 1) -> Range:
    steps = plan.steps(count)
    found = phases(plan, steps=steps, processes=count, around=True, report=True)
    return Range(*(sum(each) for each in zip(*(p.whole.seconds(DEVICES[device]) for p in found))))


def with_training(plan: Outline, **changes) -> Outline:
    section = plan.recipe.training.model_copy(update=changes)
    return replace(plan, recipe=plan.recipe.model_copy(update={"training": section}))


def with_length(plan: Outline, length: int) -> Outline:
    data = plan.recipe.data.model_copy(update={"max_length": length})
    return replace(plan, recipe=plan.recipe.model_copy(update={"data": data}))


@pytest.mark.slow
def test_more_of_anything_takes_more(real, tmp_path):
    """Memory and time of a step: rows, longer rows, a target of more layers."""

    def cost(plan: Outline) -> tuple[float, float]:
        step = sum(p.whole.seconds(DEVICES["h100"]).likely for p in phases(plan, steps=1))
        return step, training_memory(plan).total

    config = json.loads((Path(real.target.name_or_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 72}))
    deeper = real.recipe.model_copy(
        update={"target": real.recipe.target.model_copy(update={"model": str(tmp_path)})}
    )
    larger = outline(deeper, counted=(real.sources, real.validation), device="cuda")
    rows, length = real.recipe.training.batch_size, real.recipe.data.max_length
    for other in (with_training(real, batch_size=2 * rows), with_length(real, 2 * length), larger):
        assert all(more > less for more, less in zip(cost(other), cost(real), strict=True))
    low, likely, high = seconds(real)
    assert 0 < low < likely < high


@pytest.mark.slow
def test_more_devices_are_never_slower(real):
    times = [seconds(real, count=count).likely for count in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True) and times[1] > times[0] / 2
    assert (
        seconds(real, "h200").likely
        <= seconds(real, "h100").likely
        < seconds(real, "a100-80").likely
    )


def test_decoding_is_bound_by_weights_at_first_and_by_arithmetic_later(real):
    fast = replace(DEVICES["h100"], call_seconds=0.0)

    def round_seconds(rows: int) -> float:
        return rehearsal.decode(real, rows, 2, torch.bfloat16)[0].work.seconds(fast).likely

    assert round_seconds(8) < 1.1 * round_seconds(1)
    assert round_seconds(4096) > 1.8 * round_seconds(2048)


def test_work_scales_and_adds_up():
    one = Work(
        {Product(1e12, 1e9, torch.bfloat16): 3, Product(1e6, 1e9, torch.float32): 2}, 1e9, 100, 1e6
    )
    for device in (DEVICES["l4"], replace(DEVICES["l4"], kind="cpu")):
        twice = (one + one).seconds(device)
        assert twice == pytest.approx((one * 2).seconds(device))
        assert twice.likely == pytest.approx(2 * one.seconds(device).likely)


# ------------------------------------------------------------------ fitting, and what would fit


@pytest.fixture
def recipe_file(tmp_path, folder) -> Path:
    path = tmp_path / "tiny.yaml"
    fields = tree(folder, batch_size=16, keep_features_gb=0.5) | {
        "output_dir": str(tmp_path / "run")
    }
    fields["regenerate"] = {"batch_size": 64}
    path.write_text(yaml.safe_dump(fields))
    return path


def pocket(monkeypatch, recipe_file: Path, share: float) -> float:
    """A device with `share` of the memory that the recipe needs; returns what that is."""
    tiny = replace(DEVICES["l4"], name="pocket", context=0.0)
    needed = make_plan(load_recipe(recipe_file), tiny).needed
    monkeypatch.setitem(hardware.DEVICES, "pocket", replace(tiny, memory=share * needed))
    return needed


@pytest.mark.slow
def test_a_run_that_fits(monkeypatch, recipe_file):
    pocket(monkeypatch, recipe_file, 1.5)
    code, output = call("plan", recipe_file, "--gpu", "pocket", "--price-per-hour", "3")
    assert code == 0, output
    assert "fits:" in output and "in money" in output and "responses of the target" in output
    assert not (recipe_file.parent / "run").exists()
    code, output = call("plan", recipe_file, "--gpu", "pocket", "--json")
    told = json.loads(output)
    assert code == 0 and told["fits"] and told["cost"] is None and not told["advice"]
    assert told["seconds"]["likely"] == pytest.approx(sum(p["likely"] for p in told["phases"]))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.35])
def test_advice_holds(monkeypatch, recipe_file, share):
    """A run that does not fit is refused with exit code 1, and fits with every advice that is
    given."""
    pocket(monkeypatch, recipe_file, share)
    code, output = call("plan", recipe_file, "--gpu", "pocket")
    assert (
        code == 1 and "does not fit" in output and "most of all" in output and "would fit" in output
    )
    code, output = call("plan", recipe_file, "--gpu", "pocket", "--json")
    told = json.loads(output)
    assert code == 1 and not told["fits"] and told["advice"]
    for advice in told["advice"]:
        arguments = " ".join(advice["changes"]).split()
        device = [] if "--gpu" in arguments else ["--gpu", "pocket"]
        code, output = call("plan", recipe_file, *device, *arguments)
        assert code == 0, (advice, output)


@pytest.mark.slow
def test_unknown_devices_and_unknown_data(recipe_file, tmp_path, folder):
    assert "expected one of h100" in refused("plan", recipe_file, "--gpu", "abacus")
    assert "one device" in refused("plan", recipe_file, "--count", "2")
    hub = yaml.safe_load(recipe_file.read_text())
    hub["data"] = {"train": [{"name": "org/chats"}], "max_length": 256}
    hub["training"] = {"epochs": 1, "batch_size": 2}
    recipe_file.write_text(yaml.safe_dump(hub))
    code, output = call("plan", recipe_file, "--gpu", "l4", "--price-per-hour", "1")
    assert code == 0 and "give --examples" in output and "in money" not in output
    assert "Time of one step" in output
    code, output = call(
        "plan", recipe_file, "--gpu", "l4", "--examples", "5000", "--tokens", "120", "--json"
    )
    told = json.loads(output)
    assert code == 0 and told["steps"] == [pytest.approx(5000 * 120 / 512, rel=0.02)]
    assert any("5,000 examples of 120 tokens" in text for text in told["assumptions"])


@pytest.mark.slow
def test_a_budget_of_minutes_is_the_time_of_the_training(folder):
    recipe = make_recipe(
        tree(folder)
        | {
            "training": {"max_minutes": 3, "batch_size": 2},
            "regenerate": {"enabled": False},
        }
    )
    plan = make_plan(recipe, DEVICES["l4"])
    steps = (
        "features of the target",
        "drafter, forward and backward",
        "logits and loss",
        "optimizer",
    )
    training = sum(time.likely for name, time in plan.times if name in steps)
    assert training == pytest.approx(180, rel=0.02)


@pytest.mark.slow
def test_stages_add_up(folder):
    """Two stages of the same steps take about twice the training of one, and are measured once."""
    fields = tree(folder)
    one = make_plan(make_recipe(fields), DEVICES["l4"])
    two = make_plan(make_recipe(fields | {"stages": [{"name": "a"}, {"name": "b"}]}), DEVICES["l4"])
    names = [name for name, _ in two.times]
    assert "a: logits and loss" in names and "b: logits and loss" in names
    assert [name for name in names if "final" in name] == ["b: final measurement"]
    loss = dict(one.times)["logits and loss"].likely
    assert dict(two.times)["a: logits and loss"].likely == pytest.approx(loss)
    assert (
        two.disk["best weights"] == 2 * one.disk["best weights"]
        and two.disk["export"] == one.disk["export"]
    )


@pytest.mark.slow
def test_this_machine_is_measured():
    device = find_device("cpu")
    assert isinstance(device, Device) and device.kind == "cpu"
    assert (
        device.flops["float32"] > 1e8 and device.bandwidth > 1e8 and 0 < device.call_seconds < 1e-3
    )
    assert SimpleNamespace(**device.products._asdict()).low <= device.products.high


def test_a_mixture_is_counted_as_it_is_used(folder):
    """The largest that repeats nothing: the scarcer source is used up, the other as its share
    says."""
    whole = tree(folder, "medusa")
    whole["data"]["train"] = [
        quickstart("train", 40, split="train[30:]", share=0.25),
        quickstart("train", 30, share=0.75),
    ]
    plan = outline(make_recipe(whole))
    assert [source.examples for source in plan.sources] == [10, 30]
    assert len(load_sources(plan.recipe.data.train)) == 40


def test_turns_of_suites_are_counted(tmp_path):
    rows = [{"category": name, "turns": ["a"] * n} for name, n in (("x", 1), ("x", 3), ("y", 2))]
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"suites": {"mt_bench": str(tmp_path / "mt_bench.jsonl")}}
    assert suite_turns(EvaluationSection(**asked)) == {("mt_bench", "x"): 4, ("mt_bench", "y"): 2}
    one = EvaluationSection(**asked, suite_prompts=1)
    assert suite_turns(one) == {("mt_bench", "x"): 2, ("mt_bench", "y"): 2}
