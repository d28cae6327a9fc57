"""The plan: bytes are those that are allocated, FLOPs close to what torch counts, and
only what cannot fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.speculators.errors import DataError
from draftsmith.speculators.registry import family_class
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.planner import devices
from draftsmith.train.planner.describe import verdict
from draftsmith.train.planner.devices import DEVICES, device_called, this_cpu
from draftsmith.train.planner.plan import (
    active_parameters,
    forward_flops,
    make_plan,
    make_stage,
    short_budgets,
)
from draftsmith.train.planner.token_counts import TokenCount, count_tokens
from draftsmith.train.recipe.load import load_recipe, read
from draftsmith.train.recipe.recipe import make_recipe, yaml_text
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.joint_target import JointTarget
from draftsmith.train.trainer.optimizers import make_optimizers
from tests.support.cli import call, refused
from tests.support.errors import raises_at
from tests.support.memory import Peak, Saved
from tests.support.quickstart_data import source as quickstart
from tests.support.real_recipes import RECIPES, local_recipe
from tests.support.targets import save_target

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
def folder(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), head_dim=8)


def tree(folder: Path, family: str = "eagle3", **training) -> dict:
    return {
        "name": "tiny",
        "family": family,
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder)},
        "drafter": FAMILIES[family],
        "data": {"train": [quickstart("train", 30)], "max_length": 256},
        "training": {"steps": 10, "batch_size": 2} | training,
        "evaluation": {"num_speculative_tokens": 2},
    }


@pytest.fixture
def recipe_file(tmp_path, folder) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml_text(tree(folder) | {"output_dir": str(tmp_path / "run")}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, optimizer", [("eagle3", "adamw"), *((family, "muon") for family in FAMILIES)]
)
def test_bytes_held_are_exact(family, optimizer, folder, tmp_path):
    plan = make_stage(make_recipe(tree(folder, family, optimizer=optimizer)))
    target = FrozenTarget.from_pretrained(str(folder), tap_layers=plan.drafter.tap_layers)
    drafter = family_class(family)(plan.drafter).attach(target)
    drafter.initialise_from(target, plan.recipe.drafter)
    parameters = drafter.prepare_training(plan.recipe.drafter).trainable_parameters()
    optimizers = make_optimizers(drafter, plan.recipe.training)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    states: list[torch.Tensor] = []
    for optimizer in optimizers:
        optimizer.step()
        states += [t for values in optimizer.state.values() for t in values.values()]
    held = plan.held
    assert held["target's weights"] == sum(p.nbytes for p in target.parameters())
    assert held["gradients"] == sum(p.grad.nbytes for p in parameters)
    # AdamW's step counts aside
    assert plan.optimizer_bytes == sum(t.nbytes for t in states if t.ndim)
    checkpoint.save_best(tmp_path, drafter)
    saved = load_file(tmp_path / "best" / "drafter.safetensors").values()
    assert held["drafter's weights"] == sum(tensor.nbytes for tensor in saved)
    assert plan.disk["checkpoints"] == 3 * held["drafter's weights"] + 2 * plan.optimizer_bytes
    batch = torch.randint(5, 4096, (1, 7))
    features = target.features(batch, torch.arange(7)[None], torch.zeros_like(batch), batch > 0)
    read = [part for part in (features.taps, features.last_hidden) if part is not None]
    assert plan.feature_bytes * 7 == sum(part.nbytes for part in read)


SERVED = {"mode": "cache", "engine": "vllm", "endpoints": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("features", "trains", "writes"),
    [({}, True, False), ({"mode": "cache"}, False, True), (SERVED, False, False)],
    ids=["online", "cache", "servers"],
)
def test_a_target_counts_whole_where_it_is_loaded(folder, features, trains, writes):
    """Else its head alone, but for the few numbers of a norm."""
    sections = tree(folder) | {"features": features, "regenerate": {"enabled": False}}
    stage = make_stage(make_recipe(sections))
    head = sum(p.nbytes for p in TargetHead.from_pretrained(str(folder)).parameters())
    held = stage.held["target's weights"]
    assert held == stage.whole_target if trains else 0 <= head - held <= 4 * 64
    assert stage.written_with["target's weights"] == (stage.whole_target if writes else 0)


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (4, 4), (16, 8), (12, 12)])
def test_a_sharded_target_has_a_replica_on_each_host_if_hosts_are_alike(folder, count, shards):
    sharded = tree(folder)
    sharded["target"] = sharded["target"] | {"sharding": "fsdp"}
    whole = make_stage(make_recipe(tree(folder)), count=count).held["target's weights"]
    part = make_stage(make_recipe(sharded), count=count).held["target's weights"]
    assert part == whole // shards


@pytest.mark.slow
def test_a_target_that_is_trained_too_counts(folder):
    """The adapter exactly, and a backward pass through the target."""
    sections = tree(folder, "medusa")
    alone = make_stage(make_recipe(sections))
    joint = make_stage(make_recipe(sections | {"joint": {"r": 4}}))
    target = JointTarget(FrozenTarget.from_pretrained(str(folder)), joint.recipe.joint)
    assert joint.lora == sum(p.numel() for p in target.trainable_parameters())
    assert alone.lora == 0
    ids = torch.randint(5, 4096, (joint.step_rows.rows, joint.recipe.data.max_length))
    places = torch.arange(ids.shape[1]).expand_as(ids)
    batch = {"input_ids": ids, "position_ids": places, "segment_ids": torch.zeros_like(ids)}
    saved = Saved({p.data_ptr() for p in target.model.parameters()})
    with saved:
        target.features(batch | {"loss_mask": ids > 0})
    kept = joint.memory["activations of the target"]
    assert kept == pytest.approx(saved.bytes, rel=0.2)
    assert joint.phases[-2].flops == 2 * alone.phases[-2].flops
    assert joint.disk["trained target"] == joint.whole_target


FITTED = {
    "eagle": {},
    "eagle3": {"norm_before_residual": True},
    "peagle": {"norm_before_residual": True},
    "medusa": {"shared_lm_head": True},
    "dflash": {},
    "dspark": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FITTED)
def test_the_fit_of_a_start_counts(family, folder):
    changes = {"init": "least_squares"} | FITTED[family]
    sections = tree(folder, family)
    sections["drafter"] = sections["drafter"] | changes
    plan = make_stage(make_recipe(sections), [TokenCount("a", 100, 4000, 1000)])
    options = plan.recipe.drafter
    assert plan.start_terms == 1000, "fewer than it asks for"
    assert plan.fitted_with["features of the fit"] == 4000 * plan.feature_bytes
    target = FrozenTarget.from_pretrained(str(folder), tap_layers=plan.drafter.tap_layers)
    drafter = family_class(family)(plan.drafter).attach(target)
    ids = torch.randint(5, 4096, (12, 1, 128))
    places = torch.arange(128)[None]
    features = [target.features(i, places, torch.zeros_like(i), i > 0) for i in ids]
    terms = sum(int(drafter.count_terms(f, 1)[0]) for f in features)
    with Peak() as peak, FlopCounterMode(display=False) as counter:
        drafter.initialise_from(target, options, features=features)
    assert drafter.start_bytes(options, terms) == pytest.approx(peak.bytes, rel=0.15)
    # what the formula leaves out, attention above all, is much for states as narrow as these
    assert 0.4 < drafter.start_flops(options, terms) / counter.get_total_flops() < 1.1


def test_a_start_that_takes_more_than_the_training_is_what_a_plan_shows(folder):
    """Its attention heads are solved for together."""
    sections = tree(folder, "dflash")
    wide = {"num_attention_heads": 32, "num_key_value_heads": 4, "init": "least_squares"}
    sections["drafter"] = sections["drafter"] | wide | {"anchors_per_row": 8}
    plan = make_plan(make_recipe(sections))
    assert plan.memory["fit of the start"] > 3 * 4 * (32 * plan.stages[0].target.hidden_size) ** 2
    sections["drafter"] = sections["drafter"] | {"init": "taps"}
    assert "fit of the start" not in make_plan(make_recipe(sections)).memory


def test_a_fitted_start_takes_time_that_a_budget_of_minutes_pays(folder):
    sections = tree(folder, "eagle3", max_minutes=1)
    with_start = {"norm_before_residual": True, "init": "least_squares"}
    fitted = sections | {"drafter": sections["drafter"] | with_start}
    device = DEVICES["l4"]
    alone = make_plan(make_recipe(sections), device).stages[0]
    stage = make_plan(make_recipe(fitted), device).stages[0]
    seconds = stage.fitting_seconds(device)
    assert [phase.name for phase in stage.fitting] == ["features of the fit", "fit of the start"]
    assert seconds == sum(p.seconds(device, 1) for p in stage.fitting) > 0
    assert alone.fitting_seconds(device) == 0
    assert stage.seconds(device) == pytest.approx(alone.seconds(device) + seconds)
    share = stage.steps_within_minutes(device) / alone.steps_within_minutes(device)
    assert share == pytest.approx(1 - seconds / 60)
    short = fitted | {"training": {"max_minutes": 1e-6}}
    (warning,) = make_plan(make_recipe(short), device).warnings
    assert "that fit the start" in warning
    later = make_stage(make_recipe(fitted), stage.sources, first=False)
    assert not later.fitting, "it goes on with the drafter of the first stage"
    four = make_plan(make_recipe(fitted), device, count=4).stages[0]
    assert four.fitting_seconds(device) == pytest.approx(seconds), "each fits its own"


def test_forward_flops_are_those_that_torch_counts(folder):
    plan = make_stage(make_recipe(tree(folder)))
    target = FrozenTarget.from_pretrained(str(folder))
    target.model.set_attn_implementation("eager")  # whose products the counter knows
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.model(torch.zeros(1, 128, dtype=torch.long))
    # torch counts every score, masked ones too: twice the half that the formula takes
    expected = 128 * (2 * forward_flops(plan.target, 128) - forward_flops(plan.target, 0))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_active_parameters_of_a_mixture(tmp_path):
    """Qwen3-30B-A3B: 3.3 billion active with both embeddings, by its model card."""
    plan = make_stage(local_recipe(RECIPES / "qwen3-30b-a3b" / "eagle3.yaml", tmp_path))
    embedding = plan.target.vocab_size * plan.target.hidden_size
    assert (active_parameters(plan.target) + embedding) / 1e9 == pytest.approx(3.35, abs=0.05)


@pytest.mark.slow
def test_only_what_cannot_fit_is_refused(monkeypatch, recipe_file):
    held = sum(make_stage(load_recipe(recipe_file), device=torch.device("cuda")).held.values())
    for memory, code, word in ((held - 1, 1, "does not fit"), (held + 1, 0, "may not fit")):
        tiny = replace(DEVICES["l4"], memory=memory)
        monkeypatch.setitem(devices.DEVICES, "pocket", tiny)
        exit_code, output = call("plan", recipe_file, "--gpu", "pocket")
        assert (exit_code, word in output) == (code, True), output
    code, output = call("plan", recipe_file, "--gpu", "l4")
    assert code == 0 and "\nfits" in output
    assert not (recipe_file.parent / "run").exists()


@pytest.mark.slow
def test_time_grows_with_steps_and_falls_with_devices(folder):
    def likely(count: int = 1, **training) -> float:
        recipe = make_recipe(tree(folder, **training) | {"regenerate": {"enabled": False}})
        return make_plan(recipe, DEVICES["l4"], count).seconds

    assert likely(steps=20) == pytest.approx(2 * likely(steps=10))
    # rows are given to each device
    assert likely(2, batch_size=1) == pytest.approx(likely(1, batch_size=1))
    shared = dict(batch_size=2, global_batch_size=4)
    assert likely(2, **shared) == pytest.approx(likely(1, **shared) / 2)
    assert likely(steps=None, max_minutes=3) == pytest.approx(180)


def test_servers_take_no_time_of_the_trainer_and_have_to_keep_up_with_it(folder):
    def likely(**features):
        recipe = make_recipe(tree(folder, steps=10) | {"features": features})
        return make_plan(recipe, DEVICES["l4"])

    in_process, served = likely(), likely(**SERVED | {"mode": "online", "unread_gb": 3.0})
    (stage,) = served.stages
    features = in_process.stages[0].phases[-2]
    assert in_process.seconds - served.seconds == pytest.approx(features.seconds(DEVICES["l4"], 1))
    tokens = stage.step_rows.rows_per_step * stage.recipe.data.max_length
    rate = stage.states_per_second(DEVICES["l4"])
    assert rate * stage.step_seconds(DEVICES["l4"]) == pytest.approx(tokens)
    assert served.host["states under way or unread"] == 3e9
    cached = likely(**SERVED)
    assert cached.disk["features"] == cached.stages[0].feature_bytes * cached.stages[0].tokens


def test_unknown_devices_and_unknown_data(recipe_file, tmp_path):
    assert "--gpu abacus" in refused("plan", recipe_file, "--gpu", "abacus")
    of_no_device = make_plan(load_recipe(recipe_file))
    assert "--gpu" in verdict(of_no_device)
    assert of_no_device.fits and not of_no_device.warnings and of_no_device.seconds is None
    hub = read(recipe_file)
    hub["data"]["train"] = [{"name": "org/chats"}]
    hub["training"] = {"epochs": 1}
    recipe_file.write_text(yaml_text(hub))
    code, output = call("plan", recipe_file, "--gpu", "l4")
    assert code == 0 and "--examples" in output
    plan = make_plan(load_recipe(recipe_file), DEVICES["l4"], examples=1000)
    assert plan.seconds > 0 and "1,000 examples" in plan.assumptions[0]
    assert plan.assumptions[0].startswith("org/chats")


@pytest.mark.slow
def test_plan_of_this_cpu_measures_its_rates(recipe_file):
    """It plans for the dtypes of a CPU, and says what was measured."""
    cpu = this_cpu()
    assert min(cpu.float32, cpu.bfloat16, cpu.bandwidth) > 1e7
    plan = make_plan(load_recipe(recipe_file), cpu)
    assert plan.stages[0].device.type == "cpu" and plan.seconds > 0
    code, output = call("plan", recipe_file, "--gpu", "cpu")
    assert code == 0 and "measured" in output and "threads" in output


@pytest.mark.parametrize(
    "name, memory, key",
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100-80"),
        ("NVIDIA L40S", 47e9, "l40s"),
        ("NVIDIA L4", 24e9, "l4"),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx4090"),
    ],
)
def test_device_called_knows_the_names_of_drivers(name, memory, key):
    assert device_called(name, memory) is DEVICES[key]
    assert device_called("Tesla T4", 16e9) is None


@pytest.mark.slow
def test_minutes_that_hold_hardly_a_step_are_warned_of(folder):
    """Steps that the recipe itself bounds are as it wants them."""

    def warnings(**training) -> list[str]:
        recipe = make_recipe(tree(folder, **{"steps": None} | training))
        plan = make_plan(recipe, slow)
        return plan.warnings

    fast = make_plan(make_recipe(tree(folder)), DEVICES["l4"]).stages[0]
    factor = fast.step_seconds(DEVICES["l4"]) / 30
    slow = replace(DEVICES["l4"], share=DEVICES["l4"].share * factor)  # two steps a minute
    assert len(warnings(max_minutes=9.9)) == 1
    assert not warnings(max_minutes=10.1)
    assert not warnings(max_minutes=2.1, steps=4)
    assert len(warnings(max_minutes=1.9, steps=4)) == 1


def test_short_budgets_are_known_before_data_is_counted(folder, monkeypatch):
    monkeypatch.setattr("draftsmith.train.planner.plan.this_machine", lambda: DEVICES["l4"])
    bounds = {"steps": None, "max_minutes": 1e-6}
    data = {"train": [{"path": "nowhere.jsonl"}]}
    recipe = make_recipe(tree(folder, **bounds) | {"data": data})
    (warning,) = short_budgets(recipe, 1)
    assert "training.max_minutes" in warning and "training.batch_size" in warning
    assert not short_budgets(make_recipe(tree(folder)), 1)


def test_dry_run_names_the_start_that_the_recipe_has(recipe_file):
    fitted = ("drafter.init=least_squares", "drafter.norm_before_residual=true")
    assert "least_squares" in call("train", recipe_file, "--dry-run", *fitted)[1]
    assert "least_squares" not in call("train", recipe_file, "--dry-run")[1]


def test_plan_of_a_vocabulary_that_is_measured_is_of_all_tokens(recipe_file):
    output = call("train", recipe_file, "--dry-run", "drafter.draft_vocab_size=auto")[1]
    assert "as many of 4,096 tokens" in output


def test_dry_run_speaks_of_the_budget_that_the_recipe_has(recipe_file):
    options = ("training.steps=null", "training.max_minutes=7")
    output = call("train", recipe_file, "--dry-run", *options)[1]
    assert "7 min" in output and "epochs of" not in output


@pytest.mark.slow
def test_count_tokens_of_a_long_conversation_takes_an_earlier_turn(folder, tmp_path):
    """A run answers one where the last prompt leaves no room; a single prompt is left out."""
    turn = [{"role": "user", "content": "why " * 200}, {"role": "assistant", "content": "so " * 20}]
    path = tmp_path / "chats.jsonl"

    def counted(*turns: dict) -> TokenCount:
        path.write_text(json.dumps({"messages": turns}) + "\n")
        recipe = tree(folder) | {"data": {"train": [{"path": str(path)}], "max_length": 256}}
        (count,) = count_tokens(make_recipe(recipe | {"regenerate": {"max_new_tokens": 64}}))
        return count

    long = counted(*turn * 3)
    assert long.tokens == 256 and 0 < long.supervised <= 64
    assert counted({**turn[0], "content": "why " * 900}).tokens == 0


@pytest.mark.parametrize("rows", ["", "{\n[]\n"], ids=["empty", "bad"])
def test_count_tokens_of_a_source_without_examples_is_refused(rows, folder, tmp_path):
    """As by the training."""
    path = tmp_path / "chats.jsonl"
    path.write_text(rows)
    with raises_at(DataError, path):
        count_tokens(make_recipe(tree(folder) | {"data": {"train": [{"path": str(path)}]}}))


def test_count_tokens_of_all_turns_cuts_each_response_at_the_longest_that_is_written(
    folder, tmp_path
):
    question, answer = turn = [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "so " * 90},
    ]
    path = tmp_path / "chats.jsonl"
    talk = [*turn, question, answer | {"weight": 0}]  # which the target writes as well
    path.write_text(json.dumps({"messages": talk}) + "\n")

    def counted(longest: int, row: int = 512) -> TokenCount:
        recipe = tree(folder) | {"data": {"train": [{"path": str(path)}], "max_length": row}}
        section = {"turns": "all", "max_new_tokens": longest}
        (count,) = count_tokens(make_recipe(recipe | {"regenerate": section}))
        return count

    short, long = counted(16), counted(32)
    assert (short.supervised, long.supervised) == (2 * 16, 2 * 32)
    assert long.tokens - short.tokens == 2 * 16
    cut = counted(32, row=long.tokens - 10)
    assert (cut.tokens, cut.supervised) == (long.tokens - 10, long.supervised - 10)


@pytest.mark.slow
def test_minutes_hold_more_steps_where_features_are_kept(folder):
    """In the first epoch the target runs; the steps after it are the drafter's alone."""

    def steps(minutes: float, **training) -> float:
        bounds = {"steps": None, "max_minutes": minutes} | training
        stage = make_plan(make_recipe(tree(folder, **bounds)), device).stages[0]
        return stage.steps_within_minutes(device)

    device = DEVICES["l4"]
    stage = make_plan(make_recipe(tree(folder, steps=None, max_minutes=1)), device).stages[0]
    epoch = stage.tokens / (stage.step_rows.rows_per_step * stage.recipe.data.max_length)
    first = epoch * stage.step_seconds(device) / 60  # minutes
    later = epoch * stage.phases[-1].seconds(device, 1) / 60
    kept = {"keep_features_gb": 1.0}
    assert steps(first / 2, **kept) == pytest.approx(epoch / 2)
    assert steps(first + later, **kept) == pytest.approx(2 * epoch)
    assert steps(2 * first) == pytest.approx(2 * epoch)
    assert steps(2 * first, keep_features_gb=1e-9) == pytest.approx(2 * epoch)  # too little


@pytest.mark.slow
def test_stages_add_up(folder):
    recipe = tree(folder) | {"regenerate": {"enabled": False}}
    one = make_plan(make_recipe(recipe), DEVICES["l4"])
    stages = [{"name": "a"}, {"name": "b", "training": {"steps": 30}}]
    both = make_plan(make_recipe(recipe | {"stages": stages}), DEVICES["l4"])
    assert both.seconds == pytest.approx(4 * one.seconds)
    assert both.memory == one.memory
