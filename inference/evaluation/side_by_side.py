"""Compares drafting methods for one target in one process, on the same prompts and the same
weights: `draftsmith try` and `python -m draftsmith.inference.offline`.

Every method has an engine of its own; `default` drafts nothing. They answer the prompts in turns
(inference/evaluation/timing.py): one prompt at a time, or where several are in flight all of them,
so that batches stay full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from draftsmith.inference.entrypoints.draft_vocabulary import SIZE
from draftsmith.inference.entrypoints.llm import LLM
from draftsmith.inference.entrypoints.prompts import Prompt
from draftsmith.inference.entrypoints.speculative_config import complete, parse_speculative_config
from draftsmith.inference.evaluation.lossless import compare_greedy
from draftsmith.inference.evaluation.round_times import time_rounds
from draftsmith.inference.evaluation.timing import Clock, interleaved, turns_of
from draftsmith.inference.evaluation.vocabulary_curve import (
    LoadedSizes,
    VocabularySize,
    curve_table,
    fastest,
    measure_prices,
)
from draftsmith.inference.outputs import RequestOutput
from draftsmith.inference.progress import Advance, Stages, counted, unwatched
from draftsmith.inference.provenance import environment
from draftsmith.inference.report.measurement import Measurement
from draftsmith.inference.report.round_cost import RoundTimes, why_slower
from draftsmith.inference.report.schema import (
    AUTOREGRESSIVE,
    SPECULATIVE,
    Cell,
    LosslessCheck,
    TimedPass,
)
from draftsmith.inference.report.speed import how_rounds_ran, stalled
from draftsmith.inference.report.table import cost_table, methods_note, new_table, row, stall_note
from draftsmith.inference.sampling_params import SamplingParams
from draftsmith.inference.spec_decode.proposers.head_options import HeadOptions
from draftsmith.inference.whole_file import write_whole
from draftsmith.speculators.errors import ConfigError
from draftsmith.speculators.target.frozen_target import FrozenTarget

DEFAULT = "default"
WARM_UP_TOKENS = 8
COLUMNS = ("tok/s", "τ", "drafted", "/fwd", "speedup", "same")


class ResponseBar:
    """A bar of tqdm's kind that reports the responses of a turn to a stage, after the `done` of
    the turns before."""

    def __init__(self, progress: Advance, done: int, whole: int, note: str, **options: Any) -> None:
        self.progress = progress
        self.done = done
        self.whole = whole
        self.note = note

    def __enter__(self) -> Self:
        self.progress(self.done, self.note, self.whole)
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self) -> None:
        """One more response has ended."""
        self.done += 1
        self.progress(self.done, self.note, self.whole)


class SideBySide:
    """One engine per drafting method.

    `methods`: name -> speculative_config. `options`: of LLM, the same for all. The engines are
    `llms[name]`, with `llms["default"]` first; `interrupt`: what ended the last run, if anything
    did. ConfigError for a method that is called `default`."""

    def __init__(
        self, model: str | FrozenTarget, methods: Mapping[str, dict[str, Any]], **options: Any
    ) -> None:
        if DEFAULT in methods:
            raise ConfigError("this is the run without drafting", where=f"method {DEFAULT!r}")
        first = LLM(model, **options)
        self.target = first.engine.target
        self.tokenizer = first.get_tokenizer()
        self.rows = first.engine.scheduler.max_num_seqs
        self.llms = {DEFAULT: first}
        self.interrupt: KeyboardInterrupt | None = None
        self._options = options
        for name, config in methods.items():
            self._load(name, config)

    def _load(self, name: str, config: Mapping[str, Any]) -> None:
        """The engine of a method."""
        self.llms.pop(name, None)
        self.llms[name] = LLM(
            self.target, self.tokenizer, speculative_config=config, **self._options
        )

    def choose_vocabulary(
        self,
        name: str,
        config: Mapping[str, Any],
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> list[VocabularySize]:
        """Measures a drafter's vocabulary at every size, on the target's responses to the prompts,
        and loads it anew at the fastest. `config`: its speculative_config."""
        proposer = self.llms[name].engine.proposer
        assert proposer is not None, "a drafter drafts"
        k = proposer.num_speculative_tokens
        options = parse_speculative_config(complete(config, self.target))
        assert isinstance(options, HeadOptions), "a method without a drafter has no vocabulary"
        sizes = LoadedSizes(self.target, self.tokenizer, options)
        prices = measure_prices(sizes.drafters, sizes.target, k, self.rows)
        inputs, seeded = _requests(prompts, params)
        written = self.llms[DEFAULT].generate(inputs, seeded, use_tqdm=False)
        texts = [(text.prompt_token_ids, text.outputs[0].token_ids) for text in written]
        curve = sizes.curve(prices, texts, params.temperature or 0.0, k)
        chosen = fastest(curve).size
        if chosen < sizes.sizes[0]:
            self._load(name, {**config, SIZE: chosen})
        return curve

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        repeats: int,
        progress: Advance = unwatched,
        clock: Clock = perf_counter,
    ) -> dict[str, Measurement]:
        """Runs every method: warmed up, then timed `repeats` times; greedy responses are compared
        with those of the default. An interrupt ends it and is kept in `interrupt`, and what is
        measured by then is returned: the repeats that have ended, or of the first one the prompts
        that all methods have answered, and behind them the rounds and texts that were compared.

        Request i has the seed `params.seed` + i (0 if None), so that a method writes the same text
        in every repeat. `requests` are those of the first one."""
        measured: dict[str, Measurement] = {}
        passes: dict[str, list[TimedPass]] = {name: [] for name in self.llms}
        try:
            self._warm_up(prompts, params, repeats, progress)
            for name, run, outputs in self._passes(prompts, params, repeats, progress, clock):
                passes[name].append(run)
                if name not in measured:
                    measured[name] = self._measurement(name, params, outputs)
                    measured[name].passes = self._beside_default(name, passes)
            for name, measurement in measured.items():
                if name != DEFAULT:
                    measurement.rounds = self._rounds(name, prompts, params)
            for name, measurement in measured.items():
                if name != DEFAULT and params.greedy:
                    check = self._compare(measured[DEFAULT], measurement)
                    measurement.lossless.append(check)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            whole = min(map(len, passes.values()))
            for runs in passes.values():
                del runs[whole:]
        return {name: measurement for name, measurement in measured.items() if passes[name]}

    def _beside_default(
        self, name: str, passes: Mapping[str, list[TimedPass]]
    ) -> dict[str, list[TimedPass]]:
        """By kind the passes of a method, and for a method that drafts those of the default."""
        if name == DEFAULT:
            return {SPECULATIVE: passes[name]}
        return {SPECULATIVE: passes[name], AUTOREGRESSIVE: passes[DEFAULT]}

    def _warm_up(
        self, prompts: Sequence[Prompt], params: SamplingParams, repeats: int, progress: Advance
    ) -> None:
        """Warms every method up, on a few tokens of the first prompts."""
        inputs, seeded = _requests(prompts, params)
        short = min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS)
        few = [replace(p, max_tokens=short) for p in seeded[: self.rows]]
        longest = max(len(p.token_ids) for p in prompts) + (params.max_tokens or 0)
        for name, llm in self.llms.items():
            progress(0, f"{name}: warming up", self._responses(prompts, repeats))
            llm.warm_up(longest=longest if params.max_tokens else None)
            llm.generate(inputs[: self.rows], few, use_tqdm=False)

    def _responses(self, prompts: Sequence[Prompt], repeats: int) -> int:
        """How many responses all passes have."""
        return len(self.llms) * repeats * len(prompts)

    def _measurement(
        self, name: str, params: SamplingParams, requests: list[RequestOutput]
    ) -> Measurement:
        """What is known of a method after its first pass."""
        proposer = self.llms[name].engine.proposer
        tokens = 0 if proposer is None else proposer.num_speculative_tokens
        return Measurement("prompts", params.temperature or 0.0, name, tokens, requests)

    def _passes(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        repeats: int,
        progress: Advance,
        clock: Clock,
    ) -> Iterator[tuple[str, TimedPass, list[RequestOutput]]]:
        """The timed passes of every method, with their responses."""
        inputs, seeded = _requests(prompts, params)
        ended = Counter[str]()  # responses by method

        def one_turn(name: str, turn: range) -> list[RequestOutput]:
            number = ended[name] // len(prompts) + 1
            note = f"{name}, pass {number} of {repeats}"
            whole = self._responses(prompts, repeats)
            bar = partial(ResponseBar, progress, ended.total(), whole, note)
            part = slice(turn.start, turn.stop)
            outputs = self.llms[name].generate(inputs[part], seeded[part], use_tqdm=bar)
            ended[name] += len(turn)
            return outputs

        runs = {name: partial(one_turn, name) for name in self.llms}
        turns = turns_of(len(prompts), 1 if self.rows == 1 else len(prompts))
        yield from interleaved(runs, "prompts", turns, repeats, self.target.device, clock)

    def _rounds(self, name: str, prompts: Sequence[Prompt], params: SamplingParams) -> RoundTimes:
        """The rounds of a method by part, over the first prompts."""
        ids = [prompt.token_ids for prompt in prompts]
        _, seeded = _requests(prompts, params)
        return time_rounds(self.llms[name], ids, seeded, self.rows)

    def _compare(self, default: Measurement, measurement: Measurement) -> LosslessCheck:
        return compare_greedy(
            self.llms[DEFAULT].engine.runner,
            default.requests,
            measurement.requests,
            num_speculative_tokens=measurement.num_speculative_tokens,
            rows=min(self.rows, len(default.requests)),
        )


def _requests(
    prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """The prompts as `LLM.generate` takes them, and for each its own seed."""
    inputs = [{"prompt": p.text, "prompt_token_ids": p.token_ids} for p in prompts]
    seeded = [replace(params, seed=(params.seed or 0) + i) for i in range(len(prompts))]
    return inputs, seeded


def compare_methods(
    model: str,
    methods: Mapping[str, dict[str, Any]],
    prompts_of: Callable[[Any], Sequence[Prompt]],
    params: SamplingParams,
    *,
    repeats: int,
    title: str,
    saved: Path | None,
    arguments: Mapping[str, Any],
    choose_vocabulary: Sequence[str] = (),
    clock: Clock = perf_counter,
    **options: Any,
) -> bool:
    """Runs the methods, prints the table and what it does not say, and saves the results as JSON;
    False if greedy responses differ by more than a tie. `prompts_of`: the tokenizer -> the
    prompts; `choose_vocabulary`: methods whose drafters run at the fastest size of their
    vocabulary; `clock`: of the times. An interrupt is raised again after what was measured by
    then."""
    console = Console()
    stages = Stages(console=Console(stderr=True))
    with stages.stage(f"load {model}"):
        engines = SideBySide(model, methods, **options)
        prompts = prompts_of(engines.tokenizer)
    curves: dict[str, list[VocabularySize]] = {}
    for name in choose_vocabulary:
        with stages.stage(f"measure draft vocabularies of {name}"):
            curves[name] = engines.choose_vocabulary(name, methods[name], prompts, params)
        console.print(curve_table(curves[name], f"{name}: draft vocabularies"))
    stages.say(_extent(engines, len(prompts), repeats, params))
    with stages.stage("passes") as advance:
        measured = engines.run(prompts, params, repeats, advance, clock)
    if engines.interrupt is not None and not measured:
        raise engines.interrupt
    cells = {name: measurement.cell() for name, measurement in measured.items()}
    versions = environment(engines.target.device, engines.target.dtype)
    conditions = f"T={params.temperature:g}, {versions['dtype']}, {versions['device']}"
    extent = _answered(cells[DEFAULT].prompts, len(prompts))
    _print_results(console, measured, cells, f"{title}: {extent}, {conditions}")
    if saved is not None:
        tree = _records(measured, cells, curves)
        _write(saved, tree | {"versions": versions, "arguments": dict(arguments)})
        console.print(f"written to {saved}", highlight=False, soft_wrap=True)
    if engines.interrupt is not None:
        raise engines.interrupt
    return not any(check.mismatches for cell in cells.values() for check in cell.lossless)


def _print_results(
    console: Console, measured: Mapping[str, Measurement], cells: Mapping[str, Cell], title: str
) -> None:
    """The table, the costs of rounds that were timed, and what the two do not say."""
    console.print(_table(cells, title))
    if costs := [(name, cell) for name, cell in cells.items() if cell.round_cost]:
        console.print(cost_table(costs))
    for line in [*remarks(measured), *_drafted_by(cells), *_slower(cells)]:
        console.print(line, highlight=False, soft_wrap=True)


def _records(
    measured: Mapping[str, Measurement],
    cells: Mapping[str, Cell],
    curves: Mapping[str, Sequence[VocabularySize]],
) -> dict[str, Any]:
    """The results of the methods by name, with the curves of those whose sizes were measured."""
    tree = {name: results(measured[name].requests, cell) for name, cell in cells.items()}
    for name, curve in curves.items():
        if name in tree:
            tree[name]["draft_vocabularies"] = [point.record() for point in curve]
    return tree


def _extent(engines: SideBySide, prompts: int, repeats: int, params: SamplingParams) -> str:
    """What will be run, in words."""
    most = len(engines.llms) * repeats * prompts * (params.max_tokens or 0)
    return (
        f"{', '.join(engines.llms)} take turns: {counted(prompts, 'prompt')},"
        f" {counted(repeats, 'pass', 'passes')} of each, {counted(most, 'token')} at most"
    )


def _answered(count: int, prompts: int) -> str:
    """How many prompts a table is of, in words."""
    of_all = counted(prompts, "prompt")
    return of_all if count == prompts else f"{count} of {of_all}"


def _write(file: Path, tree: Mapping[str, Any]) -> None:
    """The tree as JSON; what is none, such as a path, as its text."""
    write_whole(file, json.dumps(tree, indent=2, ensure_ascii=False, default=str) + "\n")


def _table(cells: Mapping[str, Cell], title: str) -> Table:
    """A row for each method."""
    table = new_table(title, "", *COLUMNS)
    for name, cell in cells.items():
        table.add_row(name, *(row(cell)[column] for column in COLUMNS))
    table.caption = (
        "τ: tokens per verification of drafts; /fwd: tokens per forward of the target; drafted:"
        " share of the forwards with a draft; speedup with 90 % of a bootstrap; same: the text of"
        " the default (~: ties)"
    )
    table.caption_justify = "left"
    return table


def _drafted_by(cells: Mapping[str, Cell]) -> list[str]:
    """Of every method that drafts beside a head, how often either did."""
    return [f"{name}: {line}" for name, cell in cells.items() for line in methods_note(cell)]


def _slower(cells: Mapping[str, Cell]) -> list[str]:
    """Of every method that is slower than the default, why, and what to do."""
    return [f"{name}: {line}" for name, cell in cells.items() for line in why_slower(cell)]


def results(requests: Sequence[RequestOutput], cell: Cell) -> dict[str, Any]:
    """The saved results of a method: outputs and timings, and the fields of its cell
    (docs/evaluate.md) as metrics."""
    outputs = [
        {
            "prompt": request.prompt,
            "text": request.outputs[0].text,
            "token_ids": request.outputs[0].token_ids,
            "finish_reason": request.outputs[0].finish_reason,
        }
        for request in requests
    ]
    timings = {
        "seconds": median(run.seconds for run in cell.passes[SPECULATIVE]),
        "tokens_per_second": cell.tokens_per_second[SPECULATIVE].value,
    }
    metrics = cell.model_dump(exclude={"workload", "engine", "suite"}, exclude_none=True)
    return {"outputs": outputs, "timings": timings, "metrics": metrics}


def remarks(measured: Mapping[str, Measurement]) -> list[str]:
    """What the table does not say: responses that repeat themselves, every first difference from
    the default, how rounds ran, and passes that stalled."""
    lines = []
    default = measured[DEFAULT].requests if DEFAULT in measured else []
    responses = [output.outputs[0].token_ids for output in default]
    if repeated := sum(map(repeats_itself, responses)):
        lines.append(
            f"{repeated} of {len(responses)} responses repeat themselves to the end: n-grams and"
            " suffixes gain more on them than on real answers"
        )
    lines += [
        f"{name}, prompt {difference.prompt}, token {difference.position}:"
        f" {'a tie' if difference.tie else 'a mismatch'}; the two best logits are"
        f" {difference.top_two_gap:.3g} apart and {difference.noise:.3g} of noise was measured"
        for name, measurement in measured.items()
        for check in measurement.lossless
        for difference in check.details
    ]
    methods_by_rounds: dict[str, list[str]] = {}
    for name, measurement in measured.items():
        if how := how_rounds_ran(measurement.passes[SPECULATIVE]):
            methods_by_rounds.setdefault(how, []).append(name)
    for how, names in methods_by_rounds.items():
        lines.append(f"rounds: {how} ({', '.join(names)})")
    for name, measurement in measured.items():
        drafted = {SPECULATIVE: measurement.passes[SPECULATIVE]}
        lines += [f"{name}: {stall_note(stall)}" for stall in stalled(drafted)]
    return lines


def repeats_itself(token_ids: Sequence[int]) -> bool:
    """True if the second half of a response of 16 tokens or more is one piece of at most 8 tokens,
    over and over."""
    half = list(token_ids[len(token_ids) // 2 :])
    return len(token_ids) >= 16 and any(
        half[period:] == half[:-period] for period in range(1, min(8, len(half) // 2) + 1)
    )
