"""On-policy training: the micro-steps that learn from rollouts, and the refresh of these rollouts.

Texts are written anew every so many steps, by the drafter as it is at the first step that needs
them, to the training prompts in a seeded order. Each process writes its part and all read all of
them, so that nothing depends on the number of processes. They are kept in a file per refresh until
no checkpoint can need them, so that a run that was killed reads what it read before. The mixture of
steps is that of arXiv 2306.13649."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from draftsmith.inference.metrics import acceptance_length
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.drafter import Drafter
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.train.data.loss_mask import TokenRow
from draftsmith.train.data.packing import Shuffled, pack
from draftsmith.train.features.row_features import RowFeatures
from draftsmith.train.features.source import InProcess
from draftsmith.train.on_policy.rollout import Rollout, RolloutWriter
from draftsmith.train.processes import gather_in_turn, on_first
from draftsmith.train.recipe.recipe import Recipe

WORKLOAD = "rollout"
FOLDER = "on_policy"  # below the folder of the stage's checkpoints
STEPS, PROMPTS, ROWS = range(3)  # what random numbers are for


@dataclass(frozen=True)
class Refresh:
    """The texts that were written at one step."""

    step: int
    rollouts: tuple[Rollout, ...]


class OnPolicy:
    """The on-policy texts of a stage; `folder` is that of the stage's checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        target: FrozenTarget,
        prompts: Sequence[Sequence[int]],
        *,
        folder: Path,
        accelerator: Accelerator,
        tokenizer: Any = None,
    ) -> None:
        if recipe.on_policy is None:
            raise ValueError("OnPolicy: the recipe has no on_policy section")
        self.section = recipe.on_policy
        self.recipe = recipe
        self.target = target
        self.writer = RolloutWriter(target, recipe, tokenizer)
        self.prompts = prompts
        self.folder = folder
        self.accelerator = accelerator
        self.seed = recipe.training.seed
        self.pad_token_id = getattr(tokenizer, "pad_token_id", None) or 0
        # the texts that are read now, and their rows
        self.current: tuple[Refresh, RowFeatures] | None = None

    # -------------------------------------------------------------- which steps, which rows

    def wants(self, step: int, number: int) -> bool:
        """True if batch `number` of a step learns from rollouts."""
        draw = np.random.default_rng([self.seed, STEPS, step, number]).random()
        return bool(draw < self.section.share)

    def due(self, step: int, numbers: Iterable[int]) -> bool:
        """True if some of these batches of a step want texts that are not yet there."""
        current = self.current
        fresh = current is not None and self._period(current[0].step) == self._period(step)
        return not fresh and any(self.wants(step, number) for number in numbers)

    def rows(self, places: range, rows_per_step: int) -> tuple[RowFeatures, list[int]]:
        """The rows of a micro-step that wants rollouts, by its places in the stream of rows,
        counted from the step at which the texts were written."""
        assert self.current is not None, "renew() comes first"
        refresh, features = self.current
        order = Shuffled([self.seed, ROWS, refresh.step], len(features.rows))
        return features, [order[place - refresh.step * rows_per_step] for place in places]

    def figures(self, step: int) -> dict[str, float]:
        """The age in steps of the texts that `step` has read, and the acceptance length of
        drafts."""
        if self.current is None:
            return {}
        refresh = self.current[0]
        drafts = sum(rollout.num_drafts for rollout in refresh.rollouts)
        accepted = sum(rollout.num_accepted for rollout in refresh.rollouts)
        record: dict[str, float] = {"text_age": step - refresh.step}
        if drafts:
            record["rollout_acceptance_length"] = acceptance_length(accepted, drafts)
        return record

    # -------------------------------------------------------------- texts

    def resume(self, step: int) -> None:
        """Deletes the texts of a run that came further than `step`; they are written again."""
        self.current = None
        if self.accelerator.process_index:
            return
        for path in self._files():
            if _step_of(path) >= step:
                path.unlink()

    def renew(self, step: int, drafter: Drafter) -> None:
        """Reads or writes the texts of the period of `step`; all processes come together, and the
        first one reads."""
        period = self._period(step)
        files = [path for path in self._files() if self._period(_step_of(path)) == period]
        kept = on_first(self.accelerator, lambda: _read(files[0]) if files else None)
        refresh = kept or self._write(step, drafter)
        texts = [
            TokenRow.from_response(rollout.prompt_ids, rollout.output_ids, WORKLOAD)
            for rollout in refresh.rollouts
        ]
        rows = pack(texts, self.recipe.data.max_length)
        source = InProcess(self.target)
        self.current = refresh, RowFeatures(source, rows, pad_token_id=self.pad_token_id)

    def _write(self, step: int, drafter: Drafter) -> Refresh:
        count = self.section.prompts
        part = self.accelerator.process_index, self.accelerator.num_processes
        first = self._period(step) * count  # counted over the whole stage
        numbers = range(first, first + count)
        order = Shuffled([self.seed, PROMPTS], len(self.prompts))
        prompts = [self.prompts[order[number]] for number in numbers]
        digests = [
            hashlib.sha256(f"{self.seed}/on-policy/{number}".encode()).digest()
            for number in numbers
        ]
        seeds = [int.from_bytes(digest[:6], "big") for digest in digests]
        rollouts = self.writer.write(drafter, prompts, seeds, part)
        self.accelerator.wait_for_everyone()  # texts may take one process much longer
        refresh = Refresh(step, tuple(gather_in_turn(self.accelerator, rollouts, count)))
        if self.accelerator.is_main_process:
            write_whole(self.folder / FOLDER / f"step-{step:08d}.json", json.dumps(asdict(refresh)))
            self._prune()
        return refresh

    def _period(self, step: int) -> int:
        return step // self.section.refresh_every

    def _files(self) -> list[Path]:
        return sorted((self.folder / FOLDER).glob("step-*.json"))

    def _prune(self) -> None:
        """Removes texts of periods before every checkpoint."""
        oldest = min(
            (int(path.name.split("-")[1]) for path in self.folder.glob("step-*")), default=0
        )
        for path in self._files():
            if self._period(_step_of(path)) < self._period(oldest):
                path.unlink()


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step-"))


def _read(path: Path) -> Refresh:
    tree = json.loads(path.read_text())
    return Refresh(tree["step"], tuple(Rollout(**entry) for entry in tree["rollouts"]))
