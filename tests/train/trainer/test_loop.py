"""The loop: resumable to the bit, normalised over all valid terms, safe to stop at any moment."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftsmith.speculators.errors import CheckpointError, ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.losses.divergences import DIVERGENCES
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer import trainer as module
from draftsmith.train.trainer.batches import StepRows
from draftsmith.train.trainer.checkpoint import TrainState
from draftsmith.train.trainer.optimizers import learning_rate
from draftsmith.train.trainer.pace import FEW_STEPS, first_step_warning, pace_warning
from draftsmith.train.trainer.step_records import EXPECTED, Unread, flat
from draftsmith.train.trainer.trainer import MAX_SKIPPED, Diverged, Interrupted, Trainer
from tests.support.disks import full_disk
from tests.support.errors import raises_at
from tests.support.training import assert_equal, cut_off, make_recipe, make_trainer, weights


def test_loss_falls_and_records_are_complete(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(steps=25))
    state = trainer.run()
    first, last = state.history[0], state.history[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert len(first["acceptance_rate"]) == 3 and 1 <= first["in_loop_acceptance_length"] <= 4
    assert state.step == 25 and [r["step"] for r in state.history] == list(range(1, 26))


def test_record_of_a_step_has_the_rates_of_its_terms_and_no_number_that_json_lacks():
    """Of two depths: three of four drafts accepted and two right, and none at all."""
    numbers = torch.tensor([3, 0, 2, 0, 10, 4, 0.5, 20, 12, 4, 0, math.inf]).double()
    record, tokens = Unread({"step": 7, "learning_rate": 0.1}, numbers).read(2)
    assert tokens == [20, 12]
    assert record == {
        "step": 7,
        "loss": 0.5,
        "learning_rate": 0.1,
        "grad_norm": None,
        "acceptance_rate": [0.75, 0],
        "top1_agreement": [0.5, 0],
        "in_loop_acceptance_length": 2.5,
        "terms": 4,
        "supervised_tokens": 12,
        "skipped": 1,
    }
    tracked = flat(record)
    assert (tracked["acceptance_rate/0"], tracked["terms"]) == (0.75, 4)
    assert not tracked.keys() & {"step", "grad_norm", "acceptance_rate"}
    numbers[5] = 0  # no anchor
    assert Unread({"step": 7}, numbers).read(2)[0]["in_loop_acceptance_length"] == 1


@pytest.mark.parametrize("optimizer, stop_after", [("adamw", 1), ("adamw", 4), ("muon", 5)])
@pytest.mark.slow
def test_killed_anywhere_ends_with_the_same_weights(tiny_model, tmp_path, optimizer, stop_after):
    """A run that dies after any step and is started again ends bit for bit like one that was left
    alone; so does one that is asked to stop, which saves itself first."""
    recipe = make_recipe(optimizer=optimizer)
    whole = make_trainer(tiny_model, tmp_path / "whole", recipe)
    whole.run()
    cut_off(make_trainer(tiny_model, tmp_path / "broken", recipe), stop_after)
    asked = make_trainer(tiny_model, tmp_path / "broken", recipe)
    with pytest.raises(Interrupted):
        asked.run(lambda share, note: os.kill(os.getpid(), signal.SIGTERM))
    newest = checkpoint.latest(tmp_path / "broken")
    assert newest == checkpoint.step_folder(tmp_path / "broken", asked.state.step)
    again = make_trainer(tiny_model, tmp_path / "broken", recipe)
    state = again.run()
    assert_equal(weights(whole), weights(again))
    assert [r["step"] for r in state.history] == list(range(1, 9))
    assert [r["loss"] for r in state.history] == [r["loss"] for r in whole.state.history]


def test_dropout_of_a_step_follows_from_its_rows_alone(tiny_model, tmp_path):
    losses = []
    for seed in (0, 1):
        target = FrozenTarget(copy.deepcopy(tiny_model("llama", attention_dropout=0.5)))
        recipe = make_recipe("draft_model")
        trainer = make_trainer(tiny_model, tmp_path / str(seed), recipe, target=target)
        torch.manual_seed(seed)
        losses.append(trainer.step(0.0).numbers)
    assert torch.equal(*losses)


def test_checkpoint_of_other_rows_a_step_is_refused(tiny_model, tmp_path):
    """As of more processes: so many steps would be another share of the data."""
    make_trainer(tiny_model, tmp_path, make_recipe(steps=1)).run()
    again = make_trainer(tiny_model, tmp_path, make_recipe(steps=1))
    again.step_rows.rows_per_step *= 2
    with raises_at(CheckpointError, f"{checkpoint.step_folder(tmp_path, 1)}"):
        again.run()


def test_stop_signal_that_a_launcher_sends_again_is_one_request(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe())

    def twice(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        trainer.run(twice)
    saved = checkpoint.latest(tmp_path)
    assert saved == checkpoint.step_folder(tmp_path, trainer.state.step)
    monkeypatch.setattr(module, "SAME_REQUEST", 0.0)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tiny_model, tmp_path, make_recipe()).run(twice)


@pytest.mark.parametrize(
    "sizes, processes, rows",
    [
        ({"batch_size": 2, "gradient_accumulation_steps": 3}, 2, 2),
        ({"batch_size": 4, "global_batch_size": 24}, 4, 3),
        ({"batch_size": 8, "global_batch_size": 12}, 2, 6),
    ],
)
def test_steps_of_all_processes_read_every_place_once_in_the_largest_even_batches(
    sizes, processes, rows
):
    training = make_recipe(**sizes).training
    parts = [StepRows(training, process, processes) for process in range(processes)]
    read = []
    for step in range(3):
        of_processes = [part.of(step) for part in parts]
        assert len(set(map(len, of_processes))) == 1
        batches = [micro for of_process in of_processes for micro in of_process]
        assert {len(micro.places) for micro in batches} == {rows}
        begin = len(read)
        for micro in batches:
            assert micro.number == (micro.places.start - begin) // training.batch_size
        read += sorted(place for micro in batches for place in micro.places)
    assert read == list(range(3 * parts[0].rows_per_step))
    assert parts[0].rows_per_step == sizes.get("global_batch_size", 12)
    if "global_batch_size" in sizes:
        with raises_at(ConfigError, "training.global_batch_size"):
            StepRows(training, 0, 7)


def test_accumulation_equals_one_large_batch(tiny_model, tmp_path):
    """Two micro-batches of two rows give the gradient of one batch of four: every valid term counts
    once."""
    gradients = []
    for sizes in ({"batch_size": 4}, {"batch_size": 2, "gradient_accumulation_steps": 2}):
        trainer = make_trainer(tiny_model, tmp_path, make_recipe(**sizes))
        (optimizer,) = trainer.optimizers
        optimizer.step = lambda: None  # look at the gradient, not at what Adam makes of its sign
        optimizer.zero_grad = lambda set_to_none: None
        record, _ = trainer.step(0.5).read(trainer.loss.depths)
        gradients.append(
            [record["loss"], record["grad_norm"], *(p.grad.clone() for p in trainer.parameters)]
        )
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_best_is_kept_by_held_out_value(tiny_model, tmp_path):
    values = iter([1.0, 3.0, float("nan"), 2.5])
    recipe = make_recipe(eval_every=2)
    trainer = make_trainer(
        tiny_model, tmp_path, recipe, evaluate=lambda d: {EXPECTED: next(values)}
    )
    seen = {}
    state = trainer.run(lambda share, note: seen.__setitem__(trainer.state.step, weights(trainer)))
    assert (state.best_value, state.best_step) == (3.0, 4)
    trainer.load_best()
    assert_equal(weights(trainer), seen[4])


@pytest.mark.parametrize("total_steps", [1, 10, None])
def test_the_warm_up_rises_and_never_passes_the_peak(total_steps):
    """Whatever the budget: shares of few steps, or of time (None), in which a step may be a large
    part of a run."""
    for warmup_ratio in (0.02, 0.5, 1.0):
        training = make_recipe(warmup_ratio=warmup_ratio, learning_rate=1.0).training
        shares = [s / 1000 for s in range(1001)]
        rates = [learning_rate(training, share, total_steps) for share in shares]
        assert 0 < rates[0] and max(rates) <= 1.0 and rates[-1] in (0.0, 1.0)
        warm = [rate for share, rate in zip(shares, rates) if share <= warmup_ratio]
        assert warm == sorted(warm)
        assert rates[1 + len(warm) :] == sorted(rates[1 + len(warm) :], reverse=True)


def test_the_warm_up_begins_behind_a_start_that_took_time():
    """Or a fitted start would be overrun at the full rate."""
    training = make_recipe(warmup_ratio=0.1, learning_rate=1.0).training
    shares = [0.3 + s / 1000 for s in range(701)]
    rates = [learning_rate(training, share, None, begun=0.3) for share in shares]
    assert rates[0] < 0.02 and rates[100] == 1.0 and rates[-1] == 0.0
    assert rates[:101] == sorted(rates[:101]) and rates[100:] == sorted(rates[100:], reverse=True)


def overflow(trainer: Trainer, monkeypatch, *steps: int) -> None:
    """One element of one gradient is infinite in each of these steps."""
    real = trainer.replica.fill_gradients

    def summed(parameters):
        real(parameters)
        if trainer.state.step + 1 in steps:
            parameters[0].grad.view(-1)[0] = float("inf")

    monkeypatch.setattr(trainer.replica, "fill_gradients", summed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_whose_gradients_are_not_finite_changes_nothing(
    tiny_model, tmp_path, monkeypatch, optimizer
):
    """Neither weights, nor moments, nor the optimizer's count of steps."""
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(optimizer=optimizer))
    overflow(trainer, monkeypatch, 3, 5, 6)
    seen = {}

    def look(share, note):
        states = [part.state_dict()["state"] for part in trainer.optimizers]
        seen[trainer.state.step] = copy.deepcopy(
            weights(trainer)
            | {
                f"{part}.{number}.{name}": tensor
                for part, state in enumerate(states)
                for number, values in state.items()
                for name, tensor in values.items()
            }
        )

    state = trainer.run(look)
    assert [r["step"] for r in state.history if r.get("skipped")] == [3, 5, 6]
    for step in (3, 5, 6):
        assert_equal(seen[step - 1], seen[step])
    adam = len(trainer.optimizers) - 1
    for name in ("fc.weight", f"{adam}.0.step"):
        assert not torch.equal(seen[6][name], seen[7][name])
    assert json.loads((checkpoint.latest(tmp_path) / "state.json").read_text())["skipped"] == 3


def test_clip_gradients_not_finite_in_a_row_stops_the_run(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(
        tiny_model, tmp_path, make_recipe(eval_every=2), evaluate=lambda d: {EXPECTED: 1.5}
    )
    overflow(trainer, monkeypatch, *range(4, 4 + MAX_SKIPPED))
    with raises_at(Diverged, "training"):
        trainer.run()
    assert trainer.state.best_step == 2 and checkpoint.latest(tmp_path).name == "step-00000004"


def test_checkpoint_without_room_is_an_error_of_the_disk_and_keeps_those_before(
    tiny_model, tmp_path
):
    trainer = make_trainer(
        tiny_model, tmp_path, make_recipe(steps=2), evaluate=lambda d: {EXPECTED: 1.5}
    )
    trainer.run()
    before = sorted(path for path in tmp_path.rglob("*"))
    trainer.state.step = 3
    with full_disk(), pytest.raises(OSError) as error:
        trainer._save()
    assert error.value.filename == str(checkpoint.step_folder(tmp_path, 3))
    with full_disk(), pytest.raises(OSError) as error:
        checkpoint.save_best(tmp_path, trainer.drafter)
    assert error.value.filename == str(tmp_path / checkpoint.BEST)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert not checkpoint.damage(checkpoint.latest(tmp_path))


def test_save_optimizer_without_room_is_an_error_of_the_disk(tmp_path):
    """Which torch's own says of no disk."""
    state = TrainState(step=1)
    with full_disk(), pytest.raises(OSError) as error:
        checkpoint.save(tmp_path, torch.nn.Module(), {"moments": torch.ones(500)}, state)
    assert error.value.errno == errno.EFBIG


def damaged(folder: Path, name: str) -> None:
    """One byte of a file is another."""
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.pt", "state.json"])
def test_damaged_newest_checkpoint_is_set_aside_for_the_one_before(tiny_model, tmp_path, name):
    recipe = make_recipe(steps=6)
    whole = make_trainer(tiny_model, tmp_path, recipe)
    whole.run()
    newest, lines = checkpoint.latest(tmp_path), []
    checkpoint.set_aside_damaged(tmp_path, lines.append)
    assert checkpoint.latest(tmp_path) == newest and not lines
    damaged(newest, name)
    checkpoint.set_aside_damaged(tmp_path, lines.append)
    assert checkpoint.latest(tmp_path).name == "step-00000004"
    assert len(lines) == 1 and str(newest) in lines[0]
    again = make_trainer(tiny_model, tmp_path, recipe)
    again.run()
    assert_equal(weights(whole), weights(again))


def test_damaged_checkpoints_alone_are_refused(tiny_model, tmp_path):
    make_trainer(tiny_model, tmp_path, make_recipe(steps=4)).run()
    for folder in tmp_path.glob("step-*"):
        damaged(folder, "optimizer.pt")
    with raises_at(CheckpointError, checkpoint.latest(tmp_path)):
        checkpoint.set_aside_damaged(tmp_path, print)
    assert len(list(tmp_path.glob("step-*"))) == checkpoint.KEPT


def test_checkpoints_come_by_the_clock_where_no_step_asks_for_one(
    tiny_model, tmp_path, monkeypatch
):
    """Two steps a minute: every third step is the first after a minute and a quarter."""
    recipe = make_recipe(steps=8, save_every=100, save_minutes=1.25)
    clock, seen = SimpleNamespace(seconds=0.0), set()
    monkeypatch.setattr(
        "draftsmith.train.trainer.trainer.time", SimpleNamespace(monotonic=lambda: clock.seconds)
    )
    trainer = make_trainer(tiny_model, tmp_path, recipe)

    def tick(share: float, note: str) -> None:
        clock.seconds += 30
        seen.update(path.name for path in tmp_path.glob("step-*"))

    trainer.run(tick)
    assert sorted(int(name.removeprefix("step-")) for name in seen) == [4, 7, 8]
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == ["step-00000007", "step-00000008"]


@pytest.mark.parametrize(("stop_after", "best_step"), [(4, 6), (None, 2)])
def test_best_value_of_another_measure_is_forgotten_by_a_run_that_goes_on(
    tiny_model, tmp_path, stop_after, best_step
):
    """And kept by one that has ended, whose values are all of one measure."""
    recipe = make_recipe(eval_every=2)
    high, low = iter([3.0, 2.0, 1.9, 1.8]), iter([1.5, 1.4])
    first = make_trainer(
        tiny_model, tmp_path, recipe, evaluate=lambda d: {EXPECTED: next(high)}, measure="K = 4"
    )
    if stop_after is None:
        first.run()
    else:
        cut_off(first, stop_after)
    lines = []
    again = make_trainer(
        tiny_model,
        tmp_path,
        recipe,
        evaluate=lambda d: {EXPECTED: next(low)},
        measure="K = 1",
        say=lines.append,
    )
    assert again.run().best_step == best_step
    assert len(lines) == (stop_after is not None)


def test_checkpoint_weights_not_finite_keeps_the_one_before(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(steps=2))
    trainer.run()
    with torch.no_grad():
        trainer.parameters[0].view(-1)[0] = float("nan")
    trainer.state.step = 3
    with pytest.raises(CheckpointError, match="not finite"):
        trainer._save()
    assert checkpoint.latest(tmp_path).name == "step-00000002"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"max_minutes": 1.0}, {"steps": 40}])
def test_evaluations_without_eval_every_are_ten_a_run(tiny_model, tmp_path, budget):
    recipe = make_recipe(**{"steps": None, "save_every": None, **budget})
    trainer = make_trainer(tiny_model, tmp_path, recipe, evaluate=lambda d: {EXPECTED: 1.5})
    real = trainer.step

    def slow(share):
        trainer.state.seconds += 1.5  # 40 steps a minute
        return real(share)

    trainer.step = slow
    state = trainer.run()
    assert len([r for r in state.history if EXPECTED in r]) == 10


def test_share_of_minutes_is_agreed_on_twice_a_step_at_most(tiny_model, tmp_path):
    """Processes wait for one another each time."""
    recipe = make_recipe(max_minutes=60.0, save_every=100)
    trainer, asked = make_trainer(tiny_model, tmp_path, recipe), []
    share_done = trainer.share_done
    trainer.share_done = lambda: asked.append(trainer.state.step) or share_done()
    trainer.run()
    assert max(asked.count(step) for step in range(1, 9)) == 2 and asked.count(0) == 1


@pytest.mark.slow
def test_a_budget_of_minutes_goes_on_where_it_stopped(tiny_model, tmp_path, monkeypatch):
    """Seconds that were spent, and with them the learning rate, are part of a checkpoint; so is
    what a start took of them, behind which the warm-up begins."""
    recipe = make_recipe(steps=None, max_minutes=1.0, save_every=5)
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(
        "draftsmith.train.trainer.trainer.time", SimpleNamespace(monotonic=lambda: clock.seconds)
    )

    def timed():
        trainer = make_trainer(tiny_model, tmp_path, recipe)
        trainer.state.seconds = 15.0
        real = trainer.step

        def slow(share):
            clock.seconds += 1.5  # 40 steps a minute
            return real(share)

        trainer.step = slow
        return trainer

    cut_off(timed(), 12)
    rates = [record["learning_rate"] for record in timed().run().history]
    expected = [learning_rate(recipe.training, n / 40, None, begun=0.25) for n in range(10, 40)]
    assert rates == pytest.approx(expected)


def test_what_the_start_took_is_part_of_the_minutes(tiny_model, tmp_path, monkeypatch):
    recipe = make_recipe(steps=None, max_minutes=1.0, save_every=100)
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(
        "draftsmith.train.trainer.trainer.time", SimpleNamespace(monotonic=lambda: clock.seconds)
    )
    trainer = make_trainer(tiny_model, tmp_path / "54", recipe)
    trainer.state.seconds = 54.0
    real = trainer.step

    def slow(share):
        clock.seconds += 1.5
        return real(share)

    trainer.step = slow
    assert len(trainer.run().history) == 4
    trainer = make_trainer(tiny_model, tmp_path / "60", recipe)
    trainer.state.seconds = 60.0
    with pytest.raises(ConfigError, match="fitting the start took 60 s"):
        trainer.run()


@pytest.mark.parametrize(("log_every", "warnings"), [(10, 0), (1, 1)])
def test_the_first_step_whose_kernels_are_compiled_is_left_out_of_the_pace(
    tiny_model, tmp_path, monkeypatch, log_every, warnings
):
    """100 seconds of compiling, and steps of a second: many fit in three minutes, unless the first
    one is all that is measured."""
    lines = list[str]()
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(
        "draftsmith.train.trainer.trainer.time", SimpleNamespace(monotonic=lambda: clock.seconds)
    )
    recipe = make_recipe(steps=12, max_minutes=3.0, save_every=100)
    trainer = make_trainer(tiny_model, tmp_path, recipe, say=lines.append)
    trainer.log_every = log_every
    real = trainer.step

    def timed(share):
        clock.seconds += 100 if trainer.state.step == 0 else 1
        return real(share)

    trainer.step = timed
    trainer.run()
    assert len(lines) == warnings


def weighed_trainer(tiny_model, tmp_path, position_weights: dict) -> tuple:
    """A trainer, its first batch, and the batch's terms at three depths."""
    recipe = make_recipe().model_copy(update={"position_weights": position_weights})
    trainer = make_trainer(tiny_model, tmp_path, recipe)
    micro = trainer.step_rows.of(0)[0]
    rows = [trainer.order[place] for place in micro.places]
    features = trainer.features.of(rows, trainer.features.batch(rows))
    return trainer, features, list(trainer.module.unroll(features, 3))


@pytest.mark.parametrize("kind", ["step_decay", "d_pace"])
def test_step_loss_is_a_mean_of_each_depth_or_with_d_pace_of_all_terms(tiny_model, tmp_path, kind):
    trainer, features, steps = weighed_trainer(tiny_model, tmp_path, {kind: 0.5})
    counts = torch.tensor([len(step.hidden) for step in steps])
    assert len(counts.unique()) > 1
    loss, sums = trainer.loss(features, trainer.loss.term_weights(counts), None)
    weighed = trainer.loss.weighed(features, steps) if kind == "d_pace" else steps
    of_depths = []
    for step, weight in zip(steps, [step.weight for step in weighed], strict=True):
        states = features.last_hidden.flatten(0, 1)[step.target_index]
        p = trainer.target.logits(states).softmax(-1)[:, trainer.module.draft_to_target]
        log_q = trainer.module.head(step.hidden, step.depth).log_softmax(-1)
        kl = DIVERGENCES["forward_kl"](log_q, p, step.target_index)
        of_depths.append((kl * weight).sum() if kind == "d_pace" else kl.mean())
    total = torch.stack(of_depths)
    shares = torch.tensor([4, 2, 1]) / 7 if kind == "step_decay" else 1 / counts.sum()
    torch.testing.assert_close(loss, (total * shares).sum())
    assert sums[-1].item() == pytest.approx(loss.item())


def test_d_pace_tokens_outside_the_draft_vocabulary_have_no_probability(tiny_model, tmp_path):
    trainer, features, steps = weighed_trainer(tiny_model, tmp_path, {"d_pace": 0.5})
    labels = features.input_ids.flatten().roll(-1)
    drafted = set(trainer.module.draft_to_target.tolist())
    inside = [[int(labels[i]) in drafted for i in s.target_index] for s in steps]
    assert not all(inside[0])  # the reduced vocabulary lacks some
    weighed = trainer.loss.weighed(features, steps)
    known = trainer.module.draft_to_target.tolist()
    smoothed = {}  # of (anchor, depth)
    for step in steps:
        logits = trainer.module.head(step.hidden, step.depth).detach().log_softmax(-1)
        for row, (a, i) in enumerate(zip(step.anchor_index, step.target_index)):
            label = int(labels[i])
            q = float(logits[row, known.index(label)].exp()) if label in drafted else 0.0
            smoothed[int(a), step.depth] = 0.5 * q + 0.5
    for a, weight in zip(steps[0].anchor_index.tolist(), weighed[0].weight.tolist()):
        chain = [smoothed.get((a, depth), 0.0) for depth in range(3)]
        assert weight == pytest.approx(np.cumprod(chain).sum(), rel=1e-4)


def on_clock(monkeypatch, trainer, seconds_a_look: float) -> tuple[list[str], list[tuple]]:
    """(lines said, (share, note) of the progress) of a run whose clock goes on with every look at
    it."""
    clock, lines, told = iter(np.arange(0, 1e6, seconds_a_look)), [], []
    monkeypatch.setattr(
        "draftsmith.train.trainer.trainer.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    trainer.say = lines.append
    trainer.run(lambda share, note: told.append((share, note)))
    return lines, told


def test_run_over_a_short_budget_says_how_few_steps_fit_and_never_exceeds_it(
    tiny_model, tmp_path, monkeypatch
):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(steps=None, max_minutes=1.0))
    lines, told = on_clock(monkeypatch, trainer, 0.5)
    (warning,) = lines
    fitting = int(re.search(r"(\d+) steps fit in 1 min\b", warning)[1])
    assert 1 < fitting < FEW_STEPS and abs(fitting - trainer.state.step) <= 1
    assert "training.batch_size" in warning and told[-1][0] == 1.0
    assert trainer.state.seconds >= 60


def test_step_that_takes_long_tells_what_it_computes_and_that_it_outlives_the_budget(
    tiny_model, tmp_path, monkeypatch
):
    trainer = make_trainer(tiny_model, tmp_path, make_recipe(steps=None, max_minutes=1.0))
    lines, told = on_clock(monkeypatch, trainer, 30.0)
    assert lines == [first_step_warning(1.0)] and trainer.state.step == 1
    within = [note for share, note in told if share == 0]
    assert "step 1, depth 2 of 3" in within and "step 1, gradients" in within
    assert told[-1][0] == 1.0


def test_pace_warning_counts_steps_that_fit() -> None:
    assert pace_warning(2.9, 1.0) == "" == pace_warning(100, 1.0, spent=50, steps=30)
    assert "85 s: 2 steps fit in 3 min" in pace_warning(85, 3.0)
    assert "1 step fits" in pace_warning(767, 3.0)
    assert "4 steps fit" in pace_warning(20, 1.0, spent=15, steps=2)
    assert "2 steps fit" in pace_warning(20, 1.0, spent=55, steps=2)
