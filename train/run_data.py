"""What the stages of a run read: packed training rows, prompts, and held-out texts that the target wrote.

Knows recipes, files and the target that writes; no drafter and no loop.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from rich.markup import escape

from inference import LLM
from inference.provenance import text_sha256, weights_sha256
from speculators.errors import DataError
from speculators.hub import cached_folder
from speculators.target import FrozenTarget
from train.data import PackedRow, conversation_tokenizer, fit_rows, pack, prepare_rows
from train.prepare import Prepared, askable, bad_rows, training_examples
from train.progress import Stages
from train.recipe import Recipe
from train.regenerate import Response, regenerate
from train.sources import Example, load_sources


class RunData:
    """Training rows, their prompts and held-out texts of a run."""

    def __init__(
        self,
        recipe: Recipe,
        target: FrozenTarget,
        tokenizer,
        accelerator: Accelerator,
        stages: Stages,
        *,
        stage: str = "",
    ) -> None:
        """`stage`: of the training, if it has several; names the lists of what is left out."""
        self.recipe, self.target, self.tokenizer = recipe, target, conversation_tokenizer(recipe.data, tokenizer)
        self.accelerator, self.stages, self.stage = accelerator, stages, stage
        self.folder = Path(recipe.output_dir) if accelerator.is_main_process else None
        self.bad = bad_rows(recipe.data, self.folder, stage)
        self._prepared: Prepared | None = None
        self._askable: list[Example] | None = None
        weights = weights_sha256(cached_folder(recipe.target.model, recipe.target.revision))
        self.target_hash = hashlib.sha256((weights + text_sha256(tokenizer.chat_template or "")).encode()).hexdigest()
        self.responses_folder = Path(recipe.regenerate.cache_dir or Path(recipe.output_dir) / "responses")
        batch = recipe.regenerate.batch_size
        self.llm = LLM(target, tokenizer, max_num_seqs=batch, max_num_batched_tokens=max(512, 32 * batch))

    def training_rows(self) -> list[PackedRow]:
        """Packed rows of the training sources, their responses rewritten by the target unless the recipe says no."""
        data = self.recipe.data
        if self.recipe.regenerate.enabled:
            examples = self._asked()
            self._account()
            rows, statistics = fit_rows((r.row() for r in self._responses("regenerate", examples)), data.max_length)
        else:
            examples = self._examples()
            with self.stages.stage("tokenise", len(examples)) as advance:
                rows, statistics = prepare_rows(
                    examples,
                    self.tokenizer,
                    max_length=data.max_length,
                    bad=self.bad,
                    num_proc=data.num_proc,
                    progress=lambda done, total: advance(done),
                )
            self._account()
        if not rows:
            raise DataError("data.train: no row with a supervised token is left")
        packed = pack(rows, data.max_length, packing=data.packing)
        self.stages.say(f"      {statistics}; {len(packed)} packed rows")
        return packed

    def prompts(self) -> list[tuple[int, ...]]:
        """What serving would send for the last response of every training example; those that leave no room for one
        are left out. DataError if none is left."""
        room = min(self.recipe.data.max_length, self.llm.engine.max_model_len) - 2
        found = [tuple(self.tokenizer.prompt_ids(example)) for example in self._asked()]
        if not any(fits := [len(prompt) <= room for prompt in found]):
            raise DataError(f"on_policy: all {len(found)} prompts are longer than {room} tokens; raise data.max_length")
        return [prompt for prompt, kept in zip(found, fits) if kept]

    def _examples(self) -> list[Example]:
        """Read once."""
        if self._prepared is None:
            self._prepared = training_examples(self.recipe, self.bad, self.folder, self.stage)
            self._say(str(self._prepared))
        return self._prepared.examples

    def _asked(self) -> list[Example]:
        """Those of which a prompt can be made; found once."""
        if self._askable is None:
            examples, self.bad.use = self._examples(), "train"
            self._askable = askable(examples, self.tokenizer, self.bad)
        return self._askable

    def _account(self) -> None:
        """Says which rows were bad; DataError if they are more than the recipe takes."""
        self.bad.finish()
        self._say(str(self.bad))

    def _say(self, text: str) -> None:
        if text:
            self.stages.say(f"      {escape(text)}")

    def held_out(self, limit: int = 8) -> dict[float, list[Response]]:
        """Texts the target wrote to validation prompts at each evaluated temperature, at most `limit` per workload."""
        if not self.recipe.data.validation:
            return {}
        found = load_sources(self.recipe.data.validation, bad=self.bad.begin("validation"))
        examples = _per_workload(askable(found, self.tokenizer, self.bad), limit)
        self._account()
        chosen = [(e, t) for t in self.recipe.evaluation.temperatures for e in examples]
        responses = self._responses(
            "held-out responses",
            [e for e, _ in chosen],
            [t for _, t in chosen],
            max_new_tokens=self.recipe.evaluation.max_tokens,
        )
        return {t: [r for r in responses if r.temperature == t] for t in self.recipe.evaluation.temperatures}

    def _responses(
        self, name: str, examples: list[Example], temperatures=None, max_new_tokens: int | None = None
    ) -> list[Response]:
        """Written by the main process, read by the others."""
        section = self.recipe.regenerate
        if max_new_tokens is not None:
            section = section.model_copy(update={"max_new_tokens": max_new_tokens})
        responses: list[Response] = []
        for main in (True, False):
            if self.accelerator.is_main_process == main:
                with self.stages.stage(name, len(examples)) as advance:
                    responses = regenerate(
                        self.llm,
                        examples,
                        self.tokenizer,
                        section,
                        target_hash=self.target_hash,
                        folder=self.responses_folder,
                        max_length=self.recipe.data.max_length,
                        temperatures=temperatures,
                        progress=lambda done, total: advance(done, total=total),
                    )
            self.accelerator.wait_for_everyone()
        return responses


def _per_workload(examples: Sequence[Example], limit: int) -> list[Example]:
    seen: Counter[str] = Counter()
    chosen = []
    for example in examples:
        seen[example.workload] += 1
        if seen[example.workload] <= limit:
            chosen.append(example)
    return chosen
