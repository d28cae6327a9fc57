"""Measures an exported drafter, loaded strictly, on prompts of several workloads, for the
acceptance report.

Per workload and temperature: acceptance on many prompts in batches; the text that the target writes
without drafting, and the acceptance that replay expects on it; times on a few prompts per repeat,
with drafting, without, and of `transformers.generate`, one right after the other; the parts of a
round alone. Then the lossless check in float32. The engine that is measured is any of engines.py.
Rates are computed by inference.report.build."""

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
from inference.report.build import build_report
from inference.report.measurement import (
    CellMeasurement,
    Costs,
    LosslessCheck,
    RequestRounds,
    TimedRun,
)
from inference.report.schema import AcceptanceReport, Bound, SuiteFacts
from inference.sampling_params import SamplingParams
from inference.spec_decode.replay import ReplayResult
from speculators.errors import ConfigError, DataError


@dataclass(frozen=True)
class Chat:
    """A conversation whose later turns are asked once the answers to those before them are written.

    prompt    token ids of the first turn, template applied later     texts of the turns after it
    ask       the answers so far -> token ids of the next turn's prompt longest   most tokens of a
    prompt; a turn that has more is not asked, nor are those after it, and all are counted"""

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
    waiting does timed_prompts         prompts of one timed pass, fresh ones in every repeat while
    there are any, so that the median
                          is not that of three texts
    repeats               interleaved passes: on, off, transformers, then in reverse; 0: nothing is
    timed transformers_repeats  repeats that include `transformers.generate` on the first
    `batch_size` prompts; 0 is off. It
                          is slow, and only for reference
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
    transformers_repeats: int = 1
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

    workloads     name -> prompts as token ids, templates applied; may be empty beside suites suites
    measured as well, their categories as workloads of their own, with an `all` for each suite
    method        drafting without a checkpoint (ngram, suffix); `drafter` is then None engine
    makes the engine that is measured: this runtime, or vLLM (vllm_bridge/engine.py, server.py)
    gates         bounds on keys of the summary llm_options   further options of LLM (dtype, device,
    revision, trust_remote_code, tokenizer) provenance    fields of report.Provenance that only the
    caller knows (recipe_name, recipe_sha256, …) progress      called with the fraction done, by
    expected time, and a few words

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
    if settings.lossless_prompts:
        run.check_float32()  # in an engine of its own, after the first has freed its memory
    facts = facts.model_copy(update={"duration_s": round(time.monotonic() - began, 1)})
    not_asked = Counter[str | None]()
    for cell in cells:
        not_asked[cell.suite] += cell.turns_not_asked
    told = [
        suite.facts.model_copy(update={"turns_not_asked": not_asked[suite.facts.name]})
        for suite in suites
    ]
    return build_report(
        [cell.build(drafting.method, facts.engine) for cell in cells], facts, gates, told
    )


def _said(prompt: Sequence[int] | Chat) -> list[Any]:
    """What decides a prompt, for a hash."""
    return [list(prompt.prompt), *prompt.later] if isinstance(prompt, Chat) else list(prompt)


@dataclass
class CellBuilder:
    """One (workload, temperature) while it is measured."""

    workload: str
    temperature: float
    prompts: list[Sequence[int]]  # of first turns, then of those that were asked after them
    suite: str | None = None
    chats: list[tuple[Chat, list[str]]] = field(
        default_factory=list
    )  # of the prompts asked last, and answers before
    turns: int = 0  # prompts there will be, if all are asked
    turns_not_asked: int = 0
    drafted: list[RequestOutput] = field(default_factory=list)
    baseline: list[RequestOutput] = field(
        default_factory=list
    )  # without drafting; empty if the engine always drafts
    requests: list[RequestRounds] = field(default_factory=list)  # counters of `drafted`
    runs: dict[str, list[TimedRun]] = field(
        default_factory=dict
    )  # by the fields of CellMeasurement
    phase_seconds: Counter[str] = field(default_factory=Counter)  # of the speculative runs
    costs: Costs | None = None
    replay: list[ReplayResult] = field(
        default_factory=list
    )  # over `baseline`, or over `drafted` without one
    replay_own_text: list[ReplayResult] = field(default_factory=list)  # over `drafted`
    lossless: list[LosslessCheck] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        workload: str,
        temperature: float,
        prompts: Sequence[Sequence[int] | Chat],
        suite: str | None,
    ) -> CellBuilder:
        chats = [
            p if isinstance(p, Chat) else Chat(p, (), lambda answers: [], len(p)) for p in prompts
        ]
        turns = sum(1 + len(chat.later) for chat in chats)
        return cls(
            workload,
            temperature,
            [chat.prompt for chat in chats],
            suite,
            [(chat, []) for chat in chats],
            turns,
        )

    def go_on(self, text_of: Callable[[RequestOutput], str]) -> list[Sequence[int]]:
        """Prompts of the turns that follow the latest responses in `drafted`; empty at the end of
        all conversations."""
        newest = self.drafted[len(self.drafted) - len(self.chats) :]
        going_on, asked = [], []
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

    def build(self, method: str, engine: str) -> CellMeasurement:
        """The measurement of `method` in `engine`."""
        return CellMeasurement(
            self.workload,
            self.temperature,
            method,
            self.requests,
            **self.runs,
            phase_seconds=self.phase_seconds,
            costs=self.costs,
            replay=self.replay,
            replay_paired=bool(self.replay),
            replay_own_text=self.replay_own_text,
            lossless=self.lossless,
            engine=engine,
            suite=self.suite,
        )


def _cells_of(
    workloads: Workloads, suites: Sequence[MeasuredSuite], settings: EvaluationSettings
) -> list[CellBuilder]:
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
    return [
        CellBuilder.of(name, t, prompts, suite)
        for t in settings.temperatures
        for suite, name, prompts in chosen
    ]


class _Evaluation:
    def __init__(
        self,
        engine: MeasuredEngine,
        cells: list[CellBuilder],
        settings: EvaluationSettings,
        progress: Progress | None,
    ) -> None:
        self.engine, self.cells, self.settings = engine, cells, settings
        self.progress, self.done, self.text = progress, 0.0, ""
        timing = sum(self._timing_work(cell) for cell in self.cells)
        self.total = self._acceptance_work(self.cells) + timing + self._lossless_work()

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
                    self._compare(self.engine, cell.prompts, cell.baseline, cell.drafted)
                )
            self._advance(0.3 * self._acceptance_work([cell]))

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
        if self.settings.transformers_repeats and self.engine.runs_transformers:
            self.engine.transformers(first, short, 0)

    # ------------------------------------------------------------------ acceptance

    def _accept(self, cells: Sequence[CellBuilder]) -> None:
        """Responses with drafting and without, of all cells at once, so that the rows in flight
        stay full."""
        self._note(f"T={cells[0].temperature:g}: acceptance")
        asked = [list(cell.prompts) for cell in cells]
        while any(asked):  # turn after turn, each after the answers just written
            for cell, outputs in zip(
                cells, self._generate(cells, asked, speculate=True, first_seed=0), strict=True
            ):
                cell.drafted += outputs
            asked = [cell.go_on(self._text) for cell in cells]
        for cell in cells:
            cell.requests = [
                RequestRounds.of(output, self.settings.num_speculative_tokens)
                for output in cell.drafted
            ]
        self._advance(0.35 * self._acceptance_work(cells))
        if self.engine.drafting_off:
            written = self._generate(
                cells, [cell.prompts for cell in cells], speculate=False, first_seed=1_000
            )
            for cell, outputs in zip(cells, written, strict=True):
                cell.baseline = outputs
        self._advance(0.35 * self._acceptance_work(cells))

    def _generate(
        self,
        cells: Sequence[CellBuilder],
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

    def _replay(self, cell: CellBuilder) -> None:
        """Expected acceptance on the drafted text, and on the target's own where that is another
        text."""
        if not self.engine.replayed(cell.temperature):
            return
        cell.replay = self._expected(cell, cell.baseline or cell.drafted)
        if not cell.baseline:
            cell.replay_own_text = cell.replay
            return
        same = [_tokens(a) == _tokens(b) for a, b in zip(cell.drafted, cell.baseline, strict=True)]
        others = iter(
            self._expected(cell, [output for output, known in zip(cell.drafted, same) if not known])
        )
        cell.replay_own_text = [
            result if known else next(others) for result, known in zip(cell.replay, same)
        ]

    def _expected(self, cell: CellBuilder, outputs: Sequence[RequestOutput]) -> list[ReplayResult]:
        s, (target, drafter) = self.settings, self.engine.models
        assert drafter is not None
        texts = [(output.prompt_token_ids, _tokens(output)) for output in outputs]
        k = s.num_speculative_tokens
        return expected_acceptance(
            target, drafter, texts, cell.temperature, k, top_p=s.top_p, top_k=s.top_k
        )

    # ------------------------------------------------------------------ times

    def _time(self, cell: CellBuilder) -> None:
        """Interleaved passes on fresh prompts each, and the isolated costs at this workload's
        context length."""
        s = self.settings
        if not s.repeats:
            return
        where = cell.workload if cell.suite is None else f"{cell.suite}/{cell.workload}"
        self._note(f"{where}, T={cell.temperature:g}: times")
        # at the middle of a typical response, appending as many slots to the head as a typical
        # round does
        tau = acceptance_length(
            sum(r.accepted for r in cell.requests), sum(r.num_drafts for r in cell.requests)
        )
        parts = self.engine.isolated_costs(typical_context(cell.drafted), s.batch_size, round(tau))
        times: dict[str, list[float]] = {}
        for repeat in range(s.repeats):
            for name, run in interleaved(
                self._passes(cell, repeat), repeat, self.engine.device
            ).items():
                cell.runs.setdefault(name, []).append(run)
            for name, values in parts.measure(s.cost_trials).items() if parts is not None else ():
                times.setdefault(name, []).extend(values)
            self._advance(self._timing_work(cell) / s.repeats)
        cell.costs = None if parts is None else costs_of(times, s.batch_size, parts.context)

    def _passes(self, cell: CellBuilder, repeat: int) -> dict[str, Run]:
        s, total = self.settings, len(cell.prompts)
        places = [
            (repeat * s.timed_prompts + i) % total for i in range(min(s.timed_prompts, total))
        ]
        prompts = [cell.prompts[place] for place in places]
        params = s.sampling(cell.temperature, [2_000 + 100 * repeat + place for place in places])

        def timed(speculate: bool) -> tuple[int, int, int]:
            outputs = self.engine.write(
                prompts, params, speculate=speculate, batch=s.batch_size, counted=False
            )
            if speculate:
                cell.phase_seconds.update(self.engine.phase_seconds)
            rounds = [RequestRounds.of(output, s.num_speculative_tokens) for output in outputs]
            tokens = sum(r.output_tokens for r in rounds)
            return tokens, sum(r.num_drafts for r in rounds), sum(r.accepted for r in rounds)

        passes: dict[str, Run] = {"speculative": lambda: timed(True)}
        if self.engine.drafting_off:
            passes["autoregressive"] = lambda: timed(False)
        if repeat < s.transformers_repeats and self.engine.runs_transformers:
            few = prompts[: s.batch_size]
            passes["transformers_generate"] = lambda: (
                self.engine.transformers(few, params[0], s.seed + repeat),
                0,
                0,
            )
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
            self._advance(0.6 * self._lossless_work())
            on = exact.write(prompts, params, speculate=True, batch=s.rows)
            start = 0
            for cell in cells:
                part = slice(start, start + len(cell.prompts[: s.lossless_prompts]))
                cell.lossless.insert(0, self._compare(exact, prompts[part], off[part], on[part]))
                start = part.stop
        finally:
            exact.close()
        self._advance(0.4 * self._lossless_work())

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

    # ------------------------------------------------------------------ progress, in single steps
    # of the target

    def _acceptance_work(self, cells: Sequence[CellBuilder]) -> float:
        return (
            4.0 * sum(cell.turns for cell in cells) / self.settings.rows * self.settings.max_tokens
        )

    def _timing_work(self, cell: CellBuilder) -> float:
        s = self.settings
        timed = -(-min(s.timed_prompts, cell.turns) // s.batch_size) * s.max_tokens
        reference = 1.3 * min(s.transformers_repeats, s.repeats) * s.max_tokens
        return 1.5 * s.repeats * timed + reference + 3 * s.cost_trials * s.repeats

    def _lossless_work(self) -> float:
        s = self.settings
        workloads = len({(cell.suite, cell.workload) for cell in self.cells})
        return 5.0 * -(-s.lossless_prompts * workloads // s.rows) * s.max_tokens

    def _advance(self, work: float) -> None:
        self.done += work
        self._note(self.text)

    def _note(self, text: str) -> None:
        self.text = text
        if self.progress is not None:
            self.progress(min(self.done / self.total, 1.0), text)


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
