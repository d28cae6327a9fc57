"""`draftsmith evaluate`: its options and engines. Torch is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith.inference.flags import flag_name, json_option
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands.options import (
    DraftTokens,
    Model,
    Overrides,
    SpeculativeConfig,
    command_of,
)

if TYPE_CHECKING:
    from draftsmith.inference.evaluation.evaluate import EngineMaker
    from draftsmith.train.pipeline.acceptance_stage import Engines

OURS = "draftsmith"
VLLM = "vllm"
EXPORT = "the run's export"
# Option -> what decides the same in the recipe of a run, mostly a key.
BY_RECIPE = {
    "model": "target.model",
    "drafter": EXPORT,
    "method": EXPORT,
    "prompts": "evaluation.prompts",
    "suite": "evaluation.suites",
    "suite_path": "evaluation.suites",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "num_speculative_tokens": "evaluation.num_speculative_tokens",
    "speculative_config": "evaluation.speculative_config",
    "temperature": "evaluation.temperatures",
    "max_tokens": "evaluation.max_tokens",
    "prompts_per_workload": "evaluation.prompts_per_workload",
    "repeats": "evaluation.repeats",
    "dtype": "target.dtype",
    "out": "output_dir",
}


@dataclass(frozen=True)
class EvaluateOptions:
    """What `draftsmith evaluate` takes. With a recipe: overrides, and which engines measure."""

    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="Recipe of the run whose export is measured."),
    ] = None
    overrides: Overrides = None
    model: Model = ""
    drafter: Annotated[str, typer.Option(help="With --model: the exported drafter.")] = ""
    method: Annotated[
        str, typer.Option(help=f"In place of --drafter: {', '.join(TRAINING_FREE)}.")
    ] = ""
    engine: Annotated[
        list[str] | None,
        typer.Option(help="What runs the drafter: draftsmith (default), vllm; repeated: both."),
    ] = None
    vllm_python: Annotated[
        str, typer.Option(help="Python that has vLLM; default: $DRAFTSMITH_VLLM_PYTHON.")
    ] = ""
    vllm_options: Annotated[str, typer.Option(metavar="JSON", help="Options of vLLM's LLM.")] = ""
    prompts: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON lines with `prompt`; default: the quickstart's."),
    ] = ""
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Benchmark suite (docs/evaluate.md); repeatable."),
    ] = None
    suite_path: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File of each --suite; default: suites/NAME.jsonl."),
    ] = None
    chat_template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Variables of the template: enable_thinking, ...")
    ] = ""
    num_speculative_tokens: DraftTokens = None
    speculative_config: SpeculativeConfig = ""
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Of sampling; 0 is greedy; repeatable; default: 0 and 1."),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest response; default: 128.")
    ] = None
    prompts_per_workload: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each workload; default: 16, of a suite all."),
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(
            min=0, help="Timed passes with drafting and without; 0: no times; default: 3."
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="Precision of the target; default: auto, its own.")] = (
        ""
    )
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default: runs/evaluation.")
    ] = None


def run(options: EvaluateOptions) -> None:
    """Measure a drafter: acceptance, speed, the same text. The drafter is the export of a recipe's
    run, which is then held to its gates (exit code 1: one is missed), or --drafter for --model."""
    engines = _engines(options)
    if options.recipe is not None:
        raise typer.Exit(_evaluate_recipe(options.recipe, options, engines))
    if not options.model or bool(options.drafter) == bool(options.method):
        raise ConfigError(
            "give a recipe, or --model and --drafter (or --method) without one", where="evaluate"
        )
    _evaluate_drafter(options, engines)


def _evaluate_recipe(recipe: Path, options: EvaluateOptions, engines: Engines | None) -> int:
    """Measures the export of a run again; the exit code. ConfigError for an option that the recipe
    decides."""
    from draftsmith.train.pipeline.evaluate_again import evaluate_run
    from draftsmith.train.recipe.load import load_recipe

    named = [name for name in BY_RECIPE if getattr(options, name) not in (None, "", [])]
    if named:
        instead = [f"{flag_name(name)} ({BY_RECIPE[name]})" for name in named]
        raise ConfigError(
            f"a recipe decides {', '.join(instead)} itself; give another value of its key behind"
            " the recipe, such as evaluation.max_tokens=64, or leave the recipe out",
            where="evaluate",
        )
    return evaluate_run(load_recipe(recipe, options.overrides or ()), engines)


def _evaluate_drafter(options: EvaluateOptions, engines: Engines | None) -> None:
    """Measures a drafter or a method without a recipe, and prints the path of the page."""
    from draftsmith.train.pipeline.evaluate_again import evaluate_folders

    suites = options.suite or []
    paths = options.suite_path or []
    if paths and len(paths) != len(suites):
        raise ConfigError(
            f"{len(paths)} for {len(suites)} of --suite; give each one, or none",
            where="--suite-path",
        )
    page = evaluate_folders(
        options.model,
        options.drafter or None,
        options.prompts or None,
        options.out or Path("runs/evaluation"),
        options.temperature or [0.0, 1.0],
        method=options.method or None,
        engines=engines,
        dtype=options.dtype or "auto",
        chat_template_kwargs=json_option("--chat-template-kwargs", options.chat_template_kwargs),
        suites=dict(zip_longest(suites, paths)),
        suite_prompts=options.prompts_per_workload,
        num_speculative_tokens=options.num_speculative_tokens or default_tokens(options.method),
        speculative_config=json_option("--speculative-config", options.speculative_config) or {},
        max_tokens=options.max_tokens or 128,
        prompts_per_workload=options.prompts_per_workload or 16,
        repeats=3 if options.repeats is None else options.repeats,
    )
    Console().print(str(page), highlight=False)


def default_tokens(method: str) -> int:
    """K of an evaluation that names none: that of a training-free method, else 4."""
    from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config

    if method not in TRAINING_FREE:  # a drafter's, or a name that is refused later
        return 4
    return parse_speculative_config({"method": method}).num_speculative_tokens or 4


def _engines(options: EvaluateOptions) -> Engines | None:
    """The engines that are named; None if none is, so that the recipe's are used."""
    names = options.engine or []
    if not set(names) <= {OURS, VLLM}:
        raise ConfigError(f"expected {OURS} or {VLLM}", where=f"--engine {' '.join(names)}")
    if (options.vllm_python or options.vllm_options) and VLLM not in names:
        raise ConfigError("--vllm-python and --vllm-options need it", where="--engine vllm")
    if not names:
        return None
    from draftsmith.inference.evaluation.engines import RuntimeEngine
    from draftsmith.inference.vllm_bridge.vllm_engine import VllmOptions

    vllm_options = json_option("--vllm-options", options.vllm_options) or {}
    vllm = VllmOptions(options.vllm_python or None, vllm_options)
    makers: dict[str, EngineMaker] = {OURS: RuntimeEngine, VLLM: vllm}
    return {name: makers[name] for name in names}


evaluate = command_of("evaluate", EvaluateOptions, run)
