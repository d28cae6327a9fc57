"""Measures again: a run that is done, or any exported drafter without a recipe.

A drafter alone gets a recipe made up for it, so that prompts, settings and gates take the same way
through `draftsmith.train.pipeline.acceptance_stage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.inference.flags import flag_name
from draftsmith.inference.progress import Stages
from draftsmith.speculators.errors import CheckpointError, ConfigError, DataError
from draftsmith.speculators.export import read_drafter_config
from draftsmith.train.data.sources import errors_of_option
from draftsmith.train.pipeline.acceptance_stage import (
    Engines,
    accept,
    check_report_writable,
    measure,
    settings_of,
    workloads,
    write_report,
)
from draftsmith.train.pipeline.adapted_target import with_adapted_target
from draftsmith.train.recipe.recipe import EXPORT, PAGE, Recipe, make_recipe

HELD_OUT = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "data" / "test.jsonl.gz"
CODE = HELD_OUT.with_name("code-test.jsonl.gz")
# Keys of a recipe with other names than the options of an evaluation without one.
OPTIONS = {"temperatures": "temperature", "suites": "suite", "train": "prompts"}
BUILT_IN = [{"path": str(HELD_OUT), "limit": 96}, {"path": str(CODE)}]


def evaluate_run(recipe: Recipe, engines: Engines | None = None) -> int:
    """Measures `<output_dir>/export` again and gates it. `engines`: instead of the recipe's."""
    require_export(recipe)
    return accept(with_adapted_target(recipe), engines=engines)


def require_export(recipe: Recipe) -> None:
    """CheckpointError unless the run has exported a drafter of the recipe's family."""
    folder = Path(recipe.output_dir)
    if not (folder / EXPORT).is_dir():
        raise CheckpointError(
            "no export; run the recipe first, or draftsmith export",
            where=f"{folder / EXPORT}",
        )
    config = read_drafter_config(folder / EXPORT, recipe.target.sketch().num_layers)
    if config.family != recipe.family:
        raise CheckpointError(
            f"the export is of family {config.family}, the recipe's is {recipe.family}; give the"
            " recipe that it was trained by, or another output_dir",
            where=f"{folder / EXPORT}",
        )


def evaluate_folders(
    model: str,
    drafter: str | None,
    prompts: str | None,
    out: Path,
    temperatures: Sequence[float],
    *,
    method: str | None = None,
    engines: Engines | None = None,
    dtype: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **evaluation: Any,
) -> Path:
    """Measures `drafter`, or a training-free `method`, for the target `model` on `prompts` (a file;
    None: those of the suites, and without suites the quickstart's, of the project's checkout);
    returns the page. ConfigError where there are none.

    `evaluation`: further keys of a recipe's evaluation section."""
    if not (prompts or evaluation.get("suites") or HELD_OUT.is_file()):
        raise ConfigError(
            "the default prompts are those of the project's checkout, which is not here; give a"
            " JSONL file",
            where="--prompts",
        )
    check_report_writable("--out", out)
    sources = [{"path": prompts}] if prompts else BUILT_IN
    asked = [] if evaluation.get("suites") and not prompts else sources
    keys = {"prompts": asked, "temperatures": list(temperatures), **evaluation}
    data = {"train": sources, "chat_template_kwargs": dict(chat_template_kwargs or {})}
    recipe = _recipe(model, data, keys, out, dtype)
    stages = Stages()
    names = {"target_name": model}
    with _errors_of_options(prompts or HELD_OUT):
        report = measure(recipe, drafter, stages, engines, method=method, provenance=names)
    write_report(report, out, stages)
    return out / PAGE


def prompts_of_file(model: str, file: Path, count: int, max_tokens: int) -> list[list[int]]:
    """Token ids of prompts of a JSONL file as `model` is asked them: `count` of each workload. What
    is left out is said on standard error. DataError names the option."""
    sources = [{"path": str(file)}]
    keys = {"prompts": sources, "prompts_per_workload": count, "max_tokens": max_tokens}
    recipe = _recipe(model, {"train": sources}, keys, Path("runs/try"))
    with _errors_of_options(file):
        chosen = workloads(recipe, settings_of(recipe))
    return [prompt for prompts in chosen.values() for prompt in prompts]


@contextmanager
def _errors_of_options(prompts: str | Path) -> Iterator[None]:
    """Names the option that a DataError comes from: --prompts, or that of a key of the recipe which
    stands for the options."""
    try:
        with errors_of_option("--prompts", prompts):
            yield
    except DataError as error:
        key = error.where or ""
        if not key.startswith("evaluation."):
            raise
        message = str(error).removeprefix(f"{key}: ")
        raise DataError(message, where=_option_name(key.split("."))) from error


def _recipe(
    model: str,
    data: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    out: Path,
    dtype: str = "auto",
) -> Recipe:
    """The recipe that an evaluation without one stands for. ConfigError names the option."""
    try:
        return make_recipe(
            {
                "name": "evaluation",
                "output_dir": str(out),
                "target": {"model": model, "dtype": dtype},
                "data": {"on_bad_row": "drop", **data},
                "evaluation": dict(evaluation),
            }
        )
    except ValidationError as error:
        faults = [
            f"{_option_name(e['loc'])}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(faults), where="evaluate") from None


def _option_name(location: Sequence[Any]) -> str:
    """The option of the command that a key of the recipe comes from, such as `--temperature`."""
    key = next(str(part) for part in location if part not in ("evaluation", "data", "target"))
    return flag_name(OPTIONS.get(key, key))
