"""Measures an exported drafter, loaded strictly, on prompts of several workloads, for the
acceptance report.

Per workload and temperature: acceptance on many prompts in batches, and the acceptance that replay
expects on the same text; at temperature 0 the text without drafting; times on a few prompts, the
same in every repeat, with drafting, without, and of `transformers.generate`, one right after the
other; the parts of a round alone. Then the lossless check in float32. The engine that
is measured is any of engines.py. Rates are computed by inference.report.build."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from inference.evaluation.engines import Drafting, MeasuredEngine, Prompts, RuntimeEngine
from inference.evaluation.expected_acceptance import expected_acceptance
from inference.evaluation.lossless import compare_greedy
from inference.evaluation.provenance import report_provenance
from inference.evaluation.timing import Run, costs_of, interleaved, typical_context
from inference.metrics import acceptance_length
from inference.outputs import RequestOutput
from inference.report.build import build_report, num_output_tokens
from inference.report.measurement import (
    AUTOREGRESSIVE,
    SPECULATIVE,
    TRANSFORMERS,
    CellMeasurement,
    LosslessCheck,
)
from inference.report.schema import AcceptanceReport, Bound, SuiteFacts
from inference.sampling_params import SamplingParams
from speculators.errors import ConfigError, DataError


@dataclass(frozen=True)
class Chat:
    """A conversation whose later turns are asked once the answers to those before them are written.

    prompt    token ids of the first turn, template applied
    later     texts of the turns after it
    ask       the answers so far -> token ids of the next turn's prompt
    longest   most tokens of a prompt; a turn that has more is not asked, nor are those after it,
              and all are counted
    """

    prompt: Sequence[int]
    later: Sequence[str]
    ask: Callable[[Sequence[str]], Sequence[int]]
    longest: int


Workloads = Mapping[
    str, Sequence[Sequence[int] | Chat]
]  # by name; a prompt is token ids, templates applied


@dataclass(frozen=True)
class MeasuredSuite:
    """The conversations of a suite by category, all of which are measured, and what the report says
    of it."""

    facts: SuiteFacts
    workloads: Workloads


EngineMaker = Callable[[Drafting], MeasuredEngine]
Progress = Callable[[float, str], None]  # fraction done, description of the present step


@dataclass(frozen=True)
class EvaluationSettings:
    """The extent of an evaluation. Every count is per workload.

    prompts_per_workload  prompts for acceptance and replay. 16 of 100 tokens are some 500 rounds
    per workload, which
                          settles the acceptance length over six workloads to about 1 %
    rows                  prompts in flight for these; acceptance does not depend on it, only the
    waiting does
    timed_prompts         prompts of every timed pass, the same ones in every repeat
    repeats               interleaved passes: on, off, transformers, then in reverse; 0: nothing is
                          timed
    transformers          the passes include `transformers.generate`; it is slow, for reference
    batch_size            requests in flight while timing
    cost_trials           forwards of each kind in one isolated measurement
    lossless_prompts      prompts for the float32 comparison; 0 is off
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    top_p: float = 1.0
    top_k: int = 0
    num_speculative_tokens: int = 4
    max_tokens: int = 128
    prompts_per_workload: int = 16
    rows: int = 32
    timed_prompts: int = 3
    repeats: int = 3
    transformers: bool = True
    batch_size: int = 1
    cost_trials: int = 5
    lossless_prompts: int = 4
    seed: int = 0

    def prompts_sha256(self, workloads: Workloads, suites: Sequence[MeasuredSuite] = ()) -> str:
        """Hash of the prompts and of the limits of responses: reports with the same one can be
        compared."""
        chosen = {
            name: list(map(_said, prompts[: self.prompts_per_workload]))
            for name, prompts in workloads.items()
        }
        for suite in suites:
            chosen |= {
                f"{suite.facts.name}/{name}": list(map(_said, some))
                for name, some in suite.workloads.items()
            }
        limits = {"max_tokens": self.max_tokens, "top_p": self.top_p, "top_k": self.top_k}
        return hashlib.sha256(json.dumps([chosen, limits], sort_keys=True).encode()).hexdigest()

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
    gates: Mapping[str, Bound] | None = None,
    llm_options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> AcceptanceReport:
    """Measure the exported `drafter` for the target `model`, both as served: loaded from their
    folders (or ids).

    workloads     name -> prompts as token ids, templates applied; may be empty beside suites
    suites        measured as well, their categories as workloads of their own, with an `all` for
                  each suite
    method        drafting without a checkpoint (ngram, suffix); `drafter` is then None
    engine        makes the engine that is measured: this runtime, or vLLM (vllm_bridge/engine.py,
                  server.py)
    gates         bounds on keys of the summary
    llm_options   further options of LLM (dtype, device, revision, trust_remote_code, tokenizer)
    provenance    fields of report.Provenance that only the caller knows (recipe_name,
                  recipe_sha256, …)
    progress      called with the fraction done, by expected time, and a few words

    Errors: CheckpointError if the drafter is not exactly as its config says, ConfigError for
    prompts that do not fit or for something that the engine cannot do."""
    settings, began = settings or EvaluationSettings(), time.monotonic()
    cells = _cells_of(workloads, suites, settings)
    in_flight = sum(len(cell.prompts) for cell in cells if cell.temperature == cells[0].temperature)
    drafting = Drafting.of(
        str(model),
        None if drafter is None else str(drafter),
        method,
        num_speculative_tokens=settings.num_speculative_tokens,
        rows=min(max(settings.rows, settings.batch_size), in_flight),
        seed=settings.seed,
        options=dict(llm_options or {}),
    )
    measured = engine(drafting)
    run = _Evaluation(measured, cells, settings, progress)
    try:
        run.measure()
        facts = report_provenance(
            measured,
            max_num_seqs=settings.batch_size,
            seeds=[settings.seed],
            prompts_sha256=settings.prompts_sha256(workloads, suites),
            **(provenance or {}),
        )
    finally:
        measured.close()
    for cell in cells:
        cell.method = drafting.method
        cell.engine = facts.engine
    if settings.lossless_prompts:
        run.check_float32()  # in an engine of its own, after the first has freed its memory
    facts = facts.model_copy(update={"duration_s": round(time.monotonic() - began, 1)})
    not_asked = Counter[str | None]()
    for cell in cells:
        not_asked[cell.suite] += cell.turns_not_asked
    measured_facts = [
        suite.facts.model_copy(update={"turns_not_asked": not_asked[suite.facts.name]})
        for suite in suites
    ]
    return build_report(cells, facts, gates, measured_facts)


def _said(prompt: Sequence[int] | Chat) -> list[Any]:
    """What decides a prompt, for a hash."""
    return [list(prompt.prompt), *prompt.later] if isinstance(prompt, Chat) else list(prompt)


@dataclass
class CellRun(CellMeasurement):
    """One (workload, temperature) while it is measured.

    prompts     of first turns, then of those that were asked after them
    chats       of the prompts asked last, with the answers before
    baseline    responses without drafting"""

    prompts: list[Sequence[int]] = field(default_factory=list)
    chats: list[tuple[Chat, list[str]]] = field(default_factory=list)
    turns_not_asked: int = 0
    baseline: list[RequestOutput] = field(default_factory=list)

    def go_on(self, text_of: Callable[[RequestOutput], str]) -> list[Sequence[int]]:
        """Prompts of the turns that follow the latest responses; empty at the end of all
        conversations."""
        newest = self.requests[len(self.requests) - len(self.chats) :]
        going_on = []
        asked = []
        for (chat, answers), output in zip(self.chats, newest, strict=True):
            if len(answers) == len(chat.later):
                continue
            answers = [*answers, text_of(output)]
            prompt = chat.ask(answers)
            if len(prompt) > chat.longest:
                self.turns_not_asked += len(chat.later) - len(answers) + 1
            else:
                going_on.append((chat, answers))
                asked.append(prompt)
        self.chats = going_on
        self.prompts += asked
        return asked


def _cells_of(
    workloads: Workloads,
    suites: Sequence[MeasuredSuite],
    settings: EvaluationSettings,
) -> list[CellRun]:
    """By temperature, then workload, those of suites last. DataError or ConfigError if there is
    nothing to measure."""
    chosen: list[tuple[str | None, str, Sequence[Sequence[int] | Chat]]] = [
        *(
            (None, name, prompts[: settings.prompts_per_workload])
            for name, prompts in workloads.items()
        ),
        *(
            (suite.facts.name, name, prompts)
            for suite in suites
            for name, prompts in suite.workloads.items()
        ),
    ]
    if not chosen or any(not prompts for *_, prompts in chosen):
        counts = {name: len(prompts) for _, name, prompts in chosen}
        raise DataError(
            f"evaluate: every workload needs at least one prompt; there are {counts or 'none'}"
        )
    if not settings.temperatures:
        raise ConfigError(
            "evaluate: no temperature to measure at; expected at least one, such as 0"
        )
    k = settings.num_speculative_tokens
    cells = []
    for temperature in settings.temperatures:
        for suite, name, prompts in chosen:
            chats = [p if isinstance(p, Chat) else Chat(p, (), _no_turn, len(p)) for p in prompts]
            cell = CellRun(name, temperature, "", k, suite=suite)  # method: once it is known
            cell.chats = [(chat, []) for chat in chats]
            cell.prompts = [chat.prompt for chat in chats]
            cells.append(cell)
    return cells


def _no_turn(answers: Sequence[str]) -> Sequence[int]:
    raise AssertionError("a prompt without later turns is not continued")


class _Evaluation:
    def __init__(
        self,
        engine: MeasuredEngine,
        cells: list[CellRun],
        settings: EvaluationSettings,
        progress: Progress | None,
    ) -> None:
        self.engine, self.cells, self.settings = engine, cells, settings
        self.progress = progress
        self.text = ""
        self.done = 0
        self.total = len(cells) * (3 + settings.repeats) + bool(settings.lossless_prompts)

    def measure(self) -> None:
        """Fills every cell, except for the check in float32. The engine has stopped afterwards."""
        temperatures = list(dict.fromkeys(cell.temperature for cell in self.cells))
        prompts = [prompt for cell in self.cells for prompt in cell.prompts]
        room = max(
            (chat.longest for cell in self.cells for chat, _ in cell.chats if chat.later), default=0
        )
        self.engine.prepare(
            [*prompts, *([[0] * room] if room else [])], self.settings.max_tokens, temperatures
        )
        self._warm_up()
        for temperature in temperatures:
            cells = [cell for cell in self.cells if cell.temperature == temperature]
            self._accept(cells)
            for cell in cells:
                self._time(cell)
        self.engine.stop()
        for cell in self.cells:
            self._replay(cell)
            if cell.temperature == 0 and cell.baseline:
                cell.lossless.append(
                    self._compare(self.engine, cell.prompts, cell.baseline, cell.requests)
                )
            self._advance(1)

    def _warm_up(self) -> None:
        """Fills caches and the allocator on a few tokens, so that the first timed pass is like the
        others."""
        self.engine.compile(lambda done, most: self._note(f"compiling {done} of {most}"))
        self._note("warming up")
        first, short = (
            self.cells[0].prompts[:1],
            replace(self.settings.sampling(0.0, [0])[0], max_tokens=8),
        )
        for speculate in (True, False) if self.engine.drafting_off else (True,):
            self.engine.write(first, [short], speculate=speculate, batch=1)
        if self.settings.transformers and self.engine.runs_transformers:
            self.engine.transformers(first, short, 0)

    # ------------------------------------------------------------------ acceptance

    def _accept(self, cells: Sequence[CellRun]) -> None:
        """Responses with drafting, and at temperature 0 without, of all cells at once, so that the
        rows in flight stay full."""
        self._note(f"T={cells[0].temperature:g}: acceptance")
        asked = [list(cell.prompts) for cell in cells]
        while any(asked):  # turn after turn, each after the answers just written
            for cell, outputs in zip(
                cells, self._generate(cells, asked, speculate=True, first_seed=0), strict=True
            ):
                cell.requests += outputs
            asked = [cell.go_on(self._text) for cell in cells]
        self._advance(len(cells))
        if self.engine.drafting_off and cells[0].temperature == 0:
            written = self._generate(
                cells, [cell.prompts for cell in cells], speculate=False, first_seed=1_000
            )
            for cell, outputs in zip(cells, written, strict=True):
                cell.baseline = outputs
        self._advance(len(cells))

    def _generate(
        self,
        cells: Sequence[CellRun],
        asked: Sequence[Prompts],
        *,
        speculate: bool,
        first_seed: int,
    ) -> Iterator[list[RequestOutput]]:
        """The responses to what each cell asks, the last of its prompts; seeds are counted per
        cell."""
        s = self.settings
        prompts = [prompt for some in asked for prompt in some]
        starts = [
            first_seed + len(cell.prompts) - len(some)
            for cell, some in zip(cells, asked, strict=True)
        ]
        seeds = [
            start + i for start, some in zip(starts, asked, strict=True) for i in range(len(some))
        ]
        params = s.sampling(cells[0].temperature, seeds)
        outputs = iter(self.engine.write(prompts, params, speculate=speculate, batch=s.rows))
        return (list(islice(outputs, len(some))) for some in asked)

    def _text(self, output: RequestOutput) -> str:
        """An answer as the next turn of its conversation reads it."""
        return self.engine.tokenizer.decode(
            _tokens(output), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _replay(self, cell: CellRun) -> None:
        """Expected acceptance on the text that drafting wrote."""
        if not self.engine.replayed(cell.temperature):
            return
        s = self.settings
        target, drafter = self.engine.models
        assert drafter is not None
        cell.replay = expected_acceptance(
            target,
            drafter,
            [(output.prompt_token_ids, _tokens(output)) for output in cell.requests],
            cell.temperature,
            s.num_speculative_tokens,
            top_p=s.top_p,
            top_k=s.top_k,
        )

    # ------------------------------------------------------------------ times

    def _time(self, cell: CellRun) -> None:
        """Interleaved passes on the same prompts each, and the isolated costs at this workload's
        context length."""
        s = self.settings
        if not s.repeats:
            return
        where = cell.workload if cell.suite is None else f"{cell.suite}/{cell.workload}"
        self._note(f"{where}, T={cell.temperature:g}: times")
        # at the middle of a typical response, appending as many slots to the head as a typical
        # round does
        tau = round(acceptance_length(cell.num_accepted_tokens, cell.num_drafts))
        parts = self.engine.isolated_costs(typical_context(cell.requests), s.batch_size, tau)
        times: dict[str, list[float]] = {}
        for repeat in range(s.repeats):
            timed = interleaved(self._passes(cell), cell.workload, repeat, self.engine.device)
            for name, run in timed.items():
                cell.passes.setdefault(name, []).append(run)
            for name, values in parts.measure(s.cost_trials).items() if parts is not None else ():
                times.setdefault(name, []).extend(values)
            self._advance(1)
        cell.costs = None if parts is None else costs_of(times, s.batch_size, parts.context)

    def _passes(self, cell: CellRun) -> dict[str, Run]:
        s = self.settings
        prompts = cell.prompts[: s.timed_prompts]
        params = s.sampling(cell.temperature, [2_000 + place for place in range(len(prompts))])

        def timed(speculate: bool) -> tuple[int, int, int]:
            outputs = self.engine.write(
                prompts, params, speculate=speculate, batch=s.batch_size, counted=False
            )
            if speculate:
                cell.phase_seconds.update(self.engine.phase_seconds)
            return (
                sum(num_output_tokens(output) for output in outputs),
                sum(output.metrics.num_drafts for output in outputs),
                sum(output.metrics.num_accepted_tokens for output in outputs),
            )

        def transformers() -> tuple[int, int, int]:
            starts = range(0, len(prompts), s.batch_size)
            parts = [(prompts[i : i + s.batch_size], params[i]) for i in starts]
            return sum(self.engine.transformers(*part, s.seed) for part in parts), 0, 0

        passes: dict[str, Run] = {SPECULATIVE: lambda: timed(True)}
        if self.engine.drafting_off:
            passes[AUTOREGRESSIVE] = lambda: timed(False)
        if s.transformers and self.engine.runs_transformers:
            passes[TRANSFORMERS] = transformers
        return passes

    # ------------------------------------------------------------------ the same tokens

    def check_float32(self) -> None:
        """Target and drafter in float32, greedy, with and without drafting: every workload in one
        go.

        It makes an engine of its own, once the first one has been closed, and adds a check to the
        cells of the lowest temperature."""
        s, coldest = self.settings, min(self.settings.temperatures)
        cells = [cell for cell in self.cells if cell.temperature == coldest]
        prompts = [prompt for cell in cells for prompt in cell.prompts[: s.lossless_prompts]]
        exact = self.engine.in_float32(min(s.rows, len(prompts)))
        if exact is None:
            return
        self._note("float32: the same tokens with and without drafting")
        params = s.sampling(0.0, range(len(prompts)))
        try:
            exact.prepare(prompts, s.max_tokens, [0.0])
            off = exact.write(prompts, params, speculate=False, batch=s.rows)
            on = exact.write(prompts, params, speculate=True, batch=s.rows)
            start = 0
            for cell in cells:
                part = slice(start, start + len(cell.prompts[: s.lossless_prompts]))
                cell.lossless.insert(0, self._compare(exact, prompts[part], off[part], on[part]))
                start = part.stop
        finally:
            exact.close()
        self._advance(1)

    def _compare(
        self,
        engine: MeasuredEngine,
        prompts: Prompts,
        off: Sequence[RequestOutput],
        on: Sequence[RequestOutput],
    ) -> LosslessCheck:
        texts = [[_tokens(output) for output in outputs] for outputs in (off, on)]
        k, rows = self.settings.num_speculative_tokens, min(self.settings.rows, len(prompts))
        return compare_greedy(engine.target, prompts, *texts, num_speculative_tokens=k, rows=rows)

    def _advance(self, steps: int) -> None:
        self.done += steps
        self._note(self.text)

    def _note(self, text: str) -> None:
        self.text = text
        if self.progress is not None:
            self.progress(self.done / self.total, text)


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
