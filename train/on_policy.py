"""On-policy training: which micro-steps learn from texts of the drafter in training, and the keeping of those texts.

Texts are written anew every so many steps, by the drafter as it is at the first step that needs them, to the training
prompts in a seeded order; each process writes and reads its own part. They are kept in a file per refresh and process
until no checkpoint can need them, so that a run that was killed reads what it read before. Knows a writer, and nothing
of how texts are written or losses made (arXiv 2306.13649 for the mixture of steps).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inference.metrics import SpecDecodeCounters, acceptance_length
from speculators.drafter import Drafter
from speculators.target import FrozenTarget
from train.branches import rollout_rows
from train.data import Shuffled
from train.features import RowFeatures
from train.recipe import Recipe
from train.rollout import Rollout, Writer

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

    def counters(self) -> SpecDecodeCounters:
        found = SpecDecodeCounters()
        for each in self.rollouts:
            found.merge(each.counters())
        return found


class OnPolicy:
    """The texts of one process of a stage. `folder`: that of the stage's checkpoints."""

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
        assert recipe.on_policy is not None
        self.section, self.recipe, self.target, self.writer = recipe.on_policy, recipe, target, writer
        self.prompts, self.folder, self.pad_token_id = prompts, folder, pad_token_id
        self.process, self.processes, self.seed = process, processes, recipe.training.seed
        self.refresh: Refresh | None = None
        self.features: RowFeatures | None = None  # of the refresh's rows

    # -------------------------------------------------------------- which steps, which rows

    def wants(self, step: int, micro: int, done: float) -> bool:
        """Whether a micro-step learns from rollouts when `done` of the budget is spent; the same on all processes."""
        return float(np.random.default_rng([self.seed, STEPS, step, micro]).random()) < self.section.share.at(done)

    def rows(self, step: int, micro: int, drafter: Drafter, depths: int) -> tuple[RowFeatures, list[int]]:
        """The rows of such a micro-step, written first if it is the first of its refresh. `depths`: those trained."""
        self._renew(step, drafter, depths)
        assert self.refresh is not None and self.features is not None
        t = self.recipe.training
        first = ((step - self.refresh.step) * t.gradient_accumulation_steps + micro) * t.batch_size
        order = Shuffled([self.seed, ROWS, self.refresh.step], len(self.features.rows))
        return self.features, [order[first + i] for i in range(t.batch_size)]

    def figures(self, step: int, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Of the texts that `step` reads: their age in steps, how fast they were written, the acceptance length of the
        drafter that had a part in them. `total` sums over processes."""
        assert self.refresh is not None
        found = self.refresh.counters()
        mine = [self.refresh.tokens, self.refresh.seconds, found.num_accepted_tokens, found.num_drafts]
        tokens, seconds, accepted, drafts = total(torch.tensor(mine, dtype=torch.float32)).tolist()
        return {
            "text_age": step - self.refresh.step,
            "writing_tokens_per_second": tokens * self.processes / max(seconds, 1e-9),
            "rollout_acceptance_length": acceptance_length(accepted, drafts),
        }

    # -------------------------------------------------------------- texts

    def resume(self, step: int) -> None:
        """Throws away what a run that came further than `step` has left; it is written again."""
        self.refresh = self.features = None
        for path in (self.folder / FOLDER).glob(f"step-*.{self.process}.*"):
            if _step_of(path) >= step or path.suffix != ".json":
                path.unlink()

    def _renew(self, step: int, drafter: Drafter, depths: int) -> None:
        """Sees to it that the texts are those of the period of `step`."""
        period = step // self.section.refresh_every
        if self.refresh is not None and self.refresh.step // self.section.refresh_every == period:
            return
        found = [path for path in self._files() if _step_of(path) // self.section.refresh_every == period]
        self.refresh = _read(found[0]) if found else self._write(step, drafter)
        rollouts = self.refresh.rollouts
        rows = rollout_rows(
            rollouts,
            depths=depths,
            max_length=self.recipe.data.max_length,
            packing=self.recipe.data.packing,
            branches=drafter.reads_drafts and self.section.suffix_weight > 0 and any(r.rounds for r in rollouts),
        )
        self.features = RowFeatures(self.target, rows, pad_token_id=self.pad_token_id)

    def _write(self, step: int, drafter: Drafter) -> Refresh:
        began = time.monotonic()
        each = -(-self.section.prompts // self.processes)
        first = (step // self.section.refresh_every * self.processes + self.process) * each
        order = Shuffled([self.seed, PROMPTS], len(self.prompts))
        numbers = range(first, first + each)
        texts = [self.prompts[order[number]] for number in numbers]
        rollouts = self.writer.write(drafter, texts, [self._seed_of(number) for number in numbers])
        refresh = Refresh(step, time.monotonic() - began, tuple(rollouts))
        path = self.folder / FOLDER / f"step-{step:08d}.{self.process}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(refresh)))
        os.replace(fresh, path)
        self._prune()
        return refresh

    def _seed_of(self, number: int) -> int:
        """Of the text with that number, counted over the whole stage and all processes."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/on-policy/{number}".encode()).digest()[:6], "big")

    def _files(self) -> list[Path]:
        return sorted((self.folder / FOLDER).glob(f"step-*.{self.process}.json"))

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
