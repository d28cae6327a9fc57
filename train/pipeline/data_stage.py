"""The data of a stage of the training: packed rows, prompts, and held-out texts that the target
wrote.

The target need not be loaded where endpoints write its texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.markup import escape

from draftsmith.inference import LLM
from draftsmith.inference.entrypoints.loading import end_of_sequence_ids
from draftsmith.inference.progress import Stages
from draftsmith.inference.provenance import text_sha256
from draftsmith.speculators.digests import model_weights_sha256
from draftsmith.speculators.errors import DataError
from draftsmith.speculators.hub import cached_folder
from draftsmith.speculators.target.adapted import config_source
from draftsmith.speculators.target.frozen_target import FrozenTarget
from draftsmith.speculators.target.longrope import trained_length
from draftsmith.train.data.arrow_tables import facts_of, remove_abandoned
from draftsmith.train.data.bad_rows import BadRows
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer, TokenRow, Turn, fewest_rows
from draftsmith.train.data.packing import (
    PackedRow,
    RowStatistics,
    conversation_tokenizer,
    fit_rows,
    packed,
    prepare_rows,
    template_date,
)
from draftsmith.train.data.prepare import bad_rows, training_examples
from draftsmith.train.data.prompt_tables import Prompts, save_prompts
from draftsmith.train.data.row_tables import ROW_FORMAT, PackedRows, rows_address, save_rows
from draftsmith.train.data.sources import load_sources
from draftsmith.train.data.tokenising import examples_address, prompts_of
from draftsmith.train.features.states_spec import states_root
from draftsmith.train.processes import once_per_folder, require_same, share_files
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.regeneration.conversations import TOO_LONG, TargetFacts
from draftsmith.train.regeneration.regenerate import regenerate
from draftsmith.train.regeneration.store import Record, Response
from draftsmith.train.regeneration.writers import UnreadStates


@dataclass(frozen=True)
class TargetHashes:
    """sha256 of what the target's texts and features depend on."""

    weights: str
    config: str
    template: str

    @property
    def combined(self) -> str:
        """One hash of the three, in hex."""
        return hashlib.sha256((self.weights + self.config + self.template).encode()).hexdigest()


def target_hashes(recipe: Recipe, template: str | None) -> TargetHashes:
    """Those of a recipe's target, whose chats pass through `template`."""
    target = recipe.target
    folder = cached_folder(*config_source(target.model, target.revision))
    weights = model_weights_sha256(target.model, target.revision)
    return TargetHashes(weights, config_sha256(folder), str(text_sha256(template)))


def config_sha256(folder: Path) -> str:
    """Of what config.json in `folder` says of the model; who wrote it, and when, is left out."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("transformers_version", "_name_or_path"):
        fields.pop(name, None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class TrainingData:
    """The input of a stage. `prompts`: of on-policy texts; `held_out`: texts by temperature."""

    rows: Sequence[PackedRow]
    prompts: Sequence[tuple[int, ...]]
    held_out: dict[float, list[Response]]
    tokenizer: ConversationTokenizer
    hashes: TargetHashes


class WholeTarget(Protocol):
    """A target that is held whole, or is loaded where something has to be written."""

    @property
    def held(self) -> FrozenTarget | None:
        """The target where it is held from start to end; None: `whole` loads it."""

    def whole(self) -> FrozenTarget:
        """The target, loaded now unless it is there."""


# Makes the data of a stage of the training, as `prepare_data` does, of the same arguments.
Prepare = Callable[[Recipe, WholeTarget, Any, Accelerator, Stages, str], TrainingData]


def prepare_data(
    recipe: Recipe,
    target: WholeTarget,
    tokenizer: Any,
    accelerator: Accelerator,
    stages: Stages,
    stage: str = "",
) -> TrainingData:
    """The data of a stage of the training; the engine that writes its texts is gone afterwards."""
    load = target.whole if target.held is None else None
    data = DataStage(recipe, target.held, tokenizer, accelerator, stages, stage=stage, load=load)
    rows = data.training_rows()
    held_out = data.held_out()
    prompts = data.prompts() if recipe.on_policy else []
    return TrainingData(rows, prompts, held_out, data.tokenizer, data.hashes)


class DataStage:
    """Makes training rows, their prompts and held-out texts of one stage of the training."""

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
        load: Callable[[], FrozenTarget] | None = None,
    ) -> None:
        """`stage`: names the lists of what is left out, if the training has several. `target`: None
        where endpoints write, or where `load` gives it once a response is missing. `part` as in
        `regenerate`."""
        self.recipe = recipe
        self.part = part
        self.accelerator = accelerator
        self.stages = stages
        self.stage = stage
        self.tokenizer = conversation_tokenizer(recipe.data, tokenizer, self._date(tokenizer))
        self.folder = Path(recipe.output_dir) if accelerator.is_main_process else None
        self.bad = bad_rows(recipe.data, self.folder, stage=stage)
        template = self.tokenizer.chat_template or tokenizer.chat_template
        self.hashes = target_hashes(recipe, template)
        shared = recipe.regenerate.cache_dir
        self.responses_folder = Path(shared or Path(recipe.output_dir) / "responses")
        self.rows_folder = Path(recipe.output_dir) / "rows"
        facts = {"target_hash": self.hashes.combined, **self.tokenizer.template_facts()}
        self.record = None if self.folder is None else Record(self.folder, facts)
        self._load = load
        self._tokenizer = tokenizer
        self.llm: LLM | None = None
        if target and target.supports_rollback and not starts_sharded(recipe, accelerator):
            self.llm = self._make_llm(target)
        self.facts = self._target_facts(target)

    def _target_facts(self, target: FrozenTarget | None) -> TargetFacts:
        """What responses need to know of the target, whether it is loaded or not."""
        recipe = self.recipe
        sketch = recipe.target.sketch()
        longest = getattr(sketch.config, "max_position_embeddings", None) or recipe.data.max_length
        if target is None and self._load is not None:
            # as the LLM that may have to write is limited
            longest = min(longest, trained_length(sketch.config, recipe.data.max_length) or longest)
        name = recipe.target.model
        end = tuple(sorted(end_of_sequence_ids(name, self._tokenizer, **recipe.target.source)))
        return TargetFacts(name, longest, sketch.vocab_size, end)

    def _make_llm(self, target: FrozenTarget) -> LLM:
        batch = self.recipe.regenerate.batch_size
        limits: dict[str, Any] = {"max_num_seqs": batch}
        limits["max_num_batched_tokens"] = max(512, 32 * batch)
        # of LongRoPE it chooses the frequencies, which are those of the training
        limits["max_model_len"] = trained_length(target.config, self.recipe.data.max_length)
        return LLM(target, self._tokenizer, **limits)

    def _loaded_llm(self) -> LLM:
        """The LLM of a target that is loaded now."""
        if self.llm is None:
            assert self._load is not None, "only a stage that can load its target asks for it"
            self.llm = self._make_llm(self._load())
        return self.llm

    def _date(self, tokenizer: Any) -> datetime | None:
        """The run's date for its chat template, kept by the main process and sent to the others."""
        dates: list[datetime | None] = [None]
        if self.accelerator.is_main_process:
            folder = Path(self.recipe.output_dir)
            dates[0] = template_date(self.recipe.data, tokenizer, folder, keep=True)
        return broadcast_object_list(dates)[0]

    def training_rows(self) -> PackedRows:
        """Packed rows of the training sources, their responses rewritten if `regenerate` is on. The
        first process that sees the run's folder writes them there, and all map them."""
        write = self._write_rows
        if self.recipe.regenerate.enabled:
            write = partial(self._write_response_rows, self._training_responses())
        path, statistics = once_per_folder(self.accelerator, self.rows_folder, write)
        rows = PackedRows(path)
        self.stages.say(f"      {statistics}; {len(rows)} packed rows")
        return rows

    def _write_rows(self) -> tuple[Path, RowStatistics]:
        """The table of the examples as they are; what is there is not made again."""
        data = self.recipe.data
        examples = self._examples
        longest = min(data.max_length, self.facts.max_model_len)
        if longest < data.max_length:
            self._say(f"texts are cut at the target's context of {longest} tokens")
        settings = ("rows", ROW_FORMAT, data.max_length, longest)
        path = self._table(examples_address(examples, self.tokenizer, *settings))
        facts = facts_of(path)
        if facts is not None:
            self.bad.refuse_again(facts["bad"])
            self._say(str(self.bad))
            return path, RowStatistics(**facts["statistics"])
        before = len(self.bad.reasons)
        with self.stages.stage("tokenise", len(examples)) as advance:
            rows, statistics = prepare_rows(
                examples,
                self.tokenizer,
                max_length=longest,
                bad=self.bad,
                num_proc=data.num_proc,
                scratch=self.rows_folder,
                progress=advance,
            )
        self._say(str(self.bad))
        facts = {"statistics": asdict(statistics), "bad": self.bad.listed(before)}
        save_rows(path, packed(rows, data.max_length), facts)
        return path, statistics

    def _write_response_rows(
        self, responses: Callable[[], list[Response]]
    ) -> tuple[Path, RowStatistics]:
        """The table of the target's own responses."""
        longest = self.recipe.data.max_length
        rows, statistics = fit_rows(response_rows(responses()), longest)
        if not rows:
            raise DataError("no row with a supervised token is left", where="data.train")
        path = self._table(rows_address(rows, longest, ROW_FORMAT))
        if facts_of(path) is None:
            save_rows(path, packed(rows, longest), {})
        return path, statistics

    def _table(self, address: str) -> Path:
        remove_abandoned(self.rows_folder)
        return self.rows_folder / f"{address}.arrow"

    def prompts(self) -> Prompts:
        """The prompt that serving would send for the last response of every training example; those
        that leave no room for a response are left out. DataError if none is left."""
        assert self.llm is not None, "texts are written on policy by a target that is loaded"
        room = min(self.recipe.data.max_length, self.llm.engine.max_model_len) - 2
        prompts = self._prompts
        fitting = prompts.at(np.flatnonzero(prompts.lengths <= room))
        if not fitting:
            raise DataError(f"all prompts exceed {room} tokens", where="data.max_length")
        if left_out := len(prompts) - len(fitting):
            self._say(f"{left_out} of {len(prompts)} on-policy prompts are left out: {TOO_LONG}")
        return fitting

    def responses(self) -> list[Response]:
        """The target's own responses to every training example that has a prompt."""
        return self._training_responses()()

    def _training_responses(self) -> Callable[[], list[Response]]:
        examples = self._examples
        prompts = self._prompts
        self._say(str(self.bad))
        return self._responses("regenerate", [examples[i] for i in prompts.examples], prompts)

    @cached_property
    def _examples(self) -> list[Example]:
        prepared = training_examples(self.recipe, self.bad, self.folder, self.stage)
        self._say(str(prepared))
        return prepared.examples

    @cached_property
    def _prompts(self) -> Prompts:
        """Of the training examples that have one."""
        return self._prompts_of(self._examples, self.bad)

    def _prompts_of(self, examples: Sequence[Example], bad: BadRows) -> Prompts:
        """The prompts of those examples that have one: rendered and tokenised once for all
        processes."""
        address = examples_address(examples, self.tokenizer, "prompts", ROW_FORMAT)
        require_same(
            self.accelerator,
            address,
            "the processes read different examples, or have other versions of the packages that"
            " tokenise; give all machines the same files and packages",
            where="processes",
        )
        path = self._table(address)
        once_per_folder(
            self.accelerator, self.rows_folder, lambda: self._write_prompts(path, examples, bad)
        )
        return Prompts(path)

    def _write_prompts(self, path: Path, examples: Sequence[Example], bad: BadRows) -> None:
        facts = facts_of(path)
        if facts is not None:
            bad.refuse_again(facts["bad"])
            return
        before = len(bad.reasons)
        num_proc = self.recipe.data.num_proc
        with self.stages.stage("tokenise prompts", len(examples)) as advance:
            prompts = prompts_of(
                examples,
                self.tokenizer,
                bad,
                num_proc=num_proc,
                scratch=self.rows_folder,
                progress=advance,
            )
        save_prompts(path, prompts, {"bad": bad.listed(before)})

    def _say(self, text: str) -> None:
        if text:
            self.stages.say(f"      {escape(text)}")

    def held_out(self) -> dict[float, list[Response]]:
        """Texts the target wrote at each evaluated temperature to validation prompts, workloads in
        turn. They are sampled with the filters of `evaluation`, under which drafts are verified,
        not with those of `regenerate`."""
        e = self.recipe.evaluation
        if not self.recipe.data.validation:
            return {}
        bad = bad_rows(self.recipe.data, self.folder, stage=self.stage, use="validation")
        examples = load_sources(self.recipe.data.validation, bad=bad)
        prompts = self._prompts_of(examples, bad)
        examples = [examples[i] for i in prompts.examples]
        turns = workloads_in_turn(examples, self.recipe.held_out_prompts)
        self._say(str(bad))
        chosen = [(number, t) for t in e.temperatures for number in turns]
        responses = self._responses(
            "held-out responses",
            [examples[number] for number, _ in chosen],
            prompts.at([number for number, _ in chosen]),
            [t for _, t in chosen],
            max_new_tokens=e.max_tokens,
            top_p=e.top_p,
            top_k=e.top_k,
            turns="last",
        )()
        return {t: [r for r in responses if r.temperature == t] for t in e.temperatures}

    def _unread_states(self) -> UnreadStates | None:
        """Servers that give features leave the hidden states of responses too."""
        if not self.recipe.features.endpoints:
            return None
        from draftsmith.train.features.transfers import ResponseStates, run_name

        root = states_root(self.recipe.features.states_dir)
        return ResponseStates(root, run_name(self.recipe.output_dir, f"responses-{self.part[0]}"))

    def _responses(
        self,
        name: str,
        examples: list[Example],
        prompts: Prompts,
        temperatures=None,
        **changed: Any,
    ) -> Callable[[], list[Response]]:
        """Writes the responses by all processes, or asks for them by the main one; what is returned
        reads them. `changed`: keys of the section."""
        section = self.recipe.regenerate.model_copy(update=changed)
        with self.stages.stage(name, len(examples)) as advance:

            def write(part: tuple[int, int]) -> list[Response]:
                whole = part == self.part  # and no process's share of it
                return regenerate(
                    self.llm,
                    examples,
                    self.tokenizer,
                    section,
                    prompts=prompts,
                    target_hash=self.hashes.combined,
                    folder=self.responses_folder,
                    max_length=self.recipe.data.max_length,
                    facts=self.facts,
                    temperatures=temperatures,
                    progress=advance,
                    say=self.stages.say if whole else lambda text: None,
                    part=part,
                    record=self.record if whole else None,
                    make_llm=None if self._load is None else self._loaded_llm,
                    unread=self._unread_states(),
                )

            accelerator = self.accelerator
            folder = self.responses_folder
            if section.endpoints or self.part != (0, 1):
                return write_first(accelerator, folder, lambda: write(self.part))
            return write_in_parts(accelerator, folder, write)


def response_rows(responses: Iterable[Response]) -> Iterator[TokenRow]:
    """Token rows of responses in the order of their conversations. Turns that continue one
    another's tokens are one row; other turns are rows of their own."""
    for _, group in groupby(responses, key=lambda response: response.example):
        turns = list(group)
        rows = [TokenRow.from_response(t.prompt_ids, t.output_ids, t.workload) for t in turns]
        if len(rows) > 1:
            rows = fewest_rows(
                [Turn(row.input_ids.tolist(), row.loss_mask) for row in rows], turns[0].workload
            )
        yield from rows


def write_first(
    accelerator: Accelerator, folder: Path, write: Callable[[], list[Response]]
) -> Callable[[], list[Response]]:
    """The first process writes responses into `folder`, where the others find them. What is
    returned gives them: it has them in the first process, and reads them in the others."""
    responses = write() if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    share_files(accelerator, folder, "*.jsonl")
    return write if responses is None else lambda: responses


def write_in_parts(
    accelerator: Accelerator, folder: Path, write: Callable[[tuple[int, int]], list[Response]]
) -> Callable[[], list[Response]]:
    """Every process writes its part of the responses into `folder`. What is returned gives all of
    them, in the order of their conversations. `write`: `regenerate` of a part."""
    if accelerator.num_processes > 1:
        share_files(accelerator, folder, "*.jsonl")  # of an earlier start
        write((accelerator.process_index, accelerator.num_processes))
        accelerator.wait_for_everyone()
        share_files(accelerator, folder, "*.jsonl")
    return write_first(accelerator, folder, lambda: write((0, 1)))


def starts_sharded(recipe: Recipe, accelerator: Accelerator) -> bool:
    """True if the target is sharded from the start, and is never whole on a device: it writes no
    texts before, and no start is fitted to its features."""
    writes = bool(recipe.regenerate.enabled or recipe.data.validation)
    writes = writes and not recipe.regenerate.endpoints
    fitted = getattr(recipe.drafter, "init", None) == "least_squares"
    sharded = recipe.target.sharding == "fsdp" and accelerator.num_processes > 1
    return sharded and not writes and not fitted


def workloads_in_turn(examples: Sequence[Example], count: int) -> list[int]:
    """The numbers of `count` examples in their order: the first of each workload, then the second
    of each."""
    seen: Counter[str] = Counter()
    turns = []
    for index, example in enumerate(examples):
        turns.append((seen[example.workload], index))
        seen[example.workload] += 1
    return sorted(index for _, index in sorted(turns)[:count])
