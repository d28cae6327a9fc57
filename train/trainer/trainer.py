"""The one training loop; every family runs through it.

Per optimizer step: batches -> frozen target's features -> the drafter's unroll and its loss over
all depths (`StepLoss`) -> gradients summed over processes -> clip -> optimizer. With `on_policy`,
some micro-steps learn from text generated with the current drafter. Knows no family, no divergence
and no file format; which rows come when is a function of the step alone, so a run that was killed
continues to the same weights."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.inference.progress import Advance, unwatched
from draftsmith.speculators import kernels
from draftsmith.speculators.drafter import Drafter, host_batch
from draftsmith.speculators.errors import CheckpointError, ConfigError, DraftsmithError
from draftsmith.speculators.precision import on_device, to_device
from draftsmith.speculators.target.frozen_target import TargetFeatures
from draftsmith.speculators.target.target_head import TargetHead
from draftsmith.train.data.packing import Shuffled
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.on_policy.refresh import OnPolicy
from draftsmith.train.processes import on_first, send_tensors
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.trainer import checkpoint
from draftsmith.train.trainer.batches import MicroStep, StepRows
from draftsmith.train.trainer.joint_target import JointTarget
from draftsmith.train.trainer.optimizers import (
    learning_rate,
    make_optimizers,
    optimizer_state,
    param_groups,
    step_if_finite,
)
from draftsmith.train.trainer.pace import LONG_STEP, first_step_warning, pace_warning
from draftsmith.train.trainer.parallel import make_replica, whole
from draftsmith.train.trainer.step_loss import StepLoss
from draftsmith.train.trainer.step_records import EXPECTED, Unread, flat, held_out_result
from draftsmith.train.trainer.telemetry import Telemetry

MAX_SKIPPED = 3  # steps in a row whose gradients are not finite, before a run stops
SAME_REQUEST = 2.0  # seconds in which a launcher passes on a signal that came already
Evaluate = Callable[[Drafter], dict[str, float]]  # of which EXPECTED decides the best


class Diverged(DraftsmithError):
    """Gradients are not finite step after step."""


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM, SIGINT); its checkpoint is on disk."""


@dataclass(frozen=True)
class Batch:
    """The rows of a micro-step. `source`: has their features, under their numbers `rows`.
    `tensors`: collated, on the device; `host`: the same in the host's memory, with `seeds` [B]."""

    micro: MicroStep
    source: RowFeatures
    rows: list[int]
    tensors: dict[str, Any]
    seeds: Tensor
    host: SimpleNamespace


class Trainer:
    """Trains `drafter` on the rows of `features` for the recipe's budget; `run()` resumes by
    itself."""

    def __init__(
        self,
        recipe: Recipe,
        target: TargetHead,
        drafter: Drafter,
        features: RowFeatures,
        *,
        accelerator: Accelerator,
        folder: Path,
        fingerprint: str = "",
        evaluate: Evaluate | None = None,
        joint: JointTarget | None = None,
        on_policy: OnPolicy | None = None,
        measure: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`measure`: a hash of what `evaluate` measures on, and how; values of two measures are not
        compared. `say`: prints a line."""
        place = (accelerator.process_index, accelerator.num_processes)
        self.step_rows = StepRows(recipe.training, *place)
        self.total_steps = steps_of(recipe, len(features.rows), self.step_rows.rows_per_step)
        self.training = recipe.training_for(self.total_steps)
        self.recipe = recipe
        self.target = target
        self.drafter = drafter.to(accelerator.device)
        self.accelerator = accelerator
        self.folder = folder
        self.fingerprint = fingerprint
        self.evaluate = evaluate
        self.measure = measure
        self.features = features
        self.joint = joint
        self.on_policy = on_policy
        t = self.training
        drafter.prepare_training(recipe.drafter)
        drafter.checkpoint_activations(t.activation_checkpointing)
        others = joint.trainable_parameters() if joint else []
        self.replica = make_replica(accelerator, self.drafter, others)
        self.module = self.replica.module  # what trains; `drafter` is the whole of it
        rate = t.learning_rate / joint.section.head_lr_multiplier if joint else None
        self.parameters = self.module.trainable_parameters() + others
        self.optimizers = make_optimizers(self.module, t, others, rate)
        self.loss = StepLoss(
            recipe, target, self.module, accelerator=accelerator, joint=joint, within=self._within
        )
        self.state = checkpoint.new_state(recipe, fingerprint, self.step_rows.rows_per_step)
        self.order = Shuffled([t.seed], len(features.rows))
        self.stop_asked: float | None = None  # when a signal asked for it
        self.telemetry = Telemetry(accelerator.device)
        self.unread: list[Unread] = []
        self.held_out = ""  # the newest held-out result, for the progress bar
        self.advance: Advance = unwatched
        self.say = say  # a line of information
        self.step_began = time.monotonic()  # of the present step
        self.share = 0.0  # `share_done`, which processes agree on once a step
        self.pace_unsaid = bool(t.max_minutes)
        # steps between readings of what was measured; a CPU has nothing to wait for
        self.log_every = 1 if accelerator.device.type == "cpu" else 10
        self.saved_at = time.monotonic()  # the newest checkpoint, or the start

    # -------------------------------------------------------------- the run

    def run(self, advance: Advance = unwatched) -> checkpoint.TrainState:
        """Trains to the end of the budget. `advance(share_done, note)` is called after every step,
        and within one that takes long.

        Raises Interrupted after saving a checkpoint when SIGTERM or SIGINT arrives, ConfigError if
        the start has used up the minutes.
        """
        self._resume()
        if self.on_policy is not None:
            self.on_policy.resume(self.state.step)
            self.accelerator.wait_for_everyone()
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        self.advance = advance
        first = self.state.step
        spent = self.state.seconds
        warm = spent  # after the first step, in which kernels are compiled
        try:
            self.share = self.share_done()
            if not self.state.step:
                self.state.begun = self.share
            self._require_minutes()
            while self.share < 1:
                self.step_began = time.monotonic()
                if not self.unread:
                    self.telemetry.begin()
                self.unread.append(self.step(self.share))
                self.state.seconds += time.monotonic() - self.step_began
                if self.state.step == first + 1:
                    warm = self.state.seconds
                self._after_step()
                self._say_pace(first, spent, warm)
                if self.state.history:
                    advance(self.share, self._note(self.state.history[-1]))
        finally:
            self.features.forget_ahead()
            for number, handler in before.items():
                signal.signal(number, handler)
        with self.replica.whole():  # which leaves the whole drafter with its last weights
            return self.state

    def _require_minutes(self) -> None:
        """ConfigError: nothing is left of the budget before the first step."""
        if self.share >= 1 and not self.state.step:
            minutes = self.recipe.training.max_minutes
            raise ConfigError(
                f"fitting the start took {self.state.seconds:.0f} s, which is all of {minutes:g}"
                " minutes; give more of them, or set drafter.init to another start",
                where="training.max_minutes",
            )

    def _resume(self) -> None:
        """The newest checkpoint, if there is one: the first process reads it and sends it."""

        def read() -> checkpoint.TrainState | None:
            newest = checkpoint.latest(self.folder)
            if newest is None:
                return None
            state = checkpoint.load(newest, self.fingerprint)
            self._require_rows(state, newest)
            return state

        self.saved_at = time.monotonic()
        state = on_first(self.accelerator, read)
        if state is None:
            return
        self.state = state
        newest = checkpoint.step_folder(self.folder, state.step)
        with_adapter = self.joint is not None
        saved = send_tensors(
            self.accelerator, lambda: checkpoint.read_tensors(newest, with_adapter)
        )
        checkpoint.load_tensors(saved, self.replica, self.optimizers, self.modules(), self.joint)
        self.held_out = held_out_result(state.history)
        goes_on = self.share_done() < 1  # and else every value is of the one measure
        if goes_on and state.best_value is not None and state.measure != self.measure:
            best = held_out_result(state.history, state.best_step)
            self.say(
                f"      the best held-out value, {best}, was measured with other settings of"
                " `evaluation` or on other texts; it is forgotten, and the next one counts"
            )
            state.best_value = None
            state.best_step = 0
            state.measure = ""

    def _require_rows(self, state: checkpoint.TrainState, folder: Path) -> None:
        """CheckpointError where steps had other rows: the same number of them would be another
        share of the data. Before this was written down it is not known."""
        rows = self.step_rows.rows_per_step
        if state.rows_per_step not in (0, rows):
            raise CheckpointError(
                f"its steps had {state.rows_per_step} rows, and have {rows} with"
                f" {self.accelerator.num_processes} processes; start as many as before. A run with"
                " training.global_batch_size goes on with any number",
                where=f"{folder}",
            )
        state.rows_per_step = rows

    def load_best(self) -> None:
        """Fills the drafter with the weights of the best held-out evaluation, which the first
        process reads and sends."""
        folder = self.folder / checkpoint.BEST
        with_adapter = self.joint is not None
        saved = send_tensors(
            self.accelerator, lambda: checkpoint.read_weights(folder, with_adapter)
        )
        checkpoint.load_weights(saved, self.drafter, self.joint)

    def _note(self, record: dict[str, Any]) -> str:
        """What the progress bar says after a step."""
        figures = {
            "loss": record["loss"],
            "in-loop τ": record["in_loop_acceptance_length"],
            "skipped": self.state.skipped or None,
            "held-out": self.held_out or None,
        }
        texts = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in figures.items()}
        return "  ".join(f"{name} {text}" for name, text in texts.items() if text is not None)

    def _within(self, work: str) -> None:
        """Tells what a step that takes long computes, and once that the first one takes longer than
        the whole budget."""
        seconds = time.monotonic() - self.step_began
        if seconds < LONG_STEP:
            return
        if self.stop_asked is not None:
            work += "; the run stops after this step, and without it if asked again"
        self.advance(self.share, f"step {self.state.step + 1}, {work}")
        minutes = self.recipe.training.max_minutes
        if self.pace_unsaid and minutes and not self.state.step and seconds > 60 * minutes:
            self.pace_unsaid = False
            self.say(first_step_warning(minutes))

    def _say_pace(self, first: int, spent: float, warm: float) -> None:
        """Warns once, when the first steps are measured, of a budget in which few fit. `first`,
        `spent`: steps and seconds before this process began. `warm`: seconds after its first step,
        which is left out if there are more: kernels were compiled in it."""
        minutes = self.recipe.training.max_minutes
        if not (minutes and self.pace_unsaid) or self.unread:
            return
        self.pace_unsaid = False
        if self.state.step - first > 1:
            spent = warm
            first += 1
        pace = (self.state.seconds - spent) / (self.state.step - first)
        if warning := pace_warning(pace, minutes, spent, first):
            self.say(warning)

    def share_done(self) -> float:
        """Part of the budget that is spent, 0 to 1, the same on every process."""
        t = self.training
        shares = []
        if self.total_steps:
            shares.append(self.state.step / self.total_steps)
        if t.max_minutes:
            shares.append(self.state.seconds / (60 * t.max_minutes))
        share = min(max(shares), 1.0)  # a last step ends after the budget
        if t.max_minutes and self.accelerator.num_processes > 1:
            own = on_device([share], self.accelerator.device, torch.float32)
            share = float(self.accelerator.gather(own).max())
        return share

    def step(self, share: float) -> Unread:
        """One optimizer step; returns what it measured. It reads nothing from the device."""
        step = self.state.step
        if self.on_policy is not None and self.on_policy.due(step, self.step_rows.numbers()):
            with self.telemetry.phase("data"), self.replica.whole() as drafter:
                self.on_policy.renew(step, drafter)
        batches = [self._batch(micro) for micro in self.step_rows.of(step)]
        hosts = [batch.host for batch in batches]
        self.module.train()
        # valid terms of each depth [K] in the whole step, before any loss
        depths = self.loss.depths
        counts = self._sum(sum(self.module.count_terms(host, depths) for host in hosts))
        term_weights = self.loss.term_weights(counts)
        supervised = None
        if self.joint is not None:
            term_weights = term_weights * self.joint.heads_weight(share)
            supervised = self._sum(sum(self.joint.count_terms(host) for host in hosts))
        measured = self._gradients(batches, term_weights, supervised)
        rate = learning_rate(self.training, share, self.total_steps, self.state.begun)
        norm = self._update(rate)
        self.state.step += 1
        tokens = [[(host.segment_ids >= 0).sum(), host.loss_mask.sum()] for host in hosts]
        seen = to_device(torch.tensor(tokens).sum(0), self.accelerator.device)
        sums = self._sum(torch.cat([torch.stack(measured).sum(0), seen]))
        known: dict[str, Any] = {"step": self.state.step, "learning_rate": rate}
        if self.on_policy is not None:
            known |= self._on_policy_record()
        return Unread(known, torch.cat([part.double() for part in (sums, counts, norm[None])]))

    def _batch(self, micro: MicroStep) -> Batch:
        """The rows of a micro-step, without the target's features."""
        source, rows = self._source(micro)
        tensors = source.batch(rows)
        seeds = self.step_rows.seeds(micro.places)
        host = host_batch(SimpleNamespace(**tensors, seeds=seeds))
        return Batch(micro, source, rows, tensors, seeds, host)

    def _gradients(
        self, batches: Sequence[Batch], term_weights: Tensor, supervised: Tensor | None
    ) -> list[Tensor]:
        """Adds the gradients of all batches of a step up; what `_micro_step` measures in each."""
        step = self.state.step
        following = self.step_rows.of(step + 1)
        for batch in batches:
            self._read_ahead(step, batch.micro)
        measured: list[Tensor] = []
        for number, batch in enumerate(batches):
            self.step_rows.seed_everything(batch.micro.places)
            self._within(f"batch {number + 1} of {len(batches)}: the target's features")
            with self.telemetry.phase("target"):
                features = self._features(batch)
            self._read_ahead(step + 1, following[number])
            last = batch is batches[-1]
            if last:
                self._compute_ahead(step + 1, following[0])
            else:
                self._compute_ahead(step, batches[number + 1].micro)
            measured.append(self._micro_step(features, term_weights, supervised, last=last))
        return measured

    def _features(self, batch: Batch) -> TargetFeatures:
        """The target's features of a batch; with gradients, if the target trains too."""
        if self.joint is not None:
            features = self.joint.features(batch.tensors)
        else:
            features = batch.source.of(batch.rows, batch.tensors)
        return replace(features, seeds=batch.seeds)

    def _update(self, rate: float) -> Tensor:
        """The optimizer's step at a learning rate, after gradients are clipped. Returns their norm
        before clipping; if it is not finite, no weight changes."""
        self.replica.fill_gradients(self.parameters)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm))
        for group in param_groups(self.optimizers):
            group["lr"] = group["peak_lr"] * rate / self.training.learning_rate
        with self.telemetry.phase("optimizer"):
            step_if_finite(self.optimizers, norm)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm

    def _micro_step(
        self,
        features: TargetFeatures,
        term_weights: Tensor,
        supervised: Tensor | None = None,
        last: bool = True,
    ) -> Tensor:
        """Forward and backward of one batch; gradients add up in the parameters. `supervised`:
        tokens of the step that a target trained jointly has a loss on. `last`: of the step, after
        which gradients are summed over processes. Returns the sums of `StepLoss` [2K + 3]."""
        with self.telemetry.phase("drafter"):
            loss, sums = self.replica.run(
                lambda: self.loss(features, term_weights, supervised), last
            )
            self._within("gradients")
            with kernels.of_compilers():
                loss.backward()
        return sums

    # -------------------------------------------------------------- data

    def _source(self, micro: MicroStep) -> tuple[RowFeatures, list[int]]:
        """The rows of a micro-step: of the data, or of texts written on-policy."""
        policy = self.on_policy
        step = self.state.step
        with self.telemetry.phase("data"):
            if policy is not None and policy.wants(step, micro.number):
                return policy.rows(micro.places, self.step_rows.rows_per_step)
            return self.features, [self.order[place] for place in micro.places]

    def _read_ahead(self, step: int, micro: MicroStep) -> None:
        """Begins to read the features of a micro-step. Each is begun when one was taken, so that no
        more than a step's rows wait."""
        if self._reads_data(step, micro):
            self.features.begin([self.order[place] for place in micro.places])

    def _compute_ahead(self, step: int, micro: MicroStep) -> None:
        """Computes the features of the next micro-step beside the head's work on this one."""
        if self.joint is None and self._reads_data(step, micro):
            self.features.compute_ahead([self.order[place] for place in micro.places])

    def _reads_data(self, step: int, micro: MicroStep) -> bool:
        """True if a micro-step of a step learns from rows of the data; False if the training ends
        before it, or it learns from text written on-policy."""
        if self.total_steps is not None and step >= self.total_steps:
            return False
        return self.on_policy is None or not self.on_policy.wants(step, micro.number)

    def modules(self) -> torch.nn.ModuleDict:
        """All that trains, under the names of checkpoints."""
        adapter = {"adapter": self.joint.model} if self.joint is not None else {}
        return torch.nn.ModuleDict({"drafter": self.module, **adapter})

    # -------------------------------------------------------------- processes, signals, records

    def _sum(self, tensor: Tensor) -> Tensor:
        """Summed over processes, on the device."""
        tensor = to_device(tensor, self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.float(), "sum")

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.stop_asked is None:
            self.stop_asked = now
        elif now - self.stop_asked > SAME_REQUEST:  # a second time: now
            raise KeyboardInterrupt

    def _asked(self) -> tuple[bool, bool]:
        """(any process has received a stop signal, so that all stop after the same step; the clock
        of the first one asks for a checkpoint)."""
        minutes = self.training.save_minutes
        late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        first = self.accelerator.is_main_process
        flags = torch.tensor([float(self.stop_asked is not None), float(first and late)])
        if self.accelerator.num_processes > 1:
            flags = self._sum(flags).cpu()
        stopping, late = (flags > 0).tolist()
        return stopping, late

    def _due_now(self) -> tuple[bool, bool]:
        """(an evaluation is due, a checkpoint is due): every so many steps, or ten times a run
        where the recipe does not say how often, and at the end of the budget."""
        share = self.share
        t = self.training
        tenth = self._tenths(share) > self.state.tenths

        def due(every: int | None) -> bool:
            return share >= 1 or (self.state.step % every == 0 if every else tenth)

        evaluates = self.evaluate is not None and due(t.eval_every)
        return evaluates, due(t.save_every) if t.save_every else evaluates or tenth or share >= 1

    def _tenths(self, share: float) -> int:
        """Tenths of the budget that are spent, 0 to 10."""
        by_steps = 10 * self.state.step // self.total_steps if self.total_steps else 0
        return min(max(by_steps, int(10 * share + 1e-9)), 10)

    def _on_policy_record(self) -> dict[str, Any]:
        """The share of the newest step that was on-policy, and the texts that it read."""
        assert self.on_policy is not None
        step = self.state.step - 1
        due = [self.on_policy.wants(step, number) for number in self.step_rows.numbers()]
        record = {"on_policy": sum(due) / len(due)}
        return record | self.on_policy.figures(step) if any(due) else record

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(records of the steps since the last time, which join the history; what these steps
        cost). Waits for the device, whose time is the training's."""
        began = time.monotonic()
        history = self.state.history
        results = [step.read(self.loss.depths) for step in self.unread]
        for record, _ in results:
            history.append(record)
            self._count_skipped(record)
        tokens = [sum(column) for column in zip(*(tokens for _, tokens in results))]
        costs = self.telemetry.finish(tokens, len(results), self.features.take_waited())
        self.unread = []
        self.state.seconds += time.monotonic() - began
        return [record for record, _ in results], costs

    def _count_skipped(self, record: dict[str, Any]) -> None:
        """Raises Diverged after MAX_SKIPPED steps in a row whose gradients were not finite."""
        state = self.state
        if not record.get("skipped"):
            state.skipped_in_a_row = 0
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row == MAX_SKIPPED:
            raise Diverged(
                f"the gradients of the last {MAX_SKIPPED} steps, up to step {record['step']}, are"
                " not finite. Lower training.learning_rate or training.max_grad_norm, or set"
                " training.mixed_precision: no, under another `name`",
                where="training",
            )

    def _after_step(self) -> None:
        """Reads, evaluates and saves where that is due. Raises Interrupted where the run was asked
        to stop, with its checkpoint on disk."""
        t = self.training
        self.share = self.share_done()
        evaluates, save = self._due_now()
        reads = evaluates or save or self.state.step % self.log_every == 0
        stopping = False
        late = False
        if reads or self.accelerator.num_processes == 1:
            stopping, late = self._asked()
        if not (reads or stopping or late):
            return
        records, costs = self._read()
        if t.max_minutes:  # reading waited for the device, whose time may have ended the budget
            self.share = self.share_done()
            evaluates, save = self._due_now()
        if evaluates or save:
            self.state.tenths = self._tenths(self.share)
        if evaluates and self.evaluate is not None:
            self._evaluate(self.evaluate, records[-1])
        for record in records:
            self.accelerator.log(flat(record) | costs, step=record["step"])
        if save or stopping or late:
            self._save()
        if stopping:
            raise Interrupted(
                f"stopped after step {self.state.step}; the checkpoint is in {self.folder}; run the"
                " same command again to continue"
            )

    def _evaluate(self, evaluate: Evaluate, record: dict[str, Any]) -> None:
        """Adds the held-out results to the newest record, and keeps the weights if they are the
        best."""
        with self.replica.whole() as drafter:
            drafter.eval()
            results = evaluate(drafter)
            value = results[EXPECTED]
            if math.isfinite(value):
                record |= results
                self.held_out = held_out_result(self.state.history)
            if value > (self.state.best_value or 0.0):  # False for NaN
                self.state.best_value = value
                self.state.best_step = self.state.step
                self.state.measure = self.measure
                if self.accelerator.is_main_process:
                    checkpoint.save_best(self.folder, drafter, self.joint)

    def _save(self) -> None:
        """All processes gather, one writes."""
        optimizer = optimizer_state(self.modules(), self.optimizers)
        with self.replica.whole() as drafter:
            if self.accelerator.is_main_process:
                checkpoint.save(self.folder, drafter, optimizer, self.state, self.joint)
        self.saved_at = time.monotonic()


def steps_of(recipe: Recipe, rows: float, rows_per_step: int) -> int | None:
    """Optimizer steps of a run over `rows` packed rows; None: its budget is minutes alone."""
    t = recipe.training
    return t.steps or (math.ceil(rows * t.epochs / rows_per_step) if t.epochs else None)
