"""`draftsmith evaluate`: its options and engines. Torch is imported when it runs."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith.inference.flags import json_option
from draftsmith.inference.spec_decode.proposers.methods import TRAINING_FREE
from draftsmith.speculators.errors import ConfigError
from draftsmith.train.commands.options import (
    DraftTokens,
    MaxTokens,
    Model,
    Overrides,
    Precision,
)

if TYPE_CHECKING:
    from draftsmith.inference.evaluation.evaluate import EngineMaker
    from draftsmith.train.pipeline.acceptance_stage import Engines

OURS = "draftsmith"
VLLM = "vllm"


def evaluate(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Evaluate the export of this run.")
    ] = None,
    overrides: Overrides = None,
    model: Model = "",
    drafter: Annotated[str, typer.Option(help="With --model: the exported drafter.")] = "",
    method: Annotated[str, typer.Option(help=f"Or one of {', '.join(TRAINING_FREE)}.")] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(help="draftsmith (default) or vllm; repeated: both, side by side."),
    ] = None,
    vllm_python: Annotated[
        str, typer.Option(help="Python that has vLLM; default: $DRAFTSMITH_VLLM_PYTHON.")
    ] = "",
    vllm_options: Annotated[str, typer.Option(metavar="JSON", help="Options of vLLM's LLM.")] = "",
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="JSONL of prompts; default: the quickstart's.")
    ] = "",
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Benchmark suite (docs/evaluate.md); repeatable."),
    ] = None,
    suite_path: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File of each --suite; default: suites/NAME.jsonl."),
    ] = None,
    chat_template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Variables of the template: enable_thinking, ...")
    ] = "",
    num_speculative_tokens: DraftTokens = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be repeated; default: 0 and 1.")
    ] = None,
    max_tokens: MaxTokens = 128,
    prompts_per_workload: Annotated[
        int | None, typer.Option(min=1, help="Default: 16; all of a suite's category.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=0, help="Interleaved repetitions of every timing; 0: no times.")
    ] = 3,
    dtype: Precision = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/evaluation"),
) -> None:
    """The acceptance report of a recipe's run (exit code 1: a gate is missed), or of --drafter."""
    from draftsmith.train.pipeline.evaluate_again import evaluate_folders, evaluate_run
    from draftsmith.train.recipe.load import load_recipe

    engines = _engines(engine, vllm_python, vllm_options)
    if recipe is not None:
        if any((suite, suite_path, chat_template_kwargs, model, drafter, method, prompts)):
            raise ConfigError(
                "a recipe names its target, drafter and prompts itself, as well as"
                " evaluation.suites and data.chat_template_kwargs",
                where="evaluate",
            )
        raise typer.Exit(evaluate_run(load_recipe(recipe, overrides or ()), engines))
    if not model or bool(drafter) == bool(method):
        raise ConfigError(
            "give a recipe, or --model and --drafter (or --method) without one", where="evaluate"
        )
    if suite_path and len(suite_path) != len(suite or ()):
        raise ConfigError(
            f"{len(suite_path)} for {len(suite or ())} of --suite; give each one, or none",
            where="--suite-path",
        )
    page = evaluate_folders(
        model,
        drafter or None,
        prompts or None,
        out,
        temperature or [0.0, 1.0],
        method=method or None,
        engines=engines,
        dtype=dtype,
        chat_template_kwargs=json_option("--chat-template-kwargs", chat_template_kwargs),
        suites=dict(zip_longest(suite or (), suite_path or ())),
        suite_prompts=prompts_per_workload,
        num_speculative_tokens=num_speculative_tokens or default_tokens(method),
        max_tokens=max_tokens,
        prompts_per_workload=prompts_per_workload or 16,
        repeats=repeats,
    )
    Console().print(str(page), highlight=False)


def default_tokens(method: str) -> int:
    """K of an evaluation that names none: that of a training-free method, else 4."""
    from draftsmith.inference.entrypoints.speculative_config import parse_speculative_config

    if method not in TRAINING_FREE:  # a drafter's, or a name that is refused later
        return 4
    return parse_speculative_config({"method": method}).num_speculative_tokens or 4


def _engines(names: list[str] | None, python: str, options: str) -> Engines | None:
    """The engines that are named; None if none is, so that the recipe's are used."""
    names = names or []
    if not set(names) <= {OURS, VLLM}:
        raise ConfigError(f"expected {OURS} or {VLLM}", where=f"--engine {' '.join(names)}")
    if (python or options) and VLLM not in names:
        raise ConfigError("--vllm-python and --vllm-options need it", where="--engine vllm")
    if not names:
        return None
    from draftsmith.inference.evaluation.engines import RuntimeEngine
    from draftsmith.inference.vllm_bridge.vllm_engine import VllmOptions

    vllm = VllmOptions(python or None, json_option("--vllm-options", options) or {})
    makers: dict[str, EngineMaker] = {OURS: RuntimeEngine, VLLM: vllm}
    return {name: makers[name] for name in names}
