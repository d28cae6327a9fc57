"""On-policy training: which micro-steps learn from texts of the drafter in training, and the keeping of those texts.

Texts are written anew every so many steps, by the drafter as it is at the first step that needs them, to the training
prompts in a seeded order; each process writes its part and all read all of them, so that nothing depends on how many
there are. They are kept in a file per refresh until no checkpoint can need them, so that a run that was killed reads
what it read before. Knows a writer, and nothing of how texts are written or losses made (arXiv 2306.13649 for the
mixture of steps).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from inference.metrics import SpecDecodeCounters, acceptance_length
from speculators.drafter import Drafter
from speculators.target.frozen_target import FrozenTarget
from train.data.packing import Shuffled
from train.features.row_features import RowFeatures
from train.on_policy.branches import rollout_rows
from train.on_policy.rollout import Rollout, Writer
from train.recipe.recipe import Recipe

FOLDER = "on_policy"  # below the folder of the stage's checkpoints
STEPS, PROMPTS, ROWS = range(3)  # what random numbers are for


@dataclass(frozen=True)
class Refresh:
    """The texts that were written at one step, and the seconds that took."""

    step: int
    seconds: float
    rollouts: tuple[Rollout, ...]

    @property
    def tokens(self) -> int:
        return sum(len(each.output_ids) for each in self.rollouts)

    @property
    def verified(self) -> bool:
        """Whether the target wrote them, in rounds; otherwise the drafter did."""
        return any(each.rounds for each in self.rollouts)

    def counters(self) -> SpecDecodeCounters:
        found = SpecDecodeCounters()
        for each in self.rollouts:
            found.merge(each.counters())
        return found


class OnPolicy:
    """The texts of a stage. `folder`: that of the stage's checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        target: FrozenTarget,
        writer: Writer,
        prompts: Sequence[Sequence[int]],
        *,
        folder: Path,
        process: int = 0,
        processes: int = 1,
        pad_token_id: int = 0,
    ) -> None:
        if recipe.on_policy is None:
            raise ValueError("OnPolicy: the recipe has no on_policy section")
        self.section, self.recipe, self.target, self.writer = recipe.on_policy, recipe, target, writer
        self.prompts, self.folder, self.pad_token_id = prompts, folder, pad_token_id
        self.process, self.processes, self.seed = process, processes, recipe.training.seed
        self.current: tuple[Refresh, RowFeatures] | None = None  # the texts that are read now, and their rows

    # -------------------------------------------------------------- which steps, which rows

    def wants(self, step: int, number: int, done: float) -> bool:
        """Whether a batch of a step learns from rollouts when `done` of the budget is spent; `number`: which batch."""
        return float(np.random.default_rng([self.seed, STEPS, step, number]).random()) < self.section.share.at(done)

    def due(self, step: int, numbers: Iterable[int], done: float) -> bool:
        """Whether some of these batches of a step want texts that are not those that are read now."""
        fresh = self.current is not None and self._period(self.current[0].step) == self._period(step)
        return not fresh and any(self.wants(step, number, done) for number in numbers)

    def rows(self, places: range, rows_per_step: int) -> tuple[RowFeatures, list[int]]:
        """The rows of a micro-step that wants rollouts: of its places in the stream of rows, counted from the step at
        which the texts were written."""
        assert self.current is not None, "renew() comes first"
        refresh, features = self.current
        order = Shuffled([self.seed, ROWS, refresh.step], len(features.rows))
        return features, [order[place - refresh.step * rows_per_step] for place in places]

    def figures(self, step: int) -> dict[str, float]:
        """Of the texts that `step` has read: their age in steps, how fast they were written, and where drafts were
        verified their acceptance length."""
        if self.current is None:
            return {}
        refresh, _ = self.current
        found = refresh.counters()
        record = {"text_age": step - refresh.step, "writing_tokens_per_second": refresh.tokens / refresh.seconds}
        if not found.num_drafts:
            return record
        return record | {"rollout_acceptance_length": acceptance_length(found.num_accepted_tokens, found.num_drafts)}

    # -------------------------------------------------------------- texts

    def resume(self, step: int) -> None:
        """Throws away what a run that came further than `step` has left; it is written again."""
        self.current = None
        if self.process:
            return
        for path in (self.folder / FOLDER).glob("step-*"):
            if _step_of(path) >= step or path.name.count(".") != 1:
                path.unlink()

    def renew(self, step: int, drafter: Drafter, depths: int) -> None:
        """The texts of the period of `step`: those on disk, or written. `depths`: those trained. All processes come
        together."""
        found = [path for path in self._files() if self._period(_step_of(path)) == self._period(step)]
        refresh = _read(found[0]) if found else self._write(step, drafter)
        rows = rollout_rows(
            refresh.rollouts,
            depths=depths,
            max_length=self.recipe.data.max_length,
            packing=self.recipe.data.packing,
            branches=drafter.reads_drafts
            and self.section.suffix_weight > 0
            and any(each.rounds for each in refresh.rollouts),
        )
        self.current = refresh, RowFeatures(self.target, rows, pad_token_id=self.pad_token_id)

    def _write(self, step: int, drafter: Drafter) -> Refresh:
        began, count = time.monotonic(), self.section.prompts
        numbers = range(self._period(step) * count, (self._period(step) + 1) * count)
        order = Shuffled([self.seed, PROMPTS], len(self.prompts))
        texts = [self.prompts[order[number]] for number in numbers]
        seeds = [self._seed_of(number) for number in numbers]
        parts = [self.writer.write(drafter, texts, seeds, (self.process, self.processes))]
        if self.processes > 1:
            parts = gather_object(parts)
        rollouts = tuple(parts[i % self.processes][i // self.processes] for i in range(count))
        refresh = Refresh(step, time.monotonic() - began, rollouts)
        if self.process == 0:
            path = self.folder / FOLDER / f"step-{step:08d}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}.json")
            fresh.write_text(json.dumps(asdict(refresh)))
            os.replace(fresh, path)
            self._prune()
        return refresh

    def _period(self, step: int) -> int:
        return step // self.section.refresh_every

    def _seed_of(self, number: int) -> int:
        """Of the text with that number, counted over the whole stage."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/on-policy/{number}".encode()).digest()[:6], "big")

    def _files(self) -> list[Path]:
        return sorted(path for path in (self.folder / FOLDER).glob("step-*.json") if path.name.count(".") == 1)

    def _prune(self) -> None:
        """Removes texts of periods that lie before every checkpoint."""
        every = self.section.refresh_every
        oldest = min((int(path.name.split("-")[1]) for path in self.folder.glob("step-*")), default=0)
        for path in self._files():
            if _step_of(path) < oldest // every * every:
                path.unlink()


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step-"))


def _read(path: Path) -> Refresh:
    tree = json.loads(path.read_text())
    return Refresh(tree["step"], tree["seconds"], tuple(Rollout.from_dict(each) for each in tree["rollouts"]))
