"""What the stages of a run read: packed training rows, prompts, and held-out texts that the target wrote.

Knows recipes, files and the target that writes, which need not be loaded where endpoints do; no drafter and no loop.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.markup import escape

from inference import LLM
from inference.provenance import config_sha256, text_sha256, weights_sha256
from speculators.errors import DataError
from speculators.hub import cached_folder
from speculators.target.frozen_target import FrozenTarget
from train.data.packing import PackedRow, conversation_tokenizer, fit_rows, pack, prepare_rows
from train.data.prepare import Prepared, askable, bad_rows, training_examples
from train.data.sources import Example, load_sources
from train.pipeline.progress import Stages
from train.recipe.recipe import Recipe
from train.regeneration.record import Record, keep_summary
from train.regeneration.regenerate import facts_of, regenerate, settings_hash
from train.regeneration.store import Response, rows_of


class RunData:
    """Training rows, their prompts and held-out texts of a run."""

    def __init__(
        self,
        recipe: Recipe,
        target: FrozenTarget | None,
        tokenizer: Any,
        accelerator: Accelerator,
        stages: Stages,
        *,
        stage: str = "",
        part: tuple[int, int] = (0, 1),
        retry_failed: bool = False,
    ) -> None:
        """`stage`: of the training, if it has several; names the lists of what is left out. `target`: None only where
        endpoints write; `part` and `retry_failed` as in `regenerate`."""
        self.recipe, self.target, self.tokenizer = recipe, target, conversation_tokenizer(recipe.data, tokenizer)
        self.part, self.retry_failed = part, retry_failed
        self.accelerator, self.stages, self.stage = accelerator, stages, stage
        self.folder = Path(recipe.output_dir) if accelerator.is_main_process else None
        self.bad = bad_rows(recipe.data, self.folder, stage)
        self._prepared: Prepared | None = None
        self._askable: list[Example] | None = None
        self.pad_token_id = tokenizer.pad_token_id or 0
        folder = cached_folder(recipe.target.model, recipe.target.revision)
        self.weights_hash = weights_sha256(folder)
        template = text_sha256(self.tokenizer.chat_template or tokenizer.chat_template or "")
        self.target_hash = hashlib.sha256((self.weights_hash + config_sha256(folder) + template).encode()).hexdigest()
        self.responses_folder = Path(recipe.regenerate.cache_dir or Path(recipe.output_dir) / "responses")
        self.record = Record(
            recipe.target.model,
            recipe.target.revision,
            self.target_hash,
            text_sha256(self.tokenizer.chat_template or tokenizer.chat_template),
            recipe.data.chat_template_kwargs,
        )
        batch = recipe.regenerate.batch_size
        asked = target is not None and not waits_on_host(recipe, accelerator)
        limits = {"max_num_seqs": batch, "max_num_batched_tokens": max(512, 32 * batch)}
        self.llm = LLM(target, tokenizer, **limits) if asked else None
        self.facts = facts_of(recipe, tokenizer) if self.llm is None else None

    def training_rows(self) -> list[PackedRow]:
        """Packed rows of the training sources, their responses rewritten by the target unless the recipe says no."""
        data = self.recipe.data
        if self.recipe.regenerate.enabled:
            rows, statistics = fit_rows(rows_of(self.responses()), data.max_length)
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
        assert self.llm is not None, "texts are written on policy by a target that is loaded"
        room = min(self.recipe.data.max_length, self.llm.engine.max_model_len) - 2
        found = [tuple(self.tokenizer.prompt_ids(example)) for example in self._asked()]
        if not any(fits := [len(prompt) <= room for prompt in found]):
            raise DataError(f"on_policy: all {len(found)} prompts are longer than {room} tokens; raise data.max_length")
        return [prompt for prompt, kept in zip(found, fits) if kept]

    def responses(self) -> list[Response]:
        """The target's own, to every training example that can be asked; DataError if too many cannot."""
        asked = self._asked()
        self._account()
        return self._responses("regenerate", asked)

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

    def held_out(self, prompts: int | None = None) -> dict[float, list[Response]]:
        """Texts the target wrote at each evaluated temperature to validation prompts, as many as the recipe says (or
        `prompts`), workloads in turn. They are sampled as the report samples: with the filters of `evaluation`, under
        which drafts will be verified, and not those of `regenerate`."""
        e = self.recipe.evaluation
        if not self.recipe.data.validation:
            return {}
        found = load_sources(self.recipe.data.validation, bad=self.bad.begin("validation"))
        examples = workloads_in_turn(askable(found, self.tokenizer, self.bad), prompts or self.recipe.held_out_prompts)
        self._account()
        chosen = [(example, t) for t in e.temperatures for example in examples]
        responses = self._responses(
            "held-out responses",
            [example for example, _ in chosen],
            [t for _, t in chosen],
            max_new_tokens=e.max_tokens,
            top_p=e.top_p,
            top_k=e.top_k,
            turns="last",
        )
        return {t: [r for r in responses if r.temperature == t] for t in e.temperatures}

    def _responses(self, name: str, examples: list[Example], temperatures=None, **changed: Any) -> list[Response]:
        """Written by the main process, read by the others. `changed`: keys of the section."""
        section = self.recipe.regenerate.model_copy(update=changed)
        with self.accelerator.main_process_first():
            with self.stages.stage(name, len(examples)) as advance:
                responses = regenerate(
                    self.llm,
                    examples,
                    self.tokenizer,
                    section,
                    target_hash=self.target_hash,
                    folder=self.responses_folder,
                    max_length=self.recipe.data.max_length,
                    facts=self.facts,
                    temperatures=temperatures,
                    progress=lambda done, total, note: advance(done, note, total=total),
                    say=self.stages.say,
                    part=self.part,
                    retry_failed=self.retry_failed,
                    record=self.record,
                )
            if self.accelerator.is_main_process:
                kept = self.responses_folder / f"{settings_hash(section, self.target_hash)}.json"
                keep_summary(Path(self.recipe.output_dir), kept)
        self.accelerator.wait_for_everyone()
        return responses


def waits_on_host(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Whether the target stays in the host's memory until it is shared out, and is never whole on a device: where it
    is asked for nothing before, neither for texts nor for features that a start is fitted to."""
    writes = bool(recipe.regenerate.enabled or recipe.data.validation) and not recipe.regenerate.endpoints
    fitted = getattr(recipe.drafter, "init", None) == "least_squares"
    return recipe.target.sharding == "fsdp" and accelerator.num_processes > 1 and not writes and not fitted


def workloads_in_turn(examples: Sequence[Example], count: int) -> list[Example]:
    """`count` examples in their order: the first of each workload, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for place, example in enumerate(examples):
        turns.append((seen[example.workload], place))
        seen[example.workload] += 1
    return [examples[place] for place in sorted(place for _, place in sorted(turns)[:count])]
