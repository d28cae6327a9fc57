"""The acceptance report, measured: an exported drafter, loaded strictly, run on prompts of several workloads.

Per workload and temperature: acceptance on many prompts in batches; the text the target writes to them by itself, and
what replay expects of it; times on a few prompts per repeat, drafting on, off and `transformers.generate` one right
after the other; the parts of a round alone. Then the lossless check in float32. What is measured goes into
`CellMeasurement`s; this module computes no rate, and must not know recipes, templates, how a report looks, or which
engine (engines.py) it measures.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.evaluation.engines import Drafting, MeasuredEngine, Prompts, RuntimeEngine
from inference.evaluation.expected_acceptance import expected_acceptance
from inference.evaluation.lossless import compare_greedy
from inference.evaluation.provenance import report_provenance
from inference.evaluation.timing import IsolatedCosts, Run, costs_of, interleaved, typical_context
from inference.metrics import acceptance_length
from inference.outputs import RequestOutput
from inference.report.build import build_report
from inference.report.cell import LosslessCheck
from inference.report.measurement import CellMeasurement, RequestRounds, TimedRun
from inference.report.schema import AcceptanceReport, Bound
from inference.sampling_params import SamplingParams
from inference.spec_decode.replay import ReplayResult
from speculators.errors import ConfigError, DataError

EngineMaker = Callable[[Drafting], MeasuredEngine]
Progress = Callable[[float, str], None]  # share done, what is being done


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured, and how much of it. Every count is per workload.

    prompts_per_workload  prompts for acceptance and replay. 16 of 100 tokens are some 500 rounds per workload, which
                          settles the acceptance length over six workloads to about 1 %
    rows                  prompts in flight for these; acceptance does not depend on it, only the waiting does
    timed_prompts         prompts of one timed pass, fresh ones in every repeat while there are any, so that the median
                          is not that of three texts
    repeats               interleaved passes: on, off, transformers, then in reverse; 0: nothing is timed
    transformers_repeats  repeats that include `transformers.generate` on the first `batch_size` prompts; 0 is off. It
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

    def prompts_sha256(self, workloads: Mapping[str, Prompts]) -> str:
        """Of what is asked and of what limits the answers: reports with the same one can be compared."""
        chosen = {name: [list(p) for p in prompts[: self.prompts_per_workload]] for name, prompts in workloads.items()}
        limits = {"max_tokens": self.max_tokens, "top_p": self.top_p, "top_k": self.top_k}
        return hashlib.sha256(json.dumps([chosen, limits], sort_keys=True).encode()).hexdigest()

    def sampling(self, temperature: float, seeds: Sequence[int]) -> list[SamplingParams]:
        """One SamplingParams per seed."""
        common = SamplingParams(temperature=temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens)
        return [replace(common, seed=self.seed * 1_000_003 + seed) for seed in seeds]


def evaluate(
    model: str | Path,
    drafter: str | Path | None,
    workloads: Mapping[str, Prompts],
    settings: EvaluationSettings | None = None,
    *,
    method: str | None = None,
    engine: EngineMaker = RuntimeEngine,
    gates: Mapping[str, Bound] | None = None,
    llm_options: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> AcceptanceReport:
    """Measure the exported `drafter` for the target `model`, both as served: loaded from their folders (or ids).

    workloads     name -> prompts as token ids, templates applied
    method        of drafting without a checkpoint (ngram, suffix); `drafter` is then None
    engine        makes the engine that is measured: this runtime, or vLLM (vllm_bridge/engine.py,
    vllm_bridge/server.py) gates         bounds on keys of the summary llm_options   further options of LLM (dtype,
    device, revision, trust_remote_code, tokenizer) provenance    fields of report.Provenance that only the caller knows
    (recipe_name, recipe_sha256, …) progress      called with the share done, by expected time, and a few words

    Errors: CheckpointError if the drafter is not exactly what its config says, ConfigError for prompts that do not fit
    or what the engine cannot do.
    """
    settings, began = settings or EvaluationSettings(), time.monotonic()
    cells = _cells_of(workloads, settings)
    drafting = Drafting.of(
        str(model),
        None if drafter is None else str(drafter),
        method,
        num_speculative_tokens=settings.num_speculative_tokens,
        rows=min(max(settings.rows, settings.batch_size), _most_prompts(cells)),
        seed=settings.seed,
        options=dict(llm_options or {}),
    )
    measured = engine(drafting)
    run = _Evaluation(measured, cells, settings, progress)
    try:
        measurements = run.measure()
        facts = report_provenance(
            measured,
            max_num_seqs=settings.batch_size,
            seeds=[settings.seed],
            prompts_sha256=settings.prompts_sha256(workloads),
            **(provenance or {}),
        )
    finally:
        measured.close()
    if settings.lossless_prompts:
        run.check_float32()  # in an engine of its own, which has the memory of the first
    facts = facts.model_copy(update={"duration_s": round(time.monotonic() - began, 1)})
    return build_report(measurements, facts, gates)


def _most_prompts(cells: Sequence[_Cell]) -> int:
    """Of one temperature: as many as are ever in flight."""
    return max(sum(len(cell.prompts) for cell in cells if cell.temperature == c.temperature) for c in cells)


@dataclass
class _Cell:
    """What has been gathered of one (workload, temperature)."""

    workload: str
    temperature: float
    prompts: Prompts
    on: list[RequestOutput] = field(default_factory=list)
    off: list[RequestOutput] = field(default_factory=list)  # empty if the engine cannot write without drafting
    measured: dict[str, Any] = field(default_factory=dict)  # fields of CellMeasurement
    checks: list[LosslessCheck] = field(default_factory=list)


def _cells_of(workloads: Mapping[str, Prompts], settings: EvaluationSettings) -> list[_Cell]:
    """By temperature, then workload. DataError or ConfigError if there is nothing to measure."""
    if not workloads or any(not prompts for prompts in workloads.values()):
        counts = {name: len(prompts) for name, prompts in workloads.items()}
        raise DataError(f"evaluate: every workload needs at least one prompt; there are {counts or 'none'}")
    if not settings.temperatures:
        raise ConfigError("evaluate: no temperature to measure at; expected at least one, such as 0")
    chosen = {name: list(prompts[: settings.prompts_per_workload]) for name, prompts in workloads.items()}
    return [_Cell(name, t, prompts) for t in settings.temperatures for name, prompts in chosen.items()]


class _Evaluation:
    """One evaluation in progress: the engine under test, and the share of the work that is done."""

    def __init__(
        self,
        engine: MeasuredEngine,
        cells: list[_Cell],
        settings: EvaluationSettings,
        progress: Progress | None,
    ) -> None:
        self.engine, self.cells, self.settings = engine, cells, settings
        self.progress, self.done = progress, 0.0
        timing = sum(self._timing_work(cell) for cell in self.cells)
        self.total = self._acceptance_work(self.cells) + timing + self._lossless_work()

    def measure(self) -> list[CellMeasurement]:
        """Every cell: all that the engine writes, and then what is made of it."""
        temperatures = list(dict.fromkeys(cell.temperature for cell in self.cells))
        prompts = [prompt for cell in self.cells for prompt in cell.prompts]
        self.engine.prepare(prompts, self.settings.max_tokens, temperatures)
        self._warm_up()
        for temperature in temperatures:
            cells = [cell for cell in self.cells if cell.temperature == temperature]
            self._accept(cells)
            for cell in cells:
                self._time(cell)
        self.engine.stop()
        for cell in self.cells:
            self._replay(cell)
            if cell.temperature == 0 and cell.off:
                cell.checks.append(self._compare(self.engine, cell.prompts, cell.off, cell.on))
            self._advance(0.3 * self._acceptance_work([cell]))
        method, engine = self.engine.drafting.method, self.engine.facts().name
        return [
            CellMeasurement(
                cell.workload, cell.temperature, method, lossless=cell.checks, engine=engine, **cell.measured
            )
            for cell in self.cells
        ]

    def _warm_up(self) -> None:
        """Fills caches and the allocator on a few tokens, so that the first timed pass is like the others."""
        self._note("warming up")
        first, short = self.cells[0].prompts[:1], replace(self.settings.sampling(0.0, [0])[0], max_tokens=8)
        for speculate in (True, False) if self.engine.drafting_off else (True,):
            self.engine.write(first, [short], speculate=speculate, batch=1)
        if self.settings.transformers_repeats and self.engine.runs_transformers:
            self.engine.transformers(first, short, 0)

    # ------------------------------------------------------------------ acceptance

    def _accept(self, cells: Sequence[_Cell]) -> None:
        """Rounds with drafting; the target's own text without. All cells at once, so that the rows in flight stay
        full."""
        self._note(f"T={cells[0].temperature:g}: acceptance")
        self._write(cells, "on", True, 0)
        self._advance(0.35 * self._acceptance_work(cells))
        if self.engine.drafting_off:
            self._write(cells, "off", False, 1_000)
        self._advance(0.35 * self._acceptance_work(cells))
        for cell in cells:
            k = self.settings.num_speculative_tokens
            cell.measured["requests"] = [RequestRounds.of(output, k) for output in cell.on]

    def _write(self, cells: Sequence[_Cell], name: str, speculate: bool, first_seed: int) -> None:
        """The responses to every prompt of every cell, as `cell.<name>`; seeds are counted per cell."""
        s = self.settings
        prompts = [prompt for cell in cells for prompt in cell.prompts]
        seeds = [first_seed + i for cell in cells for i in range(len(cell.prompts))]
        params = s.sampling(cells[0].temperature, seeds)
        outputs = iter(self.engine.write(prompts, params, speculate=speculate, batch=s.rows))
        for cell in cells:
            setattr(cell, name, [next(outputs) for _ in cell.prompts])

    def _replay(self, cell: _Cell) -> None:
        """What replay expects of the text that drafting wrote, and of the target's own if that is another."""
        if not self.engine.replayed(cell.temperature):
            return
        if not cell.off:
            own = self._expected(cell, cell.on)
            cell.measured |= dict(replay=own, replay_paired=True, replay_own_text=own)
            return
        off = self._expected(cell, cell.off)
        same = [_tokens(a) == _tokens(b) for a, b in zip(cell.on, cell.off, strict=True)]
        others = iter(self._expected(cell, [output for output, known in zip(cell.on, same) if not known]))
        own = [result if known else next(others) for result, known in zip(off, same)]
        cell.measured |= dict(replay=off, replay_paired=True, replay_own_text=own)

    def _expected(self, cell: _Cell, outputs: Sequence[RequestOutput]) -> list[ReplayResult]:
        s, (target, drafter) = self.settings, self.engine.models
        assert drafter is not None
        return expected_acceptance(
            target,
            drafter,
            [(output.prompt_token_ids, _tokens(output)) for output in outputs],
            cell.temperature,
            s.num_speculative_tokens,
            top_p=s.top_p,
            top_k=s.top_k,
        )

    # ------------------------------------------------------------------ times

    def _time(self, cell: _Cell) -> None:
        """Interleaved passes on fresh prompts each, and the isolated costs at this workload's context length."""
        s = self.settings
        if not s.repeats:
            return
        runs: dict[str, list[TimedRun]] = {"speculative": [], "autoregressive": [], "transformers_generate": []}
        phases: dict[str, float] = {}
        self._note(f"{cell.workload}, T={cell.temperature:g}: times")
        parts = self._isolated(cell)
        times: dict[str, list[float]] = {}
        for repeat in range(s.repeats):
            timed = interleaved(self._passes(cell, repeat, phases), repeat, self.engine.device)
            for name, run in timed.items():
                runs[name].append(run)
            for name, values in parts.measure(s.cost_trials).items() if parts is not None else ():
                times.setdefault(name, []).extend(values)
            self._advance(self._timing_work(cell) / s.repeats)
        costs = None if parts is None else costs_of(times, s.batch_size, parts.context)
        cell.measured |= dict(**runs, phase_seconds=phases, costs=costs)

    def _passes(self, cell: _Cell, repeat: int, phases: dict[str, float]) -> dict[str, Run]:
        """The passes of one repeat, by the names of CellMeasurement; `phases` gathers the engine's timers."""
        s, total = self.settings, len(cell.prompts)
        places = [(repeat * s.timed_prompts + i) % total for i in range(min(s.timed_prompts, total))]
        prompts = [cell.prompts[place] for place in places]
        params = s.sampling(cell.temperature, [2_000 + 100 * repeat + place for place in places])

        def timed(speculate: bool) -> tuple[int, int, int]:
            outputs = self.engine.write(prompts, params, speculate=speculate, batch=s.batch_size, counted=False)
            if speculate:
                for name, seconds in self.engine.phase_seconds.items():
                    phases[name] = phases.get(name, 0.0) + seconds
            rounds = [RequestRounds.of(output, s.num_speculative_tokens) for output in outputs]
            return (
                sum(r.output_tokens for r in rounds),
                sum(r.num_drafts for r in rounds),
                sum(r.accepted for r in rounds),
            )

        passes: dict[str, Run] = {"speculative": lambda: timed(True)}
        if self.engine.drafting_off:
            passes["autoregressive"] = lambda: timed(False)
        if repeat < s.transformers_repeats and self.engine.runs_transformers:
            few = prompts[: s.batch_size]
            passes["transformers_generate"] = lambda: (self.engine.transformers(few, params[0], s.seed + repeat), 0, 0)
        return passes

    def _isolated(self, cell: _Cell) -> IsolatedCosts | None:
        """At the middle of a typical response, appending as many slots to the head as a typical round does."""
        rounds: list[RequestRounds] = cell.measured["requests"]
        tau = acceptance_length(sum(r.accepted for r in rounds), sum(r.num_drafts for r in rounds))
        return self.engine.isolated_costs(typical_context(cell.on), self.settings.batch_size, round(tau))

    # ------------------------------------------------------------------ the same tokens

    def check_float32(self) -> None:
        """Target and drafter in float32, greedy, with and without drafting: every workload in one go. After `measure`,
        once the first engine has stopped: its cells' `checks`, which the measurements share, get one more each."""
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
                cell.checks.insert(0, self._compare(exact, prompts[part], off[part], on[part]))
                start = part.stop
        finally:
            exact.close()
        self._advance(0.4 * self._lossless_work())

    def _compare(
        self, engine: MeasuredEngine, prompts: Prompts, off: Sequence[RequestOutput], on: Sequence[RequestOutput]
    ) -> LosslessCheck:
        return compare_greedy(
            engine.target,
            prompts,
            [_tokens(output) for output in off],
            [_tokens(output) for output in on],
            num_speculative_tokens=self.settings.num_speculative_tokens,
            rows=min(self.settings.rows, len(prompts)),
        )

    # ------------------------------------------------------------------ progress

    # Work is counted in single steps of the target.

    def _acceptance_work(self, cells: Sequence[_Cell]) -> float:
        return 4.0 * sum(len(cell.prompts) for cell in cells) / self.settings.rows * self.settings.max_tokens

    def _timing_work(self, cell: _Cell) -> float:
        s = self.settings
        timed = -(-min(s.timed_prompts, len(cell.prompts)) // s.batch_size) * s.max_tokens
        reference = 1.3 * min(s.transformers_repeats, s.repeats) * s.max_tokens
        return 1.5 * s.repeats * timed + reference + 3 * s.cost_trials * s.repeats

    def _lossless_work(self) -> float:
        s = self.settings
        workloads = len({cell.workload for cell in self.cells})
        return 5.0 * -(-s.lossless_prompts * workloads // s.rows) * s.max_tokens

    def _advance(self, work: float) -> None:
        self.done += work
        self._note("")

    def _note(self, text: str) -> None:
        self.text = text or getattr(self, "text", "")
        if self.progress is not None:
            self.progress(min(self.done / self.total, 1.0), self.text)


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
