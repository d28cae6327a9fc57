"""Which engines a report is measured in, and both in one report. Knows recipes; how an engine is run is inference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.evaluation.engines import Prompts
from inference.evaluation.evaluate import EngineMaker, EvaluationSettings, Progress, evaluate
from inference.report.merge_engines import lay_beside, measured_before
from inference.report.schema import AcceptanceReport
from inference.vllm_bridge.engine import VLLM, VllmOptions, vllm_python
from speculators.errors import ConfigError
from train.recipe.recipe import Recipe
from train.recipe.run_folder import REPORT
from train.recipe.sections import split_gate


@dataclass(frozen=True)
class Engines:
    """The engines of one evaluation.

    ours           whether this runtime is measured now; else what was measured of it before is taken, if there is any
    vllm           makes vLLM; None: it is not measured
    temperatures   those to measure vLLM at; None: all
    needs_ours     without an earlier report of this runtime it is measured after all
    """

    ours: bool = True
    vllm: EngineMaker | None = None
    temperatures: Sequence[float] | None = None
    needs_ours: bool = field(default=False, kw_only=True)


def require_engines(recipe: Recipe) -> None:
    """Before anything is trained: ConfigError if a gate needs vLLM and there is none."""
    if any(split_gate(name)[1] == "vllm_gap" for name in recipe.gates):
        try:
            vllm_python()
        except ConfigError as error:
            raise ConfigError(f"gates: vllm_gap is set, so the run must be measured in vLLM. {error}") from None


def engines_of(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Engines:
    """Those of the recipe's evaluation section. vLLM is passed over, and that is said, where there is none and no gate
    needs it."""
    e = recipe.evaluation
    if VLLM not in e.engines:
        return Engines()
    require_engines(recipe)
    try:
        python = vllm_python()
    except ConfigError as error:
        say(f"acceptance: not measured in vLLM. {error}")
        return Engines()
    return Engines(True, VllmOptions(python, e.vllm.options, e.vllm.speculative_config), e.vllm_temperatures)


def evaluate_in(
    engines: Engines,
    folders: list[Path],
    model: str,
    drafter: str | Path | None,
    workloads: Mapping[str, Prompts],
    settings: EvaluationSettings,
    *,
    progress: Progress | None = None,
    **rest: Any,
) -> AcceptanceReport:
    """`inference.evaluation.evaluate.evaluate` in each engine, side by side in one report.

    vLLM comes first, since it may refuse. `folders`: where an earlier report of this runtime may lie that vLLM's can be
    laid beside. `rest`: of `evaluate`.
    """
    if engines.vllm is None:
        return evaluate(model, drafter, workloads, settings, progress=progress, **rest)

    def part(first: float, last: float) -> Progress | None:
        return None if progress is None else lambda share, note: progress(first + (last - first) * share, note)

    half = 0.5 if engines.ours else 1.0
    chosen = replace(settings, temperatures=engines.temperatures or settings.temperatures)
    theirs = evaluate(model, drafter, workloads, chosen, engine=engines.vllm, progress=part(0.0, half), **rest)
    ours = None if engines.ours else measured_before(folders, REPORT, theirs.provenance)
    if ours is None and (engines.ours or engines.needs_ours):
        ours = evaluate(model, drafter, workloads, settings, progress=part(half, 1.0), **rest)
    return theirs if ours is None else lay_beside(ours, theirs)
