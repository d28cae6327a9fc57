"""Measures an exported drafter, loaded strictly, on prompts of several workloads, for the
acceptance report.

Per workload and temperature: acceptance on many prompts in batches, and the acceptance that replay
expects on the same text; at temperature 0 the text without drafting; times on a few prompts, the
same in every repeat, which drafting and no drafting answer in turns. Then the lossless check in
float32. The engine that is measured is any of engines.py."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.inference.evaluation.engines import Drafting, MeasuredEngine, Prompts, RuntimeEngine
from draftsmith.inference.evaluation.expected_acceptance import expected_acceptance
from draftsmith.inference.evaluation.lossless import compare_greedy
from draftsmith.inference.evaluation.timing import interleaved
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.progress import Advance, unwatched
from draftsmith.inference.provenance import environment, text_sha256
from draftsmith.inference.report.build import build_report
from draftsmith.inference.report.measurement import Measurement
from draftsmith.inference.report.schema import (
    ALL_WORKLOADS,
    AUTOREGRESSIVE,
    SPECULATIVE,
    AcceptanceReport,
    Cell,
    LosslessCheck,
    Provenance,
    SuiteFacts,
)
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.speculators.digests import model_weights_sha256, weights_sha256
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.speculators.export import other_target
from draftsmith.speculators.hub import cached_folder

logger = logging.getLogger(__name__)

SHORT = 8  # tokens that warm an engine up


@dataclass(frozen=True)
class Chat:
    """A conversation whose later turns are asked once the answers to those before them are written.

    prompt    token ids of the first turn, template applied
    later     texts of the turns after it
    ask       the answers so far -> token ids of the next turn's prompt
    longest   most tokens of a prompt; a turn that has more is not asked, nor are those after it
    """

    prompt: Sequence[int]
    later: Sequence[str] = ()
    ask: Callable[[Sequence[str]], Sequence[int]] = lambda answers: ()
    longest: int = 0


# by name; a prompt is token ids, templates applied
Workloads = Mapping[str, Sequence[Sequence[int] | Chat]]


@dataclass(frozen=True)
class MeasuredSuite:
    """The conversations of a suite by category, all of which are measured, and what the report says
    of it."""

    facts: SuiteFacts
    workloads: Workloads


EngineMaker = Callable[[Drafting], MeasuredEngine]


@dataclass(frozen=True)
class EvaluationSettings:
    """The extent of an evaluation. Every count is per workload.

    prompts_per_workload  prompts for acceptance and replay: 16 of 100 tokens are some 500 rounds,
                          which settles the acceptance length over six workloads to about 1 %
    rows                  prompts in flight for these; acceptance does not depend on it
    speculative_config    further options of drafting: adaptive lengths, trees (docs/runtime.md).
                          Without any, chains of num_speculative_tokens are drafted
    timed_prompts         least prompts of a timed pass, the same ones in every repeat
    timed_tokens          least tokens of a timed pass: more prompts are timed until there are as
                          many; a pass of fewer is settled by a few rounds
    repeats               passes with drafting and without, in turns; 0: nothing is timed
    batch_size            requests in flight while timing
    lossless_prompts      prompts for the float32 comparison; 0 is off
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    top_p: float = 1.0
    top_k: int = 0
    num_speculative_tokens: int = 4
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 128
    prompts_per_workload: int = 16
    rows: int = 32
    timed_prompts: int = 3
    timed_tokens: int = 500
    repeats: int = 3
    batch_size: int = 1
    lossless_prompts: int = 4
    seed: int = 0

    def sampling(self, temperature: float, seeds: Sequence[int]) -> list[SamplingParams]:
        """One SamplingParams per seed."""
        common = SamplingParams(
            temperature=temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens
        )
        return [replace(common, seed=self.seed * 1_000_003 + seed) for seed in seeds]


def evaluate(
    model: str | Path,
    drafter: str | Path | None,
    workloads: Workloads,
    settings: EvaluationSettings | None = None,
    *,
    suites: Sequence[MeasuredSuite] = (),
    method: str | None = None,
    engine: EngineMaker = RuntimeEngine,
    llm_options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: Advance = unwatched,
) -> AcceptanceReport:
    """Measure the exported `drafter` for the target `model`, both as served: loaded from their
    folders (or ids).

    workloads     name -> prompts as token ids, templates applied; may be empty beside suites
    suites        measured as well, their categories as workloads of their own, with an `all` for
                  each suite
    method        drafting without a checkpoint (ngram, suffix); `drafter` is then None
    engine        makes the engine that is measured: this runtime, or vLLM (`vllm_bridge`)
    llm_options   further options of LLM (dtype, device, revision, trust_remote_code, tokenizer)
    provenance    fields of report.Provenance that only the caller knows (recipe_name,
                  recipe_sha256, …)
    progress      called with the fraction of the cells that is done, and a few words

    EvaluationStopped, which holds what was measured, if the process is interrupted.

    Errors: CheckpointError if the drafter is not exactly as its config says, ConfigError for
    prompts that do not fit or for something that the engine cannot do."""
    settings = settings or EvaluationSettings()
    began = time.monotonic()
    progress(0.0, "loading")
    parts = _parts(workloads, suites, settings)
    in_flight = sum(len(part.chats) for part in parts)
    drafting = Drafting.of(
        str(model),
        None if drafter is None else str(drafter),
        method,
        num_speculative_tokens=settings.num_speculative_tokens,
        rows=min(max(settings.rows, settings.batch_size), in_flight),
        seed=settings.seed,
        options=dict(llm_options or {}),
        further=settings.speculative_config,
    )
    measured = engine(drafting)
    cells = _cells(parts, measured, settings)
    run = _Evaluation(measured, cells, settings, progress)
    try:
        facts = _measure(run, provenance or {})
    except KeyboardInterrupt as stop:
        raise EvaluationStopped([cell.cell() for cell in cells if cell.ended]) from stop
    ended = Provenance(**facts, duration_s=round(time.monotonic() - began, 1))
    progress(1.0, "done")
    most = {"num_speculative_tokens": ended.num_speculative_tokens}
    return build_report(cells, ended, [suite.facts.model_copy(update=most) for suite in suites])


def _measure(run: _Evaluation, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Fills the cells; returns what they depend on, as `_provenance`. The engine is closed
    afterwards."""
    settings = run.settings
    try:
        run.measure()
        facts = _provenance(run.engine, max_num_seqs=settings.batch_size, **provenance)
    finally:
        run.engine.close()
    if settings.lossless_prompts:
        run.check_float32()  # in an engine of its own, after the first has freed its memory
    return facts


def _provenance(
    engine: MeasuredEngine,
    *,
    target_name: str | None = None,
    chat_template: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The provenance of an engine that has not been closed, but `duration_s`, which is not known
    yet. `chat_template`: used instead of the tokenizer's."""
    drafting = engine.drafting
    target = engine.target
    facts = engine.facts()
    template = chat_template or getattr(engine.tokenizer, "chat_template", None)
    if not (template is None or isinstance(template, str)):  # several, by name
        template = json.dumps(template)
    target_weights = model_weights_sha256(drafting.model, drafting.options.get("revision"))
    return {
        **environment(target.device, target.dtype),
        **_drafter_facts(drafting, target_weights),
        "chat_template_sha256": text_sha256(template),
        "target_name": target_name or drafting.model,
        "target_weights_sha256": target_weights,
        "num_speculative_tokens": drafting.drafts.most_drafts,
        "speculative_config": dict(drafting.further),
        "engine": facts.name,
        "engines": [facts],
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "recipe_name": None,
        "recipe_sha256": None,
        **fields,
    }


def _drafter_facts(drafting: Drafting, target_weights: str) -> dict[str, Any]:
    """What the provenance says of the drafter. A drafter that was trained for other weights than
    `target_weights`, by their hash, is a warning."""
    config = drafting.speculative_config
    weights = None
    if drafting.drafter is not None:
        folder = cached_folder(drafting.drafter)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = weights_sha256(folder)
        if warning := other_target(config, target_weights):
            logger.warning("%s: %s", drafting.drafter, warning)
    return {
        "drafter_method": drafting.method,
        "drafter_path": drafting.drafter,
        "drafter_config": config,
        "drafter_weights_sha256": weights,
    }


@dataclass(frozen=True)
class _Part:
    """The conversations of one workload. `suite`: of which it is a category."""

    workload: str
    chats: Sequence[Chat]
    suite: str | None


@dataclass
class _CellRun(Measurement):
    """One (workload, temperature) while it is measured. `baseline`: the responses without drafting
    to the prompts of `requests`. `ended`: acceptance and times are there."""

    chats: Sequence[Chat] = ()
    baseline: list[RequestOutput] = field(default_factory=list)
    ended: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """Those of first turns, then those that were asked after them."""
        return [output.prompt_token_ids for output in self.requests]


def _parts(
    workloads: Workloads, suites: Sequence[MeasuredSuite], settings: EvaluationSettings
) -> list[_Part]:
    """What is measured at every temperature: the workloads, then the categories of suites, which
    are measured whole. DataError or ConfigError if there is nothing to measure."""
    most = settings.prompts_per_workload
    parts = [_Part(name, _chats(prompts[:most]), None) for name, prompts in workloads.items()]
    for measured in suites:
        for category, prompts in measured.workloads.items():
            parts.append(_Part(category, _chats(prompts), measured.facts.name))
    check_names(workloads)
    counts = {part.workload: len(part.chats) for part in parts}
    if not parts or not all(part.chats for part in parts):
        raise DataError(
            f"every workload needs at least one prompt; there are {counts or 'none'}",
            where="evaluate",
        )
    if not settings.temperatures:
        raise ConfigError("give at least one temperature, such as 0", where="evaluate")
    return parts


def check_names(workloads: Iterable[str]) -> None:
    """ConfigError if a workload has a name of the report's own."""
    if ALL_WORKLOADS in workloads:
        raise ConfigError(
            f"a workload is called {ALL_WORKLOADS}, the name that reports pool all of them under;"
            " give its rows, or its source, another `workload`",
            where="evaluate",
        )


def _chats(prompts: Sequence[Sequence[int] | Chat]) -> list[Chat]:
    return [prompt if isinstance(prompt, Chat) else Chat(prompt) for prompt in prompts]


def _cells(
    parts: Sequence[_Part], engine: MeasuredEngine, settings: EvaluationSettings
) -> list[_CellRun]:
    """By temperature, then part. Nothing is measured yet."""
    return [
        _CellRun(
            part.workload,
            temperature,
            engine.drafting.method,
            engine.drafting.depth,
            engine=engine.name,
            suite=part.suite,
            chats=part.chats,
        )
        for temperature in settings.temperatures
        for part in parts
    ]


class EvaluationStopped(KeyboardInterrupt):
    """An evaluation was interrupted; `cells`: those whose acceptance and times are measured."""

    def __init__(self, cells: list[Cell]) -> None:
        super().__init__()
        self.cells = cells


class _Evaluation:
    def __init__(
        self,
        engine: MeasuredEngine,
        cells: list[_CellRun],
        settings: EvaluationSettings,
        progress: Advance,
    ) -> None:
        self.engine = engine
        self.cells = cells
        self.settings = settings
        self.progress: Advance = progress
        self.done = 0

    def measure(self) -> None:
        """Fills every cell, except for the check in float32. The engine has stopped afterwards."""
        settings = self.settings
        temperatures = list(dict.fromkeys(cell.temperature for cell in self.cells))
        chats = [chat for cell in self.cells for chat in cell.chats]
        prompts = [chat.prompt for chat in chats]
        prompts += [[0] * chat.longest for chat in chats if chat.later]  # of turns not yet written
        self._note("warming up")
        self.engine.prepare(prompts, settings.max_tokens)
        self._warm_up(prompts[:1])
        for temperature in temperatures:
            cells = [cell for cell in self.cells if cell.temperature == temperature]
            self._note(f"T={temperature:g}: acceptance")
            self._write(cells)
            if temperature == 0:
                written = self._greedy(self.engine, [cell.prompts for cell in cells], False)
                for cell, baseline in zip(cells, written, strict=True):
                    cell.baseline = baseline
            for cell in cells:
                if settings.repeats:
                    self._time(cell)
                cell.ended = True
                if settings.repeats:
                    self._time_rounds(cell)
                self.done += 1
        self.engine.stop()
        self._note("replay")
        for cell in self.cells:
            if self.engine.replayed(cell.temperature):
                self._replay(cell)
            if cell.baseline:
                cell.lossless.append(self._compare(self.engine, cell.baseline, cell.requests))

    def _warm_up(self, prompts: Prompts) -> None:
        """Fills caches and the allocator on a few tokens, so that the first timed pass is like the
        others."""
        short = replace(self.settings.sampling(0.0, [0])[0], max_tokens=SHORT)
        for speculate in (True, False):
            self.engine.write(prompts, [short], speculate=speculate, batch=1)

    # ------------------------------------------------------------------ acceptance

    def _write(self, cells: Sequence[_CellRun]) -> None:
        """Responses with drafting of all cells at once, so that the rows in flight stay full; turn
        after turn, each after the answers just written. Seeds are counted per cell."""
        answers: list[str] = []
        turns = [(cell, chat, answers, chat.prompt) for cell in cells for chat in cell.chats]
        while turns:
            asked = {id(cell): len(cell.requests) for cell in cells}
            seeds = []
            for cell, *_ in turns:
                seeds.append(asked[id(cell)])
                asked[id(cell)] += 1
            params = self.settings.sampling(cells[0].temperature, seeds)
            prompts = [prompt for *_, prompt in turns]
            outputs = self.engine.write(prompts, params, speculate=True, batch=self.settings.rows)
            following = []
            for (cell, chat, answers, _), output in zip(turns, outputs, strict=True):
                cell.requests.append(output)
                if len(answers) < len(chat.later):
                    answers = [*answers, self._text(output)]
                    prompt = chat.ask(answers)
                    if len(prompt) <= chat.longest:
                        following.append((cell, chat, answers, prompt))
            turns = following

    def _greedy(
        self, engine: MeasuredEngine, parts: Sequence[Prompts], speculate: bool
    ) -> list[list[RequestOutput]]:
        """The greedy responses to the prompts of each part, all written in one go."""
        prompts = [prompt for part in parts for prompt in part]
        params = self.settings.sampling(0.0, range(len(prompts)))
        rows = self.settings.rows
        outputs = iter(engine.write(prompts, params, speculate=speculate, batch=rows))
        return [list(islice(outputs, len(part))) for part in parts]

    def _text(self, output: RequestOutput) -> str:
        """An answer as the next turn of its conversation reads it."""
        return self.engine.tokenizer.decode(
            output.outputs[0].token_ids,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def _replay(self, cell: _CellRun) -> None:
        """Expected acceptance on the text that drafting wrote."""
        settings = self.settings
        target, drafter = self.engine.models
        assert drafter is not None
        cell.replay = expected_acceptance(
            target,
            drafter,
            [(output.prompt_token_ids, output.outputs[0].token_ids) for output in cell.requests],
            cell.temperature,
            settings.num_speculative_tokens,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )

    # ------------------------------------------------------------------ times

    def _time(self, cell: _CellRun) -> None:
        """Passes on the same prompts each, which drafting and no drafting answer in turns."""
        settings = self.settings
        note = f"{cell.suite or ''} {cell.workload}, T={cell.temperature:g}: times".strip()
        prompts, params = self._timed(cell)
        turns = self.engine.turns(len(prompts), settings.batch_size)
        whole = 2 * settings.repeats * len(prompts)  # responses
        ended = 0

        def write(speculate: bool, turn: range) -> list[RequestOutput]:
            nonlocal ended
            self._note(f"{note}, {ended} of {whole} responses", ended / whole)
            part = slice(turn.start, turn.stop)
            outputs = self.engine.write(
                prompts[part], params[part], speculate=speculate, batch=settings.batch_size
            )
            ended += len(outputs)
            return outputs

        runs = {SPECULATIVE: partial(write, True), AUTOREGRESSIVE: partial(write, False)}
        cell.passes = {kind: [] for kind in runs}
        for kind, run, _ in interleaved(
            runs, cell.workload, turns, settings.repeats, self.engine.device
        ):
            cell.passes[kind].append(run)

    def _time_rounds(self, cell: _CellRun) -> None:
        """Rounds part by part, on the prompts of the passes."""
        prompts, params = self._timed(cell)
        cell.rounds = self.engine.time_rounds(prompts, params, self.settings.batch_size)

    def _timed(self, cell: _CellRun) -> tuple[Prompts, list[SamplingParams]]:
        """The prompts of a timed pass, and their parameters with the seeds of `_write`, so that
        drafting writes the texts that were counted."""
        prompts = cell.prompts[: self._num_timed(cell)]
        return prompts, self.settings.sampling(cell.temperature, range(len(prompts)))

    def _num_timed(self, cell: _CellRun) -> int:
        """Prompts of a timed pass: enough for `timed_prompts` and, by the responses that were
        written with drafting, for `timed_tokens`; all, if the cell has no more."""
        tokens = 0
        for count, output in enumerate(cell.requests, 1):
            tokens += len(output.outputs[0].token_ids)
            if count >= self.settings.timed_prompts and tokens >= self.settings.timed_tokens:
                return count
        return len(cell.requests)

    # ------------------------------------------------------------------ the same tokens

    def check_float32(self) -> None:
        """Target and drafter in float32, greedy, with and without drafting: every workload in one
        go.

        It makes an engine of its own, once the first one has been closed, and adds a check to the
        cells of the lowest temperature."""
        settings = self.settings
        coldest = min(settings.temperatures)
        cells = [cell for cell in self.cells if cell.temperature == coldest]
        parts = [cell.prompts[: settings.lossless_prompts] for cell in cells]
        prompts = [prompt for part in parts for prompt in part]
        exact = self.engine.in_float32(min(settings.rows, len(prompts)))
        if exact is None:
            return
        self._note("float32: the same tokens with and without drafting")
        try:
            exact.prepare(prompts, settings.max_tokens)
            off, on = (self._greedy(exact, parts, speculate) for speculate in (False, True))
            for cell, references, outputs in zip(cells, off, on, strict=True):
                cell.lossless.insert(0, self._compare(exact, references, outputs))
        finally:
            exact.close()

    def _compare(
        self,
        engine: MeasuredEngine,
        off: Sequence[RequestOutput],
        on: Sequence[RequestOutput],
    ) -> LosslessCheck:
        return compare_greedy(
            engine.runner,
            off,
            on,
            num_speculative_tokens=engine.drafting.drafts.most_drafts,
            rows=min(self.settings.rows, len(on)),
        )

    def _note(self, text: str, of_cell: float = 0.0) -> None:
        """Says what is under way, and the share of the cells: `of_cell` of the one being timed."""
        self.progress((self.done + of_cell) / len(self.cells), text)
