"""The acceptance stage: measures the exported folder, loaded as an engine loads it, and checks the
gates.

Prompts come from the recipe's evaluation sources, as serving would send them. The report goes to
the run's folder as `acceptance.json` and `report.html`, and its table to the terminal. The model in
memory plays no part."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from draftsmith.inference.entrypoints.loading import load_tokenizer, target_config
from draftsmith.inference.evaluation.evaluate import (
    Chat,
    EngineMaker,
    EvaluationSettings,
    MeasuredSuite,
    Progress,
    Workloads,
    evaluate,
)
from draftsmith.inference.evaluation.suites import Conversation, load_suite
from draftsmith.inference.report.build import (
    Bound,
    History,
    check_gates,
    lay_beside,
    training_progress,
)
from draftsmith.inference.report.html import write_html
from draftsmith.inference.report.schema import (
    OUR_ENGINE,
    AcceptanceReport,
    SuiteFacts,
    save_report,
)
from draftsmith.inference.report.table import print_report
from draftsmith.inference.vllm_bridge.engine import VLLM, VllmOptions
from draftsmith.inference.vllm_python import vllm_python
from draftsmith.speculators.errors import ConfigError, DataError
from draftsmith.train.data.loss_mask import ConversationTokenizer
from draftsmith.train.data.packing import conversation_tokenizer
from draftsmith.train.data.prepare import askable, bad_rows
from draftsmith.train.data.sources import Example, load_sources
from draftsmith.train.pipeline.progress import Stages
from draftsmith.train.recipe.recipe import Recipe
from draftsmith.train.recipe.run_folder import EXPORT, PAGE, REPORT, TARGET
from draftsmith.train.recipe.sections import split_gate
from draftsmith.train.trainer.joint_target import change_of

SEED = 0  # of the choice of prompts


@dataclass(frozen=True)
class Engines:
    """The engines of one evaluation.

    ours           measures this runtime
    vllm           makes vLLM; None: vLLM is not measured
    enforce_eager  False: rounds of this runtime are compiled, at the batch size that is timed
    """

    ours: bool = True
    vllm: EngineMaker | None = None
    enforce_eager: bool | None = None


def require_engines(recipe: Recipe) -> None:
    """Before anything is trained: ConfigError if a gate, or the choice of engines, needs vLLM and
    there is none."""
    gated = any(split_gate(name)[1] == "vllm_gap" for name in recipe.gates)
    if gated or recipe.evaluation.engines == [VLLM]:
        why = "gates: vllm_gap is set" if gated else "evaluation.engines names vllm alone"
        try:
            vllm_python()
        except ConfigError as error:
            raise ConfigError(f"{why}, so the run must be measured in vLLM. {error}") from None


def require_suites(recipe: Recipe) -> None:
    """Before anything is trained: DataError names a suite's file that is missing or of another
    shape."""
    for name, path in recipe.evaluation.suite_paths.items():
        load_suite(name, path)


def engines_of(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Engines:
    """The engines of the recipe's evaluation section. Without an installed vLLM it is left out with
    a message; ConfigError if a gate needs it."""
    e = recipe.evaluation
    if VLLM not in e.engines:
        return Engines()
    require_engines(recipe)
    try:
        python = vllm_python()
    except ConfigError as error:
        say(f"acceptance: not measured in vLLM. {error}")
        return Engines()
    vllm = VllmOptions(python, e.vllm.options, e.vllm.speculative_config)
    return Engines(OUR_ENGINE in e.engines, vllm)


def accept(
    recipe: Recipe,
    *,
    stages: Stages | None = None,
    history: History = (),
    engines: Engines | None = None,
) -> int:
    """Evaluates `<output_dir>/export`, writes the report, prints the table; 0, or 1 if a gate of
    the recipe is missed.

    `history`: the training loop's records. `engines`: instead of the
    recipe's."""
    stages = stages or Stages(1)
    if not recipe.measured:
        stages.say(
            "acceptance: not measured, the recipe names no evaluation.prompts, data.validation or"
            " suites"
        )
        return 0
    target = str(Path(recipe.output_dir) / TARGET) if recipe.joint else recipe.target.model
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
        Path(recipe.output_dir) / EXPORT,
        stages,
        engines or engines_of(recipe, stages.say),
        target=target,
        provenance=provenance,
    )
    report = report.model_copy(update={"training": training_progress(history)})
    folder = Path(recipe.output_dir)
    save_report(report, folder / REPORT)  # kept even if a gate turns out to name nothing
    report.gates = check_gates(report.summary, gate_bounds(recipe))
    write_report(report, folder, stages)
    missed = [gate.name for gate in report.gates if not gate.passed]
    if change := report.provenance.target_change:
        stages.say(
            f"target, trained jointly: {change['before']:.4f} -> {change['after']:.4f} nats per"
            f" token on {change['responses']:.0f} held-out responses"
        )
    verdict = "all gates passed" if report.gates else "no gates"
    if missed:
        verdict = f"missed: {', '.join(missed)}"
    stages.say(f"{verdict}; {folder / PAGE}, {folder / REPORT}")
    return 1 if missed else 0


def write_report(report: AcceptanceReport, folder: Path, stages: Stages) -> None:
    """The report as JSON, as a page, and as a table on the terminal."""
    save_report(report, folder / REPORT)
    write_html(report, folder / PAGE)
    if stages.enabled:
        print_report(report, stages.console)


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
    engines, settings = engines or Engines(), settings_of(recipe)
    t = recipe.target
    common = options | {
        "suites": measured_suites(recipe, settings),
        "llm_options": {
            "dtype": t.dtype,
            "revision": t.revision if target in (None, t.model) else None,
            "trust_remote_code": t.trust_remote_code,
        },
    }
    chosen = workloads(recipe, settings)

    def run(settings: EvaluationSettings, **rest: Any) -> AcceptanceReport:
        return evaluate(target or t.model, drafter, chosen, settings, **common | rest)

    def run_ours(progress: Progress) -> AcceptanceReport:
        own = common["llm_options"] | _compiled(engines, settings, chosen, common["suites"])
        return run(settings, llm_options=own, progress=progress)

    with stages.stage("acceptance", 100) as advance:

        def part(first: float, last: float, name: str = "") -> Progress:
            return lambda share, note: advance(
                round(100 * (first + (last - first) * share), 1), name + note
            )

        if engines.vllm is None:
            return run_ours(part(0.0, 1.0))
        half = 0.5 if engines.ours else 1.0
        theirs = run(
            settings,
            engine=engines.vllm,
            progress=part(0.0, half, "vllm: "),
        )
        if not engines.ours:
            return theirs
        return lay_beside(run_ours(part(half, 1.0)), theirs)


def _compiled(
    engines: Engines,
    settings: EvaluationSettings,
    chosen: Workloads,
    suites: Sequence[MeasuredSuite],
) -> dict[str, Any]:
    """Options of an LLM that compile the rounds, or not. A compiled engine's rows have all their
    memory at the start, so it is given the longest of them where no later turn decides it."""
    if engines.enforce_eager is None:
        return {}
    options: dict[str, Any] = {"enforce_eager": engines.enforce_eager}
    if not engines.enforce_eager:
        chats = [chat for *_, some in settings.chosen(chosen, suites) for chat in some]
        if not any(chat.later for chat in chats):
            longest = max(len(chat.prompt) for chat in chats)
            options["max_model_len"] = longest + settings.max_tokens
    return options


def settings_of(recipe: Recipe) -> EvaluationSettings:
    """The recipe's evaluation section; what it does not name keeps its default."""
    e, usual = recipe.evaluation, EvaluationSettings()
    named = {f.name: getattr(e, f.name) for f in fields(usual) if hasattr(e, f.name)}
    named |= {
        "temperatures": tuple(e.temperatures),
        "timed_prompts": max(e.timed_prompts, e.batch_size),
        "transformers": e.baseline_transformers,
        "lossless_prompts": usual.lossless_prompts if e.lossless_check else 0,
    }
    return replace(usual, **named)


# ------------------------------------------------------------------ prompts


def workloads(recipe: Recipe, settings: EvaluationSettings) -> dict[str, list[list[int]]]:
    """Prompts as token ids by workload, a seeded choice of `prompts_per_workload`, in the order of
    the sources.

    Prompts that leave no room for a response of `max_tokens` are passed over; DataError if a
    workload has no other."""
    sources, seed = recipe.evaluation.prompts or recipe.data.validation, SEED
    if not sources:
        return {}
    tokenizer, limit = _tokenizer_and_limit(recipe)
    by_workload: dict[str, list[list[int]]] = {}
    bad = bad_rows(recipe.data, Path(recipe.output_dir), "evaluation").begin("evaluation")
    examples = load_sources(sources, seed=seed, bad=bad)
    for example in askable(examples, tokenizer, bad):
        by_workload.setdefault(example.workload, []).append(tokenizer.prompt_ids(example))
    chosen = {}
    for name, prompts in by_workload.items():
        longest = None if limit is None else limit - settings.max_tokens
        fitting = [prompt for prompt in prompts if longest is None or len(prompt) <= longest]
        if not fitting:
            raise DataError(
                f"every prompt of workload {name!r} is too long: the shortest of"
                f" {len(prompts)} has {min(map(len, prompts))} tokens, max_tokens is"
                f" {settings.max_tokens}, and the target's context is {limit} tokens; lower"
                " max_tokens, or leave the source out",
                where="evaluation",
            )
        chosen[name] = _sample(fitting, settings.prompts_per_workload, f"{seed}/{name}")
    return chosen


def _tokenizer_and_limit(recipe: Recipe) -> tuple[ConversationTokenizer, int | None]:
    t = recipe.target
    source: dict[str, Any] = {"revision": t.revision, "trust_remote_code": t.trust_remote_code}
    tokenizer = conversation_tokenizer(recipe.data, load_tokenizer(t.model, None, **source))
    return tokenizer, getattr(target_config(t.model, **source), "max_position_embeddings", None)


def _sample(items: Sequence[Any], count: int | None, seed: str) -> list[Any]:
    """A seeded choice of `count` items (None: all), in their order."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i] for i in sorted(random.Random(seed).sample(range(len(items)), count))]


def measured_suites(recipe: Recipe, settings: EvaluationSettings) -> list[MeasuredSuite]:
    """The suites of the recipe's evaluation section: a seeded choice of `suite_prompts`
    conversations per category.

    Conversations are passed over, and counted, that leave no room for a response of `max_tokens` to
    every turn; DataError if a category has no other, or for a file that is missing or of another
    shape."""
    e = recipe.evaluation
    if not e.suites:
        return []
    tokenizer, limit = _tokenizer_and_limit(recipe)
    kwargs = dict(recipe.data.chat_template_kwargs)
    suites = []
    for name, path in e.suite_paths.items():
        rows = load_suite(name, path)
        by_category: dict[str, list[Chat]] = {row.category: [] for row in rows}
        for row in rows:
            if (chat := _chat(row, tokenizer, limit, settings.max_tokens)) is not None:
                by_category[row.category].append(chat)
        if full := [category for category, chats in by_category.items() if not chats]:
            raise DataError(
                f"every conversation of category {full[0]!r} is too long"
                f" for the target, whose context is {limit} tokens, with responses of"
                f" {settings.max_tokens}; lower max_tokens",
                where=f"evaluation.suites.{name}",
            )
        chosen = {
            category: _sample(chats, e.suite_prompts, f"{SEED}/{name}/{category}")
            for category, chats in by_category.items()
        }
        facts = SuiteFacts(
            name=name,
            chat_template_kwargs=kwargs,
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


def _chat(
    conversation: Conversation,
    tokenizer: ConversationTokenizer,
    limit: int | None,
    max_tokens: int,
) -> Chat | None:
    """The conversation as the target is asked it; None if it has no room for the longest
    responses."""

    def ask(answers: Sequence[str]) -> list[int]:
        messages = [{"role": "user", "content": conversation.turns[0]}]
        for answer, turn in zip(answers, conversation.turns[1:]):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": turn})
        return tokenizer.prompt_ids(
            Example(conversation.category, conversation.origin, tuple(messages))
        )

    later = conversation.turns[1:]
    bare = len(ask([""] * len(later)))
    if limit is not None and bare + (len(later) + 1) * max_tokens > limit:
        return None
    # a text may have more tokens than those it was written with
    longest = bare + 2 * len(later) * max_tokens
    if limit is not None:
        longest = min(longest, limit - max_tokens)
    return Chat(ask([]), later, ask, longest)


def gate_bounds(recipe: Recipe) -> dict[str, Bound]:
    """The recipe's gates by keys of the summary: one without a temperature holds at each that is
    measured."""
    bounds: dict[str, Bound] = {}
    for name, gate in recipe.gates.items():
        temperature, metric = split_gate(name)
        if temperature is not None:
            names = [f"t{temperature:g}.{metric}"]
        elif metric in ("lossless_mismatches", "expected_measured_gap", "vllm_gap"):
            names = [metric]  # over all temperatures already
        else:
            names = [f"t{t:g}.{metric}" for t in recipe.evaluation.temperatures]
        for key in names:
            if key not in bounds or temperature is not None:
                bounds[key] = Bound(gate.min, gate.max)
    return bounds
