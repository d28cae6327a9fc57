"""The acceptance stage: measures the exported folder as engines load it, and checks gates.

Prompts come from the recipe's evaluation sources, as serving would send them. The report goes to
the run's folder as `acceptance.json` and `report.html`, and its table to the terminal."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from draftsmith.inference.entrypoints.loading import target_config
from draftsmith.inference.evaluation.engines import RuntimeEngine
from draftsmith.inference.evaluation.evaluate import (
    Chat,
    EngineMaker,
    EvaluationSettings,
    EvaluationStopped,
    MeasuredSuite,
    check_names,
    evaluate,
)
from draftsmith.inference.evaluation.suites import SuiteConversation, load_suite
from draftsmith.inference.progress import Advance, Stages
from draftsmith.inference.report.build import Bound, check_gates, lay_beside
from draftsmith.inference.report.html import render_html
from draftsmith.inference.report.schema import (
    OUR_ENGINE,
    AcceptanceReport,
    SuiteFacts,
    save_report,
)
from draftsmith.inference.report.table import cell_table, print_report
from draftsmith.inference.vllm_bridge.vllm_engine import VLLM, VllmOptions
from draftsmith.inference.vllm_python import vllm_python
from draftsmith.inference.whole_file import check_writable, write_whole
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.speculators.target.longrope import trained_length
from draftsmith.train.data.examples import Example
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.prepare import bad_rows, run_tokenizer
from draftsmith.train.data.sources import load_sources
from draftsmith.train.data.tokenising import prompts_of
from draftsmith.train.recipe.recipe import EXPORT, PAGE, REPORT, TARGET, Recipe
from draftsmith.train.recipe.sections import GATES, GATES_OF_TEMPERATURES
from draftsmith.train.trainer.joint_target import change_of

SEED = 0  # of the choice of prompts
ROLES = ("user", "assistant")
Engines = Mapping[str, EngineMaker]  # by name: OUR_ENGINE, VLLM or both


def engines_of(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Engines:
    """The engines of the recipe's evaluation section. Without an installed vLLM it is left out with
    a message; ConfigError if a gate, or nothing but vLLM, is asked for."""
    e = recipe.evaluation
    engines: dict[str, EngineMaker] = {}
    if OUR_ENGINE in e.engines:
        engines[OUR_ENGINE] = RuntimeEngine
    if VLLM in e.engines:
        try:
            python = vllm_python()
        except ConfigError as error:
            if not engines or any(name.endswith("vllm_gap") for name in recipe.gates):
                raise
            say(f"acceptance: not measured in vLLM. {error}")
            return engines
        engines[VLLM] = VllmOptions(python, e.vllm.options, e.vllm.speculative_config)
    return engines


def accept(recipe: Recipe, *, stages: Stages | None = None, engines: Engines | None = None) -> int:
    """Evaluates `<output_dir>/export` and writes the report; 0, or 1 if a gate is missed.

    `engines`: not the recipe's."""
    stages = stages or Stages()
    if not recipe.measured:
        stages.say("acceptance: not measured, as the recipe names no prompts or suites")
        return 0
    folder = Path(recipe.output_dir)
    check_report_writable("output_dir", folder)
    target = str(folder / TARGET) if recipe.joint else recipe.target.model
    provenance: dict[str, Any] = {
        "recipe_name": recipe.name,
        "recipe_sha256": recipe.recipe_hash(),
        "target_name": target,
    }
    if recipe.joint:
        provenance["target_change"] = change_of(Path(target))
    if (template := recipe.data.chat_template) is not None:
        provenance["chat_template"] = Path(template).read_text(encoding="utf-8")
    report = measure(
        recipe,
        folder / EXPORT,
        stages,
        engines or engines_of(recipe, stages.say),
        target=target,
        provenance=provenance,
    )
    try:
        report.gates = check_gates(report.summary, gate_bounds(recipe))
    finally:  # kept even if a gate turns out to name nothing
        write_report(report, folder, stages)
    missed = [gate.name for gate in report.gates if not gate.passed]
    verdict = "all gates passed" if report.gates else "no gates"
    if missed:
        verdict = f"missed: {', '.join(missed)}"
    stages.say(f"{verdict}; {folder / PAGE}, {folder / REPORT}")
    return 1 if missed else 0


def check_report_writable(option: str, folder: Path) -> None:
    """ConfigError if the files of a report cannot be written there, `option` naming the folder."""
    for name in (REPORT, PAGE):
        check_writable(option, folder / name)


def write_report(report: AcceptanceReport, folder: Path, stages: Stages) -> None:
    """The report as a table on the terminal, which comes first since no disk can be too full for
    it, as JSON, and as a page."""
    if stages.enabled:
        print_report(report, stages.console)
    save_report(report, folder / REPORT)
    write_whole(folder / PAGE, render_html(report))


def measure(
    recipe: Recipe,
    drafter: str | Path | None,
    stages: Stages,
    engines: Engines | None = None,
    *,
    target: str | None = None,
    **options: Any,
) -> AcceptanceReport:
    """The report on `drafter` without gates, by the recipe's evaluation section, in one engine or
    two side by side. vLLM comes first, since it may refuse.

    `target`: instead of the recipe's, which it was trained from. `options`: of
    `draftsmith.inference.evaluation.evaluate.evaluate`."""
    engines = engines or {OUR_ENGINE: RuntimeEngine}
    settings = settings_of(recipe)
    model = target or recipe.target.model
    llm_options = _llm_options(recipe, model)
    suites = measured_suites(recipe, settings)
    chosen = workloads(recipe, settings, stages.say, Path(recipe.output_dir))
    reports: dict[str, AcceptanceReport] = {}
    with _shown_if_stopped(stages), stages.stage("acceptance", 1) as advance:
        for name in sorted(engines, key=lambda name: name == OUR_ENGINE):
            reports[name] = evaluate(
                model,
                drafter,
                chosen,
                settings,
                suites=suites,
                engine=engines[name],
                llm_options=llm_options,
                progress=_part_of(advance, len(reports), len(engines), name),
                **options,
            )
    if len(reports) > 1:
        return lay_beside(reports[OUR_ENGINE], reports[VLLM])
    return reports.popitem()[1]


def _part_of(advance: Advance, number: int, count: int, engine: str) -> Advance:
    """The progress of the engine `number` of `count` as a part of that of the stage."""

    def progress(done: float, note: str = "", total: float | None = None) -> None:
        advance((number + done) / count, f"{engine}: {note}" if count > 1 else note)

    return progress


def _llm_options(recipe: Recipe, model: str) -> dict[str, Any]:
    """The options of LLM for the recipe's target, or for `model` in its place; of LongRoPE with the
    length whose frequencies the drafter was trained with."""
    source = dict(recipe.target.source)
    if model != recipe.target.model:
        source["revision"] = None
    options: dict[str, Any] = {"dtype": recipe.target.dtype, **source}
    length = trained_length(target_config(model, **source), recipe.data.max_length)
    if length is not None:
        options["max_model_len"] = length
    return options


@contextmanager
def _shown_if_stopped(stages: Stages) -> Iterator[None]:
    """Shows what an interrupted evaluation has measured, which no file holds."""
    try:
        yield
    except EvaluationStopped as stop:
        stages.say(
            "acceptance: stopped; no report is written, and an earlier one stays; the same command"
            " measures again"
        )
        if stages.enabled and stop.cells:
            stages.console.print(cell_table(stop.cells, "measured before the stop"))
        raise


def settings_of(recipe: Recipe) -> EvaluationSettings:
    """The recipe's evaluation section; what it does not name keeps its default."""
    e = recipe.evaluation
    usual = EvaluationSettings()
    named = {f.name: getattr(e, f.name) for f in fields(usual) if hasattr(e, f.name)}
    named |= {
        "temperatures": tuple(e.temperatures),
        "timed_prompts": max(e.timed_prompts, e.batch_size),
        "lossless_prompts": usual.lossless_prompts if e.lossless_check else 0,
    }
    return replace(usual, **named)


# ------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class Asker:
    """Prompts as the target is asked them, with room for `max_tokens` in its `limit` of tokens."""

    tokenizer: ConversationTokenizer
    limit: float
    max_tokens: int

    @classmethod
    def of(cls, recipe: Recipe) -> Asker:
        """Of the target of a recipe, whose tokenizer and config are read; no weights are."""
        tokenizer = run_tokenizer(recipe, recipe.target.load_tokenizer())
        config = target_config(recipe.target.model, **recipe.target.source)
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        return cls(tokenizer, limit, recipe.evaluation.max_tokens)

    def chat(self, conversation: SuiteConversation) -> Chat | None:
        """None if the conversation has no room for the longest responses."""

        def ask(answers: Sequence[str]) -> list[int]:
            texts = [text for pair in zip(conversation.turns, answers) for text in pair]
            texts.append(conversation.turns[len(answers)])
            messages = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(texts)]
            example = Example(conversation.category, conversation.origin, tuple(messages))
            return self.tokenizer.prompt_ids(example)

        later = conversation.turns[1:]
        bare = len(ask([""] * len(later)))
        if bare + (len(later) + 1) * self.max_tokens > self.limit:
            return None
        # a text may have more tokens than those it was written with
        longest = min(bare + 2 * len(later) * self.max_tokens, self.limit - self.max_tokens)
        return Chat(ask([]), later, ask, int(longest))

    def choose(
        self, groups: Mapping[str, Sequence[Any]], count: int | None, seed: str, where: str
    ) -> dict[str, list[Any]]:
        """A seeded choice of `count` items of each group (None: all). DataError: one has none."""
        chosen: dict[str, list[Any]] = {}
        for name, items in groups.items():
            if not items:
                raise DataError(
                    f"every prompt of {name!r} is too long: the target's context is {self.limit}"
                    f" tokens, and responses have up to {self.max_tokens}",
                    where=where,
                )
            numbers: Sequence[int] = range(len(items))
            if count is not None and count < len(items):
                numbers = sorted(random.Random(f"{seed}/{name}").sample(numbers, count))
            chosen[name] = [items[i] for i in numbers]
        return chosen


def workloads(
    recipe: Recipe,
    settings: EvaluationSettings,
    say: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> dict[str, list[list[int]]]:
    """Prompts as token ids by workload: a seeded choice of `prompts_per_workload` in their order.

    Rows that cannot be used are left out, and listed in `folder` if there is one; so are prompts
    that leave no room for a response of `max_tokens`. `say` is told how many (None: standard
    error). DataError if a workload has no other."""
    sources = recipe.evaluation.prompts or recipe.data.validation
    if not sources:
        return {}
    asker = Asker.of(recipe)
    by_workload: dict[str, list[np.ndarray]] = {}
    bad = bad_rows(recipe.data, folder, use="evaluation")
    without_room = 0
    examples = load_sources(sources, bad=bad)
    for number, prompt in prompts_of(examples, asker.tokenizer, bad).items():
        fitting = by_workload.setdefault(examples[number].workload, [])
        if len(prompt) + asker.max_tokens <= asker.limit:
            fitting.append(prompt)
        else:
            without_room += 1
    count = settings.prompts_per_workload
    chosen = asker.choose(by_workload, count, f"{SEED}", "evaluation.max_tokens")
    say = say or Stages(console=Console(stderr=True)).say
    if str(bad):
        say(f"evaluation prompts: {escape(str(bad))}")
    if without_room:
        say(
            f"evaluation prompts: {without_room} left out, which leave no room for a response of"
            f" {asker.max_tokens} tokens in the target's context of {asker.limit}"
        )
    return {name: [prompt.tolist() for prompt in prompts] for name, prompts in chosen.items()}


def check_prompts(recipe: Recipe) -> None:
    """Reads what the recipe's evaluation asks, so that its errors come before the training: files
    that are not there, templates that refuse a conversation, prompts that are too long."""
    if not recipe.measured:
        return
    settings = settings_of(recipe)
    check_names(workloads(recipe, settings, say=lambda text: None))
    measured_suites(recipe, settings)


def measured_suites(recipe: Recipe, settings: EvaluationSettings) -> list[MeasuredSuite]:
    """The recipe's suites: a seeded choice of `suite_prompts` conversations per category.

    Conversations are passed over, and counted, that leave no room for a response of `max_tokens` to
    every turn; DataError: a category has no other, or a file is missing."""
    e = recipe.evaluation
    if not e.suites:
        return []
    asker = Asker.of(recipe)
    suites = []
    for name, path in e.suite_paths.items():
        rows = load_suite(name, path)
        by_category: dict[str, list[Chat]] = {row.category: [] for row in rows}
        for row in rows:
            if (chat := asker.chat(row)) is not None:
                by_category[row.category].append(chat)
        where = f"evaluation.suites.{name}"
        chosen = asker.choose(by_category, e.suite_prompts, f"{SEED}/{name}", where)
        facts = SuiteFacts(
            name=name,
            chat_template_kwargs=dict(recipe.data.chat_template_kwargs),
            path=path,
            sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(),
            conversations=sum(map(len, chosen.values())),
            conversations_in_file=len(rows),
            conversations_without_room=len(rows) - sum(map(len, by_category.values())),
            max_tokens=settings.max_tokens,
            num_speculative_tokens=settings.num_speculative_tokens,
        )
        suites.append(MeasuredSuite(facts, chosen))
    return suites


def gate_bounds(recipe: Recipe) -> dict[str, Bound]:
    """The recipe's gates by keys of the summary: one without a temperature holds at each that is
    measured, unless that has a gate of its own."""
    bounds: dict[str, Bound] = {}
    for name, gate in recipe.gates.items():
        names = [name]
        if name in GATES_OF_TEMPERATURES and name not in GATES:
            names = [f"t{t:g}.{name}" for t in recipe.evaluation.temperatures]
        keys = sorted(key for key in names if key == name or key not in recipe.gates)
        bounds |= dict.fromkeys(keys, Bound(gate.min, gate.max))
    return bounds
